"""From a recipe to a job in the queue, or to one line that says why not; and, with ``--wait``, to the job's end."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mopd.base.files.json_text import parse_json
from mopd.base.files.reading import shown_path
from mopd.base.files.writing import write_text, writing
from mopd.base.text import one_line, visible
from mopd.base.types import UserError
from mopd.config.load import Loaded, dump
from mopd.config.reading.tree import STANDARD_INPUT
from mopd.conversion.models.dims import check_layout
from mopd.conversion.models.reading import read_dims
from mopd.conversion.models.stages import stages_of
from mopd.launch.slurm.job import JobState, keep_id, kept_id, state_of, submit
from mopd.launch.slurm.layout import lay_out, slurm_of
from mopd.launch.slurm.script import render_script
from mopd.report.run_files import CURE, RunFiles
from mopd.run.folder import RunDir


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedJob:
    """What would be submitted."""

    loaded: Loaded
    folder: Path
    """The run's ``job`` folder."""
    text: str
    """The script."""

    @property
    def script(self) -> Path:
        return self.folder / "job.sh"

    @property
    def recipe(self) -> Path:
        """The recipe as it is now: the job, queued again hours later, reads no other."""
        return self.folder / "recipe.yaml"

    @property
    def id_file(self) -> Path:
        return self.folder / "job.json"

    @property
    def runs(self) -> list[Path]:
        """Folders of the runs: one, or one for each seed."""
        seeds = slurm_of(self.loaded).seeds
        return [self.folder.parent / f"seed_{seed}" for seed in seeds] or [self.folder.parent]


def prepare_job(loaded: Loaded) -> PreparedJob:
    """Lay the job out and write its script, in memory.

    Raises:
        UserError: what cannot be, by key.
    """
    if loaded.path == STANDARD_INPUT:
        raise UserError("recipe: standard input is gone when a job is queued again: write it to a file and name that")
    layout = lay_out(loaded)
    _check_student(loaded)
    folder = RunDir(loaded.recipe.run_dir).path / "job"
    job = PreparedJob(loaded=loaded, folder=folder, text="")
    text = render_script(loaded, layout, run=folder.parent, recipe=job.recipe, script=job.script)
    return PreparedJob(loaded=loaded, folder=folder, text=text)


def submit_job(job: PreparedJob) -> str:
    """Write the script into the run's folder, submit it, and return the job's id.

    Raises:
        UserError: a job of this run is in the queue, the folder cannot be written, or sbatch refuses; a folder that was
            made for this is removed.
    """
    before = kept_id(job.id_file)
    if before is not None:
        state = state_of(before)
        if state is not None and not state.has_ended:
            raise UserError(
                f"{job.loaded.where('run_dir')}: {state} is this run's: stop it (mopd stop {job.folder.parent}, or "
                f"scancel {before}), or set another run_dir"
            )
    logs = job.folder.parent / "logs" / "job"
    made = [path for path in (logs, *logs.parents, job.folder) if not path.exists()]
    written = [path for path in (job.script, job.recipe) if not path.exists()]
    try:
        with writing(job.folder):
            logs.mkdir(parents=True, exist_ok=True)
            job.folder.mkdir(exist_ok=True)
        write_text(job.recipe, dump(job.loaded))
        write_text(job.script, job.text)
        job.script.chmod(0o755)
        job_id = submit(job.script, where=job.loaded.where("slurm"))
    except UserError:
        for path in written:
            path.unlink(missing_ok=True)
        with suppress(OSError):  # what somebody has put there meanwhile
            for path in sorted(made, key=lambda path: len(path.parts), reverse=True):
                path.rmdir()
        raise
    keep_id(job.id_file, job_id, slurm_of(job.loaded).form)
    return job_id


def _check_student(loaded: Loaded) -> None:
    """The layout divides the model, where its folder is here."""
    parallel, folder = loaded.recipe.student.parallel, Path(loaded.recipe.student.model)
    if not (folder / "config.json").is_file():
        return
    try:
        check_layout(
            read_dims(folder),
            tensor_model_parallel_size=parallel.tensor_model_parallel_size,
            stages=stages_of(parallel),
            expert_model_parallel_size=parallel.expert_model_parallel_size,
            expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        )
    except UserError as error:
        raise UserError(f"{loaded.path}: {error}") from error


POLL_S = 2.0
PATIENCE_S = 600.0
LINE_EVERY_S = 30.0
"""Where output is no terminal: a line at most so often, unless the job's state changes."""
MAX_RECORD_BYTES = 2**22
LOG_LINES = 15
MAX_LOG_BYTES = 65_536


def wait_for(job: PreparedJob, job_id: str) -> int:
    """Show how far the job is until it has ended; its exit code. Ctrl-C leaves the job alone.

    Raises:
        UserError: Slurm has not answered for ``PATIENCE_S``, or has forgotten the job.
    """
    progress, has_ended, answered = _Line(), False, time.monotonic()
    try:
        while True:
            try:
                state = state_of(job_id)
            except UserError as error:  # a controller that restarts; a job may take days
                if time.monotonic() - answered > PATIENCE_S:
                    raise
                progress.show(f"job {job_id}: {one_line(error)}", key=str(error))
                time.sleep(POLL_S)
                continue
            answered = time.monotonic()
            if state is None:
                raise UserError(
                    f"job {job_id}: Slurm has forgotten it: mopd status {job.folder.parent} tells what it left"
                )
            progress.show(f"{state}{_steps(job.runs)}", key=str(state))
            if state.has_ended and has_ended:  # one that is queued again may pass through such a state
                progress.end()
                return _told(job, state)
            has_ended = state.has_ended
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        progress.end()
        print(f"mopd: job {job_id} goes on: mopd stop {job.folder.parent} ends it", file=sys.stderr)
        raise


class _Line:
    """One line that changes, or where nothing can change (a pipe, a log) one now and then."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._told = 0.0
        self._key = ""
        self._width = 0

    def show(self, text: str, *, key: str) -> None:
        if self._is_terminal:
            print(f"\r{text:<{self._width}}", end="", flush=True)
            self._width = len(text)
        elif key != self._key or time.monotonic() - self._told > LINE_EVERY_S:
            print(text, flush=True)
            self._told, self._key = time.monotonic(), key

    def end(self) -> None:
        if self._is_terminal and self._width:
            print(flush=True)


def _steps(runs: Sequence[Path]) -> str:
    """How far they are, together; empty before the first has begun."""
    begun = [files for files in map(RunFiles, runs) if files.recipe.is_file()]
    if not begun:
        return ""
    done = sum(_last_step(files.metrics) for files in begun)
    planned = len(runs) * begun[0].recipe_tree()["schedule"]["steps"]
    return f"  step {done}/{planned}" + (f" of {len(runs)} runs" if len(runs) > 1 else "")


def _last_step(metrics: Path) -> int:
    """Of the newest record, without reading those before it; 0 before the first."""
    if not metrics.is_file():
        return 0
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - MAX_RECORD_BYTES))
        lines = file.read(MAX_RECORD_BYTES).split(b"\n")
    try:
        step = parse_json(lines[-2]).get("step") if len(lines) > 1 else 0
    except (ValueError, AttributeError) as error:
        raise UserError(f"{shown_path(metrics)}: its last line is no record of a step: {CURE}") from error
    return step if isinstance(step, int) else 0


def _told(job: PreparedJob, state: JobState) -> int:
    """The exit code of a job that has ended, after the last lines of its log where it did not end well."""
    if state.exit_code == 0 and set(state.states) == {"COMPLETED"}:
        return 0
    logs = sorted((job.folder.parent / "logs" / "job").glob("*.log"), key=lambda path: path.stat().st_mtime)
    if logs:
        with logs[-1].open("rb") as file:
            file.seek(max(0, logs[-1].stat().st_size - MAX_LOG_BYTES))
            lines = file.read(MAX_LOG_BYTES).decode(errors="replace").splitlines()[-LOG_LINES:]
        print(*map(visible, lines), sep="\n", file=sys.stderr)
    return state.exit_code or 1

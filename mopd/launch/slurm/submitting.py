"""Submit a recipe as a job, or say in one line why not; with ``--wait`` follow the job to its end."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mopd.base.files.json_text import parse_json
from mopd.base.files.reading import shown_path
from mopd.base.files.writing import write_json, write_text, writing
from mopd.base.text import one_line, visible
from mopd.base.types import UserError
from mopd.config.load import Loaded, dump
from mopd.config.reading.tree import STANDARD_INPUT
from mopd.launch.preparing import check_student_layout
from mopd.launch.slurm.job import JobState, kept_id, state_of, submit
from mopd.launch.slurm.layout import lay_out, slurm_of
from mopd.launch.slurm.script import RECIPE, SCRIPT, render_script
from mopd.report.run_files import CURE, RunFiles
from mopd.run.folder import RunDir


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedJob:
    """A job that has not been submitted."""

    loaded: Loaded
    folder: Path
    """The run's ``job`` folder. Its copy of the recipe is what the job reads, even if it is queued hours later."""
    text: str
    """The script."""

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
    if Path(loaded.recipe.student.model, "config.json").is_file():
        try:
            check_student_layout(loaded.recipe.student)
        except UserError as error:
            raise UserError(f"{loaded.path}: {error}") from error
    run = RunDir(loaded.recipe.run_dir).path
    return PreparedJob(loaded=loaded, folder=run / "job", text=render_script(loaded, layout, run=run))


def submit_job(job: PreparedJob) -> str:
    """Write the script into the run's folder, submit it, and return the job's id.

    Raises:
        UserError: a job of this run is in the queue, the folder cannot be written, or sbatch refuses; a folder that was
            made for this is removed.
    """
    id_file, script, recipe = (job.folder / name for name in ("job.json", SCRIPT, RECIPE))
    before = kept_id(id_file)
    state = None if before is None else state_of(before)
    if state is not None and not state.has_ended:
        raise UserError(
            f"{job.loaded.where('run_dir')}: {state} is this run's: stop it (mopd stop {job.folder.parent}, or "
            f"scancel {before}), or set another run_dir"
        )
    logs = job.folder.parent / "logs" / "job"
    made = [path for path in (logs, *logs.parents, job.folder) if not path.exists()]
    written = [path for path in (script, recipe) if not path.exists()]
    try:
        with writing(job.folder):
            logs.mkdir(parents=True, exist_ok=True)
            job.folder.mkdir(exist_ok=True)
        write_text(recipe, dump(job.loaded))
        write_text(script, job.text)
        script.chmod(0o755)
        job_id = submit(script, where=job.loaded.where("slurm"))
    except UserError:
        for path in written:
            path.unlink(missing_ok=True)
        with suppress(OSError):  # it holds something else by now
            for path in sorted(made, key=lambda path: len(path.parts), reverse=True):
                path.rmdir()
        raise
    write_json(id_file, {"id": job_id})
    return job_id


POLL_S = 2.0
PATIENCE_S = 600.0
LINE_EVERY_S = 30.0
"""Seconds between two lines where output is no terminal, unless the job's state changes."""
MAX_RECORD_BYTES = 2**22
LOG_LINES = 15
MAX_LOG_BYTES = 65_536


def wait_for(job: PreparedJob, job_id: str) -> int:
    """Show how far the job is until it has ended, and return its exit code. Ctrl-C leaves the job alone.

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
                return _exit_code(job, state)
            has_ended = state.has_ended
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        progress.end()
        print(f"mopd: job {job_id} goes on: mopd stop {job.folder.parent} ends it", file=sys.stderr)
        raise


class _Line:
    """A line of progress: on a terminal one that changes, in a pipe or log a new one now and then."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._shown_at = 0.0
        self._key = ""
        self._width = 0

    def show(self, text: str, *, key: str) -> None:
        if self._is_terminal:
            print(f"\r{text:<{self._width}}", end="", flush=True)
            self._width = len(text)
        elif key != self._key or time.monotonic() - self._shown_at > LINE_EVERY_S:
            print(text, flush=True)
            self._shown_at, self._key = time.monotonic(), key

    def end(self) -> None:
        if self._is_terminal and self._width:
            print(flush=True)


def _steps(runs: Sequence[Path]) -> str:
    """Return the steps that the runs have done together, in words; empty before the first has begun."""
    begun = [files for files in map(RunFiles, runs) if files.recipe.is_file()]
    if not begun:
        return ""
    done = sum(_last_step(files.metrics) for files in begun)
    planned = len(runs) * begun[0].recipe_tree()["schedule"]["steps"]
    return f"  step {done}/{planned}" + (f" of {len(runs)} runs" if len(runs) > 1 else "")


def _last_step(metrics: Path) -> int:
    """Return the step of the newest record, without reading those before it; 0 before the first."""
    lines = _tail(metrics, MAX_RECORD_BYTES).split(b"\n") if metrics.is_file() else []
    try:
        step = parse_json(lines[-2]).get("step") if len(lines) > 1 else 0
    except (ValueError, AttributeError) as error:
        raise UserError(f"{shown_path(metrics)}: its last line is no record of a step: {CURE}") from error
    return step if isinstance(step, int) else 0


def _exit_code(job: PreparedJob, state: JobState) -> int:
    """Return the exit code of a job that has ended; print the last lines of its log where it did not end well."""
    if state.exit_code == 0 and set(state.states) == {"COMPLETED"}:
        return 0
    logs = sorted((job.folder.parent / "logs" / "job").glob("*.log"), key=lambda path: path.stat().st_mtime)
    for log in logs[-1:]:
        lines = _tail(log, MAX_LOG_BYTES).decode(errors="replace").splitlines()[-LOG_LINES:]
        print(*map(visible, lines), sep="\n", file=sys.stderr)
    return state.exit_code or 1


def _tail(path: Path, num_bytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - num_bytes))
        return file.read(num_bytes)

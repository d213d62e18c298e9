"""A recipe as a job of Slurm: write its script, which a person can read from top to bottom, change, and submit by hand;
submit it, or say in one line why not; with ``--wait`` follow the job to its end.

The template renders quoted values alone: each ``{{ … }}`` becomes one word of the shell, unless a filter quotes it for
where else it stands (a remark, a line of sbatch). No value spans lines.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from mopd.base.files.json_text import parse_json
from mopd.base.files.reading import shown_path
from mopd.base.files.writing import write_json, write_text, writing
from mopd.base.text import file_name, one_line, visible
from mopd.base.types import UserError
from mopd.config.data import TransferQueueConfig
from mopd.config.load import DEFAULT_ORIGIN, Loaded, dump
from mopd.config.machine.places import Tenant, engine_groups, path_of
from mopd.config.placements import RayConfig
from mopd.config.reading.tree import STANDARD_INPUT, dotted
from mopd.config.slurm import SlurmConfig
from mopd.launch.preparing import check_student_layout
from mopd.launch.slurm.job import JobState, gpus_of, kept_id, state_of, submit
from mopd.launch.slurm.layout import JobComponent, JobLayout, lay_out, slurm_of
from mopd.report.run_files import CURE, RunFiles
from mopd.run.folder import RunDir

MAX_JOB_NAME = 60
MAX_FAILURES, LONG_LIFE_S = 4, 3600
"""A replica that has ended so often is not started again; one that worked for so long counts from the beginning."""
SCRIPT, RECIPE = "job.sh", "recipe.yaml"
"""Files of the run's ``job`` folder: the script, and the copy of the recipe that the job reads."""


class Quoted(str):
    """Text that is quoted already."""


def render_script(loaded: Loaded, layout: JobLayout, *, run: Path) -> str:
    """Write the script of a recipe's job, for bash.

    Args:
        layout: of ``lay_out``.
        run: the run's folder, or the folder of the runs of an array.

    Raises:
        UserError: a value, the working directory or the interpreter's path cannot stand in a script.
    """
    config = slurm_of(loaded)
    is_split, num_nodes = len(layout.components) > 1, sum(component.num_nodes for component in layout.components)
    one_each = [f"--nodes={num_nodes}", f"--ntasks={num_nodes}", "--ntasks-per-node=1"]
    are_wide = any(server.num_nodes > 1 for server in layout.servers)
    environment = Environment(
        loader=PackageLoader("mopd.launch.slurm", "."),
        autoescape=False,  # HTML's
        finalize=_word,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "remark": lambda text: Quoted(visible(text)),
        "sbatch": _sbatch_word,
        "words": lambda values: Quoted(" ".join(map(_word, values))),
        "lines": lambda values: Quoted(shlex.quote("\n".join(map(_on_one_line, values)))),  # for ``eval``
    }
    return environment.get_template("job.sh.j2").render(
        slurm=config,
        student_nodes=layout.places.student_nodes,
        recipe_name=loaded.path,
        script=shlex.quote(_path(run / "job" / SCRIPT)),
        recipe=_path(run / "job" / RECIPE),
        run_dir=_path(run),
        run_key=f"run_dir={json.dumps(_path(run), ensure_ascii=False)[:-1]}",
        folder=os.getcwd(),
        output=_output(loaded, run),
        job_name=visible(f"mopd-{run.resolve().name}")[:MAX_JOB_NAME],
        python=sys.executable,
        container=config.container.type if config.container else None,
        pyxis=_pyxis(config),
        student_gpus=" ".join(map(str, layout.student_gpus[0])),
        others_gpus=" ".join(map(str, layout.student_gpus[-1])),
        ray=str(Path(sys.executable).with_name("ray")),
        ray_keys=_ray_keys(loaded),
        ray_gpus=_ray_gpus(layout) if config.form == "ray" else [],
        max_failures=MAX_FAILURES,
        restarts_last_s=LONG_LIFE_S,
        table=_table(layout, "spare" if config.spare_nodes else "Ray"),
        is_split=is_split,
        num_nodes=num_nodes,
        everywhere=[f"--het-group=0-{len(layout.components) - 1}"] if is_split else one_each,
        components=[_options(config, component) for component in layout.components],
        servers=[_server(server) for server in layout.servers],
        are_wide=are_wide,
        first=Quoted("${node%%,*}" if are_wide else "$node"),
        nodes=Quoted('"$nodes"' if are_wide else "1"),
    )


def _options(config: SlurmConfig, component: JobComponent) -> list[str]:
    """Return the options of sbatch for one component."""
    options = [f"--nodes={component.num_nodes}", "--ntasks-per-node=1"]
    options += [f"--partition={component.partition}"] if component.partition else []
    for name in ("account", "qos", "time"):
        value = getattr(config, name)
        options += [f"--{name}={value}"] if value else []
    options += ["--no-kill"] if config.spare_nodes else []  # the job outlives a node
    options += [f"--gpus-per-node={component.gpus_per_node}"] if component.gpus_per_node else []
    options += [f"--cpus-per-task={component.cpus_per_node}"] if component.cpus_per_node else ["--exclusive", "--mem=0"]
    return [*options, *config.options]


def _server(server: Tenant) -> dict[str, Any]:
    """Return the template's values for one replica, which the script starts by a line."""
    nodes = (f'"${{nodes_{server.component}[{server.node + i}]}}"' for i in range(server.num_nodes))
    return {
        "nodes": Quoted(",".join(nodes)),
        "component": server.component,
        "teacher": server.key.partition(".")[2],
        "role": file_name(f"{server.key}.{server.number}"),
        "gpus": " ".join(map(str, server.gpus)),
        "number": server.number,
    }


def _ray_gpus(layout: JobLayout) -> list[list[int]]:
    """Return the GPUs of each node's Ray daemon: those that the student's ranks leave."""
    (component,) = layout.components
    firsts = [len(own) for own in layout.student_gpus]
    firsts += [0] * (component.num_nodes - len(firsts))
    return [list(range(first, component.gpus_per_node)) for first in firsts]


def _ray_keys(loaded: Loaded) -> list[str]:
    """Return the keys that take the address of the job's own cluster."""
    groups = engine_groups(loaded.recipe)
    on_ray = [path_of(key) for key in groups if isinstance(groups[key].placement, RayConfig)]
    keys = [dotted((*path, "placement", "address")) for path in on_ray]
    if isinstance(loaded.recipe.data_plane, TransferQueueConfig):
        keys.append("data_plane.address")
    return [f"{key}=" for key in keys]


def _pyxis(config: SlurmConfig) -> list[str]:
    """Return the options of srun for a container of pyxis; none without.

    Raises:
        UserError: the container cannot see the working directory, whose name would end where a mount's source ends.
    """
    folder = os.getcwd()
    if config.container is not None and {":", ","} & set(folder):
        raise UserError(
            f"{visible(folder)}: a container's mount cannot name a working directory with a colon or a comma: call "
            "mopd slurm in another"
        )
    if config.container is None or config.container.type != "pyxis":
        return []
    mounts = ",".join([f"{folder}:{folder}", *config.container.mounts])
    image, workdir = f"--container-image={config.container.image}", f"--container-workdir={folder}"
    return [image, f"--container-mounts={mounts}", workdir]


def _table(layout: JobLayout, others: str) -> list[str]:
    """Return a line for each node: what it is for; ``others`` for those that nothing has a fixed place on."""
    lines = []
    for index, component in enumerate(layout.components):
        for node in range(component.num_nodes):
            name = f"node {node}" if len(layout.components) == 1 else f"{component.key}, node {node}"
            parts = []
            if index == 0 and node < layout.places.student_nodes:
                first = node * layout.places.ranks_per_node
                last = first + layout.places.ranks_per_node - 1
                ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
                parts.append(f"{ranks} of the student{_on(layout.student_gpus[node])}")
            parts += [
                f"{server.key}.{server.number}{_on(server.gpus)}"
                for server in layout.servers
                if server.component == index and node in range(server.node, server.node + server.num_nodes)
            ]
            lines.append(f"{name}: {'; '.join(parts) or others}")
    return lines


def _on(gpus: Sequence[int]) -> str:
    if not gpus:
        return ""
    return f" on GPU {gpus[0]}" if len(gpus) == 1 else f" on GPUs {gpus[0]} to {gpus[-1]}"


def _path(path: Path) -> str:
    """Return the path in a form that no command reads as an option."""
    return f"./{path}" if str(path).startswith("-") else str(path)


def _output(loaded: Loaded, run: Path) -> str:
    """Return the path of the job's log, in which sbatch replaces nothing but ``%j``."""
    folder = os.path.join(os.getcwd(), run, "logs", "job")
    if "\\" in folder:
        raise UserError(
            f"{loaded.where('run_dir')}: {visible(folder)} holds a backslash, which Slurm takes out of the path of a "
            "job's log: set another run_dir, or call mopd slurm elsewhere"
        )
    return f"{folder.replace('%', '%%')}/%j.log"


def _word(value: object) -> str:
    """Quote the value of an expression of the template as one word of the shell."""
    if isinstance(value, (Quoted, int)):
        return str(value)
    assert isinstance(value, str), value
    return shlex.quote(_on_one_line(value))


def _sbatch_word(text: str) -> Quoted:
    """Quote a word of a ``#SBATCH`` line.

    sbatch reads a backslash in either kind of quotes, ``#`` outside of them as a remark, and ``hetjob`` (once
    ``packjob``) anywhere in a line as the next component (``get_argument`` in ``src/common/slurm_opt.c``).
    """
    quoted = re.sub(r'[\\"]', r"\\\g<0>", _on_one_line(text))
    divided = re.sub("(?i)(het|pack)(?=job)", r"\1\\", quoted)
    return Quoted(text if re.fullmatch("[A-Za-z0-9_=./,:@%+-]+", divided) else f'"{divided}"')


def _on_one_line(text: str) -> str:
    """Return the text; ``UserError`` for the working directory or interpreter's path, which no reader of the recipe has
    checked, with a line end in it."""
    if visible(text) != text:
        raise UserError(
            f"'{visible(text)[:300]}' would stand in the job's script, and holds a control character, such as a line "
            "end: rename it"
        )
    return text


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
        UserError: a job of this run is in the queue, nobody said whether it wants the nodes' GPUs, the folder cannot be
            written, or sbatch refuses; a folder that was made for this is removed.
    """
    id_file, script, recipe = (job.folder / name for name in ("job.json", SCRIPT, RECIPE))
    before = kept_id(id_file)
    state = None if before is None else state_of(before)
    if state is not None and not state.has_ended:
        raise UserError(
            f"{job.loaded.where('run_dir')}: {state} is this run's: stop it (mopd stop {job.folder.parent}, or "
            f"scancel {before}), or set another run_dir"
        )
    _check_gpus(job.loaded)
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


def _check_gpus(loaded: Loaded) -> None:
    """Raise ``UserError`` for a recipe that does not say whether it wants the GPUs that its nodes have."""
    config = slurm_of(loaded)
    if loaded.origins.get("slurm.gpus_per_node") != DEFAULT_ORIGIN:
        return
    found = gpus_of(config.partition)
    if found:
        where = "the default partition" if config.partition is None else f"partition {config.partition!r}"
        raise UserError(
            f"{loaded.where('slurm', 'gpus_per_node')} is missing, and nodes of {where} have {found}: set it, to 0 for "
            "a job without GPUs"
        )


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

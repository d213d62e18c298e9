"""``mopd status``: the status of a run, from its folder: its state and progress, its checkpoints and its registered
servers."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from mopd.base.files.reading import shown_path
from mopd.base.text import json_lines, one_line
from mopd.base.types import UserError
from mopd.run.folder import RunDir
from mopd.run.stopping import stop_requested
from mopd.serving.registration import read_registrations

ABOUT = "tell how a run does: its steps, checkpoints, servers"
EXAMPLES = "example: mopd status runs/quickstart"
SILENT_S = 30.0
"""Seconds after which a registered server counts as gone; it writes its file anew every two seconds."""
State = Literal["starts", "runs", "stops", "has ended", "is done", "has not begun"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RegisteredServer:
    """A server that has registered with the run."""

    group: str
    url: str
    host: str
    silent_s: float
    """Seconds since its file was written."""

    @property
    def is_alive(self) -> bool:
        """Whether it still writes its file."""
        return self.silent_s < SILENT_S


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """The status of a run."""

    run: str
    state: State
    step: int
    steps: int | None
    """``schedule.steps``; ``None`` before the run has begun."""
    last_step_age_s: float | None
    checkpoints: tuple[int, ...]
    """Steps of the complete checkpoints."""
    stop: str | None
    """Origin of a request to stop, if there is one."""
    starts: int | None
    """Starts by ``--resume=auto`` since the newest checkpoint."""
    servers: tuple[RegisteredServer, ...]


def status_of(path: Path) -> RunStatus:
    """Read the status. ``UserError`` where no run is or begins, or a file is damaged."""
    from mopd.run.checkpointing import complete_steps
    from mopd.run.resuming import read_attempts

    run = RunDir(path)
    is_held = run.is_held()
    marks = (run.recipe, run.stop, run.attempts, run.path / "job")
    if not is_held and not any(map(os.path.lexists, marks)):
        raise UserError(f"{shown_path(path)!r} holds no run, and none begins there: name the run_dir of a run")
    tree: dict[str, Any] = run.recipe_tree() if run.recipe.is_file() else {}
    records = run.steps() if run.metrics.is_file() else []
    step, steps = (records[-1]["step"] if records else 0), tree.get("schedule", {}).get("steps")
    stop = stop_requested(path)
    if is_held:
        state: State = "stops" if stop is not None else "runs" if tree else "starts"
    else:
        state = "is done" if step == steps and run.report_json.is_file() else "has ended"
        state = state if tree else "has not begun"
    return RunStatus(
        run=str(path),
        state=state,
        step=step,
        steps=steps,
        last_step_age_s=round(time.time() - run.metrics.stat().st_mtime, 1) if records else None,
        checkpoints=tuple(complete_steps(run.checkpoints)),
        stop=stop,
        starts=read_attempts(run)[0] if run.attempts.is_file() else None,
        servers=tuple(_servers(run, tree)),
    )


def _servers(run: RunDir, tree: dict[str, Any]) -> list[RegisteredServer]:
    keys = ["rollout", *(f"teachers.{name}" for name in tree.get("teachers", {}))]
    now = time.time()
    return [
        RegisteredServer(
            group=key, url=server.url, host=server.host, silent_s=round(max(0.0, now - file.stat().st_mtime), 1)
        )
        for key in keys
        for file, server in read_registrations(run.replicas, key).servers.items()
        if file.is_file()
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Light to import, as all of this file."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    parser.add_argument("--json", action="store_true", help="print the same as JSON")


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Look once and print; the exit code. ``UserError`` for a folder that holds no run."""
    from mopd.launch.slurm.job import job_of

    status = status_of(args.run)
    job = job_of(args.run / "job" / "job.json")
    if args.json:
        print(json_lines({**asdict(status), "job": job}))
    else:
        for name, value in [*_lines(status), *([] if job is None else [("slurm", job)])]:
            print(f"{name:<11}{one_line(value)}")
    return 0


def _lines(status: RunStatus) -> Iterator[tuple[str, str]]:
    yield "run", f"{status.run} {status.state}"
    if status.stop is not None:
        yield "stop", f"asked for by {status.stop}"
    if status.steps is not None:
        age = "" if status.last_step_age_s is None else f", the last one {_duration(status.last_step_age_s)} ago"
        yield "step", f"{status.step} of {status.steps}{age}"
        steps = status.checkpoints
        yield "checkpoint", f"after step {steps[-1]}, {len(steps)} in all" if steps else "none yet"
    if status.starts is not None:
        yield "starts", f"{status.starts} by --resume=auto since the newest checkpoint"
    for server in status.servers:
        state = "alive" if server.is_alive else f"silent for {_duration(server.silent_s)}"
        yield "server", f"{server.group} {server.url} on {server.host}: {state}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"

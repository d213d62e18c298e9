"""A job from the outside: one line of progress until it has ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mopd.base.files.json_text import parse_json
from mopd.base.files.reading import shown_path
from mopd.base.text import one_line, visible
from mopd.base.types import UserError
from mopd.launch.slurm.job import JobState, state_of
from mopd.launch.slurm.submitting import PreparedJob
from mopd.report.run_files import CURE, RunFiles

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

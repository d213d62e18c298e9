"""Callbacks of a recipe, each in a process beside the run (``mopd/api/callbacks.py``), which no step waits for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mopd.base.types import UserError
from mopd.config.output import CallbackConfig

logger = logging.getLogger(__name__)
START_S = 120.0
"""Seconds for a callback's process to import its module."""
MARGIN_S = 5.0
"""Seconds for a callback's process to end, beside the deadline of its call."""


@dataclass(frozen=True)
class CallbackProcess:
    """A process that has its callback, or is getting it."""

    key: str
    cfg: CallbackConfig
    process: subprocess.Popen[str]

    def wait_ready(self) -> None:
        """Wait until the callback is made. ``UserError`` if it cannot be."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"{self.key}: {self.cfg.module!r} ended its process"}
        if "error" in answer:
            raise UserError(answer["error"])

    def follow(self, after_step: int) -> None:
        """Have it told of everything after a step, -1 for all."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and told why
            self.process.stdin.write(json.dumps({"after": after_step}) + "\n")
            self.process.stdin.flush()

    def end(self) -> None:
        """Let it deliver what is there, within its deadline; then kill it."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(self.cfg.timeout_s + MARGIN_S)
        except subprocess.TimeoutExpired:
            logger.warning("%s: %r did not end: it is killed", self.key, self.cfg.module)
            self.process.kill()
            self.process.wait()


@contextlib.asynccontextmanager
async def callbacks_beside(callbacks: Sequence[CallbackConfig], run: Path) -> AsyncIterator[list[CallbackProcess]]:
    """Start the callbacks of a run; at the block's end let them finish.

    Raises:
        UserError: one cannot be made within ``START_S``.
    """
    processes: list[CallbackProcess] = []
    try:
        for i, cfg in enumerate(callbacks):
            processes.append(_start(f"callbacks[{i}]", cfg, run))
        for one in processes:
            try:
                await asyncio.wait_for(asyncio.to_thread(one.wait_ready), START_S)
            except asyncio.TimeoutError as error:
                one.process.kill()
                raise UserError(f"{one.key}: {one.cfg.module!r} was not made within {START_S:g} s") from error
        yield processes
    finally:
        await asyncio.gather(*(asyncio.to_thread(one.end) for one in processes))


def _start(key: str, cfg: CallbackConfig, run: Path) -> CallbackProcess:
    process = subprocess.Popen(
        [sys.executable, "-m", "mopd.api.callbacks"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("MOPD_")},  # a run's secrets
    )
    assert process.stdin is not None
    task: dict[str, Any] = {"run": str(run), "key": key, "module": cfg.module, "options": dict(cfg.options)}
    task |= {"timeout_s": cfg.timeout_s, "on_error": cfg.on_error}
    process.stdin.write(json.dumps(task) + "\n")
    process.stdin.flush()
    return CallbackProcess(key, cfg, process)

"""A reward function of the user's, in a process and an environment of its own.

The process starts at the first call, imports the file once and answers one JSON line per batch (see ``child.py``).
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from mopd.config.schema import CustomReward as CustomRewardConfig
from mopd.rewards.interface import RewardItem
from mopd.types import UserError

CHILD = Path(__file__).with_name("child.py")
ENVIRONMENT = {"PATH": os.defpath, "LANG": "C.UTF-8"}
"""All that the function sees of the environment."""


class CustomReward:
    """Implements ``Reward``. Every failure is a ``UserError`` that names the file and the function, and is final."""

    needs_ground_truth = False

    def __init__(self, cfg: CustomRewardConfig) -> None:
        """``UserError`` when the file does not exist; the function is looked up at the first call."""
        self._path, self._cfg = Path(cfg.path).resolve(), cfg
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None
        self._lock = asyncio.Lock()
        if not self._path.is_file():
            raise UserError(f"{cfg.path}: no such file: correct the path of the custom reward")

    async def __call__(self, items: Sequence[RewardItem]) -> list[float]:
        """The function's value for each item, within ``timeout_s`` for the whole batch (and again for the import)."""
        async with self._lock:
            if self._process is None:
                self._process = self._start()
                await self._exchange(None)
            calls = [
                {
                    "prompt": item.prompt,
                    "response": item.response,
                    "ground_truth": item.ground_truth,
                    "extra_info": item.extra_info,
                    "domain": item.domain,
                }
                for item in items
            ]
            values = (await self._exchange(calls))["values"]
        for item, value in zip(items, values, strict=True):
            if not isinstance(value, (int, float)) or not math.isfinite(value):
                raise self._error(f"returned {value!r}, not a finite number, for {item.place}")
        return [float(value) for value in values]

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._kill(self._process)
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout, self._stderr):
                if stream is not None:
                    stream.close()

    def _start(self) -> subprocess.Popen[bytes]:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process; closed by close)
        return subprocess.Popen(
            [sys.executable, "-I", str(CHILD), str(self._path), self._cfg.function, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=ENVIRONMENT,
            cwd=self._path.parent,
            start_new_session=True,
        )

    @staticmethod
    def _kill(process: subprocess.Popen[bytes]) -> None:
        """Kill the process and whatever it started: its session is its own."""
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)

    async def _exchange(self, calls: list[dict[str, Any]] | None) -> dict[str, Any]:
        """Send a batch (``None``: only wait for the import) and read the answer before the deadline."""
        process, timeout_s = self._process, self._cfg.timeout_s
        assert process is not None
        waiting = asyncio.ensure_future(asyncio.to_thread(_send_and_read, process, calls))
        done, _ = await asyncio.wait([waiting], timeout=timeout_s)
        if not done:
            self._kill(process)  # the pipe closes and the waiting thread ends
            await waiting
            raise self._error(f"gave no answer within timeout_s {timeout_s:g}: make it faster or raise timeout_s")
        line = waiting.result()
        if not line:
            raise self._error(f"ended its process (exit code {process.wait()}): {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise self._error(answer["error"])
        return answer

    def _error(self, what: str) -> UserError:
        return UserError(f"{self._cfg.path}: custom reward {self._cfg.function!r} {what}")

    def _last_words(self) -> str:
        assert self._stderr is not None
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it wrote nothing to stderr"


def _send_and_read(process: subprocess.Popen[bytes], calls: list[dict[str, Any]] | None) -> bytes:
    """The answer's line; empty when the process has ended."""
    assert process.stdin is not None and process.stdout is not None
    try:
        if calls is not None:
            process.stdin.write(json.dumps(calls, default=str).encode() + b"\n")
            process.stdin.flush()
        return process.stdout.readline()
    except BrokenPipeError:
        return b""

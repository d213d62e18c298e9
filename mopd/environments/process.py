"""The environment of a run, as the orchestrator asks it: one process (``child.py``) that holds an object for each
response under way, and answers many at a time."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mopd.base.files.json_text import parse_json
from mopd.base.files.reading import resolved_file, shown_path
from mopd.base.text import one_line
from mopd.base.types import CutOffError, UserError
from mopd.config.environment import (
    CustomEnvironmentConfig,
    EnvironmentConfig,
    OpenEnvConfig,
    PythonToolConfig,
    VerifiersConfig,
)
from mopd.config.values import shown_url
from mopd.rewards.graders.system_calls import architecture_named
from mopd.rewards.process import GIB, MAX_READ, RewardProcess

CHILD = Path(__file__).with_name("child.py")
MAX_ANSWER_BYTES = 2**24
"""Longest line of the process: 1 Mi characters of an observation, escaped, and what stands around them."""
START_S = 60.0
"""Deadline for the import of the class."""
LIBRARY_START_S = 600.0
"""The same for an environment of a library, which may fetch its rows first."""
GRACE_S = 5.0
"""Seconds beyond a turn's deadline, which the process keeps itself unless something in it blocks its event loop."""
LATE_S = 1.0
"""Seconds after a deadline in which an answer still counts: an event loop that an engine has held up finds both."""
MAX_TOOL_BYTES = 2 * GIB
"""Memory of a built-in environment's process; programs of ``python_tool`` have a limit of their own."""
RESETS = 3
"""Tries of a ``reset`` with ``on_error: end``, where another response's object has ended the process."""


class EnvironmentFailed(Exception):
    """A failure of an environment, worded to follow its name."""


class EnvironmentProcess(RewardProcess):
    """The process, whose requests are answered in any order. It is used on one event loop."""

    def __init__(
        self, kind: str, settings: Mapping[str, Any], *, max_bytes: int, folder: Path | None, python: str
    ) -> None:
        """As ``RewardProcess``; ``start`` then waits for the import."""
        super().__init__(CHILD, (kind, json.dumps(settings)), max_bytes=max_bytes, folder=folder, python=python)
        self._link.setblocking(False)
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._sending = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None
        self.failure: str | None = None
        """Why it answers no more."""

    async def start(self, timeout_s: float) -> None:
        """Wait for the import; ``EnvironmentFailed`` if it fails."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[dict[str, Any]] = loop.create_future()
        self._waiting[-1] = ready
        loop.add_reader(self._output, self._read_output)
        self._reading = loop.create_task(self._read())
        await self._answered(ready, timeout_s, f"was not loaded within {timeout_s:g} s")

    async def ask(self, request: dict[str, Any], timeout_s: float) -> Any:
        """Return the value of an answer; ``EnvironmentFailed`` for an error, and for none in time."""
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        sending = asyncio.ensure_future(self._send({"number": number, **request}))
        try:
            late = f"gave no answer within turn_timeout_s {timeout_s:g}: something blocks the event loop of its process"
            return await self._answered(answer, timeout_s + GRACE_S, late)
        finally:
            self._waiting.pop(number, None)
            sending.cancel()

    async def _answered(self, answer: asyncio.Future[dict[str, Any]], timeout_s: float, late: str) -> Any:
        for wait_s in (timeout_s, LATE_S):
            if self.failure is None:
                await asyncio.wait({answer}, timeout=wait_s)
        if not answer.done():
            self.fail(self.failure or late)
            raise EnvironmentFailed(self.failure)
        found = await answer
        if "error" in found:
            raise EnvironmentFailed(str(found["error"]))
        return found.get("value")

    async def _send(self, request: dict[str, Any]) -> None:
        line = json.dumps(request, default=str).encode() + b"\n"
        async with self._sending:
            if self.failure is None:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `_read` says why
                    await asyncio.get_running_loop().sock_sendall(self._link, line)

    async def _read(self) -> None:
        """Hand out answers until the process ends, or writes what is none."""
        loop, text = asyncio.get_running_loop(), b""
        while self.failure is None:
            read = b""
            with contextlib.suppress(ConnectionResetError):
                read = await loop.sock_recv(self._link, MAX_READ)
            if not read:
                self.fail(self._last_words())
                return
            *lines, text = (text + read).split(b"\n")
            if len(text) > MAX_ANSWER_BYTES:
                self.fail(f"answered with more than {MAX_ANSWER_BYTES} bytes")
            for line in lines:
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            answer = parse_json(line)
        except ValueError as error:
            self.fail(f"sent no answer ({error}): it wrote to a descriptor not its own")
            return
        number = answer.get("number", -1) if isinstance(answer, dict) else None
        waiting = self._waiting.get(number) if isinstance(number, int) else None
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def _read_output(self) -> None:
        if not self._keep_output():
            asyncio.get_running_loop().remove_reader(self._output)

    def fail(self, why: str) -> None:
        """Kill the process; all that wait for it learn why."""
        if self.failure is None:
            self.failure = why
            self.abandon()
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_result({"error": why})

    async def stop(self) -> None:
        """End the process where the event loop goes on."""
        self.fail("has ended")
        asyncio.get_running_loop().remove_reader(self._output)  # before another file has its number
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})
        self.end()


class Environments:
    """The environment of a recipe: the process, started at the first response and again where it may fail."""

    def __init__(self, cfg: EnvironmentConfig) -> None:
        """Find file and package. ``UserError`` if one does not exist, or this machine cannot confine programs."""
        self.cfg, self._called = cfg, f"rollout.environment ({cfg.type})"
        self.around_calls: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        """Entered around each call."""
        self._settings, self._folder = asdict(cfg), None
        self._max_bytes, self._python = MAX_TOOL_BYTES, sys.executable
        if isinstance(cfg, CustomEnvironmentConfig):
            self._called = f"{shown_path(cfg.module)}: environment {cfg.class_name!r}"
            path = resolved_file(cfg.module, cure="correct rollout.environment.module")
            self._settings["path"], self._folder = str(path), path.parent
            self._max_bytes = int(cfg.max_memory_gib * GIB)
        elif isinstance(cfg, VerifiersConfig):
            self._called = f"rollout.environment ({cfg.id} of verifiers)"
            self._max_bytes = int(cfg.max_memory_gib * GIB)
            self._python = self._python if cfg.python is None else os.path.abspath(cfg.python)
            if cfg.python is None and importlib.util.find_spec("verifiers") is None:
                cure = "pip install 'mopd[verifiers]', or set rollout.environment.python"
                raise UserError(f"{self._called} needs the package verifiers: {cure}")
        elif isinstance(cfg, OpenEnvConfig):
            self._called = f"rollout.environment ({shown_url(cfg.url)})"
            if importlib.util.find_spec("websockets") is None:
                raise UserError(f"{self._called} needs the package websockets: pip install 'mopd[openenv]'")
        elif architecture_named(os.uname().machine) is None:
            raise UserError(
                f"rollout.environment: python_tool knows no way to confine programs on {os.uname().machine}: run on "
                "x86_64 or aarch64, or write a custom environment"
            )
        self._process: EnvironmentProcess | None = None
        self._starting = asyncio.Lock()
        self._numbers = itertools.count()

    @property
    def goes_on(self) -> bool:
        """A failure ends one response, not the run."""
        return not isinstance(self.cfg, PythonToolConfig) and self.cfg.on_error == "end"

    def error(self, failed: EnvironmentFailed, *, at_start: bool = False) -> UserError:
        """Return what ends the run. What fails ``at_start`` ends it whatever ``on_error`` says."""
        if isinstance(self.cfg, PythonToolConfig):
            cure = "see that the machine has memory and processes left, and a kernel with seccomp"
            return CutOffError(f"{self._called} {one_line(failed)}: {cure}")
        cure = "see its server" if isinstance(self.cfg, OpenEnvConfig) else "correct it"
        cure = cure if self.goes_on or at_start else f"{cure}, or set rollout.environment.on_error: end"
        return UserError(f"{self._called} {one_line(failed)}: {cure}")

    async def reset(self, row: Mapping[str, Any], seed: int) -> Episode:
        """Open the episode of one response; ``UserError`` if that fails: there is nothing to train on."""
        for left in reversed(range(RESETS if self.goes_on else 1)):
            process = await self._running()
            episode = Episode(self, process, next(self._numbers))
            try:
                episode.messages = await episode.ask({"do": "reset", "row": dict(row), "seed": seed})
                return episode
            except EnvironmentFailed as failed:
                if process.failure is None or not left:
                    raise self.error(failed) from failed
        raise AssertionError("the last try has returned or raised")

    async def _running(self) -> EnvironmentProcess:
        async with self._starting:
            if self._process is None or self._process.failure is not None:
                if self._process is not None:
                    await self._process.stop()
                    self._process = None
                try:
                    self._process = EnvironmentProcess(
                        self.cfg.type,
                        self._settings,
                        max_bytes=self._max_bytes,
                        folder=self._folder,
                        python=self._python,
                    )
                    is_library = isinstance(self.cfg, VerifiersConfig)
                    await self._process.start(LIBRARY_START_S if is_library else START_S)
                except EnvironmentFailed as failed:
                    raise self.error(failed, at_start=True) from failed
                except (OSError, ValueError) as error:
                    raise self.error(EnvironmentFailed(f"could not be started: {error}"), at_start=True) from error
            return self._process

    def close(self) -> None:
        """End the process, once the event loop has ended."""
        if self._process is not None:
            self._process.end()


class Episode:
    """The environment of one response."""

    def __init__(self, environments: Environments, process: EnvironmentProcess, number: int) -> None:
        self._environments, self._process, self._number = environments, process, number
        self.messages: list[dict[str, str]] | None = None
        """The prompt's messages in the place of the row's; ``None`` for the row's."""

    async def ask(self, request: dict[str, Any]) -> Any:
        """Return the answer to a request; ``EnvironmentFailed`` for an error, and for none in time."""
        with self._environments.around_calls():
            return await self._process.ask({"episode": self._number, **request}, self._environments.cfg.turn_timeout_s)

    async def step(self, text: str) -> tuple[str | None, float]:
        """Return what the environment answers to a turn (``None``: the response is over), and the turn's reward."""
        observation, reward = await self.ask({"do": "step", "text": text})
        return observation, float(reward)

    async def close(self) -> None:
        """Forget the object; ``EnvironmentFailed`` if its own ``close`` fails."""
        await self.ask({"do": "close"})

"""Rewards in processes of their own: started at the first call, asked one batch after the other, ended for good when
one fails.

A process answers one JSON line for each batch (``child.py``, ``judge.py``). It dies with the run, and in the end its
process group is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from mopd.base.files.json_text import parse_json
from mopd.base.files.temporary import TemporaryFolder
from mopd.base.text import one_line
from mopd.base.types import CutOffError, UserError
from mopd.rewards.interface import Graded, RewardItem

GIB = 2**30
ENVIRONMENT = {"PATH": os.defpath, "LANG": "C.UTF-8"}
"""The whole environment that the process sees."""
BYTES_PER_VALUE = 2**14
"""Longest value in an answer, of 500 characters extracted and 500 of a problem, escaped; also what may stand beside the
values."""
MAX_READ = 65536
MAX_OUTPUT_BYTES = 4096
"""Bytes kept of what the process writes; the rest is read and dropped."""
MAX_SHOWN = 300
"""Characters of its last line in the reason."""
END_S = 6.0
"""Seconds for a killed process to end."""


class RewardFailed(Exception):
    """A failure of a reward, worded to follow its name."""


class RewardProcess:
    """A process, ready or starting. Its calls block; every wait has a deadline."""

    def __init__(
        self,
        program: str | Path,
        arguments: tuple[str, str],
        *,
        max_bytes: int,
        folder: Path | None = None,
        python: str = sys.executable,
    ) -> None:
        """Start it; ``exchange(None)`` then waits for the import. It dies with the thread that calls this.

        Args:
            program: ``child.py`` or ``judge.py`` of this folder, or a path, with its own two ``arguments``.
            max_bytes: memory of the process, and of each that it starts.
            folder: working directory; absent: a new one, which is removed with the process.
            python: interpreter, by an absolute path.

        Raises:
            UserError: there is no room for its folder.
            OSError: the system cannot start it.
        """
        with contextlib.ExitStack() as held:
            folder = held.enter_context(TemporaryFolder("mopd-reward-")) if folder is None else folder
            self._link, theirs = map(held.enter_context, socket.socketpair())
            self._output, output_end = os.pipe()
            held.callback(os.close, self._output)
            os.set_blocking(self._output, False)
            with open(output_end, "wb") as output:
                path, numbers = Path(__file__).parent / program, (os.getpid(), theirs.fileno(), max_bytes)
                self._process = subprocess.Popen(
                    [python, "-I", str(path), *arguments, *map(str, numbers)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=ENVIRONMENT,
                    cwd=folder,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            theirs.close()
            self._end = os.pidfd_open(self._process.pid)
            held.callback(os.close, self._end)
            self._held = held.pop_all()
        self._written = b""
        self._in_use = threading.Lock()

    def exchange(self, calls: list[str] | None, timeout_s: float) -> dict[str, Any]:
        """Return the answer to a batch of JSON objects, or (``None``) the result of the import, within ``timeout_s``.

        Raises:
            RewardFailed: no answer in time, an invalid one, or the process has ended. The caller must then call
                ``end``.
        """
        deadline = time.monotonic() + timeout_s
        message = b"" if calls is None else f"[{', '.join(calls)}]\n".encode()
        longest = BYTES_PER_VALUE * (1 + len(calls or ()))
        # `end` waits for this lock before it closes the socket
        with self._in_use:
            try:
                line = self._talk(message, longest, deadline)
            except TimeoutError as error:
                reason = f"gave no answer within timeout_s {timeout_s:g}: make it faster or raise timeout_s"
                raise RewardFailed(reason) from error
        try:
            answer = parse_json(line, max_values=longest)
        except ValueError as error:
            raise RewardFailed(f"sent no answer ({error}): it wrote to a descriptor not its own") from error
        if not isinstance(answer, dict):
            raise RewardFailed("sent no answer: it wrote to a descriptor not its own")
        return answer

    def abandon(self) -> None:
        """Kill the process group; a thread in ``exchange`` then returns soon."""
        if self._process.returncode is None:  # until it is waited for, no other process can have its number
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the process group and wait for the process, at most a few seconds. May be repeated."""
        self.abandon()
        with self._in_use:
            with contextlib.suppress(subprocess.TimeoutExpired):  # held inside the kernel, as by a dead disk
                self._process.wait(END_S)
            self._held.close()

    def _talk(self, message: bytes, longest: int, deadline: float) -> bytes:
        """Write the message and return the line that comes back; ``TimeoutError`` at the deadline."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._link.settimeout(_left_s(deadline))
            self._link.sendall(message)
        answer, watched = b"", {self._link.fileno(), self._output, self._end}
        while b"\n" not in answer:
            ready = _ready(watched, deadline)
            if self._output in ready and not self._keep_output():
                watched.discard(self._output)
            if self._link.fileno() in ready:
                read = b""
                with contextlib.suppress(ConnectionResetError):
                    read = self._link.recv(MAX_READ)
                answer += read
                if not read:
                    watched.discard(self._link.fileno())
                if len(answer) > longest:
                    raise RewardFailed(f"answered with more than {longest} bytes")
            elif self._end in ready:  # what it has started may hold its end of the link
                raise RewardFailed(self._last_words())
        return answer.partition(b"\n")[0]

    def _keep_output(self) -> bool:
        """Read what the process has written, keep the end of it, and return whether it may write more."""
        try:
            read = os.read(self._output, MAX_READ)  # all that a pipe holds
        except BlockingIOError:
            return True
        self._written = (self._written + read)[-MAX_OUTPUT_BYTES:]
        return bool(read)

    def _last_words(self) -> str:
        """Return how the process has ended, and the last line that it wrote."""
        self.abandon()
        code = self._process.wait()
        self._keep_output()
        lines = [line.strip() for line in self._written.decode("utf-8", "replace").splitlines() if line.strip()]
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return f"ended its process ({how}): {lines[-1][-MAX_SHOWN:] if lines else 'it wrote nothing to stderr'}"


def _ready(descriptors: Collection[int], deadline: float) -> set[int]:
    """Wait until some of the descriptors can be read, and return them; ``TimeoutError`` at the deadline."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(1000 * _left_s(deadline))}


def _left_s(deadline: float) -> float:
    """Return the seconds to the deadline, above 0; ``TimeoutError`` if it has passed."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


class ServedReward(ABC):
    """Base of rewards in a process. Every failure is a ``UserError`` that begins with the reward's name, and final."""

    def __init__(self, called: str, cure: str = "") -> None:
        """Prepare the reward. ``called`` heads its errors: a file or a key, and the reward; ``cure`` ends those of a
        run that can go on."""
        self._called, self._cure = called, cure
        self._process: RewardProcess | None = None
        self._failure: UserError | None = None
        self._lock = asyncio.Lock()

    @abstractmethod
    def check(self, item: RewardItem) -> None:
        """Raise ``UserError`` for a row whose ground truth is unusable."""

    async def __call__(self, items: Sequence[RewardItem]) -> list[Graded]:
        """Return the outcome of each item, within a deadline for the whole batch (and another for the start)."""
        async with self._lock:
            if self._failure is not None:
                raise self._failure
            try:
                is_new = self._process is None
                if self._process is None:
                    self._process = self._started()
                return await asyncio.to_thread(self._score, self._process, items, is_new=is_new)
            except RewardFailed as error:
                kind = CutOffError if self._cure else UserError
                self._failure = kind(f"{self._called} {one_line(error)}{self._cure}")
                await asyncio.to_thread(self.close)
                raise self._failure from error
            except asyncio.CancelledError:
                if self._process is not None:
                    self._process.abandon()  # the thread returns soon
                raise

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.end()

    @abstractmethod
    def _start(self) -> RewardProcess:
        """Start the process; ``OSError`` or ``ValueError`` if the system refuses."""

    @abstractmethod
    def _arguments(self, item: RewardItem) -> dict[str, Any]:
        """Return the process's input for an item; ``UserError`` if there is none."""

    @abstractmethod
    def _graded(self, value: Any, item: RewardItem) -> Graded:
        """Return the outcome that ``value`` stands for; ``TypeError`` or ``ValueError`` if it is none."""

    @abstractmethod
    def _timeout_s(self, num_items: int) -> float:
        """Return the deadline in seconds of a batch of so many items; for 0 that of the start."""

    def _started(self) -> RewardProcess:
        try:
            return self._start()
        except (OSError, ValueError) as error:
            raise RewardFailed(f"could not be started: {error}") from error

    def _score(self, process: RewardProcess, items: Sequence[RewardItem], *, is_new: bool) -> list[Graded]:
        """Grade the items in a thread, after the import if the process is new."""
        calls = [self._call(item) for item in items]
        if is_new:
            _require_no_error(process.exchange(None, self._timeout_s(0)), items)
        answer = process.exchange(calls, self._timeout_s(len(calls)))
        _require_no_error(answer, items)
        try:
            return [self._graded(value, item) for value, item in zip(answer["values"], items, strict=True)]
        except (KeyError, TypeError, ValueError) as error:
            reason = f"sent no answer of {len(items)} numbers: it wrote to a descriptor not its own"
            raise RewardFailed(reason) from error

    def _call(self, item: RewardItem) -> str:
        """Return the process's input for an item as JSON; what JSON does not know goes as its text."""
        try:
            return json.dumps(self._arguments(item), default=str)
        except (TypeError, ValueError, RecursionError) as error:  # keys that are no text, whole numbers of 5,000 digits
            raise RewardFailed(f"cannot be given {item.place}: {error}") from error


def _require_no_error(answer: dict[str, Any], items: Sequence[RewardItem]) -> None:
    if "error" in answer:
        item = items[answer["item"]] if "item" in answer else None
        place = "" if item is None else f", for {item.place} (domain {item.domain!r})"
        raise RewardFailed(f"{answer['error']}{place}")

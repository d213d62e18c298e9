"""Processes of one reward: started, called within a deadline, and ended without a trace.

Calls block and are made in a thread. Every wait has a deadline, whatever the function does to its processes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from mopd.base.files.json_text import parse_json
from mopd.base.files.temporary import TemporaryFolder
from mopd.rewards.supervisor import KILL_S, MAX_PROCESSES, descendants

SUPERVISOR = Path(__file__).with_name("supervisor.py")
ENVIRONMENT = {"PATH": os.defpath, "LANG": "C.UTF-8"}
"""The whole environment that the function sees."""
MAX_ANSWER_BYTES = 16384
"""Bytes of an answer beside its numbers."""
MAX_READ = 65536
MAX_WORDS = 300
"""Characters of the function's last line in an error."""
END_S = KILL_S + 1.0
"""Seconds that the supervisor may take to kill everything and end."""


class RewardFailed(Exception):
    """A failure of the function, worded to follow its name."""


class RewardProcess:
    """Processes of one function, ready or starting."""

    def __init__(
        self,
        program: str,
        arguments: tuple[str, str],
        *,
        max_bytes: int,
        bytes_per_value: int,
        folder: Path | None = None,
    ) -> None:
        """Start them; ``exchange(None)`` then waits for the import.

        Args:
            program: ``child.py`` or ``judge.py``, of this folder, with its own two ``arguments``.
            max_bytes: memory of all its processes together.
            bytes_per_value: longest value in an answer.
            folder: working directory; absent: a new one, which is removed with the processes.

        Raises:
            UserError: there is no room for its folder.
            OSError: the system cannot start it.
        """
        self._bytes_per_value = bytes_per_value
        self._scratch = TemporaryFolder("mopd-reward-") if folder is None else None
        calls, self._calls = os.pipe()
        self._answers, answers = os.pipe()
        self._mark = secrets.token_hex(16)
        numbers = [str(number) for number in (os.getpid(), calls, answers, max_bytes)]
        child = str(SUPERVISOR.with_name(program))
        scratch = "" if self._scratch is None else str(self._scratch.path)
        try:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", str(SUPERVISOR), *numbers, scratch, child, *arguments, self._mark],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=ENVIRONMENT,
                cwd=folder or scratch,
                pass_fds=(calls, answers),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._calls)
            os.close(self._answers)
            self._remove_scratch()
            raise
        finally:
            os.close(calls)
            os.close(answers)
        assert self._supervisor.stdout is not None
        self._reason = self._supervisor.stdout.fileno()
        for descriptor in (self._calls, self._answers, self._reason):
            os.set_blocking(descriptor, False)
        self._batch = 0
        self._in_use = threading.Lock()

    def exchange(self, calls: list[str] | None, timeout_s: float) -> dict[str, Any]:
        """Return the answer to a batch of JSON objects, or (``None``) the result of the import, within ``timeout_s``.

        Raises:
            RewardFailed: no answer in time, an invalid one, or the processes have ended. The caller must then end them
                all.
        """
        deadline = time.monotonic() + timeout_s
        self._batch += calls is not None
        text = "" if calls is None else f'{{"batch": {self._batch}, "calls": [{", ".join(calls)}]}}\n'
        longest = MAX_ANSWER_BYTES + self._bytes_per_value * len(calls or ())
        # `end` waits for this lock before it closes the descriptors
        with self._in_use:
            line = self._talk(memoryview(text.encode()), longest, deadline, timeout_s)
        try:
            answer = parse_json(line, max_values=longest)
        except ValueError as error:
            raise RewardFailed(f"sent no answer ({error}): it wrote to a descriptor not its own") from error
        if not isinstance(answer, dict) or (calls is not None and answer.get("batch") != self._batch):
            raise RewardFailed("sent no answer of this batch: it wrote to a descriptor not its own")
        return answer

    def abandon(self) -> None:
        """Let the supervisor kill everything; a thread in ``exchange`` then returns soon."""
        assert self._supervisor.stdin is not None
        self._supervisor.stdin.close()

    def end(self) -> None:
        """Kill everything and wait for its end, at most a few seconds. May be repeated."""
        self.abandon()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the function has stopped the supervisor
            self._supervisor.wait(END_S)
        if self._supervisor.returncode != 0:
            self._end_without_supervisor()
        with self._in_use:
            if self._calls >= 0:
                os.close(self._calls)
                os.close(self._answers)
                self._calls = self._answers = -1
            assert self._supervisor.stdout is not None
            self._supervisor.stdout.close()
        self._remove_scratch()

    def _remove_scratch(self) -> None:
        """Remove the folder if the supervisor could not."""
        if self._scratch is not None:
            self._scratch.close()

    def _talk(self, message: memoryview, longest: int, deadline: float, timeout_s: float) -> bytes:
        """Write the message while reading, and return the first line that comes back."""
        answer, reason = b"", b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            selector.register(self._reason, selectors.EVENT_READ)
            if message:
                selector.register(self._calls, selectors.EVENT_WRITE)
            while (left_s := deadline - time.monotonic()) > 0:
                ready = {key.fd for key, _ in selector.select(left_s)}
                if self._calls in ready:
                    message = message[self._write(message) :]
                    if not message:
                        selector.unregister(self._calls)
                if self._answers in ready:
                    read = os.read(self._answers, MAX_READ)
                    answer += read
                    if b"\n" in answer:
                        return answer.partition(b"\n")[0]
                    if len(answer) > longest:
                        raise RewardFailed(f"answered with more than {longest} bytes")
                    if not read:  # the supervisor will report the reason
                        selector.unregister(self._answers)
                elif self._reason in ready:
                    read = os.read(self._reason, MAX_READ)
                    reason += read
                    if not read or b"\n" in reason:
                        raise RewardFailed(_why(reason))
        raise RewardFailed(f"gave no answer within timeout_s {timeout_s:g}: make it faster or raise timeout_s")

    def _write(self, message: memoryview) -> int:
        """Write to the function's process and return the number of bytes accepted. If it has closed the pipe, report
        all bytes as written: the supervisor reports the reason."""
        try:
            return os.write(self._calls, message[:MAX_READ])
        except BrokenPipeError:
            return len(message)

    def _end_without_supervisor(self) -> None:
        """Find and kill what is left by its mark: the function has killed or stopped its supervisor."""
        give_up_at = time.monotonic() + KILL_S
        found = {self._supervisor.pid, *descendants(self._supervisor.pid)}
        while found and time.monotonic() < give_up_at:
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
            self._supervisor.poll()
            found = _marked(self._mark)
        with contextlib.suppress(subprocess.TimeoutExpired):  # killed, and not yet gone on a machine that is too busy
            self._supervisor.wait(KILL_S)


def _marked(mark: str) -> set[int]:
    """Return the living processes with this mark on their command line: started with it, or forked from such a one."""
    found = set()
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                if mark.encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                    found.add(int(name))
            except OSError:  # gone, or not ours
                continue
    return found


def _why(reason: bytes) -> str:
    """Return the supervisor's last line in words."""
    try:
        said = parse_json(reason)
        why, code = said["why"], said.get("code", 0)
        lines = [line for line in said["words"].splitlines() if line.strip()]
    except (ValueError, KeyError, TypeError, AttributeError):
        return "ended the process that watches it"
    if why == "memory":
        return "took more memory than max_memory_gib: make it smaller or raise max_memory_gib"
    if why == "processes":
        return f"started more than {MAX_PROCESSES} processes"
    if why == "closed":
        return "was ended with the run"
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return f"ended its process ({how}): {lines[-1].strip()[-MAX_WORDS:] if lines else 'it wrote nothing to stderr'}"

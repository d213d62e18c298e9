"""The process of one of our own rewards that may run long.

``python -I judge.py KIND SETTINGS PARENT_PID LINK_FD MAX_BYTES`` speaks the protocol of ``child.py``; its
values are ``[value, extracted, problem]``. Every response is judged in a fork of this process, several at a time, each
with a deadline: one that takes too long, or too much memory, is ended and scores 0.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from mopd.rewards.child import bind, plain, serve
from mopd.rewards.graders.answers import grade_json, grade_math, grade_regex, prepare_math
from mopd.rewards.graders.programs import grade_program

PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
MAX_SHOWN = 500
"""Characters of an extraction or a problem in an answer."""
MAX_FORK_BYTES = 2**30
"""Memory of a grader itself; programs of a response have a limit of their own."""
GRACE_S = 2.0
"""Seconds beyond its deadline for a grader that must end programs of its own."""
Grader = Callable[[dict[str, Any]], tuple[float, "str | None", str]]


@dataclass
class Fork:
    """A process that judges one response."""

    pid: int
    number: int
    """Number of the response in its batch."""
    deadline: float
    answer: bytes = b""


def main(kind: str, settings: dict[str, Any], parent_pid: int, link_fd: int, max_bytes: int) -> None:
    """Serve batches until the link closes."""
    bind(parent_pid, max_bytes)
    settings["grace_s"] = GRACE_S if kind == "code" else 0.0
    serve(link_fd, lambda: grader_of(kind, settings), lambda grader, calls: judge(grader, calls, settings))


def grader_of(kind: str, settings: dict[str, Any]) -> Grader:
    """Return the grader of a kind, ready to be forked: everything is imported."""
    if kind == "math":
        prepare_math()
        return grade_math
    if kind == "regex":
        pattern = re.compile(settings["pattern"])
        return lambda call: grade_regex(call, pattern)
    if kind == "json_schema":
        schema = None if settings["path"] is None else json.loads(Path(settings["path"]).read_text(encoding="utf-8"))
        grade_json({"response": "1", "truth": True}, None)  # or each fork would import the library again
        return lambda call: grade_json(call, schema)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # its memory holds the expected outputs
    max_bytes = int(settings["max_memory_gib"] * 2**30)
    return lambda call: grade_program(call, timeout_s=settings["timeout_s"], max_bytes=max_bytes)


def judge(grader: Grader, calls: list[dict[str, Any]], settings: dict[str, Any]) -> dict[str, Any]:
    """Every call judged, ``num_processes`` at a time; an error where the system let a grader do nothing even alone.

    Beside others a grader may lack what their responses have taken, as the rest of a disk: it is asked once more when
    they are gone.
    """
    values = _judged(grader, calls, range(len(calls)), settings, settings["num_processes"])
    for number in [number for number, value in values.items() if isinstance(value, str)]:
        again = _judged(grader, calls, [number], settings, 1)[number]
        if isinstance(again, str):
            return {"error": again, "item": number}
        values[number] = again
    return {"values": [values[number] for number in range(len(calls))]}


def _judged(
    grader: Grader, calls: list[dict[str, Any]], numbers: Sequence[int], settings: dict[str, Any], at_a_time: int
) -> dict[int, Any]:
    """Number of each call -> its value, or text where the system let its grader do nothing."""
    values: dict[int, Any] = {}
    running: dict[int, Fork] = {}
    waiting = list(reversed(numbers))
    while running or waiting:
        while len(running) < at_a_time and waiting:
            number = waiting.pop()
            deadline = time.monotonic() + settings["timeout_s"] + settings["grace_s"]
            descriptor, fork = _start(grader, calls[number], number, deadline)
            running[descriptor] = fork
        wait_s = max(0.0, min(fork.deadline for fork in running.values()) - time.monotonic())
        ready = select.select(list(running), [], [], wait_s)[0]
        for descriptor in ready:
            read = os.read(descriptor, 65536)
            running[descriptor].answer += read
            if not read:
                fork = running.pop(descriptor)
                values[fork.number] = _end(descriptor, fork)
        for descriptor in [fd for fd, fork in running.items() if fork.deadline <= time.monotonic()]:
            fork = running.pop(descriptor)
            _end(descriptor, fork)
            values[fork.number] = [0.0, None, f"it took more than {settings['timeout_s']:g} s"]
    return values


def _start(grader: Grader, call: dict[str, Any], number: int, deadline: float) -> tuple[int, Fork]:
    """Start a fork; return it with the descriptor of its answer."""
    mine, its = os.pipe()
    pid = os.fork()
    if pid:
        os.close(its)
        return mine, Fork(pid, number, deadline)
    try:
        os.setpgid(0, 0)  # a group of its own: killed with all that it starts
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_FORK_BYTES, MAX_FORK_BYTES))
        os.write(its, _answer(grader, call))
    finally:
        # never back into the parent's code, whatever was raised
        os._exit(0)


def _answer(grader: Grader, call: dict[str, Any]) -> bytes:
    """Return the grader's outcome as JSON that any reader takes. Whatever a response can make it raise scores 0."""
    try:
        value, extracted, problem = grader(call)
    except (OSError, SubprocessError) as error:  # no room for a process or a file, no sandbox: not the response's fault
        return json.dumps(f"could not judge: {type(error).__name__}: {plain(str(error), MAX_SHOWN)}").encode()
    except Exception as error:
        value, extracted, problem = 0.0, None, f"{type(error).__name__}: {error}"
    shown = None if extracted is None else plain(extracted, MAX_SHOWN)
    return json.dumps([value, shown, plain(problem, MAX_SHOWN)]).encode()


def _end(descriptor: int, fork: Fork) -> Any:
    """Kill the fork, reap it, and return its answer."""
    os.close(descriptor)
    for kill in (os.killpg, os.kill):
        try:
            kill(fork.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    status = os.waitpid(fork.pid, 0)[1]
    try:
        return json.loads(fork.answer)
    except ValueError:
        code = os.waitstatus_to_exitcode(status)
        return [0.0, None, f"judging it ended by signal {-code}" if code < 0 else "judging it gave no answer"]


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), *map(int, sys.argv[3:6]))

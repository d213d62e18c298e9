"""Reward functions that do what they should not: one line, in time, and no process is left.

Every program here is bounded by itself: it sleeps for 15 minutes at most, which is longer than a test may take, and
forks a handful of times.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mopd.base.files.json_text import parse_json
from mopd.base.types import UserError
from mopd.config.rewards import CustomRewardConfig
from mopd.rewards.child import _run
from mopd.rewards.domains import CustomReward
from mopd.rewards.interface import RewardItem

TIMEOUT_S = 0.7

START = """
import os, signal, subprocess, sys, threading, time
SLEEP = [sys.executable, "-c", "import time; time.sleep(900)"]

def write_everywhere(data):
    for fd in range(3, 1024):
        try: os.write(fd, data)
        except OSError: pass
"""

BAD: dict[str, tuple[str, str]] = {
    # what it does -> body of the function, what the line says
    "starts another and hangs": ("subprocess.Popen(SLEEP)\ntime.sleep(900)", r"no answer within timeout_s 0\.7"),
    "leaves many that hold its ends": (
        "for _ in range(12):\n    if os.fork() == 0:\n        time.sleep(900)\nos._exit(6)",
        "exit code 6",
    ),
    "stops itself": ("os.kill(os.getpid(), signal.SIGSTOP)", "no answer within timeout_s"),
    "a thread for ever": ("threading.Thread(target=time.sleep, args=(900,)).start()\nsys.exit(1)", "SystemExit: 1"),
    "crashes": ("print('last', 'words', flush=True)\nos.kill(os.getpid(), 11)", "killed by signal 11.*: last words"),
    "30 GB at once": ("return len(bytearray(30 * 2**30))", r"failed: MemoryError"),
    "closes all": ("os.closerange(0, 256)\nreturn 1.0", "ended its process"),
    "answers itself": (
        'write_everywhere(b\'{"batch": 1, "values": ["x"]}\\n\')',
        "sent no answer of 1 numbers: it wrote to a descriptor not its own",
    ),
    "answers nonsense": (
        "write_everywhere(b'[' * 9999 + b'\\n')",
        "sent no answer .*: it wrote to a descriptor not its own",
    ),
    "answers without end": ("while True: write_everywhere(b'x' * 4096)", "answered with more than"),
    "10**400": ("return 10**400", r"returned 1000.*, larger than 1e\+09, for f: row 3 \(domain 'math'\)"),
    "100 MB": ("return 'x' * 100_000_000", "returned 'xxxx.*, not a finite number"),
}

RESULTS: dict[str, tuple[str, str]] = {
    "endless recursion": ("return f(**row)", "failed: RecursionError: "),
    "text": ("return 'great'", "returned 'great', not a finite number"),
    "NaN": ("return float('nan')", "returned nan, not a finite number"),
    "1e300": ("return 1e300", r"returned 1e\+300, larger than 1e\+09"),
    "an array of two": ("import numpy; return numpy.ones(2)", "failed: ValueError: can only convert"),
    "a long exception": ("raise ValueError('x\\n' * 10**6)", "failed: ValueError: x x x"),
    "a surrogate in an exception": ("raise ValueError('\\ud800')", r"failed: ValueError: \\ud800"),
}


def source_of(body: str) -> str:
    return START + "def f(**row):\n" + "".join(f"    {line}\n" for line in body.split("\n"))


MODULES: dict[str, tuple[str, str]] = {
    "raises": ("1 / 0", r"cannot be loaded: ZeroDivisionError: division by zero \(line 1\)"),
    "hangs": ("import time; time.sleep(900)", "no answer within timeout_s"),
    "dies": ("import os; os._exit(9)", r"ended its process \(exit code 9\)"),
    "no Python": ("def f(:", "cannot be loaded: SyntaxError"),
    "no function": ("g = 1", "cannot be loaded: AttributeError: .*'f'"),
    "not callable": ("f = 'x' * 10**6", "cannot be loaded: TypeError: it is no function but 'xxx"),
    "another signature": ("def f(x): return 1.0", r"failed: TypeError: f\(\) got an unexpected keyword"),
}


def item(**changes: Any) -> RewardItem:
    values = {"prompt": "p", "response": "r", "ground_truth": "g", "extra_info": {}, "domain": "math"}
    return RewardItem(**{**values, "place": "f: row 3", **changes})


def run(path: Path, items: list[RewardItem], *, timeout_s: float = 20.0, gib: float = 0.25) -> list[float]:
    reward = CustomReward(
        CustomRewardConfig(type="custom", path=str(path), function="f", timeout_s=timeout_s, max_memory_gib=gib)
    )
    try:
        return [graded.value for graded in asyncio.run(reward(items))]  # type: ignore[arg-type]
    finally:
        reward.close()


def left_over(folder: Path) -> list[str]:
    """Command lines of processes whose working directory is ``folder`` and that do not end although killed."""
    deadline = time.monotonic() + 60
    while (found := living(folder)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def living(folder: Path) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_text(errors="replace") if entry.name.isdecimal() else ""
            if words and os.readlink(entry / "cwd") == str(folder):  # the dying lose their words first
                found.append(words)
        except OSError:
            continue
    return found


def refused(path: Path, message: str) -> None:
    timeout_s = TIMEOUT_S if "no answer within" in message else 20.0
    threads = threading.active_count()
    with pytest.raises(UserError, match=message) as caught:
        run(path, [item()], timeout_s=timeout_s)
    line = str(caught.value)
    assert line.startswith(f"{path}: custom reward 'f' ") and len(line) < 1000
    assert line.isprintable(), line
    assert left_over(path.parent) == []
    assert threading.active_count() <= threads + 1


@pytest.mark.parametrize("name", BAD)
def test_one_line_in_time_and_nothing_is_left(name: str, tmp_path: Path) -> None:
    body, message = BAD[name]
    path = tmp_path / "mine.py"
    path.write_text(source_of(body))
    refused(path, message)


@pytest.mark.parametrize("name", MODULES)
def test_files_that_do_not_load(name: str, tmp_path: Path) -> None:
    source, message = MODULES[name]
    path = tmp_path / "mine.py"
    path.write_text(source)
    refused(path, message)


@pytest.mark.parametrize("name", RESULTS)
def test_results_and_exceptions_become_one_short_line(name: str) -> None:
    body, message = RESULTS[name]
    space: dict[str, Any] = {}
    exec(compile(source_of(body), "mine.py", "exec"), space)
    answer = _run(space["f"], [{}], "mine.py")
    line = json.dumps(answer).encode()
    assert re.search(message, answer["error"]) and len(line) < 2000, answer
    assert parse_json(line) == answer and answer["item"] == 0


NUMBERS: dict[str, tuple[str, float]] = {
    "a whole number": ("return 3", 3.0),
    "the largest": ("return -1e9", -1e9),
    "numpy": ("import numpy; return numpy.float32(0.5)", 0.5),
    "torch": ("import torch; return torch.tensor(1.5)", 1.5),
    "a subclass": ("class Mine(float): pass\nreturn Mine(0.5)", 0.5),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_every_kind(name: str) -> None:
    body, value = NUMBERS[name]
    space: dict[str, Any] = {}
    exec(compile(source_of(body), "mine.py", "exec"), space)
    answer = _run(space["f"], [{}, {}], "mine.py")
    assert answer == {"values": [value, value]} and [type(v) for v in answer["values"]] == [float, float]


GOOD: dict[str, tuple[str, float]] = {
    "prints much": ("for _ in range(200): print('x' * 10**5)\nreturn 1.0", 1.0),
    "writes to fd 1 and 2": ("os.write(1, b'{}\\n'); os.write(2, b'{}\\n')\nreturn 1.0", 1.0),
    "reads stdin": ("return len(sys.stdin.read())", 0.0),
    "a child left behind": ("subprocess.Popen(SLEEP)\nreturn 1.0", 1.0),
    "a pool": ("import multiprocessing as m\nwith m.Pool(2) as pool: return sum(pool.map(abs, [1, -2]))", 3.0),
    "a clean environment": ("return len(set(os.environ) - {'PATH', 'LANG', 'LC_CTYPE'})", 0.0),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_is_allowed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    body, value = GOOD[name]
    path = tmp_path / "mine.py"
    path.write_text(source_of(body))
    assert run(path, [item(), item()], gib=1.0) == [value, value]
    assert left_over(tmp_path) == []


def test_arguments_of_every_kind(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def f(response, extra_info, **row): return len(response) + len(str(extra_info.get('x', '')))")
    odd = "a\0b\ud800\x1b\u2028"
    assert run(path, [item(response=odd), item(response="x" * 10**6)]) == [len(odd), 10**6]
    assert run(path, [item(extra_info={"x": np.float32(1.5)})]) == [1 + 3]
    for extra_info in ({(1, 2): 3}, {"x": 10**5000}):
        with pytest.raises(UserError, match="custom reward 'f' cannot be given f: row 3: "):
            run(path, [item(extra_info=extra_info)])
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(UserError, match="cannot be given f: row 3"):
        run(path, [item(extra_info=deep)])
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("path", ["nowhere.py", "a\0b.py", "\ud800.py", "x" * 5000, "", "."])
def test_paths_that_are_no_file(path: str) -> None:
    with pytest.raises(UserError, match="no such file: correct the path of the custom reward") as caught:
        CustomReward(CustomRewardConfig(type="custom", path=path, function="f"))
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500


def test_a_failure_is_final_and_cancelling_ends_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(source_of("time.sleep(900)"))
    cfg = CustomRewardConfig(type="custom", path=str(path), function="f", timeout_s=0.5)

    async def twice() -> None:
        reward = CustomReward(cfg)
        for _ in range(2):
            with pytest.raises(UserError, match="no answer within"):
                await reward([item()])
        reward.close()

    async def cancelled() -> None:
        reward = CustomReward(CustomRewardConfig(type="custom", path=str(path), function="f", timeout_s=900.0))
        task = asyncio.create_task(reward([item()]))  # type: ignore[arg-type]
        await asyncio.sleep(0.4)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        reward.close()

    asyncio.run(twice())
    asyncio.run(cancelled())
    assert left_over(tmp_path) == []

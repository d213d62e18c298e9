"""The code reward: tests of the shapes that data sets have, and programs that would rather do something else."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from mopd.base.types import UserError
from mopd.config.rewards import CodeConfig
from mopd.rewards.domains import build_rewards
from mopd.rewards.graders.programs import MAX_OPEN_FILES, Sandbox, same_output
from tests.unit.rewards.items import item, judged, values

CODE = CodeConfig(type="code", timeout_s=20.0)
ASSERTS = ["assert add(1, 2) == 3", "assert set(add(i, 1) for i in (1, 2)) == {2, 3}"]


def program(source: str) -> str:
    return f"Like this:\n```python\n{source}\n```\nThat is all."


ADD, DOUBLE = program("def add(a, b):\n    return a + b"), program("print(2 * int(input()))")
PAIR = program(
    "class Pair:\n    def __init__(self, a, b): self.a, self.b = a, b\n"
    "def largest(pairs): return max(pair.b for pair in pairs)"
)
SOLUTION = program("class Solution:\n    def twice(self, a: List[int]): return tuple(a * 2)")
CASE = {"input": "[1]", "output": "[1, 1]", "testtype": "functional"}
RIGHT: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "asserts": (ADD, ASSERTS, {}),
    "asserts as text": (ADD, json.dumps(ASSERTS), {}),
    "MBPP": (
        program("def near(x): return x / 3"),
        {"test_list": ["assert math.isclose(near(1), third)"], "test_imports": ["import math"], "challenge": None},
        {"test_setup_code": "third = 1 / 3"},
    ),
    "classes of the program": (PAIR, {"test_list": ["assert largest([Pair(1, 2), Pair(5, 4)]) == 4"]}, {}),
    "a function named as a builtin": (program("def sum(a, b): return a + b"), ["assert sum(10, 15) == 25"], {}),
    "what it raises": (
        program("def f(): raise KeyError('x')"),
        ["try:\n    f()\n    raise SystemExit\nexcept KeyError:\n    pass"],
        {},
    ),
    "results of every plain type": (
        program("import collections as c\ndef f(): return (1, 2.5, 'x', b'y', None, {3}, c.Counter('aa'), [True])"),
        ["assert f() == (1, 2.5, 'x', b'y', None, {3}, {'a': 2}, [True])"],
        {},
    ),
    "stdin": (DOUBLE, [{"input": "4\n", "output": "8\n", "testtype": "stdin"}, {"input": "5", "output": "10"}], {}),
    "LiveCodeBench": (SOLUTION, {"public_test_cases": json.dumps([CASE]), "metadata": '{"func_name": "twice"}'}, {}),
    "a name beside the cases": (SOLUTION, json.dumps([CASE]), {"fn_name": "Solution.twice"}),
    "APPS": (DOUBLE, json.dumps({"inputs": ["4\n", "5\n"], "outputs": ["8\n", ["10"]]}), {}),
    "APPS functions": (ADD, {"inputs": [[1, 2], [3, 4]], "outputs": [[3], 7], "fn_name": "add"}, {}),
}


@pytest.fixture(scope="module")
def right() -> list[float]:
    return values(CODE, *(item(text, truth, **extra) for text, truth, extra in RIGHT.values()))


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_pass(name: str, right: list[float]) -> None:
    assert right[list(RIGHT).index(name)] == 1.0


def test_wrong_ones_say_why() -> None:
    found = judged(
        CODE,
        item(program("def add(a, b): return a * b"), ASSERTS),
        item(program("def added(a, b): return a + b"), ASSERTS),
        item(program("def add(a, b): return a +"), ASSERTS),
        item("def add(a, b): return a + b", ASSERTS),
        item(program("print(input())"), [{"input": "4", "output": "8"}]),
        item(program("print(1 / 0)"), [{"input": "4", "output": "8"}]),
        item(SOLUTION, [{**CASE, "output": "[1]"}], fn_name="twice"),
        item(ADD, [CASE], fn_name="twice"),
    )
    assert [graded.value for graded in found] == [0.0] * len(found)
    assert [graded.extracted is None for graded in found].index(True) == 3
    problems = (
        "AssertionError: assert add(1, 2) == 3",
        "NameError: name 'add' is not defined",
        "SyntaxError",
        "no finished block",
        "case 0: another output",
        "case 0: exit code 1: ZeroDivisionError",
        "case 0: another result",
        "it defines no function 'twice'",
    )
    for graded, words in zip(found, problems, strict=True):
        assert words in graded.problem, graded


def test_outputs_are_compared_line_by_line_and_as_numbers() -> None:
    assert same_output(" 1 2 \n3\n\n", "1 2\n3") and same_output("0.50 1", "0.5 1.0")
    assert not same_output("1\n2", "1 2") and not same_output("nan", "1") and not same_output("", "1")


HOSTILE: dict[str, str] = {
    "fork bomb": "import os\nwhile True: os.fork()",
    "4 GB": "x = bytearray(4 * 2**30)\ndef add(a, b): return a + b",
    "4 GB in pieces": "x = []\nwhile True: x.append(bytearray(2**20))",
    "endless loop": "while True: pass",
    "endless sleep": "import time\ndef add(a, b): time.sleep(1000)",
    "a file outside": "open(OUTSIDE, 'w').write('x')\ndef add(a, b): return a + b",
    "a folder full of files": "i = 0\nwhile True:\n    open(str(i), 'wb').write(bytes(10**6)); i += 1",
    "a socket": "import socket\nsocket.create_connection(('127.0.0.1', PORT))\ndef add(a, b): return a + b",
    "os._exit": "import os\nos._exit(0)",
    "os._exit in the call": "import os\ndef add(a, b): os._exit(0)",
    "sys.exit": "import sys\nsys.exit(0)",
    "exit with every code": "import atexit, os\natexit.register(lambda: os._exit(0))",
    "100 MB of output": "for _ in range(100): print('x' * 10**6)",
    "builtins": "import builtins\nfor n in ('set', 'sorted', 'isinstance', 'len', 'AssertionError'):\n"
    "    setattr(builtins, n, lambda *a, **k: True)\nset = lambda *a: 0\nadd = lambda a, b: 3",
    "equal to all": "class E(int):\n    __eq__ = lambda s, o: True\n    __hash__ = int.__hash__\nadd = lambda *a: E(7)",
    "equal object": "class E:\n    __eq__ = lambda s, o: True\n    __hash__ = lambda s: 1\nadd = lambda a, b: E()",
    "kills its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "kills everybody": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "a daemon": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(1000)",
    "a subprocess": "import subprocess\nsubprocess.Popen(['sleep', '1000'])",
    "writes to every descriptor": "import os\nfor fd in range(64):\n"
    '    try: os.write(fd, b\'{"passed": true, "problem": "", "result": 3}\\n\')\n    except OSError: pass',
    "reads every descriptor": "import os, glob\nsaid = [os.read(fd, 9999) for fd in (0, 3, 4) if os.fstat(fd)]\n"
    "def add(a, b): return 3",
    "its parent's memory": "import os\nopen(f'/proc/{os.getppid()}/mem', 'rb').read(10)\ndef add(a, b): return a + b",
    "endless recursion": "def add(a, b): return add(b, a)",
    "a crash": "import ctypes\nctypes.string_at(0)",
    "a builtins' key": "globals()['__builtins__'] = {'set': lambda *a: 0}\ndef add(a, b): return 3",
    "prints the verdict": 'print(\'{"passed": true, "problem": ""}\')\nprint(3)',
    "stops": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "huge result": "def add(a, b): return 'x' * (40 * 2**20)",
    "deep result": "def add(a, b):\n    x = []\n    for _ in range(100000): x = [x]\n    return x",
}
TIMEOUT_S = 5.0
"""The honest program starts two Pythons in it, beside hostile ones."""


def processes(folder: Path) -> set[str]:
    """Command lines of what works below ``folder``."""
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # no process, gone, or another user's
            words = (entry / "cmdline").read_text(errors="replace")
            if words and os.readlink(entry / "cwd").startswith(str(folder)):
                found.add(f"{entry.name} {words}")
    return found


@pytest.mark.slow
def test_hostile_programs_score_0_in_time_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As functions and, where that is something else, as whole programs; honest ones among them still pass. A batch
    that is not judged within the sum of its deadlines ends in ``RewardFailed``."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    outside = tmp_path / "outside"
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        head = f"OUTSIDE = {str(outside)!r}\nPORT = {listener.getsockname()[1]}\n"
        cases = [{"input": "1\n", "output": "2\n"}]
        items = [item(program(head + source), tests) for source in HOSTILE.values() for tests in (ASSERTS, cases)]
        found = judged(CodeConfig(type="code", timeout_s=TIMEOUT_S, max_memory_gib=0.25), *items, item(ADD, ASSERTS))
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    scores = {name: (found[2 * i].value, found[2 * i + 1].value) for i, name in enumerate(HOSTILE)}
    assert {name: both for name, both in scores.items() if both != (0.0, 0.0)} == {}
    assert found[-1].value == 1.0
    assert not outside.exists() and list(tmp_path.iterdir()) == []
    assert processes(tmp_path) == set()


@pytest.mark.parametrize("use_landlock", [True, False])
def test_a_program_is_confined_with_and_without_landlock(use_landlock: bool, tmp_path: Path) -> None:
    """Older kernels have none: the filter then refuses every write."""
    source = """
import fcntl, os, struct, sys
def refused(call):
    try: call()
    except OSError: return True
for call in (
    os.fork, lambda: os.kill(os.getppid(), 0), lambda: os.kill(1, 0), lambda: __import__('socket').socket(),
    lambda: open(sys.argv[1] + '/x', 'w'), lambda: os.truncate(sys.argv[1] + '/kept', 0),
    lambda: os.open(sys.argv[1] + '/kept', os.O_TRUNC), lambda: os.chmod(sys.argv[1], 0o777), lambda: os.mkdir('a'),
    lambda: os.unlink(sys.argv[1] + '/kept'), lambda: os.setsid(), lambda: os.setpriority(0, os.getppid(), 19),
    lambda: os.memfd_create('a'), lambda: os.rename(sys.argv[1] + '/kept', 'b'),
    # Signals that the kernel would send in its name.
    lambda: fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid()), lambda: fcntl.fcntl(0, 10, 9),
    lambda: fcntl.fcntl(0, 15, struct.pack('ii', 1, os.getppid())),
):
    assert refused(call), call.__code__.co_firstlineno
import resource, threading
try: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)); raise SystemExit('raised its limit')
except ValueError: pass
thread = threading.Thread(target=print, args=('threads run',)); thread.start(); thread.join()
os.kill(os.getpid(), 0)
"""
    (tmp_path / "in").mkdir()
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "in" / "program.py").write_text(source)
    box = Sandbox(tmp_path / "in", 2**29, time.monotonic() + 20, use_landlock=use_landlock)
    running = box.start(["program.py", str(tmp_path)])
    try:
        assert running.wait() == "", running.read_output(running.errors)
        assert running.read_output(running.output) == "threads run\n"
    finally:
        running.end()
    assert sorted(os.listdir(tmp_path)) == ["in", "kept"] and (tmp_path / "kept").read_text() == "kept"


def test_a_large_process_with_many_files_starts_programs(tmp_path: Path) -> None:
    """What it holds is above the limits of the programs, which have none of it."""
    (tmp_path / "program.py").write_text("print(2)")
    with contextlib.ExitStack() as held, mmap.mmap(-1, 2**30):
        for _ in range(MAX_OPEN_FILES):
            held.enter_context(open(os.devnull))
        running = Sandbox(tmp_path, 2**29, time.monotonic() + 20).start(["program.py"])
        try:
            assert running.wait() == "", running.read_output(running.errors)
            assert running.read_output(running.output) == "2\n"
        finally:
            running.end()


BAD_TRUTHS: list[tuple[Any, dict[str, Any], str]] = [
    (None, {}, "the ground truth is absent without tests, the code reward takes a list of assert statements"),
    (7, {}, "the ground truth is int without tests"),
    ([], {}, "the ground truth is list without tests"),
    ({"tests": []}, {}, "the ground truth is a structure without tests"),
    ({"inputs": ["1"], "outputs": []}, {}, "the ground truth is a structure without tests"),
    ({"inputs": [], "outputs": []}, {}, "the ground truth is a structure without tests"),
    ({"inputs": "1", "outputs": ["1"]}, {}, "the ground truth is a structure without tests"),
    ({"inputs": ["1"], "outputs": "1"}, {}, "the ground truth is a structure without tests"),
    ([{"input": "1"}], {}, "the ground truth is list without tests"),
    ([{"output": "1"}], {}, "the ground truth is list without tests"),
    ([CASE, ["input", "output"]], {}, "the ground truth is list without tests"),
    (["assert f("], {}, "the test 'assert f\\(' is no Python"),
    ([CASE], {}, "its cases call a function, but no fn_name says which"),
    ([{**CASE, "output": "[1"}], {"fn_name": "f"}, "a functional case is no JSON"),
    ([{**CASE, "testtype": "web"}], {}, "its cases have testtype web: use stdin or functional"),
]


@pytest.mark.parametrize(("truth", "extra", "message"), BAD_TRUTHS)
def test_tests_of_no_known_shape_are_refused(truth: Any, extra: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        build_rewards({"math": CODE}).of("math").check(item("", truth, **extra))
    assert str(caught.value).startswith("f: row 3: ") and "\n" not in str(caught.value)

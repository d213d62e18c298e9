"""The process of a custom environment: whatever the user's class does is bounded, and one line."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from mopd.base.types import UserError
from mopd.config.environment import CustomEnvironmentConfig, PythonToolConfig, VerifiersConfig
from mopd.environments.process import EnvironmentFailed, Environments

HEAD = "import asyncio, ctypes, os, sys, time\n"
ROW = {"prompt": "1+1", "domain": "sums", "ground_truth": "2", "extra_info": None}


def environments(folder: Path, step: str, *, reset: str = "return None", **options: Any) -> Environments:
    """An environment of which one method has a body."""
    text = f"class Own:\n    async def reset(self, row, seed):\n        {reset}\n"
    text += f"    async def step(self, text):\n        {step}\n"
    path = folder / "own.py"
    path.write_text(HEAD + text)
    cfg = {"turn_timeout_s": 1.0, "max_memory_gib": 0.5, **options}
    return Environments(CustomEnvironmentConfig(type="custom", module=str(path), class_name="Own", **cfg))


def ask(own: Environments, *texts: str) -> list[Any]:
    """What the environment answers to turns of one response each, at the same time; failures as they are."""

    async def one(text: str) -> Any:
        episode = await own.reset(ROW, 1)
        return await episode.step(text)

    async def run() -> list[Any]:
        try:
            return list(await asyncio.gather(*map(one, texts), return_exceptions=True))
        finally:
            if own._process is not None:
                await own._process.stop()

    return asyncio.run(run())


HOSTILE = {
    "raises": ("raise ValueError('a\\nb \\x1b[31m')", "failed in step: ValueError: a b"),
    "ends": ("sys.exit(3)", "failed in step: SystemExit: 3"),
    "interrupts": ("raise KeyboardInterrupt", "failed in step: KeyboardInterrupt"),
    "cancels": ("raise asyncio.CancelledError", "failed in step: CancelledError"),
    "waits": ("await asyncio.sleep(1000)", "gave no answer within turn_timeout_s 1"),
    "returns nothing": ("return None", "returned None from step, no pair"),
    "returns a text": ("return 'ab'", "returned 'ab' from step, no pair"),
    "returns three": ("return 'a', 1, 2", "no pair"),
    "returns bytes": ("return b'\\xff\\xfe', 1.0", "which is neither text nor None"),
    "returns a number": ("return 5, 1.0", "which is neither text nor None"),
    "no reward": ("return 'a', None", "returned the reward None from step, not a finite number"),
    "NaN": ("return 'a', float('nan')", "returned the reward nan from step, not a finite number"),
    "infinite": ("return 'a', float('-inf')", "not a finite number"),
    "too large": ("return 'a', 1e30", "larger than 1e+09"),
    "long": ("return 'x' * 100_000_000, 0.0", "returned an observation of 100000000 characters, the limit is 1048576"),
    "hungry": ("return 'x' * 10**10, 0.0", "failed in step: MemoryError"),
    "deep": ("def f(): return f()\n        return f()", "failed in step: RecursionError"),
    "a strange error": (
        "class E(Exception):\n            __str__ = lambda self: 'x' * 10**6\n        raise E", "failed in step: E: xxx"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_step_is_one_line(name: str, tmp_path: Path) -> None:
    body, problem = HOSTILE[name]
    own = environments(tmp_path, body)
    (failed,) = ask(own, "4")
    assert isinstance(failed, EnvironmentFailed) and problem in str(failed), failed
    line = str(own.error(failed))
    assert line.startswith(f"{tmp_path}/own.py: environment 'Own' ") and "on_error: end" in line
    assert "\n" not in line and "\x1b" not in line and len(line) < 1000


KILLING = {
    "crashes": ("os._exit(7)", "ended its process (exit code 7)"),
    "kills itself": ("os.kill(os.getpid(), 9)", "ended its process (killed by signal 9)"),
    "reads address 0": ("ctypes.string_at(0)", "ended its process (killed by signal 11)"),
    "blocks": ("time.sleep(1000)", "gave no answer within turn_timeout_s 1: something blocks the event loop"),
    "writes to the link": (
        "os.write(int(sys.argv[4]), b'{}}\\n'); time.sleep(9)", "wrote to a descriptor not its own"
    ),
    "floods the link": (
        "os.set_blocking(int(sys.argv[4]), True)\n        while True: os.write(int(sys.argv[4]), b'x' * 2**20)",
        "answered with more than 16777216 bytes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KILLING)
def test_a_process_that_is_gone_fails_its_responses_and_the_next_has_a_new_one(name: str, tmp_path: Path) -> None:
    body, problem = KILLING[name]
    own = environments(tmp_path, f"if text == 'good': return 'ok', 1.0\n        {body}", on_error="end")
    began = time.monotonic()

    async def run() -> list[Any]:
        first, other = await own.reset(ROW, 1), await own.reset(ROW, 2)
        found = [await asyncio.gather(first.step("bad"), return_exceptions=True)]
        found.append(await asyncio.gather(other.step("good"), return_exceptions=True))
        again = await own.reset(ROW, 3)
        found.append([await again.step("good")])
        assert own._process is not None
        await own._process.stop()
        return [one for own_ in found for one in own_]

    bad, lost, good = asyncio.run(run())
    assert isinstance(bad, EnvironmentFailed) and problem in str(bad), bad
    assert isinstance(lost, EnvironmentFailed) and good == ("ok", 1.0)
    assert time.monotonic() - began < 60
    alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    assert not [child for child in alive if "child.py" in " ".join(child.cmdline())]


def test_what_is_answered_is_text_whatever_it_holds(tmp_path: Path) -> None:
    own = environments(tmp_path, "return '\\ud800 \\x1b[31m <|im_end|> \\x00', -5.0")
    assert ask(own, "4") == [("\\ud800 \x1b[31m <|im_end|> \x00", -5.0)]


def test_many_are_answered_side_by_side_and_what_is_printed_blocks_nobody(tmp_path: Path) -> None:
    own = environments(tmp_path, "print('x' * 100_000); await asyncio.sleep(0.5); return text + '!', 0.0")
    began = time.monotonic()
    assert ask(own, *map(str, range(40))) == [(f"{i}!", 0.0) for i in range(40)]
    assert time.monotonic() - began < 15


def test_one_late_response_leaves_the_others_alone(tmp_path: Path) -> None:
    own = environments(tmp_path, "await asyncio.sleep(100 if text == 'late' else 0); return None, 1.0")
    late, good = ask(own, "late", "good")
    assert isinstance(late, EnvironmentFailed) and good == (None, 1.0)


@pytest.mark.parametrize(
    ("reset", "problem"),
    [
        ("return 'text'", "returned 'text' from reset, no list of messages"),
        ("return []", "no list of messages"),
        ("return [{'role': 'user'}]", "no list of messages"),
        ("return [{'role': 'user', 'content': 'x' * 2**21}]", "characters, the limit is"),
        ("raise KeyError(row['domain'])", "failed in reset: KeyError: 'sums' (line 4)"),
        ("os._exit(1)", "ended its process (exit code 1)"),
    ],
)
@pytest.mark.parametrize("on_error", ["stop", "end"])
def test_a_response_that_cannot_begin_ends_the_run(reset: str, problem: str, on_error: Any, tmp_path: Path) -> None:
    (failed,) = ask(environments(tmp_path, "return None, 0.0", reset=reset, on_error=on_error), "4")
    assert isinstance(failed, UserError) and problem in str(failed)


def test_the_built_in_tools_answer_from_their_process() -> None:
    own = Environments(PythonToolConfig(type="python_tool", turn_timeout_s=20.0))
    call = '<tool_call>{"name": "%s", "arguments": {"%s": "%s"}}</tool_call>'
    texts = (call % ("calculator", "expression", "99999999 + 1"), call % ("python", "code", "print(2 ** 70)"), "4")
    assert ask(own, *texts) == [("100000000", 0.0), ("1180591620717411303424", 0.0), (None, 0.0)]


def test_a_library_that_is_not_there_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package verifiers: pip install 'mopd\[verifiers\]', or set"):
        Environments(VerifiersConfig(type="verifiers", id="words"))
    Environments(VerifiersConfig(type="verifiers", id="words", python="/opt/own/bin/python"))  # has packages of its own


def test_files_and_classes_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such file: correct rollout\.environment\.module"):
        Environments(CustomEnvironmentConfig(type="custom", module=str(tmp_path / "x.py"), class_name="Own"))
    own = environments(tmp_path, "return None, 0.0")
    (tmp_path / "own.py").write_text("import nowhere_at_all\n")
    (failed,) = ask(own, "4")
    assert isinstance(failed, UserError) and "cannot be loaded: ModuleNotFoundError" in str(failed)
    assert str(failed).endswith(": correct it")  # no on_error lets a run go on without the class
    (tmp_path / "own.py").write_text("x = 1\n")
    (failed,) = ask(environments_of(tmp_path), "4")
    assert isinstance(failed, UserError) and "has no attribute 'Own'" in str(failed)


def environments_of(folder: Path) -> Environments:
    return Environments(CustomEnvironmentConfig(type="custom", module=str(folder / "own.py"), class_name="Own"))

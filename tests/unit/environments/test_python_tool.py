"""The built-in tools: which text is a call, what they answer, and what they do not do."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from mopd.environments.python_tool import BadCall, PythonTool, calculate, calls_of

SETTINGS = {"turn_timeout_s": 5.0, "max_memory_gib": 0.5, "on_malformed_call": "answer"}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def steps(*texts: str, **options: Any) -> list[tuple[str | None, float]]:
    async def run() -> list[tuple[str | None, float]]:
        tool = PythonTool({**SETTINGS, **options})
        await tool.reset({}, 0)
        return list(await asyncio.gather(*(tool.step(text) for text in texts)))

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_calls_are_found_in_both_forms_and_never_in_thinking() -> None:
    one = call("calculator", expression="1+1")
    assert calls_of(one) == [("calculator", "1+1")]
    assert calls_of(f"I add.{one} and {call('python', code='x')}") == [("calculator", "1+1"), ("python", "x")]
    assert calls_of('{"name": "calculator", "parameters": {"expression": "2"}}') == [("calculator", "2")]
    assert calls_of(f"<think>{one}</think>4") == []
    assert calls_of("the answer is {4}") == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>{", "has no </tool_call>"),
        ("<tool_call>{</tool_call>", "no JSON"),
        ("<tool_call>[]</tool_call>", "names no tool"),
        ('<tool_call>{"name": ["a"]}</tool_call>', "names no tool"),
        ('<tool_call>{"name": "shell", "arguments": {}}</tool_call>', "names no tool"),
        ('{"name": "python", "arguments": {"code": 1}}', "no text 'code'"),
        ('{"name": "python", "arguments": "x"}', "no text 'code'"),
        (call("python", code="x") * 9, "at most 8"),
        ("[" * 5000 + "</tool_call><tool_call>" + "[" * 5000 + "</tool_call>", "no JSON"),
    ],
)
def test_a_malformed_call_is_told_or_ends_the_response(text: str, problem: str) -> None:
    with pytest.raises(BadCall, match=problem):
        calls_of(text)
    ((told, reward),) = steps(text)
    assert told is not None and told.startswith("error: ") and problem in told and reward == 0
    assert steps(text, on_malformed_call="end") == [(None, 0.0)]


def test_the_calculator_is_exact_and_knows_numbers_alone() -> None:
    assert calculate("123456789123456789 + 987654321987654321") == "1111111111111111110"
    assert calculate(" -(2 ** 10) % 7 * +3 // 1") == "15"
    assert calculate("1 / 4") == "0.25"
    for bad in ("x", "__import__('os')", "1 +", "True + 1", "'a' * 3", "[1]", "(1).real", "1 if 1 else 2", "2 < 3",
                "(" * 3000, "1 / 0", "10 ** 10 ** 10", "9 ** 99999", "(-8) ** 0.5", "1e308 * 10 // 1",
                "\x00", "9" * 1999 + "*" + "1"):  # fmt: skip
        with pytest.raises(BadCall) as caught:
            calculate(bad)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_programs_run_side_by_side_in_the_sandbox() -> None:
    long_sum = "print(12345678901234567890 + 98765432109876543210)"
    found = steps(
        call("python", code=long_sum) + call("calculator", expression="2*3"),
        call("python", code="x = 1"),
        call("python", code="print(1)\nraise ValueError('no \\x1b[31m')"),
        call("python", code="open('/etc/passwd').read()"),
        call("python", code="import socket; socket.socket()"),
        call("python", code="import os; os.fork()"),
        call("python", code="import sys; sys.stdout.buffer.write(b'\\xff\\xfe')"),
        "no call",
    )
    texts = [text for text, _ in found]
    assert texts[0] == "111111111011111111100\n6" and texts[1] == "(no output)" and texts[-1] is None
    assert texts[2] is not None and texts[2].startswith("1\nerror: exit code 1: ValueError")
    assert all(text is not None and "error: exit code 1" in text and "Error" in text for text in texts[3:6])
    assert texts[6] == "\ufffd\ufffd"
    assert all(reward == 0 for _, reward in found)


def test_a_program_that_does_not_end_or_writes_without_end_is_ended() -> None:
    endless, loud = steps(
        call("python", code="while True: pass"),
        call("python", code="while True: print('x' * 10**6)"),
        turn_timeout_s=2.0,
    )
    assert endless[0] == "error: it took too long"
    assert loud[0] is not None and len(loud[0]) < 2**17 and "error: " in loud[0]
    assert not list(Path.cwd().iterdir())

"""Environment ``python_tool``: a calculator, and Python programs confined as those of ``code`` rewards.

A call is JSON, ``{"name": "calculator", "arguments": {"expression": "2 ** 10"}}`` or ``{"name": "python", "arguments":
{"code": "…"}}``, between ``<tool_call>`` and ``</tool_call>`` (Hermes, Qwen), or all of the turn (Llama 3, which calls
the arguments ``parameters``). A call inside the student's thinking is none.
"""

from __future__ import annotations

import ast
import asyncio
import json
import math
import operator
import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mopd.rewards.graders.programs import LOOK_EVERY_S, Sandbox

OPEN, CLOSE = "<tool_call>", "</tool_call>"
CALL = re.compile(rf"{OPEN}(.*?){CLOSE}", re.DOTALL)
THINKING_ENDS = "</think>"
TOOLS = {"calculator": "expression", "python": "code"}
"""Name of each tool and of its one argument."""
MAX_CALLS = 8
"""Calls of one turn."""
MAX_OUTPUT = 2**16
"""Characters of a program's output that are given."""
END_S = 1.0
"""Seconds before the turn's deadline at which a program is ended, so that the student is told."""
MAX_EXPRESSION, MAX_BITS = 2000, 10_000
"""Characters of an expression, and bits of a whole number in it: the longest that Python writes has 14,000."""
Number = int | float
OPERATIONS: dict[type, Callable[[Any, Any], Number]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip


class BadCall(Exception):
    """A tool call that cannot be carried out, in words for the student."""


class PythonTool:
    """The tools of a run. Its one object serves all responses: it has no state."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """``settings`` are those of ``PythonToolConfig``."""
        self._timeout_s, self._max_bytes = settings["turn_timeout_s"], int(settings["max_memory_gib"] * 2**30)
        self._ends_at_malformed = settings["on_malformed_call"] == "end"
        self._free = asyncio.Semaphore(2 * len(os.sched_getaffinity(0)))
        self._is_tried = False

    async def reset(self, row: dict[str, Any], seed: int) -> None:
        """Leave the row's prompt as it is, once a program has shown that the kernel confines it."""
        if not self._is_tried:
            self._is_tried = True
            if (output := await self._run("print(6 * 7)", time.monotonic() + self._timeout_s)) != "42":
                raise OSError(f"a first program in the sandbox did not print 42: {output}")

    async def step(self, text: str) -> tuple[str | None, float]:
        """Return the results of a turn's calls, one line or more each; ``None`` for a turn without any."""
        deadline = time.monotonic() + self._timeout_s - min(END_S, self._timeout_s / 2)
        try:
            calls = calls_of(text)
        except BadCall as error:
            return (None if self._ends_at_malformed else f"error: {error}"), 0.0
        results = [await self._result(name, argument, deadline) for name, argument in calls]
        return ("\n".join(results) if results else None), 0.0

    async def _result(self, name: str, argument: str, deadline: float) -> str:
        if name == "python":
            async with self._free:
                return await self._run(argument, deadline)
        try:
            return calculate(argument)
        except BadCall as error:
            return f"error: {error}"

    async def _run(self, code: str, deadline: float) -> str:
        """Return what a program writes, and why it failed if it did."""
        with tempfile.TemporaryDirectory(dir=".") as folder:
            sandbox = Sandbox(Path(folder).resolve(), self._max_bytes, deadline)
            (sandbox.folder / "program.py").write_text(code, encoding="utf-8", errors="surrogatepass")
            # on the event loop: what is done between fork and exec would not be safe beside other threads
            running = sandbox.start(["program.py"])
            try:
                while not _has_ended(running.process.pid) and time.monotonic() < deadline and not sandbox.is_full():
                    await asyncio.sleep(LOOK_EVERY_S)
                problem = running.wait()  # returns at once
                output = running.read_output(running.output)[:MAX_OUTPUT].strip()
            finally:
                running.end()
                sandbox.clear()
        return "\n".join(filter(None, (output, problem and f"error: {problem}"))) or "(no output)"


def calls_of(text: str) -> list[tuple[str, str]]:
    """Return name and argument of each tool call of a turn; ``BadCall`` for one that cannot be read or carried out."""
    return [_call(call) for call in read_calls(text)]


def read_calls(text: str) -> list[Any]:
    """Return each tool call of a turn, any JSON; ``BadCall`` for one that is none."""
    said = text.rpartition(THINKING_ENDS)[2].strip()
    if OPEN in said:
        bodies = CALL.findall(said)
        if len(bodies) != said.count(OPEN):
            raise BadCall(f"a {OPEN} has no {CLOSE}")
    else:
        bodies = [said] if said.startswith("{") and said.endswith("}") else []
    if len(bodies) > MAX_CALLS:
        raise BadCall(f"{len(bodies)} tool calls in one turn, at most {MAX_CALLS} are made")
    try:
        return [json.loads(body) for body in bodies]
    except (ValueError, RecursionError) as error:
        raise BadCall(f"the tool call is no JSON ({str(error)[:100]})") from error


def _call(call: Any) -> tuple[str, str]:
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str) or name not in TOOLS:
        raise BadCall(f"the tool call names no tool: write name, {' or '.join(TOOLS)}, and arguments")
    arguments = call.get("arguments", call.get("parameters"))
    argument = arguments.get(TOOLS[name]) if isinstance(arguments, dict) else None
    if not isinstance(argument, str):
        raise BadCall(f"the arguments of {name} have no text {TOOLS[name]!r}")
    return name, argument


def calculate(expression: str) -> str:
    """Return the value of an expression of numbers, exact for whole ones; ``BadCall`` for anything else."""
    if len(expression) > MAX_EXPRESSION:
        raise BadCall(f"the expression has {len(expression)} characters, the limit is {MAX_EXPRESSION}")
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadCall("the expression is none of numbers, + - * / // % ** and brackets") from error
    except ArithmeticError as error:
        raise BadCall(str(error)) from error


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            a, b = _value(left), _value(right)
            if isinstance(op, ast.Pow) and isinstance(a, int) and isinstance(b, int) and a.bit_length() * b > MAX_BITS:
                raise OverflowError("the number is too large")
            value = OPERATIONS[type(op)](a, b)
            if isinstance(value, complex):
                raise ArithmeticError("the root of a negative number")
            return _bounded(value)
    raise ValueError


def _bounded(number: Number) -> Number:
    if number.bit_length() > MAX_BITS if isinstance(number, int) else not math.isfinite(number):
        raise OverflowError("the number is too large")
    return number


def _has_ended(pid: int) -> bool:
    """Return whether a child has ended, without reaping it."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

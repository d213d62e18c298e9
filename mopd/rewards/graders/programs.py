"""Grader of the ``code`` reward: runs the last fenced program of a response against the tests of its row.

The verdict never comes from the program's own process: its output is compared here, and the results of its functions in
the process of the tests (``calls.py``).
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from mopd.rewards.graders.sandbox import Sandbox

CALLS = str(Path(__file__).with_name("calls.py"))
FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+.-]*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.M | re.S)
LANGUAGES = ("", "python", "python3", "py")
MAX_VERDICT = 4096
Judged = tuple[float, "str | None", str]
"""Value, the extracted text, and why the value is 0."""


def last_block(response: str, languages: tuple[str, ...]) -> str | None:
    """Return the last fenced block in one of these languages."""
    blocks = [text for language, text in FENCE.findall(response) if language.lower() in languages]
    return blocks[-1] if blocks else None


def grade_program(call: dict[str, Any], *, timeout_s: float, max_bytes: int) -> Judged:
    """Return value 1 if the program passes all tests in time. ``tests`` as from
    ``mopd.rewards.ground_truths.tests_of``."""
    program = last_block(call["response"], LANGUAGES)
    if program is None:
        return 0.0, None, "the response has no finished block between ``` lines"
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory(dir=".") as folder:
        sandbox = Sandbox(Path(folder).resolve(), max_bytes, deadline, may_read=(CALLS,))
        tests = call["tests"]
        try:
            problem = (
                _runs(sandbox, program, tests["cases"]) if tests["kind"] == "stdin" else _calls(sandbox, program, tests)
            )
        finally:
            sandbox.clear()
    return float(not problem), program, problem


def _runs(sandbox: Sandbox, program: str, cases: list[list[str]]) -> str:
    """Run the whole program once per case: input to stdin, output to compare."""
    for number, (given, expected) in enumerate(cases):
        sandbox.clear()
        (sandbox.folder / "program.py").write_text(program, encoding="utf-8", errors="surrogatepass")
        running = sandbox.start(["program.py"], stdin=given.encode("utf-8", "surrogatepass"))
        try:
            problem = running.wait()
            if problem:
                return f"case {number}: {problem}"
            if not same_output(running.said(running.output), expected):
                return f"case {number}: another output than the expected one"
        finally:
            running.end()
    return ""


def _calls(sandbox: Sandbox, program: str, tests: dict[str, Any]) -> str:
    """Run program and tests in a process each, with a pipe between them in each direction."""
    to_program, from_tests = os.pipe()
    to_tests, from_program = os.pipe()
    verdict, verdict_end = os.pipe()
    asked = json.dumps({**tests, "program": program}).encode()
    running = []
    try:
        running.append(
            sandbox.start([CALLS, "program", str(to_program), str(from_program)], pass_fds=(to_program, from_program))
        )
        ends = (to_tests, from_tests, verdict_end)
        running.append(sandbox.start([CALLS, "tests", *map(str, ends)], stdin=asked, pass_fds=ends, is_ours=True))
        for descriptor in (to_program, from_program, *ends):
            os.close(descriptor)
        problem = running[1].wait()
        if problem:
            return f"the tests did not end: {problem}"
        said = json.loads(os.read(verdict, MAX_VERDICT) or '{"problem": "the tests gave no verdict"}')
        if said["problem"].startswith("the program has ended"):
            return f"{said['problem']}: {running[0].wait()}"
        return "" if said.get("passed") is True else str(said["problem"])
    finally:
        os.close(verdict)
        for process in running:
            process.end()


def same_output(output: str, expected: str) -> bool:
    """Compare line by line without surrounding white space; lines that differ as lists of numbers (LiveCodeBench)."""
    lines, wanted = ([line.strip() for line in text.strip().split("\n")] for text in (output, expected))
    return len(lines) == len(wanted) and all(map(_same_line, lines, wanted))


def _same_line(line: str, wanted: str) -> bool:
    if line == wanted:
        return True
    try:
        return [Decimal(word) for word in line.split()] == [Decimal(word) for word in wanted.split()]
    except InvalidOperation:
        return False

"""Tests of a program's functions, in two processes: ``python -I calls.py program|tests READ_FD WRITE_FD [VERDICT_FD]``.

::

    tests' process ── call: number, arguments ──> program's process        each in a sandbox of its own
                   <── plain value, or a number ──

A name of the program is a ``Remote`` in the tests: calling it sends the arguments over and brings the result back as a
plain value, so whatever the program does to its own process (builtins, ``__eq__``, exits, frames), the comparison
happens elsewhere. A result that is no plain value stays in the program; the tests may call it, read its attributes and
hand it back, but never compare it.

It imports nothing of mopd, and the process of the program shares no secret with it.
"""

from __future__ import annotations

import builtins
import ctypes
import json
import os
import sys
import types
from collections.abc import Callable
from typing import Any, TextIO

PR_SET_DUMPABLE = 4
MAX_LINE = 32 * 2**20
"""Characters of one call or result."""
MAX_MESSAGE = 200
PREAMBLE = """
from typing import *
from string import *
from re import *
from datetime import *
from collections import *
from heapq import *
from bisect import *
from copy import *
from math import *
from random import *
from statistics import *
from itertools import *
from functools import *
from operator import *
from builtins import *
import string, re, datetime, collections, heapq, bisect, copy, math, random, statistics
import itertools, functools, operator, sys
sys.setrecursionlimit(50000)
"""
"""Imports that LiveCodeBench puts before a solution, whose starter code names ``List`` or ``Optional``."""


class Remote:
    """Proxy, in the tests' process, of an object of the program."""

    def __init__(self, link: Link, number: int) -> None:
        self.__dict__.update(_link=link, _number=number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._link.ask({"call": self._number, "args": args, "kwargs": kwargs})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._link.ask({"of": self._number, "attribute": name})

    def _compared(self, *_: object) -> bool:
        raise TypeError("the program's result is no plain value and cannot be compared")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __contains__ = _compared
    __hash__ = None  # type: ignore[assignment]


class Link:
    """One side of the pipes between the two processes."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._reads: TextIO = os.fdopen(read_fd, encoding="utf-8")
        self._writes: TextIO = os.fdopen(write_fd, "w", encoding="utf-8")
        self._kept: list[Any] = []

    def send(self, value: Any) -> None:
        """Write a value as one line."""
        self._writes.write(json.dumps(self._encode(value)) + "\n")
        self._writes.flush()

    def receive(self) -> Any:
        """Return the next value; ``EOFError`` if the other side has ended."""
        line = self._reads.readline(MAX_LINE)
        if not line.endswith("\n"):
            raise EOFError("the program has ended, or its result is too long")
        return self._decode(json.loads(line))

    def ask(self, request: dict[str, Any]) -> Any:
        """Return the program's result. Raise its exception as the builtin of that name, or as ``RuntimeError``."""
        self.send(request)
        answer = self.receive()
        if "raised" not in answer:
            return answer["result"]
        kind = getattr(builtins, str(answer["raised"]), None)
        # an AssertionError of the program must not pass for one of the tests
        known = isinstance(kind, type) and issubclass(kind, Exception) and kind is not AssertionError
        raise (kind if known else RuntimeError)(f"{answer['raised']}: {answer['message']}")  # type: ignore[misc]

    def serve(self) -> None:
        """Answer requests until the tests have ended."""
        while True:
            try:
                request = self.receive()
            except EOFError:
                return
            try:
                self.send({"result": self._perform(request)})
            except Exception as error:
                self.send({"raised": type(error).__name__, "message": str(error)[:MAX_MESSAGE]})

    def _encode(self, value: Any) -> Any:
        """Return JSON: plain values by their own type or the plain one that they descend from, all others by their
        number."""
        if type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
            value = value.item()
        if value is None or isinstance(value, (bool, str)):
            return value if value is None or isinstance(value, bool) else str.__str__(value)
        if isinstance(value, (int, float)):
            return int.__pos__(value) if isinstance(value, int) else float.__pos__(value)
        kinds: tuple[tuple[Any, str], ...] = ((list, "list"), (tuple, "tuple"), (set, "set"), (frozenset, "frozenset"))
        for kind, tag in kinds:
            if isinstance(value, kind):
                return {tag: [self._encode(entry) for entry in kind.__iter__(value)]}
        if isinstance(value, dict):
            return {"dict": [[self._encode(key), self._encode(entry)] for key, entry in dict.items(value)]}
        if isinstance(value, (bytes, bytearray)):
            return {"bytes": value.hex()}
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        if isinstance(value, Remote):
            return {"kept": value._number}
        self._kept.append(value)
        return {"remote": len(self._kept) - 1}

    def _decode(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        ((tag, inner),) = value.items()
        if tag == "kept":
            return self._kept[inner]
        if tag == "remote":
            return Remote(self, inner)
        if tag == "dict":
            return {self._decode(key): self._decode(entry) for key, entry in inner}
        if tag == "bytes":
            return bytes.fromhex(inner)
        if tag == "complex":
            return complex(*inner)
        makers: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
        return makers[tag](self._decode(entry) for entry in inner)

    def _perform(self, request: dict[str, Any]) -> Any:
        if "call" in request:
            return self._kept[request["call"]](*request["args"], **request["kwargs"])
        return getattr(self._kept[request["of"]], request["attribute"])


def run_program(link: Link) -> None:
    """Run the program, send its names, and answer calls of them."""
    task = link.receive()
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    exec(compile(task["preamble"], "preamble", "exec"), module.__dict__)
    preamble = dict(module.__dict__)
    exec(compile(task["program"], "program.py", "exec"), module.__dict__)
    names = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("__") and (name not in preamble or preamble[name] is not value)
    }
    link.send({name: value for name, value in names.items() if not isinstance(value, types.ModuleType)})
    link.serve()


def run_tests(link: Link, task: dict[str, Any]) -> str:
    """Run the tests; return an empty text if all pass, else what failed."""
    is_call = task["kind"] == "calls"
    link.send({"program": task["program"], "preamble": PREAMBLE if is_call else ""})
    try:
        names = {name: value for name, value in link.receive().items() if name.isidentifier() and name[:2] != "__"}
        return _call_cases(names, task) if is_call else _assertions(names, task)
    except EOFError as error:
        return str(error)


def _assertions(names: dict[str, Any], task: dict[str, Any]) -> str:
    """Run statements with the program's names.

    Names of builtins and of the standard library keep their own meaning, unless the tests use no other name of the
    program (MBPP asks for a function ``sum``).
    """
    setup, tests = (compile(text, "tests", "exec") for text in (task["setup"], "\n".join(task["tests"])))
    used = _names_of(setup) | _names_of(tests)
    reserved = set(dir(builtins)) | set(sys.stdlib_module_names)
    own = {name: value for name, value in names.items() if name not in reserved}
    space: dict[str, Any] = {"__name__": "tests"}
    space.update({name: __import__(name) for name in used & sys.stdlib_module_names})
    space.update(own if used & own.keys() else names)
    try:
        exec(setup, space)
    except EOFError:
        raise
    except Exception as error:
        return f"the tests' setup: {_described(error)}"
    for text in task["tests"]:
        try:
            exec(compile(text, "tests", "exec"), space)
        except EOFError:
            raise
        except Exception as error:
            return f"{_described(error)}: {text.strip()[:MAX_MESSAGE]}"
    return ""


def _names_of(code: types.CodeType) -> set[str]:
    inner = [_names_of(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*inner)


def _call_cases(names: dict[str, Any], task: dict[str, Any]) -> str:
    name = task["function"]
    function = getattr(names["Solution"](), name) if "Solution" in names else names.get(name)
    if not isinstance(function, Remote):
        return f"it defines no function {name!r}"
    for number, (args, accepted) in enumerate(task["cases"]):
        try:
            result = _as_json(function(*args))
        except EOFError:
            raise
        except Exception as error:
            return f"case {number}: {_described(error)}"
        if isinstance(result, Remote) or not any(result == expected for expected in accepted):
            return f"case {number}: another result than the expected one"
    return ""


def _as_json(value: Any) -> Any:
    """Turn tuples into lists, as in the expected results, which were read from JSON."""
    if isinstance(value, (list, tuple)):
        return [_as_json(entry) for entry in value]
    return {key: _as_json(entry) for key, entry in value.items()} if isinstance(value, dict) else value


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:MAX_MESSAGE]}" if str(error) else type(error).__name__


def main(role: str, read_fd: int, write_fd: int, verdict_fd: int | None = None) -> None:
    """Play one of the two roles."""
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    link = Link(read_fd, write_fd)
    if role == "program":
        run_program(link)
        return
    assert verdict_fd is not None
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # without Landlock this keeps its memory its own
    task = json.load(sys.stdin)
    problem = run_tests(link, task)
    os.write(verdict_fd, json.dumps({"passed": not problem, "problem": problem}).encode())


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))

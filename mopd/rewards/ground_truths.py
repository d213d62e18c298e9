"""Ground truths in the forms that published data sets have, converted to the form that each reward needs."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from typing import Any

from mopd.base.text import shortened
from mopd.base.types import UserError
from mopd.rewards.interface import RewardItem

CODE_SHAPES = (
    "a list of assert statements (MBPP's test_list), a list of {input, output} cases (LiveCodeBench), or a structure "
    "with test_list, public_test_cases, or inputs and outputs"
)
FUNCTION_NAMES = ("fn_name", "func_name")


def text_of(item: RewardItem, kind: str) -> str:
    """Return a ground truth that is text or a number, stripped; ``UserError`` for any other."""
    truth = item.ground_truth
    if truth is None:
        raise _refused(item, f"the row has no ground truth, which the {kind} reward needs: add it")
    if not isinstance(truth, (str, int, float)) or isinstance(truth, bool):
        raise _refused(
            item, f"the ground truth is {_kind(truth)}, the {kind} reward compares text or a number: name it"
        )
    return str(truth).strip()


def letter_of(item: RewardItem) -> str:
    """Return the right choice's letter, given as one ("C", "(C)", "C."), or by its number from 0 (MMLU's answer)."""
    truth = item.ground_truth
    if type(truth) is int and 0 <= truth < len(string.ascii_uppercase):
        return string.ascii_uppercase[truth]
    letter = text_of(item, "multiple_choice").strip("().: ").upper()
    if len(letter) != 1 or letter not in string.ascii_uppercase:
        raise _refused(
            item,
            f"the ground truth {_shown(truth)} is no choice: the multiple_choice reward takes a letter or a whole "
            "number counted from 0: name it",
        )
    return letter


def schema_of(item: RewardItem) -> Any:
    """Return a JSON schema, given as a structure or as its text."""
    schema = _parsed(item.ground_truth)
    if not isinstance(schema, Mapping):
        raise _refused(item, f"the ground truth is {_kind(schema)}, no JSON schema: set the reward's path, or name it")
    schema = _without_absent(schema)
    if problem := schema_problem(schema):
        raise _refused(item, f"the ground truth is no JSON schema ({problem}): correct it")
    return schema


def schema_problem(schema: Mapping[str, Any]) -> str:
    """Return why a structure is no JSON schema; empty if it is one."""
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for

    try:
        validator_for(schema).check_schema(schema)
    except SchemaError as error:
        return str(error.message)[:200]
    return ""


def tests_of(item: RewardItem) -> dict[str, Any]:
    """Return the tests of a program, in one of three forms.

    ``{"kind": "asserts", "setup", "tests"}``: statements; ``{"kind": "stdin", "cases": [[input, output], …]}``;
    ``{"kind": "calls", "function", "cases": [[arguments, accepted results], …]}``.

    Raises:
        UserError: the ground truth has none of the shapes that ``docs/rewards.md`` lists.
    """
    truth = _parsed(item.ground_truth)
    beside = {**_structure(item.extra_info), **_structure(truth)}
    beside = {**_structure(beside.get("metadata")), **beside}
    if isinstance(truth, Mapping):
        for key in ("test_list", "public_test_cases", "test_cases", "tests"):
            if truth.get(key) is not None:
                truth = _parsed(truth[key])
                break
        else:
            return _from_columns(item, truth, beside)
    if isinstance(truth, str):
        truth = [truth] if truth.strip() else []
    if not isinstance(truth, Sequence) or not truth:
        raise _no_tests(item)
    if all(isinstance(test, str) for test in truth):
        return _asserts(item, truth, beside)
    if all(isinstance(test, Mapping) and "input" in test and "output" in test for test in truth):
        return _cases(item, truth, beside)
    raise _no_tests(item)


def _asserts(item: RewardItem, tests: Sequence[str], beside: Mapping[str, Any]) -> dict[str, Any]:
    imports = beside.get("test_imports") or []
    setup = "\n".join([*([imports] if isinstance(imports, str) else imports), beside.get("test_setup_code") or ""])
    for text in (setup, *tests):
        try:
            compile(text, "test", "exec")
        except (SyntaxError, ValueError) as error:
            raise _refused(item, f"the test {_shown(text)} is no Python ({error}): correct it, or name it") from error
    return {"kind": "asserts", "setup": setup, "tests": list(tests)}


def _cases(item: RewardItem, tests: Sequence[Mapping[str, Any]], beside: Mapping[str, Any]) -> dict[str, Any]:
    kinds = {test.get("testtype") or "stdin" for test in tests}
    if kinds == {"stdin"}:
        return {"kind": "stdin", "cases": [[_as_text(test["input"]), _as_text(test["output"])] for test in tests]}
    if kinds != {"functional"}:
        raise _refused(item, f"its cases have testtype {', '.join(sorted(map(str, kinds)))}: use stdin or functional")
    function = _function(item, {**_structure(tests[0].get("metadata")), **beside})
    try:
        cases = [[_arguments(test["input"]), [json.loads(test["output"])]] for test in tests]
    except (TypeError, ValueError) as error:
        raise _refused(item, f"a functional case is no JSON ({error}): correct it, or name another column") from error
    return {"kind": "calls", "function": function, "cases": cases}


def _from_columns(item: RewardItem, truth: Mapping[str, Any], beside: Mapping[str, Any]) -> dict[str, Any]:
    """Return tests from ``inputs`` and ``outputs`` of equal length, with ``fn_name`` for functions (APPS, TACO)."""
    inputs, outputs = truth.get("inputs"), truth.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
        raise _no_tests(item)
    if not any(beside.get(name) for name in FUNCTION_NAMES):
        cases = [[_as_text(given), _as_text(expected)] for given, expected in zip(inputs, outputs, strict=True)]
        return {"kind": "stdin", "cases": cases}
    calls = []
    for given, expected in zip(inputs, outputs, strict=True):
        if not isinstance(given, Sequence) or isinstance(given, str):
            raise _refused(item, f"the input {_shown(given)} is no list of a function's arguments: correct it")
        # these data sets wrap some results in a list of one: both forms are accepted
        one_of_list = isinstance(expected, Sequence) and not isinstance(expected, str) and len(expected) == 1
        calls.append([list(given), [expected, expected[0]] if one_of_list else [expected]])
    return {"kind": "calls", "function": _function(item, beside), "cases": calls}


def _function(item: RewardItem, beside: Mapping[str, Any]) -> str:
    for name in FUNCTION_NAMES:
        if isinstance(beside.get(name), str) and beside[name].rpartition(".")[2].isidentifier():
            return str(beside[name]).rpartition(".")[2]
    raise _refused(item, "its cases call a function, but no fn_name says which: put one beside them, or name it")


def _arguments(text: str) -> list[Any]:
    """Parse one JSON value per line (LiveCodeBench)."""
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def _as_text(value: Any) -> str:
    """Return stdin or stdout as text: some data sets store its lines as a list."""
    return value if isinstance(value, str) else "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _structure(value: Any) -> dict[str, Any]:
    """Return a structure, or its JSON, as a dict without parquet's absent entries; empty for anything else."""
    value = _parsed(value)
    return {key: entry for key, entry in value.items() if entry is not None} if isinstance(value, Mapping) else {}


def _parsed(value: Any) -> Any:
    """Return the value of JSON text; anything else as it is."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _without_absent(value: Any) -> Any:
    """Remove nulls: parquet gives every structure of a column the keys of all of them."""
    if isinstance(value, Mapping):
        return {key: _without_absent(entry) for key, entry in value.items() if entry is not None}
    return [_without_absent(entry) for entry in value] if isinstance(value, list) else value


def _no_tests(item: RewardItem) -> UserError:
    shape = _kind(_parsed(item.ground_truth))
    return _refused(item, f"the ground truth is {shape} without tests, the code reward takes {CODE_SHAPES}: name it")


def _refused(item: RewardItem, problem: str) -> UserError:
    """Build the error; ``problem`` ends in a verb for the key."""
    return UserError(
        f"{item.place}: {problem} with data.columns.ground_truth, or change the reward of domain {item.domain!r}"
    )


def _kind(value: Any) -> str:
    return "a structure" if isinstance(value, Mapping) else "absent" if value is None else type(value).__name__


def _shown(value: Any) -> str:
    return shortened(repr(value))

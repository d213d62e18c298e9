"""JSON from untrusted sources: strict, bounded in size, depth, count and magnitude of numbers."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, NoReturn

from mopd.base.files.reading import MAX_TEXT_BYTES, read_text, shown_path
from mopd.base.types import UserError

MAX_DEPTH = 64
"""Largest depth of nested lists and objects; no file that we read is deeper than ten."""
MAX_VALUES = 2_000_000
"""Largest number of values in one text: an empty list of two bytes costs 56 bytes of memory."""
MAX_INTEGER_DIGITS = 20
"""Longest whole number: 64-bit integers have at most 19 digits, 20 with a sign."""
MAX_DIGITS = 400
"""Longest whole number with ``any_number``; Python takes long to read longer ones."""
_MARK = re.compile(r'"(?:[^"\\]|\\.)*"?|[,\[{]', re.DOTALL)
"""Pattern of a string, or of a comma or opening bracket outside of strings."""


def parse_json(
    text: str | bytes,
    *,
    max_depth: int = MAX_DEPTH,
    max_values: int = MAX_VALUES,
    any_number: bool = False,
) -> Any:
    """Return the value of a JSON text.

    Stricter than ``json.loads``: a repeated key, NaN, an infinite number, an integer beyond 64 bits, a lone surrogate
    and deep nesting are refused, because the values are compared, written again and shown.

    Args:
        any_number: takes NaN, infinity and whole numbers of up to ``MAX_DIGITS`` digits, which Python's ``json`` writes
            and published model folders hold (a tokenizer's ``model_max_length`` is 10**30 where there is no limit).

    Raises:
        ValueError: one line that says what is wrong.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")  # UnicodeDecodeError is a ValueError
    # Before ``json.loads``, which builds all values. The exact count runs only if the cheap upper bound is exceeded.
    if sum(map(text.count, ",[{")) > max_values and _exceeds(text, max_values):
        raise ValueError(f"more than {max_values} values")
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unrepeated,
            parse_int=_long_integer if any_number else _integer,
            parse_float=float if any_number else _number,
            parse_constant=float if any_number else _constant,
        )
    except RecursionError:
        raise ValueError(f"nested deeper than {max_depth}") from None
    _check(value, max_depth)
    return value


def read_json_object(
    path: str | Path,
    *,
    cure: str,
    max_bytes: int = MAX_TEXT_BYTES,
    max_values: int = MAX_VALUES,
    any_number: bool = False,
) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        UserError: as ``reading.read_text`` and ``parse_json`` do, with path and ``cure``; for any other kind of value.
    """
    text = read_text(path, cure=cure, max_bytes=max_bytes)
    try:
        value = parse_json(text, max_values=max_values, any_number=any_number)
    except ValueError as error:
        raise UserError(f"{shown_path(path)}: not valid JSON ({error}): {cure}") from error
    if not isinstance(value, dict):
        raise UserError(f"{shown_path(path)}: holds a {type(value).__name__}, not a JSON object: {cure}")
    return value


def _exceeds(text: str, limit: int) -> bool:
    """Return whether commas and opening brackets outside of strings, which bound the number of values, are more than
    ``limit``. Slow: it runs only for texts with many marks, which may all stand inside one string."""
    num_marks = 0
    for found in _MARK.finditer(text):
        num_marks += found[0][0] != '"'
        if num_marks > limit:
            return True
    return False


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object whose keys occur once: ``json.loads`` would silently keep the last of two."""
    keys = dict(pairs)
    if len(keys) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {repeated!a:.80} occurs twice")
    return keys


def _integer(digits: str) -> int:
    if len(digits) > MAX_INTEGER_DIGITS or not -(2**63) <= int(digits) < 2**64:
        raise ValueError(f"the whole number {digits[:MAX_INTEGER_DIGITS]}… is beyond 64 bits")
    return int(digits)


def _long_integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"the whole number {digits[:MAX_INTEGER_DIGITS]}… has more than {MAX_DIGITS} digits")
    return int(digits)


def _number(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits:.40} is beyond double precision")
    return value


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _check(root: Any, max_depth: int) -> None:
    """Check depth, and that texts are Unicode (a lone surrogate cannot be written or shown). Without recursion."""
    level: list[Any] = [root]
    for _ in range(max_depth + 1):
        below: list[Any] = []
        for value in level:
            if isinstance(value, str):
                _check_text(value)
            elif isinstance(value, dict):
                for key in value:
                    _check_text(key)
                below.extend(value.values())
            elif isinstance(value, list):
                below.extend(value)
        if not below:
            return
        level = below
    raise ValueError(f"nested deeper than {max_depth}")


def _check_text(text: str) -> None:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError(f"text {text!a:.80} holds half a character (a lone surrogate)") from None

"""What a server says about itself in ``/info``: every value of its type and in its range, or nothing is believed."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from mopd.conversion.hf.manifest import HASHES
from mopd.engines.interface import EngineInfo, EngineLimits
from mopd.files.json_text import parse_json

MAX_NUMBER = 2**53
MAX_TEXT_CHARACTERS = 4096


def read_shown(body: bytes) -> tuple[int, dict[str, Any]]:
    """Wire version and description of an answer of ``/info``; ``ValueError`` if it is none."""
    shown = parse_json(body, max_values=10_000)
    if not isinstance(shown, dict) or not isinstance(shown.get("engine"), dict):
        raise ValueError("no object with the key engine")
    version = shown.get("wire_version")
    if type(version) is not int:
        raise ValueError("wire_version is no whole number")
    return version, shown["engine"]


def read_engine(description: dict[str, Any]) -> EngineInfo:
    """The description as ``EngineInfo``; ``ValueError`` says what is wrong with it."""
    told = _fields(description, EngineInfo)
    if not isinstance(told["limits"], dict):
        raise ValueError("limits is no object")
    limits = _fields(told.pop("limits"), EngineLimits)
    for name, value in limits.items():
        _require_count(name, value, 1, is_optional=True)
    for name in ("model", "dtype"):
        _require_text(name, told[name])
    if told["kind"] not in typing.get_args(typing.get_type_hints(EngineInfo)["kind"]):
        raise ValueError(f"kind is {told['kind']!r:.60}")
    for name, least in (("vocab_size", 1), ("max_positions", 1), ("weight_version", -1)):
        _require_count(name, told[name], least)
    _require_count("max_logprobs", told["max_logprobs"], 1, is_optional=True)
    hashes = told["manifest"]
    if hashes is not None:
        if not isinstance(hashes, dict) or set(hashes) != set(HASHES):
            raise ValueError(f"manifest is no object of {', '.join(HASHES)}")
        for name, value in hashes.items():
            _require_text(name, value)
    return EngineInfo(**told, limits=EngineLimits(**limits))


def _fields(given: dict[str, Any], cls: type[Any]) -> dict[str, Any]:
    """A copy that has the fields of ``cls`` and no others."""
    odd = given.keys() ^ {field.name for field in dataclasses.fields(cls)}
    if odd:
        raise ValueError(f"{cls.__name__} misses or does not know {', '.join(sorted(odd)[:4])!a:.80}")
    return dict(given)


def _require_count(name: str, value: object, least: int, *, is_optional: bool = False) -> None:
    if value is None and is_optional:
        return
    if type(value) is not int or not least <= value <= MAX_NUMBER:
        raise ValueError(f"{name} is {value!r:.60}, no whole number from {least}")


def _require_text(name: str, value: object) -> None:
    if not isinstance(value, str) or len(value) > MAX_TEXT_CHARACTERS:
        raise ValueError(f"{name} is {value!r:.60}, no text of at most {MAX_TEXT_CHARACTERS} characters")

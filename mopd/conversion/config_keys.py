"""``config.json`` of a Hugging Face folder: reading it, and typed access whose complaints name file and key."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mopd.types import UserError

CONFIG_FILE = "config.json"


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed ``config.json`` of a Hugging Face folder.

    Raises:
        UserError: the folder or file is missing, or the file is not a JSON object.
    """
    path = folder / CONFIG_FILE
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the folder of a Hugging Face checkpoint")
    if not path.is_file():
        raise UserError(f"{path}: missing; a Hugging Face checkpoint folder holds config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=refuse_duplicate_keys)
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); fetch the file again") from error
    if not isinstance(config, dict):
        raise UserError(f"{path}: holds a {type(config).__name__}, not a JSON object; fetch the file again")
    return config


def refuse_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """``object_pairs_hook`` of ``json.loads``, which would keep the last of two equal keys without a word."""
    keys = dict(pairs)
    if len(keys) != len(pairs):
        names = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in names if names.count(key) > 1)!r} occurs twice")
    return keys


class Keys:
    """Typed access to a parsed config; every complaint names file and key."""

    def __init__(self, config: Mapping[str, Any], path: Path, prefix: str = "") -> None:
        """``path`` and ``prefix`` (of a nested object's keys) are only for messages."""
        self.config = config
        self.path = path
        self.prefix = prefix

    def error(self, key: str, problem: str) -> UserError:
        return UserError(f"{self.path}: '{self.prefix}{key}': {problem}")

    def absent(self, key: str) -> bool:
        """Missing or null, which the format treats alike."""
        return key not in self.config or self.config[key] is None

    def value(self, key: str, kind: type | tuple[type, ...], expected: str, ok: Callable[[Any], bool]) -> Any:
        if self.absent(key):
            raise self.error(key, "missing; it is needed to build the model")
        value = self.config[key]
        is_bool_as_number = isinstance(value, bool) and kind is not bool
        if not isinstance(value, kind) or is_bool_as_number or not ok(value):
            raise self.error(key, f"{value!r} is not {expected}")
        return value

    def count(self, key: str) -> int:
        return int(self.value(key, int, "a positive whole number", lambda v: v > 0))

    def whole(self, key: str) -> int:
        return int(self.value(key, int, "a whole number >= 0", lambda v: v >= 0))

    def positive(self, key: str) -> float:
        return float(self.value(key, (int, float), "a positive number", lambda v: v > 0))

    def flag(self, key: str) -> bool:
        return bool(self.value(key, bool, "true or false", lambda v: True))

    def container(self, key: str, kind: type) -> Any:
        return self.value(key, kind, f"a JSON {'object' if kind is dict else 'list'}", lambda v: True)

    def one_of(self, key: str, choices: tuple[str, ...], what: str) -> str:
        return str(self.value(key, str, f"{what}; supported: {', '.join(choices)}", lambda v: v in choices))

    def section(self, key: str) -> Keys:
        """A nested object."""
        return Keys(self.container(key, dict), self.path, f"{self.prefix}{key}.")

    def only(self, key: str, value: Any, reason: str = "") -> None:
        """Refuses any other value; the key may be absent."""
        if not self.absent(key) and self.config[key] != value:
            because = f" ({reason})" if reason else ""
            raise self.error(key, f"{self.config[key]!r} is not supported, only {value!r} is{because}")

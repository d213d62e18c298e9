"""Reading of a Hugging Face folder's ``config.json``, and typed access whose errors name file and key."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mopd.base.files.json_text import read_json_object
from mopd.base.files.reading import shown_path
from mopd.base.text import visible
from mopd.base.types import UserError

CONFIG_FILE = "config.json"
MAX_COUNT = 10_000
"""Largest number of layers, experts, heads, labels, …; published models have some hundreds."""
MAX_NUMBER = 2**48
"""Limit of any whole number of a config; published ones stay below 2^34."""
_COUNTED = re.compile(r"(layer|expert|head|group|label|block|stage|codebook)s?$")
QUANTISATION = ("quantization_config", "compression_config")
"""Keys that announce quantised weights."""
_IMPLEMENTATION = re.compile(r"(attn|experts|attention)_implementation")


def read_config(folder: Path) -> dict[str, Any]:
    """Return the parsed ``config.json`` of a Hugging Face folder.

    Raises:
        UserError: the folder or file is missing, the file is damaged, or holds a number that no model has.
    """
    path = folder / CONFIG_FILE
    if not folder.is_dir():
        raise UserError(f"{shown_path(folder)}: no such folder; give the folder of a Hugging Face checkpoint")
    if not path.exists():
        raise UserError(f"{shown_path(path)}: missing; a Hugging Face checkpoint folder holds config.json")
    config = read_json_object(path, cure="fetch the file again", any_number=True)
    _check_values(Keys(config, path))
    return config


def _check_values(keys: Keys) -> None:
    """Refuse values that would make a library build lists or layers without end, or fetch code."""
    for key, value in keys.config.items():
        parts = value if isinstance(value, list) else [value]
        for part in parts:
            if isinstance(part, dict):
                _check_values(Keys(part, keys.path, f"{keys.prefix}{key}."))
            elif isinstance(part, int) and abs(part) >= MAX_NUMBER:
                raise keys.error(key, f"{part!s:.40} is beyond what any model has")
            elif isinstance(part, (int, float)) and _COUNTED.search(key) and abs(part) > MAX_COUNT:
                raise keys.error(key, f"{part!s:.40} is more than {MAX_COUNT}, the limit")
        if _IMPLEMENTATION.search(key) and "/" in str(value):  # a hub's kernel, which transformers would run
            raise keys.error(key, f"{value!a:.100} names code outside the folder, which is not supported")


class Keys:
    """Typed access to a parsed config; every error names file and key."""

    def __init__(self, config: Mapping[str, Any], path: Path, prefix: str = "") -> None:
        """``path`` and ``prefix`` (of a nested object's keys) are only for messages."""
        self.config = config
        self.path = path
        self.prefix = prefix

    def error(self, key: str, problem: str) -> UserError:
        """Return an error that names file and key."""
        return UserError(f"{shown_path(self.path)}: '{visible(self.prefix + key):.100}': {problem:.600}")

    def absent(self, key: str) -> bool:
        """Return whether the key is missing or null, which the format treats alike."""
        return key not in self.config or self.config[key] is None

    def value(self, key: str, kind: type | tuple[type, ...], expected: str, ok: Callable[[Any], bool]) -> Any:
        """Return a required value of type ``kind`` for which ``ok`` holds. Raise ``UserError`` that says what was
        ``expected``."""
        if self.absent(key):
            raise self.error(key, "missing; it is needed to build the model")
        value = self.config[key]
        is_bool_as_number = isinstance(value, bool) and kind is not bool
        if not isinstance(value, kind) or is_bool_as_number or not ok(value):
            raise self.error(key, f"{value!r:.200} is not {expected}")
        return value

    def count(self, key: str) -> int:
        return int(self.value(key, int, "a positive whole number", lambda v: v > 0))

    def at_most(self, key: str, limit: int) -> int:
        if self.count(key) > limit:
            raise self.error(key, f"{self.count(key)} is more than {limit}, the limit")
        return self.count(key)

    def whole(self, key: str) -> int:
        return int(self.value(key, int, "a whole number >= 0", lambda v: v >= 0))

    def positive(self, key: str) -> float:
        return float(self.value(key, (int, float), "a positive number", lambda v: 0 < v < math.inf))

    def flag(self, key: str) -> bool:
        return bool(self.value(key, bool, "true or false", lambda v: True))

    def container(self, key: str, kind: type) -> Any:
        return self.value(key, kind, f"a JSON {'object' if kind is dict else 'list'}", lambda v: True)

    def one_of(self, key: str, choices: tuple[str, ...], what: str) -> str:
        return str(self.value(key, str, f"{what}; supported: {', '.join(choices)}", lambda v: v in choices))

    def section(self, key: str) -> Keys:
        """Return a nested object."""
        return Keys(self.container(key, dict), self.path, f"{self.prefix}{key}.")

    def layers_of(self, kind: str, default: Callable[[int], bool]) -> tuple[bool, ...]:
        """Return which layers are of a ``kind``, as ``layer_types`` says; without it, as ``default`` says of a layer's
        number from 0."""
        num_layers = self.count("num_hidden_layers")
        if self.absent("layer_types"):
            return tuple(default(layer) for layer in range(num_layers))
        kinds = self.container("layer_types", list)
        if len(kinds) != num_layers:
            raise self.error("layer_types", f"names {len(kinds)} layers, num_hidden_layers is {num_layers}")
        return tuple(each == kind for each in kinds)

    def only(self, key: str, value: Any, reason: str = "") -> None:
        """Refuse any other value; the key may be absent."""
        if not self.absent(key) and self.config[key] != value:
            because = f" ({reason})" if reason else ""
            raise self.error(key, f"{self.config[key]!r:.200} is not supported, only {value!r} is{because}")


def refuse_quantised(keys: Keys, method: str = "") -> None:
    """Raise ``UserError`` for an object of a config, whole or nested, that announces quantised weights, unless it is
    by ``method``, which the reader of weights knows."""
    for key in QUANTISATION:
        if not keys.absent(key):
            if method and keys.section(key).config.get("quant_method") == method:
                continue
            raise keys.error(key, "quantised weights are not supported; use the unquantised checkpoint")


def without_quantisation(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config, whole and nested, as it was before its weights were quantised."""
    return {
        key: without_quantisation(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in QUANTISATION
    }

"""Which columns of a data file hold prompt, answer and domain: a shipped mapping by name, or the recipe's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from mopd.config.build import build_from_json
from mopd.config.values import check_name, check_text
from mopd.types import UserError

BUILT = "built"
"""Key of a field's metadata: the section that its owner builds by itself where the value is no text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnsConfig:
    """A mapping of columns. Dots reach into nested ones."""

    prompt: str
    """Column that holds the prompt: text, or chat messages."""
    ground_truth: str | None = None
    """Column that holds the reference answer."""
    domain: str | None = None
    """Column that holds the domain."""
    extra_info: str | None = None
    """Column that is handed to custom rewards."""


_VERL = ColumnsConfig(
    prompt="prompt", ground_truth="reward_model.ground_truth", domain="data_source", extra_info="extra_info"
)
SHIPPED: Mapping[str, ColumnsConfig] = MappingProxyType(
    {
        "verl": _VERL,
        "dapo": _VERL,
        "gsm8k": ColumnsConfig(prompt="question", ground_truth="answer"),
        "math": ColumnsConfig(prompt="problem", ground_truth="answer"),
        "mbpp": ColumnsConfig(prompt="prompt", ground_truth="test_list"),
        "openthoughts": ColumnsConfig(prompt="conversations", domain="domain"),
        "messages": ColumnsConfig(prompt="messages", ground_truth="ground_truth"),
        "question_answer": ColumnsConfig(prompt="question", ground_truth="answer"),
    }
)
"""Mappings by name; what else a name does is told in ``docs/data.md``."""
DEFAULT_COLUMNS = "verl"


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFileConfig:
    """One entry of ``data.train`` or ``data.validation``: a file, or a split of a data set of the Hub."""

    path: str
    """A ``.parquet`` or ``.jsonl`` file, or a name of the Hub."""
    columns: Any = field(default=None, metadata={BUILT: ColumnsConfig})
    """As ``data.columns``, for this entry alone."""
    domain: str | None = None
    """Domain of every row of this entry, whatever its columns say."""


def columns_of(key: str, value: Any) -> str | ColumnsConfig:
    """The name of a shipped mapping, or an own one built from a section.

    Raises:
        ValueError: it is neither; begins with ``key``.
    """
    if isinstance(value, ColumnsConfig):
        return value
    if isinstance(value, Mapping):
        mapping: ColumnsConfig = _build(ColumnsConfig, value, key)
        return mapping
    if not isinstance(value, str) or value not in SHIPPED:
        raise ValueError(
            f"{key} is {_shown(value)}: set one of {', '.join(SHIPPED)}, or a section {{prompt: COLUMN, "
            "ground_truth: COLUMN, domain: COLUMN}"
        )
    return value


def entry_of(key: str, value: Any) -> str | DataFileConfig:
    """An entry of ``data.train`` or ``data.validation``: a path or name of the Hub, or a section with one.

    Raises:
        ValueError: it is neither; begins with ``key``.
    """
    if isinstance(value, str):
        _checked(key, check_text, value)
        return value
    entry = value
    if isinstance(value, Mapping):
        entry = _build(DataFileConfig, value, key)
    if not isinstance(entry, DataFileConfig):
        raise ValueError(f"{key} is {_shown(value)}: write a file, a name of the Hub, or a section {{path: …}}")
    if entry.domain is not None:
        _checked(f"{key}.domain", check_name, entry.domain)
    if entry.columns is None:
        return entry
    return DataFileConfig(path=entry.path, columns=columns_of(f"{key}.columns", entry.columns), domain=entry.domain)


def mapping_of(columns: str | ColumnsConfig) -> ColumnsConfig:
    """The columns themselves."""
    return SHIPPED[columns] if isinstance(columns, str) else columns


def _build(cls: type[Any], tree: Mapping[str, Any], key: str) -> Any:
    try:
        return build_from_json(cls, dict(tree), key)
    except UserError as error:
        raise ValueError(str(error)) from None


def _checked(key: str, check: Any, text: str) -> None:
    try:
        check(text)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _shown(value: Any) -> str:
    return f"{value!a:.80}"

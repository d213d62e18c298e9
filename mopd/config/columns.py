"""Which columns of a data file hold prompt, answer and domain: a shipped mapping by name, or the recipe's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from mopd.config.values import check_name

ShippedColumns = Literal["verl", "dapo", "gsm8k", "math", "mbpp", "openthoughts", "messages", "question_answer"]
"""Names of mappings that come with mopd."""


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
SHIPPED: Mapping[ShippedColumns, ColumnsConfig] = MappingProxyType(
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
DEFAULT_COLUMNS: ShippedColumns = "verl"


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFileConfig:
    """One entry of ``data.train`` or ``data.validation``: a file, or a split of a data set of the Hub."""

    path: str
    """A ``.parquet`` or ``.jsonl`` file, or a name of the Hub."""
    columns: ShippedColumns | ColumnsConfig | None = None
    """As ``data.columns``, for this entry alone."""
    domain: str | None = None
    """Domain of every row of this entry, whatever its columns say."""

    def __post_init__(self) -> None:
        if self.domain is not None:
            try:
                check_name(self.domain)
            except ValueError as error:
                raise ValueError(f"domain: {error}") from None


def mapping_of(columns: ShippedColumns | ColumnsConfig) -> ColumnsConfig:
    """The columns themselves."""
    return SHIPPED[columns] if isinstance(columns, str) else columns

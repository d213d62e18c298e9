"""What a recipe's data is to a run: rows, lengths and one prompt by domain, as a reader wants to see them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mopd.data.prompts import PromptDataset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_BINS = 8
"""Bars of a histogram of lengths."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of a prompt."""

    text: str
    is_special: bool
    """Whether it is a token of the tokenizer's own, not text."""
    repeats: int = 1
    """How often a special token stands there in a row, as those of an image do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A prompt as the student, or a teacher with a view, reads it."""

    place: str
    """File and row."""
    num_tokens: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DomainOverview:
    """The prompts of one domain of ``data.train`` or ``data.validation``."""

    split: str
    domain: str
    rows: int
    """Rows that are used."""
    share: float | None
    """Share of the stream's prompts in the first steps; ``None`` for validation."""
    too_long: int
    """Rows that were filtered, as their prompt is longer than ``data.max_prompt_length``."""
    long_views: int
    """Rows that were filtered, as a teacher's view of them is too long."""
    cut: int
    """Rows that are used and were cut to ``data.max_prompt_length``."""
    tokens: Mapping[str, float]
    """``mean``, ``median``, ``p90`` and ``max`` of the prompts' tokens."""
    histogram: tuple[tuple[int, int], ...]
    """Prompts by length: the most tokens of a bin, and the number of prompts in it."""
    example: Example
    """The domain's first prompt."""
    views: Mapping[str, Example]
    """The same as teachers with a view read it, by their names."""


def overview_of(
    split: str, dataset: PromptDataset, tokenizer: PreTrainedTokenizerBase, shares: Mapping[str, float]
) -> list[DomainOverview]:
    """Return one entry for each domain of a split, in alphabetical order; ``shares`` are the stream's, or empty."""
    made = []
    longest = max(len(row.tokens) for row in dataset.rows)
    edges = [-(-longest * number // NUM_BINS) for number in range(1, NUM_BINS + 1)]
    for domain, numbers in dataset.rows_by_domain.items():
        first = dataset.row(numbers[0])
        lengths = np.array([len(dataset.row(number).tokens) for number in numbers])
        counts = np.bincount(np.searchsorted(edges, lengths), minlength=NUM_BINS)
        made.append(
            DomainOverview(
                split=split,
                domain=domain,
                rows=len(numbers),
                share=shares.get(domain),
                too_long=dataset.num_filtered.get(domain, 0) - dataset.num_long_views.get(domain, 0),
                long_views=dataset.num_long_views.get(domain, 0),
                cut=dataset.num_truncated.get(domain, 0),
                tokens={
                    "mean": float(lengths.mean()),
                    "median": float(np.median(lengths)),
                    "p90": float(np.quantile(lengths, 0.9, method="higher")),
                    "max": float(lengths.max()),
                },
                histogram=tuple(zip(edges, counts.tolist(), strict=True)),
                example=_example(first.place, first.tokens, tokenizer),
                views={name: _example(first.place, view.tokens, tokenizer) for name, view in first.views.items()},
            )
        )
    return made


def _example(place: str, tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> Example:
    """Return a prompt in pieces; what a person typed as a special token is one, as the model reads it."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    pieces = []
    # a run of text, or of one special token
    for number, run in itertools.groupby(tokens, lambda token: token if token in special else -1):
        ids = list(run)
        is_special = number >= 0
        text = str(tokenizer.decode(ids[:1] if is_special else ids, clean_up_tokenization_spaces=False))
        pieces.append(Piece(text=text, is_special=is_special, repeats=len(ids) if is_special else 1))
    return Example(place=place, num_tokens=len(tokens), pieces=tuple(pieces))

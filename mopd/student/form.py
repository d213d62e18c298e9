"""Where the tokens of a micro-batch stand: in a pack, sequences end to end, or in right-padded sequences side by side.

Letters: T rows of the micro-batch in the order of its logits, B sequences of S tokens, n samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mopd.data.packing import PackingRules
from mopd.types import SampleMeta


@dataclass(frozen=True, kw_only=True)
class Form:
    """Token t of sample i stands in row ``firsts[i] + t * step``."""

    shape: tuple[int, int]
    """(B, S), or (1, T) of a pack."""
    firsts: tuple[int, ...]
    """Of the samples, then of filler."""
    step: int
    lengths: tuple[int, ...] | None
    """Of a pack's sequences with their padding, one of filler included; they stand end to end."""

    @property
    def num_rows(self) -> int:
        return self.shape[0] * self.shape[1]

    def rows(self, number: int, start: int, stop: int) -> slice:
        """Those of tokens ``start`` to ``stop`` of a sample."""
        first = self.firsts[number]
        return slice(first + start * self.step, first + stop * self.step, self.step)

    def sequences(self, rows: Tensor) -> Tensor:
        """[..., B, S] from flat rows [..., T]."""
        size, length = self.shape
        return rows.unflatten(-1, (length, size)).transpose(-1, -2).contiguous()

    def samples(self) -> Tensor:
        """[T] int64: whose row it is."""
        if self.lengths is None:
            return torch.arange(self.shape[0]).repeat(self.shape[1])
        return torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths))

    def positions(self) -> Tensor:
        """[T] int64: the place of each row in its sequence."""
        if self.lengths is None:
            return torch.arange(self.shape[1]).repeat_interleave(self.shape[0])
        return torch.cat([torch.arange(length) for length in self.lengths])


def choose_form(samples: Sequence[SampleMeta], rules: PackingRules, at_least: tuple[int, int]) -> Form:
    """Of a micro-batch of ``samples``, with filler up to ``at_least`` (B, S) or (1, T); nothing else without
    samples."""
    if not rules.is_packed:
        size = max(len(samples), at_least[0])
        length = rules.sequence(max([at_least[1], *(sample.length for sample in samples)]))
        return Form(shape=(size, length), firsts=tuple(range(size)), step=size, lengths=None)
    lengths = [rules.sequence(sample.length) for sample in samples]
    total = rules.pack_size(max(sum(lengths), rules.sequence(at_least[1])))
    if total > sum(lengths):
        lengths.append(total - sum(lengths))
    firsts = tuple(itertools.accumulate(lengths[:-1], initial=0))
    return Form(shape=(1, total), firsts=firsts, step=1, lengths=tuple(lengths))

"""Where the tokens of a micro-batch stand: in a pack, sequences end to end, or in right-padded sequences side by side.

A micro-batch is laid out whole, and context-parallel ranks then take their share of its rows.

Letters: T rows of the micro-batch in the order of its logits, B sequences of S tokens, n samples, c context-parallel
ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mopd.data.packing import PackingRules
from mopd.student.attention import zigzag_rows
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
    cp_size: int = 1
    cp_rank: int = 0

    @property
    def num_rows(self) -> int:
        return self.shape[0] * self.shape[1]

    def rows(self, number: int, start: int, stop: int) -> slice:
        """Those of tokens ``start`` to ``stop`` of a sample."""
        first = self.firsts[number]
        return slice(first + start * self.step, first + stop * self.step, self.step)

    @cached_property
    def _own(self) -> Tensor | None:
        """[T / c] int64: this rank's rows, which are whole columns of right-padded sequences; None: all."""
        if self.cp_size == 1:
            return None
        size, length = self.shape
        places = zigzag_rows(self.lengths or (length,), self.cp_size)[self.cp_rank]
        return (places[:, None] * size + torch.arange(size)).flatten()

    def share(self, rows: Tensor) -> Tensor:
        """[T / c, ...]: this rank's of [T, ...]."""
        return rows if self._own is None else rows[self._own]

    def spread(self, own: Tensor) -> Tensor:
        """[T] from this rank's [T / c], 0 where other ranks have theirs."""
        if self._own is None:
            return own
        return own.new_zeros(self.num_rows).index_copy(0, self._own.to(own.device), own)

    def local(self, rows: Tensor) -> Tensor:
        """The numbers of ``rows``, any of the T, among this rank's; -1 where they are other ranks'."""
        if self._own is None:
            return rows
        numbers = torch.full((self.num_rows,), -1)
        numbers[self._own] = torch.arange(len(self._own))
        return numbers[rows]

    def sequences(self, rows: Tensor) -> Tensor:
        """[..., B, S / c] of this rank from flat rows [..., T]."""
        own = rows if self._own is None else rows[..., self._own]
        return own.unflatten(-1, (-1, self.shape[0])).transpose(-1, -2).contiguous()

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


def choose_form(
    samples: Sequence[SampleMeta], rules: PackingRules, at_least: tuple[int, int], cp_size: int = 1, cp_rank: int = 0
) -> Form:
    """Of a micro-batch of ``samples``, with filler up to ``at_least`` (B, S) or (1, T); nothing else without
    samples."""
    cp = {"cp_size": cp_size, "cp_rank": cp_rank}
    if not rules.is_packed:
        size = max(len(samples), at_least[0])
        length = rules.sequence(max([at_least[1], *(sample.length for sample in samples)]))
        return Form(shape=(size, length), firsts=tuple(range(size)), step=size, lengths=None, **cp)
    lengths = [rules.sequence(sample.length) for sample in samples]
    total = rules.pack_size(max(sum(lengths), rules.sequence(at_least[1])))
    if total > sum(lengths):
        lengths.append(total - sum(lengths))
    firsts = tuple(itertools.accumulate(lengths[:-1], initial=0))
    return Form(shape=(1, total), firsts=firsts, step=1, lengths=tuple(lengths), **cp)

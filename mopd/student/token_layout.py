"""Layout of the tokens of a micro-batch: packed, sequences end to end, or right-padded sequences side by side.

A micro-batch is laid out whole; context-parallel ranks then take their share of its rows.

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

from mopd.base.types import SampleMeta
from mopd.data.packing import PackingRules
from mopd.student.attention import zigzag_rows


@dataclass(frozen=True, kw_only=True)
class TokenLayout:
    """Mapping from tokens to rows: token t of sample i stands in row ``firsts[i] + t * step``."""

    shape: tuple[int, int]
    """(B, S), or (1, T) of a pack."""
    firsts: tuple[int, ...]
    """First row of each sample, then of each filler sequence."""
    step: int
    """Distance between the rows of neighbouring tokens: 1 in a pack, B if right-padded (rows are those of [S, B])."""
    lengths: tuple[int, ...] | None
    """Lengths of a pack's sequences with their padding, filler included; they stand end to end. ``None`` if
    right-padded."""
    cp_size: int = 1
    cp_rank: int = 0

    @property
    def num_rows(self) -> int:
        return self.shape[0] * self.shape[1]

    def rows(self, number: int, start: int, stop: int) -> slice:
        """Return the rows of tokens ``start`` to ``stop`` of sample ``number``."""
        first = self.firsts[number]
        return slice(first + start * self.step, first + stop * self.step, self.step)

    @cached_property
    def _own(self) -> Tensor | None:
        """[T / c] int64: this rank's rows, which are whole columns of right-padded sequences; ``None`` for all."""
        if self.cp_size == 1:
            return None
        size, length = self.shape
        places = zigzag_rows(self.lengths or (length,), self.cp_size)[self.cp_rank]
        return (places[:, None] * size + torch.arange(size)).flatten()

    def share(self, rows: Tensor) -> Tensor:
        """Return this rank's [T / c, ...] of [T, ...]."""
        return rows if self._own is None else rows[self._own]

    def spread(self, own: Tensor) -> Tensor:
        """Return [T] from this rank's [T / c], with 0 in the rows of other ranks."""
        if self._own is None:
            return own
        return own.new_zeros(self.num_rows).index_copy(0, self._own.to(own.device), own)

    def local(self, rows: Tensor) -> Tensor:
        """Return the numbers that ``rows``, any of the T, have among this rank's rows; -1 for rows of other ranks."""
        if self._own is None:
            return rows
        numbers = torch.full((self.num_rows,), -1)
        numbers[self._own] = torch.arange(len(self._own))
        return numbers[rows]

    def sequences(self, rows: Tensor) -> Tensor:
        """Return this rank's [..., B, S / c] from flat rows [..., T]."""
        own = rows if self._own is None else rows[..., self._own]
        grid: Tensor = own.unflatten(-1, (-1, self.shape[0]))
        return grid.transpose(-1, -2).contiguous()

    def samples(self) -> Tensor:
        """Return [T] int64: the sample that each row belongs to."""
        if self.lengths is None:
            return torch.arange(self.shape[0]).repeat(self.shape[1])
        return torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths))

    def positions(self) -> Tensor:
        """Return [T] int64: the position of each row in its sequence."""
        if self.lengths is None:
            return torch.arange(self.shape[1]).repeat_interleave(self.shape[0])
        return torch.cat([torch.arange(length) for length in self.lengths])


def choose_token_layout(
    samples: Sequence[SampleMeta], rules: PackingRules, at_least: tuple[int, int], cp_size: int = 1, cp_rank: int = 0
) -> TokenLayout:
    """Return the layout of a micro-batch of ``samples`` with filler up to ``at_least``, (B, S) or (1, T). Without
    samples the micro-batch is filler alone."""
    cp = {"cp_size": cp_size, "cp_rank": cp_rank}
    if not rules.is_packed:
        size = max(len(samples), at_least[0])
        length = rules.sequence(max([at_least[1], *(sample.length for sample in samples)]))
        return TokenLayout(shape=(size, length), firsts=tuple(range(size)), step=size, lengths=None, **cp)
    lengths = [rules.sequence(sample.length) for sample in samples]
    total = rules.pack_size(max(sum(lengths), rules.sequence(at_least[1])))
    # Filler is one more sequence at the end, so that no sample's tokens attend to it.
    if total > sum(lengths):
        lengths.append(total - sum(lengths))
    firsts = tuple(itertools.accumulate(lengths[:-1], initial=0))
    return TokenLayout(shape=(1, total), firsts=firsts, step=1, lengths=tuple(lengths), **cp)

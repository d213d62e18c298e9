"""The two streaming passes over the logits: statistics in forward, gradient in backward.

Both read a few rows at a time, so that the extra memory is two small blocks and ``[T, N]`` tensors, and both take the
exponentials from ``softmax``: one fused, vectorised pass. Its normaliser is not trusted (torch sums it in sequence on
CPU, which errs by 2e-5 at V = 151,936) but divided out again: the largest entry of a row's softmax is 1 / normaliser.

Between them stands one SUM all-reduce of ``pay[T, tp + N]``: each rank writes the log-sum-exp of its own logits into
column ``rank`` and the selected logits that it owns into their columns. Every cell has at most one non-zero
contributor, so the result is exact and equal on all ranks, and needs no MAX all-reduce. The log-sum-exp that is sent
leaves the selected ids out (they are in the payload anyway): the mass outside the selection then comes out as a sum of
positive numbers, never as 1 - P, which loses all digits when the student is sure.

Shape legend: T rows, V columns of this rank, N selected ids of a row, R rows of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.losses.call import LossCall, VocabShard
from mopd.losses.chunked.blocks import Block, blocks, can_look, scatter_where
from mopd.losses.divergences import SMALLEST


@dataclass(frozen=True)
class Selection:
    """The ids of each row whose logits are needed one by one."""

    column_TN: Tensor
    """Column on this rank, 0 where not owned."""
    owned_TN: Tensor
    removed_TN: Tensor
    """Entries that form the selected set: once per id, not necessarily owned here."""


@dataclass(frozen=True)
class FarTail:
    """Part of the gradient that is spread over the tail by ``exp(z / temperature - lse)``. Needed where the whole tail
    underflows next to the selected ids, so that ``softmax`` has no digits of it."""

    factor_T: Tensor
    """Factor of the row; 0 on all other rows."""
    lse_T: Tensor
    """Log-sum-exp of the logits that were not selected, over all ranks."""


class Scratch:
    """Two reusable blocks in the accumulation dtype."""

    def __init__(self, inp: Tensor, call: LossCall) -> None:
        self.dtype = call.dtype
        self.columns = call.shard.num_columns
        self.scale = 1.0 / call.temperature
        self._inp = inp
        self._source: Tensor | None = None
        self._result: Tensor | None = None

    def scaled(self, block: Tensor) -> Tensor:
        """Return the true columns of the logits, divided by the temperature, in the accumulation dtype."""
        block = block[:, : self.columns]
        if block.dtype == self.dtype and self.scale == 1.0 and block.is_contiguous():
            return block
        if self._source is None or self._source.size(0) < block.size(0):
            self._source = self._inp.new_empty(block.size(0), self.columns, dtype=self.dtype)
        copy = self._source[: block.size(0)].copy_(block)
        return copy if self.scale == 1.0 else copy.mul_(self.scale)

    def result(self, num_rows: int) -> Tensor:
        """Return a buffer of ``num_rows`` rows, which holds what its last user left."""
        if self._result is None or self._result.size(0) < num_rows:
            self._result = self._inp.new_empty(num_rows, self.columns, dtype=self.dtype)
        return self._result[:num_rows]


@dataclass(frozen=True)
class LogProbs:
    """Log-probs of the selected ids over the whole vocabulary, equal on all ranks.

    ``shift + log_sum`` is the log-sum-exp of the row; kept apart because a large shift would round the small part away.
    """

    shift_T: Tensor
    log_sum_T: Tensor
    logprobs_TN: Tensor
    log_tail_T: Tensor
    """Log of the probability of all ids that are not removed. NaN in rows without a distribution: a logit NaN or +inf
    on any rank, or all of them -inf."""
    tail_lse_T: Tensor
    """Log-sum-exp of the logits of those ids."""

    @property
    def lse_T(self) -> Tensor:
        """Log-sum-exp of the row."""
        return self.shift_T + self.log_sum_T


def exchange(tail_lse_T: Tensor, selected_TN: Tensor, removed_TN: Tensor, shard: VocabShard) -> LogProbs:
    """Join the shards with the one collective.

    ``tail_lse_T`` is this rank's log-sum-exp over its columns that are not removed; ``selected_TN`` its selected
    logits, 0 where it does not own the id; ``removed_TN`` marks the entries whose id is left out of ``tail_lse_T`` (the
    same on all ranks, at most one entry per id and row).
    """
    rows, tp = tail_lse_T.size(0), shard.world_size
    pay = selected_TN.new_zeros(rows, tp + selected_TN.size(1))
    pay[:, shard.rank] = tail_lse_T
    pay[:, tp:] = selected_TN
    if tp > 1:
        dist.all_reduce(pay, group=shard.group)
    tails, selected = pay[:, :tp], pay[:, tp:]
    parts = torch.cat([tails, selected.masked_fill(~removed_TN, -torch.inf)], dim=1)
    shift = parts.amax(1)
    log_sum = torch.log((parts - shift.unsqueeze(1)).exp().sum(1))
    logprobs = (selected - shift.unsqueeze(1)) - log_sum.unsqueeze(1)
    log_tail = torch.logsumexp(tails - shift.unsqueeze(1), dim=1) - log_sum
    return LogProbs(shift, log_sum, logprobs, log_tail, torch.logsumexp(tails, dim=1))


def collect(inp: Tensor, selection: Selection, call: LossCall) -> tuple[LogProbs, Tensor]:
    """Run the forward pass over the logits and the collective.

    Return the log-probs, and ``local`` [T], by which this rank's row softmax must be multiplied to give probabilities
    over the whole vocabulary. Rows of weight 0 hold meaningless numbers.
    """
    num_rows, dtype, shard = selection.column_TN.size(0), call.dtype, call.shard
    peak_T, unit_T = inp.new_zeros(num_rows, dtype=dtype), inp.new_ones(num_rows, dtype=dtype)
    tail_lse_T = inp.new_zeros(num_rows, dtype=dtype)
    selected_TN = inp.new_zeros(selection.column_TN.shape, dtype=dtype)
    if shard.num_columns == 0:
        tail_lse_T.fill_(-torch.inf)
        return exchange(tail_lse_T, selected_TN, selection.removed_TN, shard), torch.zeros_like(peak_T)
    scratch = Scratch(inp, call)
    for block in blocks(inp, call.active_T):
        if block.empty:
            continue
        owned = block.rows_of(selection.owned_TN)
        column = block.rows_of(selection.column_TN)
        logits = scratch.scaled(block.read(inp))
        block.put_rows(selected_TN, logits.gather(1, column).masked_fill_(~owned, 0))
        peak = logits.amax(1)
        share = torch.softmax(logits, 1, out=scratch.result(logits.size(0)))
        # The largest softmax entry is exp(0) / normaliser: dividing by it takes torch's inexact normaliser out.
        unit = share.amax(1)
        removed = owned & block.rows_of(selection.removed_TN)
        scatter_where(share, column, removed, torch.zeros_like(column, dtype=dtype))
        rest = share.sum(1) / unit
        tail_lse = torch.where(peak == -torch.inf, peak, peak + torch.log(rest))
        _measure_far_tails(tail_lse, rest, logits, share, column, removed)
        block.put_rows(peak_T, peak)
        block.put_rows(unit_T, unit)
        block.put_rows(tail_lse_T, tail_lse)
    stats = exchange(tail_lse_T, selected_TN, selection.removed_TN, shard)
    # exp(peak - joint log-sum-exp) over the softmax's largest entry, which belongs to the peak.
    local = torch.exp((peak_T - stats.shift_T) - stats.log_sum_T) / unit_T
    return stats, torch.where(peak_T == -torch.inf, 0, local)


def _measure_far_tails(
    tail_lse: Tensor, rest: Tensor, logits: Tensor, buffer: Tensor, column: Tensor, removed: Tensor
) -> None:
    """Replace ``tail_lse`` [R] where ``rest``, the sum of exponentials relative to a removed peak, has lost its digits.
    ``buffer`` has the logits' size and is overwritten."""
    far = rest < SMALLEST
    pick: Tensor | slice = slice(None)
    if can_look(far):
        if not bool(far.any()):
            return
        pick = far
    masked = buffer[: logits[pick].size(0)].copy_(logits[pick])
    absent = torch.full_like(column[pick], -torch.inf, dtype=masked.dtype)
    scatter_where(masked, column[pick], removed[pick], absent)
    tail_lse[pick] = torch.where(far[pick], masked.logsumexp(1), tail_lse[pick])


def write_gradient(
    inp: Tensor,
    out: Tensor,
    *,
    entry_TN: Tensor,
    write_TN: Tensor,
    column_TN: Tensor,
    dense_T: Tensor | None,
    far: FarTail | None = None,
    call: LossCall,
) -> None:
    """Run the backward pass: ``out[t] = dense[t] * softmax(z[t] / temperature)`` of this rank, then the K entries over
    it.

    ``dense_T`` is ``-G * upstream / temperature * local``, 0 on rows of weight 0; None means 0 everywhere. The entries
    replace what the dense part wrote: they were formed in the accumulation dtype and are rounded once. ``out`` may be
    ``inp``.
    """
    scratch = Scratch(inp, call)
    n = call.shard.num_columns
    for block in blocks(inp, call.active_T):
        target = block.of(out)
        if block.empty or n == 0:
            target.zero_()
            continue
        part = _dense(block, inp, out, scratch, dense_T, far)
        scatter_where(part, block.rows_of(column_TN), block.rows_of(write_TN), block.rows_of(entry_TN))
        # ``_dense`` has written in place: nothing is left to copy.
        if part.data_ptr() == target.data_ptr():
            continue
        if block.pick is not None:
            target.zero_()
            target[:, :n].index_copy_(0, block.pick, part.to(target.dtype))
        else:
            target[:, :n].copy_(part)
            target[:, n:].zero_()


def _dense(
    block: Block, inp: Tensor, out: Tensor, scratch: Scratch, dense_T: Tensor | None, far: FarTail | None
) -> Tensor:
    """Return the dense part of a block, in ``out`` itself if that needs no conversion."""
    logits = block.read(inp)
    target = block.of(out)
    direct = block.pick is None and out is not inp and target.dtype == scratch.dtype
    direct = direct and target.size(1) == scratch.columns and target.is_contiguous()
    part = target if direct else scratch.result(logits.size(0))
    if dense_T is None:
        return part.zero_()
    logits = scratch.scaled(logits)
    torch.softmax(logits, 1, out=part)
    dense = block.rows_of(dense_T).unsqueeze(1)
    part.mul_(dense)
    zero = dense == 0
    if not can_look(part) or bool(zero.any()):
        part.masked_fill_(zero, 0)  # the softmax of a masked shard or of a padding row may be NaN
    if far is not None:
        _add_far(part, logits, block.rows_of(far.factor_T), block.rows_of(far.lse_T))
    return part


def _add_far(part: Tensor, logits: Tensor, factor: Tensor, lse: Tensor) -> None:
    """Add the far tail to a block's rows. It also changes the selected ids, whose entries are written afterwards."""
    here = factor != 0
    if not can_look(part):
        spread = torch.exp(logits - lse.unsqueeze(1)) * factor.unsqueeze(1)
        part += torch.where(here.unsqueeze(1), spread, 0)
    elif bool(here.any()):
        part[here] += torch.exp(logits[here] - lse[here].unsqueeze(1)) * factor[here].unsqueeze(1)

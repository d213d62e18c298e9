"""The primitive below every loss: log-probs of a few ids per row, from logits split over the vocabulary.

One SUM all-reduce of ``pay[T, tp + N]``: each rank writes the log-sum-exp of its own logits into column ``rank`` and
the selected logits that it owns into their columns. Every cell has at most one non-zero contributor, so the result is
exact and equal on all ranks, and needs no MAX all-reduce.

The log-sum-exp that travels leaves the selected ids out (they are in the payload anyway). The mass outside the
selection then comes out as a sum of positive numbers, never as 1 - P, which loses all digits for a sure student.

Shape legend: T rows, V columns of this rank, N selected ids of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class VocabShard:
    """Which ids the columns of this rank's logits stand for."""

    start: int
    """Id of column 0."""
    num_columns: int
    """Columns that are true ids; the rest is padding."""
    vocab_size: int
    """True ids of all ranks together."""
    rank: int
    world_size: int
    group: dist.ProcessGroup | None

    def localize(self, ids_TN: Tensor) -> tuple[Tensor, Tensor]:
        """Global ids to (column, owned); the column of an id that this rank does not own is 0."""
        column = ids_TN - self.start
        owned = (column >= 0) & (column < self.num_columns)
        return torch.where(owned, column, 0), owned


def resolve_shard(
    width: int, group: dist.ProcessGroup | None, vocab_range: tuple[int, int] | None, true_vocab_size: int | None
) -> VocabShard:
    """Shard of a tensor with ``width`` columns. Equal shards in rank order unless ``vocab_range`` says otherwise.

    Raises ValueError when the range does not fit the tensor, or leaves the true vocabulary size unknown.
    """
    rank, world_size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    if vocab_range is None:
        start, total = rank * width, world_size * width
    else:
        start, end = vocab_range
        if end - start != width or start < 0:
            raise ValueError(f"vocab_range is {vocab_range} but inp has {width} columns: they must match")
        if world_size == 1 and start != 0:
            raise ValueError(f"vocab_range is {vocab_range} on a single rank: pass dist_process_group")
        if world_size > 1 and true_vocab_size is None:
            raise ValueError(f"vocab_range is {vocab_range} and true_vocab_size None: pass the whole size")
        total = end if true_vocab_size is None else max(end, true_vocab_size)
    if true_vocab_size is not None and not 0 < true_vocab_size <= total:
        raise ValueError(f"true_vocab_size is {true_vocab_size} but the shards hold {total} columns: lower it")
    size = total if true_vocab_size is None else true_vocab_size
    return VocabShard(start, min(width, max(0, size - start)), size, rank, world_size, group)


@dataclass(frozen=True)
class LogProbs:
    """Log-probs of the selected ids over the whole vocabulary, equal on all ranks.

    ``shift + log_sum`` is the log-sum-exp of the row; kept apart because a large shift would round the small part away.
    """

    shift_T: Tensor
    log_sum_T: Tensor
    logprobs_TN: Tensor
    log_tail_T: Tensor
    """Log of the probability of all ids that are not removed. NaN in rows without a distribution: a logit NaN or
    +inf on any rank, or all of them -inf."""
    tail_lse_T: Tensor
    """Log-sum-exp of the logits of those ids."""

    @property
    def lse_T(self) -> Tensor:
        return self.shift_T + self.log_sum_T


def exchange(tail_lse_T: Tensor, selected_TN: Tensor, removed_TN: Tensor, shard: VocabShard) -> LogProbs:
    """Joins the shards with the one collective.

    ``tail_lse_T`` is this rank's log-sum-exp over its columns that are not removed; ``selected_TN`` its selected
    logits, 0 where it does not own the id; ``removed_TN`` marks the entries whose id is left out of ``tail_lse_T``
    (the same on all ranks, at most one entry per id and row).
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

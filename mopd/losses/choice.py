"""Choice of the loss tokens that count: those of each response with the largest score.

The share is of a response, not of a micro-batch or a batch: which tokens count then does not depend on how the batch is
cut, and how many do is known from the lengths alone, before the first forward. Shape legend: T rows, n samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

ROUNDING = 1e-6
"""Tokens by which a product may exceed a whole number through float64's rounding."""


def num_chosen(num_loss_tokens: Tensor, share: float) -> Tensor:
    """Return how many of each sample's loss tokens count, int64 [n]: the share, rounded up."""
    wanted = torch.ceil(num_loss_tokens.double() * share - ROUNDING).long().clamp_min(1)
    return torch.minimum(wanted, num_loss_tokens)


def total_chosen(num_loss_tokens: Iterable[int], share: float) -> int:
    """Return the sum of ``num_chosen``, on the host."""
    return sum(min(n, max(1, math.ceil(n * share - ROUNDING))) for n in num_loss_tokens)


@torch.no_grad()
def largest_rows(
    score: Tensor,
    loss_mask: Tensor,
    sample_index: Tensor,
    counts: Tensor,
    *,
    numbers: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return bool [T]: for each sample i its ``counts[i]`` loss rows with the largest score; of equal scores the first.
    NaN counts as largest, so that its loss shows the fault. Does not wait for the device.

    Args:
        score: float [T], not read where ``loss_mask`` is off.
        loss_mask: bool [T].
        sample_index: int64 [T]: number of each row's sample.
        counts: int64 [n], at most the sample's loss rows.
        numbers: int64 [T]: place of each row among those of all ranks of ``group``, which hold T each.
        group: ranks that hold parts of the same samples; None for whole ones.
    """
    ranked = torch.where(loss_mask, score.double().nan_to_num(torch.inf, torch.inf), -torch.inf)
    whole = torch.stack([ranked, sample_index.double()])
    if numbers is not None and group is not None:
        total = len(score) * dist.get_world_size(group)
        whole = whole.new_zeros(2, total).index_copy(1, numbers, whole)
        dist.all_reduce(whole, group=group)
    order = whole[0].argsort(descending=True, stable=True)
    order = order[whole[1][order].argsort(stable=True)]
    sample = whole[1][order].long()
    sizes = torch.zeros_like(counts).index_add(0, sample, torch.ones_like(sample))
    place = torch.arange(len(order), device=order.device) - (sizes.cumsum(0) - sizes)[sample]
    chosen = torch.zeros_like(order, dtype=torch.bool).index_copy(0, order, place < counts[sample])
    return loss_mask & (chosen if numbers is None else chosen[numbers])

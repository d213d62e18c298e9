"""States of the distributed optimizer on their way into a checkpoint: from all data-parallel ranks to the first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

_STATES = ("param", "exp_avg", "exp_avg_sq")
"""Megatron's names: the fp32 weights, and Adam's moments."""
_NUM_AT_ONCE = 2**24
"""Numbers that one gather brings to the first rank: 64 MiB."""


@torch.no_grad()
def gather_states(
    part: DistributedOptimizer, gathered: set[int], *, empty_data: bool = False, **options: Any
) -> dict[int, Any] | None:
    """In the place of ``get_parameter_state_dp_zero`` of ``part``, whose other options are not looked at: for each
    gradient buffer and state [numel] fp32 in host memory, on data-parallel rank 0. The others write no states, and get
    ``None``. With ``empty_data``, which is for loading, zeros on every rank. Collective over ``part``'s ranks.

    Megatron 0.16.1 brings them to every rank, through three times their size; and it leaves out the padding that ends
    each bucket, which its caller counts: from the second bucket on it saves parameters shifted. The addresses of what
    this has allocated go to ``gathered``.
    """
    is_held = empty_data or part.data_parallel_group.rank() == 0
    state: dict[int, Any] = {}
    for number, (buffer, by_dtype) in enumerate(zip(part.buffers, part.gbuf_ranges, strict=True)):
        ((dtype, buckets),) = by_dtype.items()
        whole = {name: torch.zeros(buffer.numel, dtype=torch.float32) for name in _STATES} if is_held else {}
        state[number] = {dtype: whole}
        gathered |= {tensor.untyped_storage().data_ptr() for tensor in whole.values()}
        for bucket, ranges in zip(buffer.buckets, buckets, strict=True) if not empty_data else ():
            for name in _STATES:
                _gather(part, bucket, ranges["param_map"], name, whole.get(name))
    return state if is_held else None


def _gather(
    part: DistributedOptimizer, bucket: Any, ranges: Mapping[Any, Any], name: str, whole: Tensor | None
) -> None:
    """One state of a bucket into ``whole``, [numel] of the buffer; ``ranges`` are this rank's, by parameter."""
    group = part.data_parallel_group
    num_own, at_once = bucket.grad_data.numel() // group.size(), max(1, _NUM_AT_ONCE // group.size())
    for first in range(0, num_own, at_once):
        last = min(first + at_once, num_own)
        piece = bucket.grad_data.new_zeros(last - first, dtype=torch.float32)
        for param, of_param in ranges.items():
            place = of_param["gbuf_local"]
            low, high = max(first, place.start), min(last, place.end)
            if low < high:
                values = part._get_main_param_and_optimizer_states(param)[name].flatten()
                piece[low - first : high - first] = values[low - place.start : high - place.start]
        if whole is None:
            dist.gather(piece, group=group, group_dst=0)
            continue
        pieces = piece.new_empty(group.size(), len(piece))
        dist.gather(piece, list(pieces), group=group, group_dst=0)
        of_bucket = whole[bucket.offset : bucket.offset + bucket.grad_data.numel()]
        of_bucket.view(group.size(), num_own)[:, first:last] = pieces

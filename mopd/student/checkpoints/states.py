"""States of the distributed optimizer, moved a few at a time: from all data-parallel ranks to the first, which writes
them, and from a checkpoint to the rank that holds them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

_STATES = ("param", "exp_avg", "exp_avg_sq")
"""Megatron's names of the fp32 weights and Adam's two moments."""
_NUM_AT_ONCE = 2**24
"""Elements that one gather brings to the first rank, and that one round of loading reads: 64 MiB a state."""


@torch.no_grad()
def gather_states(
    part: DistributedOptimizer, gathered: set[int], *, empty_data: bool = False, **options: Any
) -> dict[int, Any] | None:
    """Replace ``part.get_parameter_state_dp_zero``, whose other options are ignored: return, for each gradient buffer,
    each state as [numel] fp32 in host memory on data-parallel rank 0, and ``None`` on the other ranks, which write no
    states. With ``empty_data``, which loading uses, return shapes alone on every rank. Collective over ``part``'s
    ranks.

    Megatron 0.16.1 gathers the states on every rank, through three times their size; and it leaves out the padding that
    ends each bucket, which its caller counts: from the second bucket on it saves parameters shifted. The addresses of
    the storages allocated here are added to ``gathered``.
    """
    is_held = empty_data or part.data_parallel_group.rank() == 0
    state: dict[int, Any] = {}
    for number, (buffer, by_dtype) in enumerate(zip(part.buffers, part.gbuf_ranges, strict=True)):
        ((dtype, buckets),) = by_dtype.items()
        names, device = _STATES if is_held else (), "meta" if empty_data else "cpu"
        whole = {name: torch.zeros(buffer.numel, dtype=torch.float32, device=device) for name in names}
        state[number] = {dtype: whole}
        if empty_data:
            continue
        gathered |= {tensor.untyped_storage().data_ptr() for tensor in whole.values()}
        for bucket, ranges in zip(buffer.buckets, buckets, strict=True):
            for name in _STATES:
                _gather(part, bucket, ranges["param_map"], name, whole.get(name))
    return state if is_held else None


def _gather(
    part: DistributedOptimizer, bucket: Any, ranges: Mapping[Any, Any], name: str, whole: Tensor | None
) -> None:
    """Gather one state of a bucket into ``whole``, [numel] of the buffer; ``ranges`` are this rank's, by parameter."""
    group = part.data_parallel_group
    num_own, at_once = bucket.grad_data.numel() // group.size(), max(1, _NUM_AT_ONCE // group.size())
    # In pieces, to bound the memory of the first rank, which receives one from every rank.
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


States = Mapping[int, Mapping[str, Any]]
"""Parameter number -> state name -> Megatron's sharded tensor (or a factory), without data."""
Fetch = Callable[[dict[str, Any]], dict[str, Any]]
"""Function that returns tensors in the structure of the sharded tensors that it is given. Collective."""


@torch.no_grad()
def load_states(
    parts: Mapping[str, tuple[DistributedOptimizer, States]], fetch: Fetch, group: dist.ProcessGroup
) -> None:
    """Fill the states of each part, by key, from a checkpoint. Each rank reads whole the parameters of which it holds a
    piece, and keeps its piece. Collective over ``group``, whose ranks may hold different parameters.

    Megatron reads all parameters of a pipeline stage at once on every data-parallel rank: 12 bytes a weight. A single
    rank does so here too: Megatron takes what a rank does not ask for to be another rank's, so it must ask for
    everything.
    """
    rounds = _rounds(parts, _NUM_AT_ONCE if group.size() > 1 else sys.maxsize)
    # Every rank takes part in every ``fetch``, which is collective, also after its own last round.
    num_rounds = torch.tensor(len(rounds))
    dist.all_reduce(num_rounds, dist.ReduceOp.MAX, group=group)
    own = {key: _own_ranges(part) for key, (part, _) in parts.items()}
    for number in range(int(num_rounds)):
        wanted = rounds[number] if number < len(rounds) else []
        asked: dict[str, Any] = {key: {} for key in parts}
        for key, index, _ in wanted:
            asked[key][index] = {name: _with_room(entry) for name, entry in parts[key][1][index].items()}
        loaded = fetch(asked)
        for key, index, param in wanted:
            place = own[key][param]
            pieces = {name: value.flatten()[place.start : place.end] for name, value in loaded[key][index].items()}
            parts[key][0]._set_main_param_and_optimizer_states(param, pieces)


def _rounds(
    parts: Mapping[str, tuple[DistributedOptimizer, States]], num_at_once: int
) -> list[list[tuple[str, int, Tensor]]]:
    """Split this rank's parameters into rounds of at most ``num_at_once`` elements, or of one larger parameter. Each
    comes with its part's key and its number in the part."""
    rounds: list[list[tuple[str, int, Tensor]]] = []
    room = 0
    for key, (part, states) in parts.items():
        own = _own_ranges(part)
        numbered = (param for buffer in part.buffers for param in buffer.param_index_map)
        for index, param in zip(states, numbered, strict=True):
            if param not in own:
                continue
            if not rounds or param.numel() > room:
                rounds.append([])
                room = num_at_once
            rounds[-1].append((key, index, param))
            room -= param.numel()
    return rounds


def _own_ranges(part: DistributedOptimizer) -> dict[Tensor, Any]:
    """Return the range of elements that this rank holds of each of its parameters."""
    buckets = [bucket for by_dtype in part.gbuf_ranges for all_of in by_dtype.values() for bucket in all_of]
    return {param: of_param["param"] for bucket in buckets for param, of_param in bucket["param_map"].items()}


def _with_room(entry: Any) -> Any:
    """Return the entry with zeros to load into. They stay where the checkpoint has no value (vocabulary padding)."""
    return replace(entry, data=torch.zeros(entry.data.shape, dtype=entry.data.dtype))

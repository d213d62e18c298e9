"""Merging and splitting tensors between Hugging Face and Megatron-Core: the only code beside the name tables.

Shape letters: G key/value groups, Q query heads per group, D head_dim, H hidden, F MLP width, V true vocabulary,
P padded vocabulary, R tensor-parallel ranks. Weights are [out, in].

- qkv: Megatron keeps one block of (Q + 2) x D rows per group: its query heads, its key head, its value head; a rank
  owns G / R consecutive groups. Hugging Face has q [G*Q*D, H], k [G*D, H], v [G*D, H]. Biases alike, without H.
- gate_up: a rank's matrix is its F / R rows of gate_proj above its F / R rows of up_proj.
- rows, columns: a rank owns its share of dimension 0 or 1.
- vocab: a rank owns P / R consecutive rows of the table padded with zero rows from V to P.

Each rank asks for its own slices only, so a load reads every byte once per tensor-parallel group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mopd.conversion.models.dims import ModelDims
from mopd.conversion.models.families import Placed

ReadSlice = Callable[[str, int, int, int], Tensor]
"""``read_slice(name, dim, start, stop)``: part of one Hugging Face tensor (``HfReader.read_slice``)."""


def load_shard(placed: Placed, read_slice: ReadSlice, dims: ModelDims, *, rank: int, size: int, rows: int) -> Tensor:
    """The part of one Megatron parameter that tensor-parallel rank ``rank`` of ``size`` owns (for an expert's, the rank
    among those that share the expert).

    Args:
        read_slice: reads a slice of a Hugging Face tensor.
        rows: rows of this rank's shard; only ``vocab`` uses it (the padding is the model's choice).

    Raises:
        ValueError: the padded vocabulary is smaller than the true one.
    """
    names = list(zip(placed.hf_names, placed.hf_shapes, strict=True))
    merge = placed.param.merge
    if merge == "vocab":
        ((name, shape),) = names
        if rows * size < shape[0]:
            raise ValueError(f"{rows} rows on each of {size} ranks cannot hold the vocabulary of {shape[0]}")
        start, stop = (min(bound, shape[0]) for bound in (rank * rows, (rank + 1) * rows))
        own = read_slice(name, 0, start, stop)
        return torch.cat([own, own.new_zeros(rows - (stop - start), *shape[1:])])
    if merge == "replicated":
        ((name, shape),) = names
        return read_slice(name, 0, 0, shape[0])
    dim = 1 if merge == "columns" else 0
    parts = [read_slice(name, dim, *_bounds(shape[dim], rank, size)) for name, shape in names]
    if merge == "qkv":
        return merge_qkv(parts, dims)
    return merge_rows(parts)


def split_shards(placed: Placed, shards: Sequence[Tensor], dims: ModelDims) -> list[Tensor]:
    """Inverse of ``load_shard``: the Hugging Face tensors of one parameter, from the shards of all ranks in order.

    Returns:
        Contiguous tensors with memory of their own, in the order of ``placed.hf_names``; padding rows are stripped.
    """
    merge = placed.param.merge
    if merge == "replicated":
        return [shards[0].clone()]
    if merge == "rows":
        return [torch.cat(list(shards))]
    if merge == "columns":
        return [torch.cat(list(shards), dim=1)]
    if merge == "vocab":
        return [torch.cat(list(shards))[: placed.hf_shapes[0][0]]]
    if merge == "gate_up":
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([half[part] for half in halves]) for part in range(2)]
    return split_qkv(torch.cat(list(shards)), dims)


def split_grouped(experts: Sequence[Placed], grouped: Tensor, *, size: int) -> list[Tensor]:
    """Views [out, in] of each expert's share in a parameter of Megatron's ``GroupedMLP``.

    ``weight1`` [H, E*2F] and ``weight2`` [E*F, H] are E transposed matrices one behind the other in memory, E this
    rank's experts and F its share of their width (of ``size`` ranks that share them).
    """
    rows, columns = (sum(shape[0] for shape in experts[0].hf_shapes), experts[0].hf_shapes[0][1])
    if experts[0].param.merge == "columns":
        columns //= size
    else:
        rows //= size
    return list(grouped.view(len(experts), columns, rows).transpose(1, 2))


def merge_rows(parts: Sequence[Tensor]) -> Tensor:
    """Parts one above the other; a single part as it is."""
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def merge_qkv(parts: Sequence[Tensor], dims: ModelDims) -> Tensor:
    """q [g*Q*D, ...], k [g*D, ...], v [g*D, ...] of any g consecutive groups -> [g*(Q+2)*D, ...]."""
    q, k, v = parts
    groups = k.shape[0] // dims.head_dim
    blocks = [part.reshape(groups, -1, *part.shape[1:]) for part in (q, k, v)]
    return torch.cat(blocks, dim=1).reshape(-1, *q.shape[1:])


def split_qkv(qkv: Tensor, dims: ModelDims) -> list[Tensor]:
    """Inverse of ``merge_qkv``: [g*(Q+2)*D, ...] -> q, k, v."""
    block = (dims.heads_per_group + 2) * dims.head_dim
    rows = qkv.reshape(-1, block, *qkv.shape[1:])
    parts = torch.split(rows, [dims.heads_per_group * dims.head_dim, dims.head_dim, dims.head_dim], dim=1)
    return [part.clone(memory_format=torch.contiguous_format).reshape(-1, *qkv.shape[1:]) for part in parts]


def _bounds(length: int, rank: int, size: int) -> tuple[int, int]:
    """Start and stop of ``rank``'s equal share; the layout was checked to divide (``dims.check_layout``)."""
    share = length // size
    return rank * share, (rank + 1) * share

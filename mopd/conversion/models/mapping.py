"""Merging and splitting tensors between Hugging Face and Megatron-Core: the only code beside the name tables.

Shape letters: G key/value groups, Q query heads per group, D head_dim, H hidden, F MLP width, V true vocabulary,
P padded vocabulary, R tensor-parallel ranks. Weights are [out, in].

- qkv: Megatron keeps one block of (Q + 2) x D rows per group: its query heads, its key head, its value head; a rank
  owns G / R consecutive groups or, if R is a multiple of G, that part of a group's rows, cut across its heads. Hugging
  Face has q [G*Q*D, H], k [G*D, H], v [G*D, H], or all three end to end in one tensor. Biases alike, without H.
- gate_up: a rank's matrix is its F / R rows of gate_proj above its F / R rows of up_proj, which may be one tensor too.
  If attention is gated, each head's gate rows follow its query rows in q, and in Megatron those of a group's heads
  follow all their query rows.
- delta: a gated delta net's rows [q k v z b a] or [q k v], cut into as many shares as it has key heads; Megatron keeps
  share after share, each with its part of every kind, and a rank owns consecutive ones. Hugging Face has the kinds end
  to end, some in one tensor, or tensors whose shares are in that order.
- rows, columns: a rank owns its share of dimension 0 or 1.
- vocab: a rank owns P / R consecutive rows of the table padded with zero rows from V to P.

Each rank asks for its own slices only, so a load reads every byte once per tensor-parallel group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mopd.conversion.models.dims import ModelDims
from mopd.conversion.models.families import Placed, sizes
from mopd.conversion.models.rows import Merge

ReadSlice = Callable[[str, int, int, int], Tensor]
"""``read_slice(name, dim, start, stop)``: part of one Hugging Face tensor (``HfReader.read_slice``)."""
CUT_DIM: dict[Merge, int] = {"replicated": 0, "vocab": 0, "qkv": 0, "gate_up": 0, "delta": 0, "rows": 0, "columns": 1}
"""Dimension of [out, in] that ranks share; replicated parameters are whole on each."""


def whole_shape(placed: Placed) -> tuple[int, ...]:
    """Return the shape of one parameter over all ranks, without vocabulary padding: gate rows stand above up rows."""
    rows = sum(shape[0] for shape in placed.hf_shapes)
    return (rows, *placed.hf_shapes[0][1:])


def boxes(placed: Placed, length: int, *, rank: int, size: int) -> list[tuple[int, int]]:
    """Return the starts and stops that rank ``rank`` of ``size`` owns of the parameter over all ranks, whose cut
    dimension has ``length`` (padding included). Gate and up are two boxes, as their rows are no neighbours there. The
    layout was checked to divide (``dims.check_layout``)."""
    if placed.param.merge == "replicated":
        return [(0, length)]
    parts = 2 if placed.param.merge == "gate_up" else 1
    part, share = length // parts, length // parts // size
    return [(i * part + rank * share, i * part + (rank + 1) * share) for i in range(parts)]


def read_box(placed: Placed, read_slice: ReadSlice, dims: ModelDims, start: int, stop: int) -> Tensor:
    """Return one of ``boxes``. May be a view; rows of vocabulary padding are zero."""
    merge = placed.param.merge
    if merge == "qkv":
        groups = dims.num_query_groups
        block = whole_shape(placed)[0] // groups
        first, last = start // block, -(-stop // block)  # groups that the box has rows of
        read = [
            read_slice(name, 0, at + rows * first // groups, at + rows * last // groups)
            for name, at, rows in _parts(placed, dims)
        ]
        return merge_qkv(read, dims)[start - first * block : stop - first * block]
    if merge == "delta":
        total = whole_shape(placed)[0]
        shares = [
            read_slice(name, 0, at + rows * start // total, at + rows * stop // total)
            for name, at, rows in _delta_parts(placed, dims)
        ]
        return _merge_shares(shares, _key_heads(dims) * (stop - start) // total)
    if merge == "gate_up":
        parts = _parts(placed, dims)
        part = start // parts[0][2]
        name, at, rows = parts[part]
        return read_slice(name, 0, at + start - part * rows, at + stop - part * rows)
    dim, length = CUT_DIM[merge], placed.hf_shapes[0][CUT_DIM[merge]]
    own = read_slice(placed.hf_names[0], dim, min(start, length), min(stop, length))
    return pad_rows(own, stop - start) if merge == "vocab" else own


def _parts(placed: Placed, dims: ModelDims) -> list[tuple[str, int, int]]:
    """Return Hugging Face name, first row and number of rows of each part that merges."""
    names, rows = placed.hf_names, [shape[0] for shape in placed.hf_shapes]
    if len(names) > 1:
        return [(name, 0, count) for name, count in zip(names, rows, strict=True)]
    shares = [dims.heads_per_group, 1, 1] if placed.param.merge == "qkv" else [1, 1]
    counts = [rows[0] * share // sum(shares) for share in shares]
    return [(names[0], sum(counts[:i]), count) for i, count in enumerate(counts)]


def _delta_parts(placed: Placed, dims: ModelDims) -> list[tuple[str, int, int]]:
    """Return Hugging Face name, first row and number of rows of each kind of rows of a gated delta net."""
    size, found = sizes(dims), list[tuple[str, int, int]]()
    for name, tensor in zip(placed.hf_names, placed.param.hf, strict=True):
        counts = [size[part] for part in tensor.parts or tensor.shape[:1]]
        found += [(name, sum(counts[:i]), count) for i, count in enumerate(counts)]
    return found


def _key_heads(dims: ModelDims) -> int:
    assert dims.delta is not None
    return dims.delta.num_key_heads


def load_shard(placed: Placed, read_slice: ReadSlice, dims: ModelDims, *, rank: int, size: int, rows: int) -> Tensor:
    """Return the part of one Megatron parameter that tensor-parallel rank ``rank`` of ``size`` owns (for an expert's,
    the rank among those that share the expert).

    Args:
        read_slice: reads a slice of a Hugging Face tensor.
        rows: rows of this rank's shard; only ``vocab`` uses it (the padding is the model's choice).

    Raises:
        ValueError: the padded vocabulary is smaller than the true one.
    """
    length = whole_shape(placed)[CUT_DIM[placed.param.merge]]
    if placed.param.merge == "vocab":
        if rows * size < length:
            raise ValueError(f"{rows} rows on each of {size} ranks cannot hold the vocabulary of {length}")
        length = rows * size
    parts = [read_box(placed, read_slice, dims, *box) for box in boxes(placed, length, rank=rank, size=size)]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def split_shards(
    placed: Placed, shards: Sequence[Tensor], dims: ModelDims, *, shares_memory: bool = False
) -> list[Tensor]:
    """Undo ``load_shard``: return the Hugging Face tensors of one parameter, from the shards of all ranks in order.

    Returns:
        Contiguous tensors in the order of ``placed.hf_names``, padding rows stripped, with memory of their own or, if
        the caller ``shares_memory``, that of a single shard where they lie in it as they are.
    """
    merge = placed.param.merge
    if shares_memory and len(shards) == 1:
        return split_whole(placed, shards[0], dims)
    if merge == "replicated":
        return [shards[0].clone()]
    if merge == "gate_up":
        halves = [shard.chunk(2) for shard in shards]
        merged = [torch.cat([half[part] for half in halves]) for part in range(2)]
        return merged if len(placed.hf_names) > 1 else [torch.cat(merged)]
    return split_whole(placed, torch.cat(list(shards), dim=CUT_DIM[merge]), dims)


def split_whole(placed: Placed, whole: Tensor, dims: ModelDims) -> list[Tensor]:
    """Return contiguous Hugging Face tensors of a parameter over all ranks, without rows past the true vocabulary size.

    Parts that are already contiguous inside ``whole`` share its memory.
    """
    if placed.param.merge == "qkv":
        parts = split_qkv(whole, dims)
        return parts if len(placed.hf_names) > 1 else [torch.cat(parts)]
    if placed.param.merge == "delta":
        return _split_shares(placed, whole, dims)
    if placed.param.merge == "vocab":
        return [whole[: placed.hf_shapes[0][0]]]
    return list(whole.split([shape[0] for shape in placed.hf_shapes]))


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return ``weight + scale * b @ a`` of whole tensors, computed in float64 and rounded once: the same bits at every
    layout of the factors."""
    return (weight.double() + scale * (b.double() @ a.double())).to(weight.dtype)


def pad_rows(tensor: Tensor, rows: int) -> Tensor:
    """Append zero rows up to ``rows``; return the tensor itself if none is missing."""
    missing = rows - tensor.shape[0]
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor


def merge_qkv(parts: Sequence[Tensor], dims: ModelDims) -> Tensor:
    """Merge q [g*Q*D, ...], k [g*D, ...], v [g*D, ...] of any g consecutive groups -> [g*(Q+2)*D, ...]."""
    q, k, v = parts
    groups = k.shape[0] // dims.head_dim
    if dims.gated_attention:
        q = q.reshape(groups, -1, 2, dims.head_dim, *q.shape[1:]).transpose(1, 2)
    blocks = [part.reshape(groups, -1, *k.shape[1:]) for part in (q, k, v)]
    return torch.cat(blocks, dim=1).reshape(-1, *k.shape[1:])


def split_qkv(qkv: Tensor, dims: ModelDims) -> list[Tensor]:
    """Undo ``merge_qkv``: [g*(Q+2)*D, ...] -> q, k, v."""
    asked = dims.heads_per_group * dims.head_dim * (2 if dims.gated_attention else 1)
    rows = qkv.reshape(-1, asked + 2 * dims.head_dim, *qkv.shape[1:])
    q, k, v = torch.split(rows, [asked, dims.head_dim, dims.head_dim], dim=1)
    if dims.gated_attention:
        q = q.unflatten(1, (2, -1, dims.head_dim)).transpose(1, 2)
    return [part.clone(memory_format=torch.contiguous_format).reshape(-1, *qkv.shape[1:]) for part in (q, k, v)]


def _merge_shares(parts: Sequence[Tensor], count: int) -> Tensor:
    """Return ``count`` shares one after another, each with its part of all ``parts``."""
    shares = [part.reshape(count, -1, *part.shape[1:]) for part in parts]
    return torch.cat(shares, dim=1).flatten(0, 1)


def _split_shares(placed: Placed, whole: Tensor, dims: ModelDims) -> list[Tensor]:
    """Undo ``_merge_shares`` of all key heads."""
    count, parts = _key_heads(dims), _delta_parts(placed, dims)
    shares = whole.unflatten(0, (count, -1)).split([rows // count for _, _, rows in parts], dim=1)
    found: dict[str, list[Tensor]] = {}
    for (name, _, _), share in zip(parts, shares, strict=True):
        found.setdefault(name, []).append(share.flatten(0, 1))
    return [torch.cat(found[name]) for name in placed.hf_names]

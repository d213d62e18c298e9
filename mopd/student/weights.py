"""Hugging Face weights into and out of a Megatron model that is spread over tensor- and pipeline-parallel ranks.

Loading: every rank reads its own slices from the safetensors files, one parameter at a time; nothing is broadcast.
Exporting: for one parameter after another, the tensor-parallel ranks of the stage that owns it send their shards to the
first of them, which undoes the merge and hands the tensors to pipeline rank 0. Rank 0 of the job never holds more than
one parameter beside its own shard. Names and merges are ``mopd.conversion``'s; the parameters are found by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mopd.conversion import families
from mopd.conversion.dims import CONFIG_FILE, ModelDims
from mopd.conversion.families import Placed
from mopd.conversion.hf import HfReader
from mopd.conversion.mapping import load_shard, split_shards
from mopd.types import UserError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LOCAL_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")


@torch.no_grad()
def load_hf_into(
    model_chunks: Sequence[torch.nn.Module], reader: HfReader, dims: ModelDims, *, tp_group: ProcessGroup
) -> None:
    """Copy this rank's part of a Hugging Face checkpoint into its model chunks, in the parameters' dtype.

    Call it before the optimizer is built (or reload its main parameters afterwards). No communication; every rank of
    the job calls it. Rows of the padded vocabulary become zero.

    Args:
        model_chunks: Megatron ``GPTModel`` chunks of this rank, bare or wrapped (DDP, ``Float16Module``).
        dims: sizes of the checkpoint; the model was built from the same.

    Raises:
        UserError: a tensor is missing, has another shape, or has no place in this family; names the file.
        RuntimeError: the model has a parameter that the family's table lacks.
    """
    check_tensor_names(reader, dims)
    rank, size = dist.get_rank(tp_group), dist.get_world_size(tp_group)
    for placed, parameter in _owned_params(model_chunks, dims):
        shard = load_shard(placed, reader.read_slice, dims, rank=rank, size=size, padded_rows=parameter.shape[0])
        if shard.shape != parameter.shape:
            raise RuntimeError(
                f"{placed.megatron[0]} has shape {list(parameter.shape)}, the checkpoint gives {list(shard.shape)}: "
                "the model was not built from these dims"
            )
        parameter.copy_(shard)
        if placed.param is families.EMBEDDING and dims.tied_embeddings:
            _check_tied_head(reader, placed, dims, rank, parameter.shape[0])


def check_tensor_names(reader: HfReader, dims: ModelDims) -> None:
    """Refuses a checkpoint that lacks a tensor or has one more than the family's table knows. Reads no weight.

    Raises:
        UserError: names the folder and the first such tensor.
    """
    expected = families.hf_tensors(dims)
    for name, shape in expected.items():
        reader.require_shape(name, shape)
    extra = {name for name in reader.names - expected.keys() if not families.IGNORED.fullmatch(name)}
    if dims.tied_embeddings:
        extra.discard(families.LM_HEAD.hf[0].name)
    if extra:
        raise UserError(
            f"{reader.folder}: tensor '{min(extra)}' has no place in model_type {dims.family}"
            f"{f' (and {len(extra) - 1} more)' if len(extra) > 1 else ''}; use a checkpoint of the plain architecture"
        )


@torch.no_grad()
def iter_hf_weights(
    model_chunks: Sequence[torch.nn.Module],
    dims: ModelDims,
    *,
    tp_group: ProcessGroup,
    pp_group: ProcessGroup,
    data_parallel_rank: int,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """The whole model as ``(hf_name, tensor)`` in checkpoint order, on the rank that is first in all three dimensions.

    Collective over the ranks with ``data_parallel_rank`` 0: each must exhaust the iterator, though only the first gets
    items. Other ranks get none and do not communicate. Vocabulary padding is stripped; tied embeddings come once.

    Args:
        dtype: dtype of the tensors; None keeps each parameter's own, which makes load and export a bit-exact pair.

    Yields:
        Contiguous CPU tensors with memory of their own.
    """
    if data_parallel_rank != 0:
        return
    owned = {placed.megatron[0]: param for placed, param in _owned_params(model_chunks, dims)}
    plan = list(families.all_params(dims))
    stages, dtypes = _agree_on_owners(plan, owned, pp_group, dtype)
    pp_rank, is_first_tp = dist.get_rank(pp_group), dist.get_rank(tp_group) == 0
    for placed, stage, wire_dtype in zip(plan, stages, dtypes, strict=True):
        tensors: list[Tensor] = []
        if pp_rank == stage:
            local = owned[placed.megatron[0]].detach().to(wire_dtype)
            shards = [local] if placed.param.merge == "replicated" else _gather_shards(local, tp_group)
            if is_first_tp:
                tensors = split_shards(placed, shards, dims)
            if is_first_tp and stage != 0:
                for tensor in tensors:
                    dist.send(_to_wire(tensor, pp_group), group=pp_group, group_dst=0)
        elif pp_rank == 0 and is_first_tp:
            tensors = [_receive(shape, wire_dtype, stage, pp_group) for shape in placed.hf_shapes]
        if pp_rank == 0 and is_first_tp:
            yield from zip(placed.hf_names, (tensor.cpu() for tensor in tensors), strict=True)


def _owned_params(model_chunks: Sequence[torch.nn.Module], dims: ModelDims) -> Iterator[tuple[Placed, Tensor]]:
    """This rank's parameters with their table rows, in model order."""
    for chunk in model_chunks:
        model = _unwrap(chunk)
        rows = _rows_by_local_name(model, dims)
        for name, parameter in model.named_parameters():
            if name not in rows:
                raise RuntimeError(f"parameter {name!r} is not in the name table of model_type {dims.family}")
            yield rows[name], parameter


def _rows_by_local_name(model: torch.nn.Module, dims: ModelDims) -> dict[str, Placed]:
    """Table rows by the names of one model chunk, whose layers count from 0 whatever their global number is."""
    outside = (
        families.EMBEDDING,
        families.FINAL_NORM,
        families.TIED_HEAD if dims.tied_embeddings else families.LM_HEAD,
    )
    rows = {name: placed for placed in (families.place(param, dims) for param in outside) for name in placed.megatron}
    layers: Any = model.get_submodule("decoder.layers")
    for local, layer in enumerate(layers):
        for param in families.FAMILIES[dims.family]:
            placed = families.place(param, dims, layer.layer_number - 1)  # Megatron counts layers from 1
            rows |= {_LOCAL_LAYER.sub(str(local), name): placed for name in placed.megatron}
    return rows


def _unwrap(model: torch.nn.Module) -> torch.nn.Module:
    while not hasattr(model, "decoder"):
        model = model.get_submodule("module")
    return model


def _check_tied_head(reader: HfReader, placed: Placed, dims: ModelDims, rank: int, rows: int) -> None:
    """A tied checkpoint may repeat the embedding as its head; a different head would be lost, so it is refused."""
    (head,), (embedding,) = families.LM_HEAD.hf, families.EMBEDDING.hf
    if head.name not in reader.names:
        return
    reader.require_shape(head.name, placed.hf_shapes[0])
    start, stop = (min(bound, dims.vocab_size) for bound in (rank * rows, (rank + 1) * rows))
    if not torch.equal(reader.read_slice(head.name, 0, start, stop), reader.read_slice(embedding.name, 0, start, stop)):
        raise UserError(
            f"{reader.folder / CONFIG_FILE}: 'tie_word_embeddings' is true but tensor '{head.name}' differs from "
            f"'{embedding.name}'; set it to false or fix the weights"
        )


def _agree_on_owners(
    plan: Sequence[Placed], owned: Mapping[str, Tensor], pp_group: ProcessGroup, dtype: torch.dtype | None
) -> tuple[list[int], list[torch.dtype]]:
    """Pipeline stage and exported dtype of each row of the plan, the same on every rank of the group."""
    codes = torch.zeros(len(plan), dtype=torch.int64)
    for i, placed in enumerate(plan):
        if placed.megatron[0] in owned:
            kind = dtype if dtype is not None else owned[placed.megatron[0]].dtype
            codes[i] = 1 + dist.get_rank(pp_group) * len(_DTYPES) + _DTYPES.index(kind)
    codes = codes.to(_wire_device(pp_group))
    dist.all_reduce(codes, op=dist.ReduceOp.MAX, group=pp_group)
    lacking = [placed.megatron[0] for placed, code in zip(plan, codes.tolist(), strict=True) if code == 0]
    if lacking:
        raise RuntimeError(f"no pipeline stage holds {lacking[0]!r}: the model was not built from these dims")
    pairs = [divmod(code - 1, len(_DTYPES)) for code in codes.tolist()]
    return [stage for stage, _ in pairs], [_DTYPES[kind] for _, kind in pairs]


def _gather_shards(shard: Tensor, tp_group: ProcessGroup) -> list[Tensor]:
    """All shards in rank order on the first rank of the group; the other ranks get an empty list."""
    size = dist.get_world_size(tp_group)
    if size == 1:
        return [shard]
    wire = _to_wire(shard, tp_group)
    is_first = dist.get_rank(tp_group) == 0
    received = [torch.empty_like(wire) for _ in range(size)] if is_first else None
    dist.gather(wire, received, group=tp_group, group_dst=0)
    return [] if received is None else [_from_wire(part, shard.shape, shard.dtype) for part in received]


def _receive(shape: Sequence[int], dtype: torch.dtype, stage: int, pp_group: ProcessGroup) -> Tensor:
    num_bytes = prod(shape) * dtype.itemsize
    wire = torch.empty(num_bytes, dtype=torch.uint8, device=_wire_device(pp_group))
    dist.recv(wire, group=pp_group, group_src=stage)
    return _from_wire(wire, shape, dtype)


def _wire_device(group: ProcessGroup) -> torch.device:
    """NCCL moves device memory only, gloo host memory."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _to_wire(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """The bytes of a tensor: no backend changes them, and gloo need not know the dtype."""
    return tensor.to(_wire_device(group)).contiguous().view(-1).view(torch.uint8)


def _from_wire(wire: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return wire.view(dtype).view(*shape)

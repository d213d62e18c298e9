"""Hugging Face weights into and out of a Megatron model that is spread over parallel ranks (tensor, pipeline, expert).

Loading: every rank reads its own slices from the safetensors files, one parameter at a time; nothing is broadcast.
Exporting: for one parameter after another, the ranks that share it send their shards to the first of them, which undoes
the merge and hands the tensors to rank 0 of the job. Rank 0 never holds more than one parameter (one expert's) beside
its own shard. Names and merges are ``mopd.conversion``'s; the parameters are found by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mopd.conversion.hf.names import check_names
from mopd.conversion.hf.reader import HfReader
from mopd.conversion.models import families
from mopd.conversion.models.dims import ModelDims
from mopd.conversion.models.families import Placed
from mopd.conversion.models.mapping import load_shard, split_grouped, split_shards
from mopd.student.parallel import Layout

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@torch.no_grad()
def load_hf_into(model_chunks: Sequence[torch.nn.Module], reader: HfReader, dims: ModelDims, layout: Layout) -> None:
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
    check_names(reader, dims)
    for placed, parameter in _owned_params(model_chunks, dims, layout):
        is_expert = placed.expert is not None
        rank, size = (layout.etp_rank, layout.etp_size) if is_expert else (layout.tp_rank, layout.tp_size)
        shard = load_shard(placed, reader.read_slice, dims, rank=rank, size=size, rows=parameter.shape[0])
        if shard.shape != parameter.shape:
            raise RuntimeError(
                f"{placed.megatron[0]} has shape {list(parameter.shape)}, the checkpoint gives {list(shard.shape)}: "
                "the model was not built from these dims"
            )
        parameter.copy_(shard)


@torch.no_grad()
def iter_hf_weights(
    model_chunks: Sequence[torch.nn.Module], dims: ModelDims, layout: Layout, *, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The whole model as ``(hf_name, tensor)`` in checkpoint order, on rank 0 of the job.

    Collective: every rank must exhaust the iterator, though only rank 0 gets items. Ranks that hold second copies of
    everything they hold do not communicate. Vocabulary padding is stripped; tied embeddings come once.

    Args:
        dtype: dtype of the tensors; None keeps each parameter's own, which makes load and export a bit-exact pair.

    Yields:
        Contiguous CPU tensors with memory of their own.
    """
    if layout.dp_rank != 0 and layout.edp_rank != 0:
        return
    owned = {placed.megatron[0]: param for placed, param in _owned_params(model_chunks, dims, layout)}
    plan = list(families.all_params(dims))
    owners = _agree_on_owners(plan, owned, layout.pp_group, dtype)
    for placed in plan:
        stage, wire_dtype = owners[_row(placed)]
        if placed.expert is None:
            if layout.dp_rank == 0:
                yield from _export_shared(placed, stage, wire_dtype, owned, dims, layout)
        elif layout.edp_rank == 0:
            yield from _export_expert(placed, stage, wire_dtype, owned, dims, layout)


def _export_shared(
    placed: Placed, stage: int, dtype: torch.dtype, owned: Mapping[str, Tensor], dims: ModelDims, layout: Layout
) -> Iterator[tuple[str, Tensor]]:
    """A parameter outside the experts: shards go to the stage's first tensor-parallel rank, tensors to rank 0."""
    if layout.tp_rank != 0 and layout.pp_rank != stage:
        return
    tensors: list[Tensor] = []
    if layout.pp_rank == stage:
        local = owned[placed.megatron[0]].detach().to(dtype)
        shards = [local] if placed.param.merge == "replicated" else _gather_shards(local, layout.tp_group)
        tensors = split_shards(placed, shards, dims) if layout.tp_rank == 0 else []
    if layout.tp_rank == 0:
        yield from _pass_on(placed, tensors, stage, dtype, layout)


def _export_expert(
    placed: Placed, stage: int, dtype: torch.dtype, owned: Mapping[str, Tensor], dims: ModelDims, layout: Layout
) -> Iterator[tuple[str, Tensor]]:
    """An expert's parameter: shards go to the first rank that shares the expert, tensors to the stage's first rank (the
    first of every group that it is in), then to rank 0."""
    owner = _owner_of(placed, dims, layout)
    tensors: list[Tensor] = []
    if layout.pp_rank == stage and layout.ep_rank == owner:
        shards = _gather_shards(owned[placed.megatron[0]].detach().to(dtype), layout.etp_group)
        tensors = split_shards(placed, shards, dims) if layout.etp_rank == 0 else []
    if layout.etp_rank != 0:
        return
    if layout.pp_rank == stage and owner != 0:
        tensors = _move(placed, tensors, owner, dtype, layout.ep_group)
    if layout.ep_rank == 0:
        yield from _pass_on(placed, tensors, stage, dtype, layout)


def _pass_on(
    placed: Placed, tensors: list[Tensor], stage: int, dtype: torch.dtype, layout: Layout
) -> Iterator[tuple[str, Tensor]]:
    """From the first rank of ``stage`` to rank 0 of the job, which yields."""
    if stage != 0 and layout.pp_rank in (0, stage):
        tensors = _move(placed, tensors, stage, dtype, layout.pp_group)
    if layout.pp_rank == 0:
        yield from zip(placed.hf_names, (tensor.cpu() for tensor in tensors), strict=True)


def _move(placed: Placed, tensors: list[Tensor], source: int, dtype: torch.dtype, group: ProcessGroup) -> list[Tensor]:
    """Tensors of one row from rank ``source`` of the group to its first; the other ranks stay out of it."""
    rank = dist.get_rank(group)
    if rank == source:
        for tensor in tensors:
            dist.send(_to_wire(tensor, group), group=group, group_dst=0)
    return [_receive(shape, dtype, source, group) for shape in placed.hf_shapes] if rank == 0 else []


def _owner_of(placed: Placed, dims: ModelDims, layout: Layout) -> int:
    """The expert-parallel rank that holds an expert: ranks own equally many consecutive ones."""
    assert placed.expert is not None and dims.moe is not None
    return placed.expert // (dims.moe.num_experts // layout.ep_size)


def _owned_params(
    model_chunks: Sequence[torch.nn.Module], dims: ModelDims, layout: Layout
) -> Iterator[tuple[Placed, Tensor]]:
    """This rank's parameters (and buffers that checkpoints hold) with their table rows, in model order. Where one
    parameter holds all experts, each comes as a view of [out, in]."""
    for chunk in model_chunks:
        model = _unwrap(chunk)
        rows = _rows_by_local_name(model, dims, layout)
        for name, parameter in model.named_parameters():
            if name not in rows:
                raise RuntimeError(f"parameter {name!r} is not in the name table of model_type {dims.family}")
            if name.endswith(families.GROUPED):
                yield from zip(rows[name], split_grouped(rows[name], parameter, size=layout.etp_size), strict=True)
            else:
                yield rows[name][0], parameter
        for name, buffer in model.named_buffers():
            if name in rows:
                yield rows[name][0], buffer


def _rows_by_local_name(model: torch.nn.Module, dims: ModelDims, layout: Layout) -> dict[str, list[Placed]]:
    """Table rows by the names of one model chunk, whose layers and experts count from 0 whatever their global number.
    Several rows share a name where one parameter holds all experts."""
    outside = (
        families.EMBEDDING,
        families.FINAL_NORM,
        families.TIED_HEAD if dims.tied_embeddings else families.LM_HEAD,
    )
    rows = {name: [placed] for placed in (families.place(param, dims) for param in outside) for name in placed.megatron}
    num_experts = 0 if dims.moe is None else dims.moe.num_experts // layout.ep_size
    layers: Any = model.get_submodule("decoder.layers")
    for local, layer in enumerate(layers):
        number = layer.layer_number - 1  # Megatron counts layers from 1
        for param in families.layer_params(dims, number):
            for expert in range(num_experts) if param.is_expert else (None,):
                own = None if expert is None else layout.ep_rank * num_experts + expert
                placed = families.place(param, dims, number, own)
                for name in families.names(param, local, expert):
                    rows.setdefault(name, []).append(placed)
    return rows


def _unwrap(model: torch.nn.Module) -> torch.nn.Module:
    while not hasattr(model, "decoder"):
        model = model.get_submodule("module")
    return model


_Row = tuple[int, str]


def _row(placed: Placed) -> _Row:
    """The same for all experts of a layer, which lie in one stage and have one dtype."""
    return (-1 if placed.layer is None else placed.layer, placed.param.megatron[0])


def _agree_on_owners(
    plan: Sequence[Placed], owned: Mapping[str, Tensor], pp_group: ProcessGroup, dtype: torch.dtype | None
) -> dict[_Row, tuple[int, torch.dtype]]:
    """Pipeline stage and exported dtype of each row of the plan, the same on every rank of the group."""
    numbers: dict[_Row, int] = {}
    for placed in plan:
        numbers.setdefault(_row(placed), len(numbers))
    codes = torch.zeros(len(numbers), dtype=torch.int64)
    for placed in plan:
        if placed.megatron[0] in owned:
            kind = dtype if dtype is not None else owned[placed.megatron[0]].dtype
            codes[numbers[_row(placed)]] = 1 + dist.get_rank(pp_group) * len(_DTYPES) + _DTYPES.index(kind)
    codes = codes.to(_wire_device(pp_group))
    dist.all_reduce(codes, op=dist.ReduceOp.MAX, group=pp_group)
    owners = {}
    for (row, _), code in zip(numbers.items(), codes.tolist(), strict=True):
        if code == 0:
            raise RuntimeError(f"no pipeline stage holds {row[1]!r}: the model was not built from these dims")
        stage, kind = divmod(code - 1, len(_DTYPES))
        owners[row] = (stage, _DTYPES[kind])
    return owners


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

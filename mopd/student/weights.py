"""Hugging Face weights into and out of a Megatron model that is spread over parallel ranks (tensor, pipeline, expert).

Loading: every rank reads its own slices from the safetensors files, one parameter at a time; nothing is broadcast.
Exporting: for one parameter after another, the ranks that share it send their shards to the first of them, which undoes
the merge and hands the tensors to rank 0 of the job. Rank 0 never holds more than one parameter (one expert's) beside
its own shard. Names and merges are ``mopd.conversion``'s; the parameters are found by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mopd.config.student import LoraConfig
from mopd.conversion.adapters import peft_names
from mopd.conversion.hf.reader import HfReader, check_names
from mopd.conversion.models import families
from mopd.conversion.models.adapted import adapted, adapted_parts
from mopd.conversion.models.dims import ModelDims
from mopd.conversion.models.families import Placed
from mopd.conversion.models.mapping import load_shard, merged, split_shards
from mopd.conversion.models.rows import EMBEDDING, FINAL_NORM, LM_HEAD, TIED_HEAD
from mopd.conversion.models.stages import Stages
from mopd.student.model import lora
from mopd.student.parallel import Layout


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
    model_chunks: Sequence[torch.nn.Module],
    dims: ModelDims,
    layout: Layout,
    *,
    takes: Callable[[Placed], bool] = lambda placed: True,
    in_place: bool = False,
    instead: Mapping[int, Tensor] = MappingProxyType({}),
) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole model, or the parameters that ``takes`` chooses, as ``(hf_name, tensor)`` in checkpoint order on
    rank 0 of the job.

    Collective: every rank must exhaust the iterator with the same choice, though only rank 0 gets items. Ranks that
    only hold second copies do not communicate. Vocabulary padding is stripped; tied embeddings come once.

    Yields:
        Contiguous tensors in their parameters' dtypes, those of ``instead`` in the place of parameters whose ``id`` it
        names: load and export are a bit-exact pair. They are on the CPU in
        memory of their own; or, ``in_place``, on the parameters' device, in the parameters' own memory if they lie
        there unmerged.

    Raises:
        RuntimeError: the model was not built from ``dims``.
    """
    # Every copy holds the same values: one of the shared weights and one of the experts send, the others leave.
    if layout.copy == 0 or layout.edp_rank == 0:
        export = _Export(model_chunks, dims, layout, in_place=in_place, by_sender=False, instead=instead)
        for placed in filter(takes, families.all_params(dims)):
            yield from export.tensors(placed)


@torch.no_grad()
def iter_adapter_weights(
    model_chunks: Sequence[torch.nn.Module],
    dims: ModelDims,
    layout: Layout,
    config: LoraConfig,
    *,
    instead: Mapping[int, Tensor] = MappingProxyType({}),
) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapters as ``(peft_name, tensor)``, A and B of each module in checkpoint order, whole, on rank 0 of
    the job and its device. Otherwise as ``iter_hf_weights``."""
    if layout.copy == 0 or layout.edp_rank == 0:
        export = _AdapterExport(model_chunks, dims, layout, config, instead=instead)
        for placed in families.all_params(dims):
            if adapted_parts(placed.param, config.target_modules):
                yield from export.tensors(placed)


def adapter_tensors(dims: ModelDims, config: LoraConfig) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield ``(peft_name, shape)`` of what ``iter_adapter_weights`` yields, in its order."""
    for placed in families.all_params(dims):
        yield from zip(*_adapter_outputs(placed, config), strict=True)


def _adapter_outputs(placed: Placed, config: LoraConfig) -> tuple[list[str], list[tuple[int, int]]]:
    own = adapted(placed, config.target_modules)
    names = [name for one in own for name in peft_names(one.module)]
    return names, [shape for one in own for shape in ((config.rank, one.num_inputs), (one.num_outputs, config.rank))]


@torch.no_grad()
def iter_sender_weights(
    model_chunks: Sequence[torch.nn.Module], dims: ModelDims, layout: Layout, *, takes: Callable[[Placed], bool]
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield as ``iter_hf_weights`` does ``in_place``, but each tensor on the rank of ``hf_senders``; other ranks get
    ``None`` in its place, and so are never behind with a gathering that a sender waits for."""
    if layout.copy == 0 or layout.edp_rank == 0:
        export = _Export(model_chunks, dims, layout, in_place=True, by_sender=True)
        for placed in filter(takes, families.all_params(dims)):
            own = dict(export.tensors(placed))
            yield from ((name, own.get(name)) for name in placed.hf_names)


def num_senders(dims: ModelDims, layout: Layout) -> int:
    """Return the number of ranks that hand their own weights on: of each pipeline stage the first, and where experts
    are spread each expert-parallel rank of the stage."""
    return layout.pp_size * _senders_a_stage(dims, layout)


def own_sender(dims: ModelDims, layout: Layout) -> int | None:
    """Return this rank's number among the senders; ``None`` if it hands nothing on."""
    first = layout.pp_rank * _senders_a_stage(dims, layout)
    if layout.copy == 0 and layout.tp_rank == 0:
        return first
    has_experts = dims.moe is not None and layout.etp_rank == 0 and layout.edp_rank == 0
    return first + layout.ep_rank if has_experts else None


def hf_senders(model_chunks: Sequence[torch.nn.Module], dims: ModelDims, layout: Layout) -> Iterator[int]:
    """Yield the sender of each of ``hf_tensors``."""
    stages, width = _stages(model_chunks, layout), _senders_a_stage(dims, layout)
    for placed in families.all_params(dims):
        owner = 0 if placed.expert is None else placed.owner(dims, ranks=layout.ep_size)
        yield from [placed.stage(dims, stages) * width + owner] * len(placed.hf_names)


def _senders_a_stage(dims: ModelDims, layout: Layout) -> int:
    return 1 if dims.moe is None else layout.ep_size


def hf_tensors(dims: ModelDims, dtype: torch.dtype) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Yield ``(hf_name, dtype, shape)`` of what ``iter_hf_weights`` yields, in its order, for a model with parameters
    in ``dtype``."""
    for placed in families.all_params(dims):
        own = torch.float32 if placed.param.stays_fp32 else dtype
        yield from ((name, own, tuple(shape)) for name, shape in zip(placed.hf_names, placed.hf_shapes, strict=True))


def _stages(model_chunks: Sequence[torch.nn.Module], layout: Layout) -> Stages:
    """Return the assignment of layers to pipeline stages."""
    config: Any = _unwrap(model_chunks[0]).config
    return Stages(
        pipeline_model_parallel_size=layout.pp_size,
        virtual_pipeline_model_parallel_size=len(model_chunks),
        num_layers_in_first_pipeline_stage=config.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=config.num_layers_in_last_pipeline_stage,
    )


class _Export:
    """One pass of ``iter_hf_weights`` over the table rows."""

    def __init__(
        self,
        model_chunks: Sequence[torch.nn.Module],
        dims: ModelDims,
        layout: Layout,
        *,
        in_place: bool,
        by_sender: bool,
        instead: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> None:
        self._instead = instead
        self._dims, self._layout, self._in_place, self._by_sender = dims, layout, in_place, by_sender
        self._owned = {placed.megatron[0]: param for placed, param in _owned_params(model_chunks, dims, layout)}
        self._factors = {factor.name: factor for factor in lora.all_factors(model_chunks)}
        self._scale = lora.scale_of(model_chunks)
        self._stages = _stages(model_chunks, layout)
        config: Any = _unwrap(model_chunks[0]).config
        self._dtype: torch.dtype = config.params_dtype

    def tensors(self, placed: Placed) -> list[tuple[str, Tensor]]:
        """Gather one parameter; return its tensors on the rank that hands them out, nothing elsewhere. Collective."""
        layout, stage = self._layout, placed.stage(self._dims, self._stages)
        is_here = layout.pp_rank == stage
        if self._by_sender and not is_here:
            return []
        if placed.expert is None:
            found = self._shared(placed, is_here=is_here) if layout.copy == 0 else None
        else:
            found = self._expert(placed, is_here=is_here) if layout.edp_rank == 0 else None
        if found is None:
            return []
        # The stage's first rank has them, or the expert's. With ``by_sender`` it hands them out, else rank 0 does.
        if not self._by_sender and stage != 0 and layout.pp_rank in (0, stage):
            found = self._move(placed, found, stage, layout.pp_group)
        if not self._by_sender and layout.pp_rank != 0:
            return []
        return [
            (name, tensor if self._in_place else tensor.cpu())
            for name, tensor in zip(self._outputs(placed)[0], found, strict=True)
        ]

    def _shared(self, placed: Placed, *, is_here: bool) -> list[Tensor] | None:
        """Bring the shards of a parameter outside the experts to the stage's first tensor-parallel rank; ``None`` on
        ranks that hand nothing on."""
        is_first, tensors = self._layout.tp_rank == 0, list[Tensor]()
        if is_here:
            tensors = self._whole(placed, self._layout.tp_group)
        return tensors if is_first else None

    def _expert(self, placed: Placed, *, is_here: bool) -> list[Tensor] | None:
        """Bring the shards of an expert's parameter to the first rank that shares the expert, the tensors to the
        stage's first rank (the first of every group that it is in); ``None`` on ranks that hand nothing on."""
        layout, tensors = self._layout, list[Tensor]()
        owner = placed.owner(self._dims, ranks=layout.ep_size)
        if is_here and layout.ep_rank == owner:
            tensors = self._whole(placed, layout.etp_group)
        giver = owner if self._by_sender else 0
        if layout.etp_rank == 0 and is_here and owner != giver:
            tensors = self._move(placed, tensors, owner, layout.ep_group)
        return tensors if layout.etp_rank == 0 and layout.ep_rank == giver else None

    def _outputs(self, placed: Placed) -> tuple[Sequence[str], Sequence[tuple[int, ...]]]:
        """Return names and shapes of a parameter's tensors."""
        return placed.hf_names, placed.hf_shapes

    def _whole(self, placed: Placed, group: ProcessGroup) -> list[Tensor]:
        """Return a parameter's tensors on the first rank of the group, adapters merged; nothing on the others."""
        local = self._own(placed)
        shards = [local] if placed.param.merge == "replicated" else _gather_shards(local, group)
        is_first = dist.get_rank(group) == 0
        tensors = split_shards(placed, shards, self._dims, shares_memory=self._in_place) if is_first else []
        if not self._factors:
            return tensors
        for number, name in enumerate(placed.hf_names):
            if factors := self._gathered_factors(name.removesuffix(".weight"), group):
                a, b = factors
                tensors[number] = merged(tensors[number], a, b, self._scale)
        return tensors

    def _gathered_factors(self, module: str, group: ProcessGroup) -> list[Tensor]:
        """Return a module's whole A and B on the first rank of the group; nothing on the others, and without any."""
        whole = []
        for name in peft_names(module):
            factor = self._factors.get(name)
            if factor is not None:
                own = self._instead.get(id(factor.own), factor.own).detach()
                shards = [own] if factor.cut_dim is None else _gather_shards(own, group)
                whole += [torch.cat(shards, factor.cut_dim or 0)] if dist.get_rank(group) == 0 else []
        return whole

    def _own(self, placed: Placed) -> Tensor:
        """Return this rank's part of a parameter. Its dtype is checked: the other ranks know it from the tables."""
        name, dtype = placed.megatron[0], self._dtype_of(placed)
        if name not in self._owned:
            raise RuntimeError(f"no pipeline stage holds {name!r}: the model was not built from these dims")
        if self._owned[name].dtype != dtype:
            raise RuntimeError(f"{name} is {self._owned[name].dtype}, expected {dtype}")
        return self._instead.get(id(self._owned[name]), self._owned[name]).detach().to(dtype)

    def _dtype_of(self, placed: Placed) -> torch.dtype:
        return torch.float32 if placed.param.stays_fp32 else self._dtype

    def _move(self, placed: Placed, tensors: list[Tensor], source: int, group: ProcessGroup) -> list[Tensor]:
        """Move a row's tensors from rank ``source`` of the group to its first; other ranks take no part."""
        rank, dtype = dist.get_rank(group), self._dtype_of(placed)
        if rank == source:
            for tensor in tensors:
                dist.send(_to_wire(tensor, group), group=group, group_dst=0)
        shapes = self._outputs(placed)[1]
        return [_receive(shape, dtype, source, group) for shape in shapes] if rank == 0 else []


class _AdapterExport(_Export):
    """One pass of ``iter_adapter_weights``."""

    def __init__(
        self,
        model_chunks: Sequence[torch.nn.Module],
        dims: ModelDims,
        layout: Layout,
        config: LoraConfig,
        *,
        instead: Mapping[int, Tensor],
    ) -> None:
        super().__init__(model_chunks, dims, layout, in_place=True, by_sender=False, instead=instead)
        self._config = config

    def _outputs(self, placed: Placed) -> tuple[Sequence[str], Sequence[tuple[int, ...]]]:
        return _adapter_outputs(placed, self._config)

    def _whole(self, placed: Placed, group: ProcessGroup) -> list[Tensor]:
        modules = (one.module for one in adapted(placed, self._config.target_modules))
        return [tensor.to(self._dtype) for one in modules for tensor in self._gathered_factors(one, group)]


def _owned_params(
    model_chunks: Sequence[torch.nn.Module], dims: ModelDims, layout: Layout
) -> Iterator[tuple[Placed, Tensor]]:
    """Yield this rank's parameters (and buffers that checkpoints hold) with their table rows, in model order."""
    for chunk in model_chunks:
        model = _unwrap(chunk)
        rows = rows_by_local_name(model, dims, layout)
        for name, parameter in model.named_parameters():
            if lora.NAME in name:
                continue
            if name not in rows:
                raise RuntimeError(f"parameter {name!r} is not in the name table of model_type {dims.family}")
            yield rows[name], parameter
        for name, buffer in model.named_buffers():
            if name in rows:
                yield rows[name], buffer


def rows_by_local_name(model: torch.nn.Module, dims: ModelDims, layout: Layout) -> dict[str, Placed]:
    """Return the table rows by the parameter names of one model chunk, whose layers and experts count from 0."""
    outside = (EMBEDDING, FINAL_NORM, TIED_HEAD if dims.tied_embeddings else LM_HEAD)
    whole = [*families.tower_params(dims), *(families.place(param, dims) for param in outside)]
    rows = {name: placed for placed in whole for name in placed.megatron}
    num_experts = 0 if dims.moe is None else dims.moe.num_experts // layout.ep_size
    layers: Any = model.get_submodule("decoder.layers")
    for local, layer in enumerate(layers):
        number = layer.layer_number - 1  # Megatron counts layers from 1
        for param in families.layer_params(dims, number):
            for expert in range(num_experts) if param.is_expert else (None,):
                own = None if expert is None else layout.ep_rank * num_experts + expert
                placed = families.place(param, dims, number, own)
                rows |= dict.fromkeys(families.names(param, local, expert), placed)
    return rows


def _unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Return the ``GPTModel`` inside wrappers."""
    while not hasattr(model, "decoder"):
        model = model.get_submodule("module")
    return model


def _gather_shards(shard: Tensor, tp_group: ProcessGroup) -> list[Tensor]:
    """Return all shards in rank order on the first rank of the group, an empty list on the others."""
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
    """Return the device of messages: NCCL moves device memory only, gloo host memory."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _to_wire(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Return the bytes of a tensor: no backend changes them, and gloo need not support the dtype."""
    return tensor.to(_wire_device(group)).contiguous().view(-1).view(torch.uint8)


def _from_wire(wire: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return wire.view(dtype).view(*shape)

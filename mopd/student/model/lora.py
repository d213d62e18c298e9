"""Low-rank adapters beside the student's linear layers, which are frozen.

A layer of Megatron's may be several Hugging Face modules (q, k and v; gate and up; experts), each of which has factors
of its own, as PEFT's have: A [r, I] and B [O, r] beside a weight [O, I]. They are cut over tensor-parallel ranks as the
weight is:

    weight       A              B              between A x and B
    rows         whole          [O / tp, r]    the gradient is summed; under sequence parallelism the rows of A x are
                                               gathered, and their gradient is scattered
    columns      [r, I / tp]    whole          A x is summed; under sequence parallelism also scattered
    replicated   whole          whole          nothing

What is whole, while a rank's input or output is a part of the rows, or an expert's (whose tokens the dispatcher gathers
and whose outputs it sums), gets a part of its gradient: the parts are summed as they come.

Letters: I inputs and O outputs of a Hugging Face module, r rank.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import linear, rms_norm

from mopd.base.types import UserError
from mopd.config.student import LoraConfig, StudentConfig
from mopd.conversion.adapters import peft_names, read_start
from mopd.conversion.models.adapted import adapted, adapted_modules, adapted_parts, check_lora, target_names
from mopd.conversion.models.dims import ModelDims
from mopd.conversion.models.families import Placed
from mopd.student.model.freezing import let_gradients_through
from mopd.student.parallel import Layout

NAME = ".lora."
"""Part of the names of adapters' parameters, and of no other."""
Slice = Callable[[str], Tensor]
"""Function from PEFT's name to the whole tensor."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Factor:
    """A or B of one Hugging Face module on this rank."""

    name: str
    """PEFT's."""
    own: nn.Parameter
    cut_dim: int | None
    """Dimension that the ranks of ``group`` share; ``None`` if each holds it whole."""
    group: ProcessGroup
    copy: int
    """Index of this rank among those that hold the same beside the group."""

    def part_of(self, whole: Tensor) -> Tensor:
        """Return this rank's part."""
        if self.cut_dim is None:
            return whole
        return whole.chunk(self.group.size(), self.cut_dim)[self.group.rank()]

    def sharded(self) -> ShardedTensor:
        """Return Megatron's description of the part, whose key is PEFT's name."""
        rank, size = self.group.rank(), self.group.size()
        offsets = () if self.cut_dim is None else ((self.cut_dim, rank, size),)
        copies = (0, rank if self.cut_dim is None else 0, self.copy)
        return ShardedTensor.from_rank_offsets(self.name, self.own, *offsets, replica_id=copies)


class Lora(nn.Module):
    """Adapters of one linear layer of Megatron's: of a row of the name table, or of as many as a rank has experts that
    are computed together."""

    def __init__(
        self, config: LoraConfig, rows: Sequence[Placed], dims: ModelDims, layout: Layout, base: Tensor
    ) -> None:
        """``base``: a weight of the layer, for dtype, device and kind of gradient reduction."""
        super().__init__()
        self.scale, self.rank = config.scale, config.rank
        param, is_expert = rows[0].param, rows[0].expert is not None
        self._merge, self._is_expert, self._head_dim = param.merge, is_expert, dims.head_dim
        self._group = layout.etp_group if is_expert else layout.tp_group
        self._splits_rows = layout.sequence_parallel and not is_expert
        self._num_outputs = [shape[0] for shape in rows[0].hf_shapes]
        self._parts = adapted_parts(param, config.target_modules)
        self.factors: list[list[tuple[Factor, Factor]]] = []
        """A and B of each adapted part of each row."""
        dim = {"replicated": None, "columns": 1}.get(param.merge, 0)
        size = self._group.size()
        for number, row in enumerate(rows):
            self.factors.append([])
            for part, own in enumerate(adapted(row, config.target_modules)):
                a_inputs = own.num_inputs // (size if dim == 1 else 1)
                b_outputs = own.num_outputs // (size if dim == 0 else 1)
                pair = []
                for name, peft_name, shape, cut_dim in zip(
                    "ab",
                    peft_names(own.module),
                    ((config.rank, a_inputs), (b_outputs, config.rank)),
                    (1 if dim == 1 else None, 0 if dim == 0 else None),
                    strict=True,
                ):
                    weight = nn.Parameter(torch.empty(shape, dtype=base.dtype, device=base.device))
                    self.register_parameter(f"{name}_{number}_{part}", weight)
                    weight.allreduce = getattr(base, "allreduce", True)  # type: ignore[attr-defined]
                    # The norm of gradients leaves out what is not marked, on all tensor-parallel ranks but the first.
                    is_alone = cut_dim is not None or (is_expert and size == 1)
                    set_tensor_model_parallel_attributes(weight, is_alone, cut_dim or 0, 1)
                    copy = layout.edp_rank if is_expert else layout.copy
                    pair.append(Factor(name=peft_name, own=weight, cut_dim=cut_dim, group=self._group, copy=copy))
                self.factors[-1].append((pair[0], pair[1]))

    def forward(self, x: Tensor, splits: Sequence[int] | None = None) -> Tensor:
        """Return what the adapters add to the layer's output on this rank. ``splits``: rows of ``x`` for each expert,
        if there are several."""
        if splits is None:
            return self._added(x, self.factors[0])
        parts = x.split(list(splits))
        return torch.cat([self._added(part, own) for part, own in zip(parts, self.factors, strict=True)])

    def _added(self, x: Tensor, factors: Sequence[tuple[Factor, Factor]]) -> Tensor:
        is_column, is_row = self._merge not in ("columns", "replicated"), self._merge == "columns"
        sums_a = (is_column and self._is_expert) or (self._splits_rows and not is_row)
        sums_b = (is_row and self._is_expert) or (self._splits_rows and not is_column)
        down = linear(x, torch.cat([self._weight(a, sums_a) for a, _ in factors]))
        if self._is_expert or self._merge == "replicated":
            pass
        elif is_column and self._splits_rows:
            down = gather_from_sequence_parallel_region(down, tensor_parallel_output_grad=True, group=self._group)
        elif is_column:
            down = copy_to_tensor_model_parallel_region(down, group=self._group)
        elif self._splits_rows:
            down = reduce_scatter_to_sequence_parallel_region(down, group=self._group)
        else:
            down = reduce_from_tensor_model_parallel_region(down, group=self._group)
        ups = [
            linear(part, self._weight(b, sums_b))
            for part, (_, b) in zip(down.split(self.rank, dim=-1), factors, strict=True)
        ]
        return self.scale * self._joined(ups)

    def _weight(self, factor: Factor, is_summed: bool) -> Tensor:
        """Return a factor whose gradient is, if ``is_summed``, that of all ranks of the group."""
        return copy_to_tensor_model_parallel_region(factor.own, group=self._group) if is_summed else factor.own

    def _joined(self, ups: list[Tensor]) -> Tensor:
        """Join the parts' outputs as the layer's are; parts without an adapter add 0."""
        if self._merge not in ("qkv", "gate_up"):
            return ups[0]
        size, given = self._group.size(), dict(zip(self._parts, ups, strict=True))
        parts = [
            given[number] if number in given else ups[0].new_zeros(*ups[0].shape[:-1], outputs // size)
            for number, outputs in enumerate(self._num_outputs)
        ]
        if self._merge == "gate_up":
            return torch.cat(parts, dim=-1)
        groups = self._num_outputs[1] // size // self._head_dim
        return torch.cat([part.unflatten(-1, (groups, -1)) for part in parts], dim=-1).flatten(-2)


def add_adapters(
    chunks: Sequence[nn.Module],
    rows: Sequence[Mapping[str, Placed]],
    student: StudentConfig,
    dims: ModelDims,
    layout: Layout,
    *,
    seed: int,
) -> None:
    """Freeze the model's weights and put adapters beside its linear layers, at their initial values. The chunks are
    bare, and hold the weights of the base. ``rows``: of each chunk the table rows by the names of its parameters.

    Raises:
        UserError: a target that the model does not have, a part of the model that no adapter can stand in, or a folder
            of ``student.lora.path`` that does not hold these adapters.
    """
    config = student.lora
    assert config is not None
    check_lora(dims, student)
    if getattr(chunks[0].config, "moe_shared_expert_overlap", False):
        raise UserError(
            "student.megatron_overrides.moe_shared_expert_overlap is true beside student.lora, whose adapters need the "
            "layers' own inputs: remove it"
        )
    for chunk, by_name in zip(chunks, rows, strict=True):
        chunk.requires_grad_(False)
        by_layer: dict[str, list[Placed]] = {}
        for name, _ in chunk.named_parameters():
            if adapted_parts(by_name[name].param, config.target_modules):
                by_layer.setdefault(name.rpartition(".")[0], []).append(by_name[name])
        for name, own in by_layer.items():
            base = chunk.get_submodule(name)
            base.add_module("lora", Lora(config, own, dims, layout, next(base.parameters())))
            base.register_forward_hook(_add)
    let_gradients_through(chunks)
    whole = _initial(config, student, dims, seed)
    with torch.no_grad():
        for factor in all_factors(chunks):
            factor.own.copy_(factor.part_of(whole(factor.name)))


def all_factors(chunks: Sequence[nn.Module]) -> Iterator[Factor]:
    """Yield all of this rank's factors; none of a student without adapters."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, Lora):
                yield from (factor for row in module.factors for pair in row for factor in pair)


def scale_of(chunks: Sequence[nn.Module]) -> float:
    """Return the factor of B A; 1 for a student without adapters."""
    modules = (module for chunk in chunks for module in chunk.modules())
    return next((module.scale for module in modules if isinstance(module, Lora)), 1.0)


def sharded_adapters(chunk: nn.Module) -> dict[str, ShardedTensor]:
    """Return Megatron's descriptions of a chunk's adapters, by the names of their parameters."""
    names = {id(weight): name for name, weight in chunk.named_parameters()}
    return {names[id(factor.own)]: factor.sharded() for factor in all_factors([chunk])}


def _add(base: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """Add the adapters' part to a layer's output, as a forward hook."""
    x, *splits = inputs
    norm = getattr(base, "layer_norm_weight", None)
    if norm is not None:  # TransformerEngine's layer with a norm in it is given what comes before the norm
        x = rms_norm(x, x.shape[-1:], norm, base.eps)
    return output[0] + base.lora(x, *splits), output[1]


def _initial(config: LoraConfig, student: StudentConfig, dims: ModelDims, seed: int) -> Slice:
    """Return the function that makes initial values: of ``path``, or B 0 and A drawn, the same at every layout."""
    modules = {own.module: own for own in adapted_modules(dims, config.target_modules)}
    if config.path is not None:
        return read_start(config.path, student.model, config, set(modules)).tensors().__getitem__
    shapes = {name: own for own in modules.values() for name in peft_names(own.module)}

    def draw(name: str) -> Tensor:
        own = shapes[name]
        if name == peft_names(own.module)[1]:
            return torch.zeros(own.num_outputs, config.rank)
        digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        made = torch.empty(config.rank, own.num_inputs)
        if config.init == "gaussian":
            return made.normal_(std=1 / config.rank, generator=generator)
        return nn.init.kaiming_uniform_(made, a=math.sqrt(5), generator=generator)

    return draw


def adapter_config(config: LoraConfig, dims: ModelDims, base: str) -> Mapping[str, Any]:
    """Return the content of ``adapter_config.json``."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "target_modules": target_names(dims, config.target_modules),
        "bias": "none",
        "inference_mode": True,
    }

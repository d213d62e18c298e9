"""How a distributed checkpoint is cut for one parallel layout: which rank's file holds which box of which tensor.

The values of a checkpoint do not depend on a layout, and any layout can load any cut. The cut decides who reads what:
with that of its own layout every rank reads its own files, and rank 0's for what all ranks hold alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import lcm, prod

import torch

from mopd.conversion.models import families
from mopd.conversion.models.dims import ModelDims
from mopd.conversion.models.families import Placed
from mopd.conversion.torch_dist.sharded import ShardedKey, sharded_key, whole_shape
from mopd.types import UserError

_CUT_DIM = {"replicated": None, "vocab": 0, "qkv": 0, "gate_up": 0, "rows": 0, "columns": 1}
"""Dimension of [out, in] that tensor parallelism cuts."""
_LINEAR = re.compile(r"(.*\.(?:linear_\w+))\.weight")
_EXTRA_STATE = "._extra_state"


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetLayout:
    """Degrees of parallelism that a checkpoint is cut for. Fields are Megatron's options."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int = 1
    """Model chunks of each pipeline stage."""
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage, as few as the degrees allow."""
        return lcm(self.tensor_model_parallel_size, self.expert_tensor_parallel_size * self.expert_model_parallel_size)

    @property
    def world_size(self) -> int:
        """Ranks in all, as few as the degrees allow."""
        return self.stage_size * self.pipeline_model_parallel_size

    def check_degrees(self) -> None:
        """Refuses a degree below 1, and virtual stages without stages.

        Raises:
            UserError: one line with the option to set.
        """
        for name, degree in asdict(self).items():
            if degree < 1:
                raise UserError(f"--{name.replace('_', '-')} is {degree}: set 1 or more")
        virtual = self.virtual_pipeline_model_parallel_size
        if virtual > 1 and self.pipeline_model_parallel_size == 1:
            raise UserError(
                f"--virtual-pipeline-model-parallel-size {virtual} needs --pipeline-model-parallel-size > 1"
            )

    def check(self, dims: ModelDims) -> None:
        """Refuses a layout that would split a head group, an expert or a layer.

        Raises:
            UserError: one line with both numbers and the option to set.
        """
        self.check_degrees()
        tp, pp, ep = self.tensor_model_parallel_size, self.pipeline_model_parallel_size, self.expert_model_parallel_size
        vp, etp = self.virtual_pipeline_model_parallel_size, self.expert_tensor_parallel_size
        rules = [
            ("tensor-model-parallel-size", tp, dims.num_attention_heads, "attention heads"),
            ("tensor-model-parallel-size", tp, dims.num_query_groups, "key/value heads"),
            ("tensor-model-parallel-size", tp, dims.ffn_hidden_size, "MLP columns"),
            ("pipeline-model-parallel-size", pp, dims.num_layers, "layers"),
            ("virtual-pipeline-model-parallel-size", vp, dims.num_layers // pp or 1, "layers of a pipeline stage"),
        ]
        if dims.moe is not None:
            rules += [
                ("expert-model-parallel-size", ep, dims.moe.num_experts, "experts"),
                ("expert-tensor-parallel-size", etp, dims.moe.ffn_hidden_size, "columns of an expert"),
                ("tensor-model-parallel-size", tp, dims.moe.shared_ffn_hidden_size, "columns of the shared experts"),
            ]
        elif ep > 1:
            raise UserError(
                f"--expert-model-parallel-size {ep} needs experts, and this {dims.family} model has none: leave it out"
            )
        for option, degree, size, what in rules:
            if size % degree:
                raise UserError(
                    f"--{option} {degree} does not divide the model's {size} {what}: set a divisor of {size}"
                )

    def stage_of(self, placed: Placed, dims: ModelDims) -> int:
        """Pipeline stage that holds a parameter (the first one where tied stages both do)."""
        pp = self.pipeline_model_parallel_size
        if placed.layer is not None:
            chunk_layers = dims.num_layers // (pp * self.virtual_pipeline_model_parallel_size)
            return placed.layer // chunk_layers % pp
        return 0 if placed.param is families.EMBEDDING else pp - 1


@dataclass(frozen=True, slots=True)
class Piece:
    """One box of one stacked tensor, and where it comes from."""

    placed: Placed
    place: ShardedKey
    owner: int
    """Rank whose file holds it."""
    dim: int
    """The cut dimension of the parameter."""
    start: int
    """Its rows (columns) ``start:stop`` of the parameter over all ranks, vocabulary padding included."""
    stop: int
    sizes: tuple[int, ...]
    """Shape of the box without stacked dimensions."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """First element of the box in the stacked tensor."""
        return (*self.place.index, *(self.start if dim == self.dim else 0 for dim in range(len(self.sizes))))

    @property
    def box(self) -> tuple[int, ...]:
        """Shape of the box in the stacked tensor."""
        return (*(1 for _ in self.place.index), *self.sizes)


def pieces(dims: ModelDims, layout: TargetLayout) -> Iterator[Piece]:
    """All boxes of the checkpoint in model order, those of a parameter by rank."""
    for placed in families.all_params(dims):
        place, shape = sharded_key(placed, dims), padded_shape(placed, layout)
        dim = _CUT_DIM[placed.param.merge]
        stage = layout.stage_of(placed, dims) * layout.stage_size
        if placed.expert is not None and dims.moe is not None:
            degree = layout.expert_tensor_parallel_size
            group = placed.expert // (dims.moe.num_experts // layout.expert_model_parallel_size)
            first = stage + group * degree
        else:
            degree, first = layout.tensor_model_parallel_size, stage
        if dim is None:
            yield Piece(placed, place, first, 0, 0, shape[0], shape)
            continue
        # Gate and up are boxes of their own, as Megatron has them: their rows are not neighbours in a rank's matrix.
        for part in range(2 if placed.param.merge == "gate_up" else 1):
            length = shape[dim] // (2 if placed.param.merge == "gate_up" else 1)
            step = length // degree
            for rank in range(degree):
                start = part * length + rank * step
                sizes = tuple(step if d == dim else size for d, size in enumerate(shape))
                yield Piece(placed, place, first + rank, dim, start, start + step, sizes)


def padded_shape(placed: Placed, layout: TargetLayout) -> tuple[int, ...]:
    """Shape of a parameter over all ranks, with the vocabulary rows that the split needs."""
    shape = whole_shape(placed)
    if placed.param.merge != "vocab":
        return shape
    tp = layout.tensor_model_parallel_size
    return (-(-shape[0] // tp) * tp, *shape[1:])


def files(cut: Sequence[Piece], itemsize: Mapping[str, int], max_file_bytes: int) -> dict[str, list[Piece]]:
    """The pieces of each file by name, ``__<rank>_<number>.distcp``: a rank's pieces in order, cut where a file fills.

    ``itemsize`` are bytes of an element by key.
    """
    by_owner: dict[int, list[list[Piece]]] = {}
    filled: dict[int, int] = {}
    for piece in cut:
        num_bytes = prod(piece.sizes) * itemsize[piece.place.key]
        rank_files = by_owner.setdefault(piece.owner, [])
        if not rank_files or filled[piece.owner] + num_bytes > max_file_bytes:
            rank_files.append([])
            filled[piece.owner] = 0
        rank_files[-1].append(piece)
        filled[piece.owner] += num_bytes
    return {
        f"__{owner}_{number}.distcp": content
        for owner, rank_files in sorted(by_owner.items())
        for number, content in enumerate(rank_files)
    }


def extra_state_keys(places: Sequence[ShardedKey]) -> list[str]:
    """Keys of the empty objects that Megatron's linear layers (and TransformerEngine's attention) ask for."""
    keys: dict[str, None] = {}
    for place in places:
        found = _LINEAR.fullmatch(place.key)
        if found is None:
            continue
        names = [found[1]]
        if found[1].endswith(".self_attention.linear_proj"):
            names.append(found[1].removesuffix("linear_proj") + "core_attention")
        position = ".".join(map(str, place.index or (0,)))
        shape = ".".join(map(str, place.stacked or (1,)))
        for name in names:
            keys[f"{name}{_EXTRA_STATE}/shard_{position}_{shape}"] = None
    return list(keys)


def one_dtype_per_key(cut: Sequence[Piece], dtype_of: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
    """Dtype by key, from the dtypes of the Hugging Face tensors.

    Raises:
        UserError: tensors that the checkpoint stacks into one have several dtypes.
    """
    found: dict[str, torch.dtype] = {}
    for piece in cut:
        for name in piece.placed.hf_names:
            dtype = found.setdefault(piece.place.key, dtype_of[name])
            if dtype != dtype_of[name]:
                raise UserError(
                    f"tensor '{name}' is {dtype_of[name]}, others of '{piece.place.key}' are {dtype}: one tensor holds "
                    "them all; choose a dtype with --dtype"
                )
    return found

"""Places of the name tables' rows in a distributed checkpoint (``torch_dist``), and its division into files.

In a model whose layers are all alike Megatron stacks them: one tensor ``decoder.layers.mlp.linear_fc1.weight`` of shape
[L, 2F, H], experts ``decoder.layers.mlp.experts.experts.linear_fc1.weight`` of shape [L, E, 2F, H]. Where dense and
expert layers mix, each layer has keys of its own (``decoder.layers.3.…``) and only experts are stacked. Keys are those
of the TransformerEngine layer spec, which the student makes Megatron's local spec write too.

The values of a checkpoint do not depend on a layout, and any layout can load any cut. The cut decides who reads what:
with that of its own layout every rank reads its own files, and rank 0's for what all ranks hold alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import lcm, prod

import torch

from mopd.base.types import UserError
from mopd.conversion.job import grouped_by_size
from mopd.conversion.models import families
from mopd.conversion.models.dims import ModelDims, division_problem
from mopd.conversion.models.families import Placed
from mopd.conversion.models.mapping import CUT_DIM, boxes, whole_shape
from mopd.conversion.models.stages import Stages
from mopd.conversion.models.towers import TOWER_PREFIX

_LAYER_NUMBER = re.compile(r"(?<=^decoder\.layers)\.\d+")
_EXPERT_NUMBER = re.compile(r"(?<=\.experts)\.local_experts\.\d+")
_MODULE = re.compile(r"(.*\.(?:linear_\w+|\w*layernorm))\.weight")
EXTRA_STATE = "._extra_state"
_UNEVEN = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetLayout(Stages):
    """Stages and degrees of parallelism that a checkpoint is cut for. Fields are Megatron's options."""

    tensor_model_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1

    @property
    def stage_size(self) -> int:
        """Number of ranks of one pipeline stage, as few as the degrees allow."""
        return lcm(self.tensor_model_parallel_size, self.expert_tensor_parallel_size * self.expert_model_parallel_size)

    def check_degrees(self) -> None:
        """Refuse a number below 1, and options of stages if there is one stage, or too few.

        Raises:
            UserError: one line with the option to set.
        """
        for name, degree in asdict(self).items():
            if degree is not None and degree < 1:
                raise UserError(f"{_option(name)} is {degree}: set 1 or more")
        uneven = {name: getattr(self, name) for name in _UNEVEN if getattr(self, name) is not None}
        virtual = self.virtual_pipeline_model_parallel_size
        of_stages = uneven | ({"virtual_pipeline_model_parallel_size": virtual} if virtual > 1 else {})
        for name, number in of_stages.items():
            if self.pipeline_model_parallel_size == 1:
                raise UserError(f"{_option(name)} {number} needs --pipeline-model-parallel-size > 1")
        if self.pipeline_model_parallel_size == 2 and len(uneven) == 2:
            raise UserError(f"{' and '.join(map(_option, uneven))}: of two stages, give the layers of one")

    def check(self, dims: ModelDims) -> None:
        """Refuse a layout that would split a head group, an expert or a layer.

        Raises:
            UserError: one line with both numbers and the option to set.
        """
        self.check_degrees()
        tp, ep, etp = self.tensor_model_parallel_size, self.expert_model_parallel_size, self.expert_tensor_parallel_size
        if problem := division_problem(dims, self, _option, tp=tp, ep=ep, etp=etp):
            raise UserError(problem)


def _option(name: str) -> str:
    """Return a field's name as an option of the command line."""
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True, slots=True)
class ShardedKey:
    """One parameter's place among the stacked tensors.

    Example (layer 2 of 4, expert 1 of 8): ``key="decoder.layers.mlp.experts.experts.linear_fc1.weight", index=(2, 1),
    stacked=(4, 8)``: the parameter is ``checkpoint[key][2, 1]`` and the checkpoint's tensor has shape ``(4, 8,
    *whole_shape(placed))``.
    """

    key: str
    """Key of the sharded tensor."""
    index: tuple[int, ...]
    """Position of this parameter in the leading dimensions."""
    stacked: tuple[int, ...]
    """Sizes of the leading dimensions."""


def sharded_key(placed: Placed, dims: ModelDims) -> ShardedKey:
    """Return key and position of one parameter."""
    # The last name is TransformerEngine's; its grouped experts carry numbers that Megatron's checkpoint does not.
    key = placed.megatron[-1] if placed.expert is None else _EXPERT_NUMBER.sub(".experts", placed.megatron[0])
    index: tuple[int, ...] = ()
    stacked: tuple[int, ...] = ()
    if placed.layer is not None and dims.has_uniform_layers:
        key = _LAYER_NUMBER.sub("", key)
        index, stacked = (placed.layer,), (dims.num_layers,)
    if placed.expert is not None and dims.moe is not None:
        index, stacked = (*index, placed.expert), (*stacked, dims.moe.num_experts)
    return ShardedKey(key, index, stacked)


@dataclass(frozen=True, slots=True)
class Piece:
    """One box of one stacked tensor, and its source."""

    placed: Placed
    place: ShardedKey
    owner: int
    """Rank whose file holds it."""
    dim: int
    """The cut dimension of the parameter."""
    start: int
    """First row (or column) of the parameter over all ranks, vocabulary padding included."""
    stop: int
    """End of these rows, exclusive."""
    sizes: tuple[int, ...]
    """Shape of the box without stacked dimensions."""
    whole: tuple[int, ...]
    """Shape of the parameter over all ranks."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """First element of the box in the stacked tensor."""
        return (*self.place.index, *(self.start if dim == self.dim else 0 for dim in range(len(self.sizes))))

    @property
    def box(self) -> tuple[int, ...]:
        """Shape of the box in the stacked tensor."""
        return (*(1 for _ in self.place.index), *self.sizes)


def pieces(dims: ModelDims, layout: TargetLayout) -> Iterator[Piece]:
    """Yield all boxes of the checkpoint in model order, those of a parameter by rank."""
    for placed in families.all_params(dims):
        place, shape = sharded_key(placed, dims), padded_shape(placed, dims, layout)
        dim = CUT_DIM[placed.param.merge]
        degree, first = layout.tensor_model_parallel_size, placed.stage(dims, layout) * layout.stage_size
        if placed.expert is not None:
            degree = layout.expert_tensor_parallel_size
            first += placed.owner(dims, ranks=layout.expert_model_parallel_size) * degree
        for rank in range(1 if placed.param.merge == "replicated" else degree):
            for start, stop in boxes(placed, shape[dim], rank=rank, size=degree):
                sizes = tuple(stop - start if d == dim else size for d, size in enumerate(shape))
                yield Piece(placed, place, first + rank, dim, start, stop, sizes, shape)


def padded_shape(placed: Placed, dims: ModelDims, layout: TargetLayout) -> tuple[int, ...]:
    """Return the shape of a parameter over all ranks, with the rows that pad the vocabulary."""
    shape = whole_shape(placed)
    if placed.param.merge != "vocab":
        return shape
    return dims.padded_vocab_size(layout.tensor_model_parallel_size), *shape[1:]


def files(cut: Sequence[Piece], itemsize: Mapping[str, int], max_file_bytes: int) -> dict[str, list[Piece]]:
    """Return the pieces of each file by name, ``__<rank>_<number>.distcp``: a rank's pieces in order, cut where a file
    fills.

    ``itemsize`` gives the bytes of an element by key.
    """
    by_owner: dict[int, list[Piece]] = {}
    for piece in cut:
        by_owner.setdefault(piece.owner, []).append(piece)
    return {
        f"__{owner}_{number}.distcp": content
        for owner, own in sorted(by_owner.items())
        for number, content in enumerate(
            grouped_by_size(own, lambda piece: prod(piece.sizes) * itemsize[piece.place.key], max_file_bytes)
        )
    }


def extra_state_keys(places: Sequence[ShardedKey]) -> list[str]:
    """Return the keys of the empty objects that Megatron-Core asks for: its linear layers, TransformerEngine's norms
    that stand alone (from 2.0 on), and in Megatron's older versions TransformerEngine's attention."""
    keys: dict[str, None] = {}
    for place in places:
        found = _MODULE.fullmatch(place.key)
        if found is None or place.key.startswith(TOWER_PREFIX):  # a tower's layers are not Megatron's
            continue
        names = [found[1]]
        if found[1].endswith(".self_attention.linear_proj"):
            names.append(found[1].removesuffix("linear_proj") + "core_attention")
        position = ".".join(map(str, place.index or (0,)))
        shape = ".".join(map(str, place.stacked or (1,)))
        for name in names:
            keys[f"{name}{EXTRA_STATE}/shard_{position}_{shape}"] = None
    return list(keys)


def one_dtype_per_key(cut: Sequence[Piece], dtype_of: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
    """Return the dtype by key, from the dtypes of the Hugging Face tensors.

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

"""Where a row of the name tables lies in a distributed checkpoint (``torch_dist``), whatever the layout that wrote it.

In a model whose layers are all alike Megatron stacks them: one tensor ``decoder.layers.mlp.linear_fc1.weight`` of
shape [L, 2F, H], experts ``decoder.layers.mlp.experts.experts.linear_fc1.weight`` of shape [L, E, 2F, H]. Where dense
and expert layers mix, each layer has keys of its own (``decoder.layers.3.…``) and only experts are stacked.
Keys are those of the TransformerEngine layer spec, which ``student.layer_specs`` makes the local spec write too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mopd.conversion.models.dims import ModelDims
from mopd.conversion.models.families import Placed
from mopd.conversion.models.mapping import merge_qkv, merge_rows, split_qkv

_LAYER_NUMBER = re.compile(r"(?<=^decoder\.layers)\.\d+")
_EXPERT_NUMBER = re.compile(r"(?<=\.experts)\.local_experts\.\d+")


@dataclass(frozen=True, slots=True)
class ShardedKey:
    """One parameter's place among the stacked tensors.

    Example (layer 2 of 4, expert 1 of 8): ``key="decoder.layers.mlp.experts.experts.linear_fc1.weight", index=(2, 1),
    stacked=(4, 8)``: the parameter is ``checkpoint[key][2, 1]`` and the checkpoint's tensor has shape
    ``(4, 8, *whole_shape(placed))``.
    """

    key: str
    """Key of the sharded tensor."""
    index: tuple[int, ...]
    """Position of this parameter in the leading dimensions."""
    stacked: tuple[int, ...]
    """Sizes of the leading dimensions."""


def sharded_key(placed: Placed, dims: ModelDims) -> ShardedKey:
    """Key and position of one parameter."""
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


def whole_shape(placed: Placed) -> tuple[int, ...]:
    """Shape of one parameter over all ranks, without stacking and without vocabulary padding."""
    rows = sum(shape[0] for shape in placed.hf_shapes)
    return (rows, *placed.hf_shapes[0][1:])


def merge_whole(placed: Placed, tensors: Sequence[Tensor], dims: ModelDims) -> Tensor:
    """The parameter over all ranks, of ``whole_shape``, from its Hugging Face tensors in the order of ``hf_names``.

    ``gate_up`` gives all gate rows above all up rows, as Megatron's checkpoint has them. Where nothing is merged the
    one tensor itself comes back, not a copy.
    """
    if placed.param.merge == "qkv":
        return merge_qkv(tensors, dims)
    return merge_rows(tensors)


def split_whole(placed: Placed, whole: Tensor, dims: ModelDims) -> list[Tensor]:
    """Inverse of ``merge_whole``: contiguous Hugging Face tensors; vocabulary rows past the true size are dropped.

    Parts that are already contiguous inside ``whole`` share its memory.
    """
    if placed.param.merge == "qkv":
        return split_qkv(whole, dims)
    if placed.param.merge == "vocab":
        return [whole[: placed.hf_shapes[0][0]]]
    return list(whole.split([shape[0] for shape in placed.hf_shapes]))

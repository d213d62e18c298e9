"""Tensors of the vision towers, by their names inside the tower; sizes are named as in ``families.sizes``.

A tower is Hugging Face's own module on the first pipeline stage, whole on every tensor-parallel rank, so its names are
the same on both sides but for a prefix.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from mopd.config.student import Freeze
from mopd.conversion.models.dims import ModelDims, Naming, VisionDims

TOWER_PREFIX = "vision_model."
"""Prefix of the tower's Megatron names."""

TowerTensor = tuple[str, tuple[str, ...]]
"""Name and shape of a tensor; ``{number}`` counts from 0."""


@dataclass(frozen=True, slots=True)
class Tower:
    """The tensors of one family's tower."""

    embedding: tuple[TowerTensor, ...]
    block: tuple[TowerTensor, ...]
    """Tensors of each block."""
    merger: tuple[TowerTensor, ...]
    deepstack_merger: tuple[TowerTensor, ...] = ()
    """Tensors of each DeepStack feature."""


def _with_bias(name: str, *shape: str) -> tuple[TowerTensor, TowerTensor]:
    """Return weight and bias of a linear layer [out, in], a norm [size] or a convolution."""
    return (f"{name}.weight", shape), (f"{name}.bias", shape[:1])


_PATCH = ("tower", "channels", "frames", "patch", "patch")
_ATTENTION = (
    *_with_bias("blocks.{number}.attn.qkv", "tower_qkv", "tower"),
    *_with_bias("blocks.{number}.attn.proj", "tower", "tower"),
)


def _layer_norm_merger(name: str, normed: str) -> tuple[TowerTensor, ...]:
    return (
        *_with_bias(f"{name}.norm", normed),
        *_with_bias(f"{name}.linear_fc1", "merged", "merged"),
        *_with_bias(f"{name}.linear_fc2", "hidden", "merged"),
    )


TOWERS = {
    "qwen2_5_vl": Tower(
        embedding=(("patch_embed.proj.weight", _PATCH),),
        block=(
            ("blocks.{number}.norm1.weight", ("tower",)),
            ("blocks.{number}.norm2.weight", ("tower",)),
            *_ATTENTION,
            *_with_bias("blocks.{number}.mlp.gate_proj", "tower_ffn", "tower"),
            *_with_bias("blocks.{number}.mlp.up_proj", "tower_ffn", "tower"),
            *_with_bias("blocks.{number}.mlp.down_proj", "tower", "tower_ffn"),
        ),
        merger=(
            ("merger.ln_q.weight", ("tower",)),
            *_with_bias("merger.mlp.0", "merged", "merged"),
            *_with_bias("merger.mlp.2", "hidden", "merged"),
        ),
    ),
    "qwen3_vl": Tower(
        embedding=(*_with_bias("patch_embed.proj", *_PATCH), ("pos_embed.weight", ("positions", "tower"))),
        block=(
            *_with_bias("blocks.{number}.norm1", "tower"),
            *_with_bias("blocks.{number}.norm2", "tower"),
            *_ATTENTION,
            *_with_bias("blocks.{number}.mlp.linear_fc1", "tower_ffn", "tower"),
            *_with_bias("blocks.{number}.mlp.linear_fc2", "tower", "tower_ffn"),
        ),
        merger=_layer_norm_merger("merger", "tower"),
        deepstack_merger=_layer_norm_merger("deepstack_merger_list.{number}", "merged"),
    ),
}
"""``model_type`` -> its tower."""


def tower_sizes(vision: VisionDims) -> dict[str, int]:
    """Return the values of the size names that towers use."""
    return {
        "tower": vision.hidden_size,
        "tower_qkv": 3 * vision.hidden_size,
        "tower_ffn": vision.intermediate_size,
        "merged": vision.hidden_size * vision.spatial_merge_size**2,
        "channels": vision.in_channels,
        "frames": vision.temporal_patch_size,
        "patch": vision.patch_size,
        "positions": vision.num_position_embeddings or 0,
    }


def tower_tensors(family: str, vision: VisionDims) -> Iterator[TowerTensor]:
    """Yield all tensors of one model's tower, with its numbers filled in."""
    tower = TOWERS[family]
    yield from tower.embedding
    for rows, number in ((tower.block, vision.depth), (tower.deepstack_merger, len(vision.deepstack_layers))):
        for i in range(number):
            yield from ((name.format(number=i), shape) for name, shape in rows)
    yield from tower.merger


def is_merger(name: str) -> bool:
    """Return whether a tensor of a tower turns its last features into the language model's, DeepStack's included."""
    return name.removeprefix(TOWER_PREFIX).startswith(("merger.", "deepstack_merger_list."))


def is_trained(name: str, freeze: Freeze) -> bool:
    """Return whether a tensor of the tower, named as in it or in the Megatron model, is trained under ``freeze``."""
    return freeze == "none" or (freeze == "tower" and is_merger(name))


_FLAT = {"visual.": "visual.", "language_model.": "model."}
_NESTED = {"visual": "model.visual.", "model": "model.language_model."}


def with_naming(dims: ModelDims, naming: Naming) -> ModelDims:
    """Return the same model with another naming of its checkpoint's tensors; a model of text has only one."""
    return dims if dims.vision is None else replace(dims, vision=replace(dims.vision, naming=naming))


def naming_of(names: Iterable[str]) -> Naming:
    """Return how a checkpoint of a model that sees images names its tensors, by prefixes that only one naming has."""
    return "nested" if any(name.startswith(("model.visual.", "model.language_model.")) for name in names) else "flat"


def named_as_read(name: str, dims: ModelDims) -> str:
    """Return a Hugging Face name, of the tables or of another naming, as this model's checkpoint spells it."""
    if dims.vision is None:
        return name
    flat = re.sub(r"^model\.(visual\.|language_model\.)", lambda found: _FLAT[found[1]], name)
    if dims.vision.naming == "flat":
        return flat
    return re.sub(r"^(visual|model)\.", lambda found: _NESTED[found[1]], flat)

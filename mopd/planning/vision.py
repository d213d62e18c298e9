"""Cost of images: operations of a vision tower, and what it adds to the first pipeline stage.

forward      2 operations a weight for every patch (mergers: every merged patch, which is an image token), 4 h a patch
             of context for attention: those of a window, or of the image; a sample's tokens are one image's
training     once where it is frozen, as often as any layer where it is trained; no tensor-parallel rank is spared
"""

from __future__ import annotations

from dataclasses import dataclass

from mopd.config.student import ParallelConfig, StudentConfig
from mopd.conversion.models.dims import ModelDims, VisionDims
from mopd.planning.memory.shards import own_layers, shard


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerPlan:
    """Plan of the student's vision tower."""

    weights: int
    trained: int
    """Weights that are trained."""
    flops_per_token: float
    """Operations of a forward pass, for each image token."""


def plan_tower(student: StudentConfig, dims: ModelDims, image_tokens: float) -> TowerPlan | None:
    """Plan the tower; ``None`` for a model of text. ``image_tokens``: mean of a sample, 0 where it is not given."""
    if dims.vision is None:
        return None
    own = shard(dims, ParallelConfig(), 0)
    return TowerPlan(
        weights=own.tower + own.mergers,
        trained=own.trained_dense(student.vision.freeze) - own.dense,
        flops_per_token=sum(_flops_per_token(dims, dims.vision, image_tokens)),
    )


def tower_flops(dims: ModelDims, image_tokens: float) -> float:
    """Return the operations of a forward pass over one sample's images."""
    return 0.0 if dims.vision is None else sum(_flops_per_token(dims, dims.vision, image_tokens)) * image_tokens


def trained_tower_flops(student: StudentConfig, dims: ModelDims, image_tokens: float, *, repeats: int) -> float:
    """Return the operations of a step for one sample's images; what is trained runs ``repeats`` forward passes'
    worth."""
    if dims.vision is None:
        return 0.0
    tower, mergers = _flops_per_token(dims, dims.vision, image_tokens)
    freeze = student.vision.freeze
    times = {"none": (repeats, repeats), "tower": (1, repeats), "tower_and_merger": (1, 1)}[freeze]
    return (tower * times[0] + mergers * times[1]) * image_tokens


def slowest_stage(
    dims: ModelDims, parallel: ParallelConfig, *, tower_layers: float, head_layers: float
) -> tuple[float, float]:
    """Return the work of the pipeline stage that has most, in layers: its own with the LM head, which takes as long as
    ``head_layers`` of the last stage, and a tower's, as long as ``tower_layers`` of the first."""
    work = [float(len(layers)) for layers in own_layers(dims, parallel)]
    work[-1] += head_layers
    beside = [tower_layers, *[0.0] * (len(work) - 1)]
    return max(zip(work, beside, strict=True), key=sum)


def _flops_per_token(dims: ModelDims, vision: VisionDims, image_tokens: float) -> tuple[float, float]:
    """Return the operations of tower and mergers for each image token."""
    own, patches = shard(dims, ParallelConfig(), 0), vision.spatial_merge_size**2
    whole = image_tokens * patches
    contexts = [whole] * vision.depth
    if vision.window_size is not None:
        window = float((vision.window_size // vision.patch_size) ** 2)
        full = set(vision.full_attention_blocks)
        contexts = [whole if block in full else min(whole, window) for block in range(vision.depth)]
    looked_up = (vision.num_position_embeddings or 0) * vision.hidden_size
    return patches * (2.0 * (own.tower - looked_up) + 4.0 * vision.hidden_size * sum(contexts)), 2.0 * own.mergers

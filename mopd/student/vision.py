"""The vision tower of a vision-language student: transformers' own module on every rank of the first pipeline stage.

Each tensor-parallel rank computes all of the tower, on the images of its data-parallel rank, without communication, so
a micro-batch without images can skip it. What is frozen has no gradient and so no place in Megatron's buffers.

Letters: P patches of all images, N tokens of them (merged patches), H channels of the language model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mopd.config.student import Freeze, StudentConfig
from mopd.conversion.hf.pretrained import build_tower
from mopd.conversion.models.dims import ModelDims
from mopd.conversion.models.families import tower_params
from mopd.conversion.models.towers import is_merger
from mopd.student.clock import TOWER, Span, StageClock
from mopd.student.parallel import Layout


@dataclass(frozen=True, kw_only=True)
class ImageInput:
    """Images of one micro-batch; images that occur several times are held once."""

    patches: Tensor
    """[P, channels x frames x side x side] fp32."""
    grids: Tensor
    """[images, 3] int64: size of each image in patches, as (1, height, width)."""
    rows: Tensor
    """[N] int64: rows of the image tokens among this rank's flat [S, B], in the order of tokens."""
    sources: Tensor
    """[N] int64: index of the feature that each of these rows gets."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor that this object holds."""
        return tuple(vars(self).values())


def is_trained(name: str, freeze: Freeze) -> bool:
    """Return whether a tensor of the tower, named as in it or in the Megatron model, is trained under ``freeze``."""
    return freeze == "none" or (freeze == "tower" and is_merger(name))


def constant_names(dims: ModelDims, freeze: Freeze) -> frozenset[str]:
    """Return the Hugging Face names of the tensors that training does not change; the same on every rank."""
    frozen = (placed for placed in tower_params(dims) if not is_trained(placed.megatron[0], freeze))
    return frozenset(name for placed in frozen for name in placed.hf_names)


def make_tower(student: StudentConfig, dtype: torch.dtype) -> nn.Module:
    """Return the tower on the CPU with undefined weights, frozen as ``student.vision.freeze`` says."""
    tower: Any = build_tower(Path(student.model), dtype)
    freeze = student.vision.freeze
    for name, parameter in tower.named_parameters():
        parameter.requires_grad_(is_trained(name, freeze))
        # Tensor-parallel ranks compute the same gradient; kernels that add in no fixed order would let copies drift.
        parameter.average_gradients_across_tp_domain = True
    if student.recompute == "full" and freeze == "none":
        tower.gradient_checkpointing_enable({"use_reentrant": False})
    return tower


def clock_of(first_chunk: Any, layout: Layout) -> StageClock:
    """Return a clock of the model's passes, set in the configuration that the chunks share, and of its tower if any."""
    clock = StageClock(layout)
    first_chunk.config.timers = clock
    if layout.is_first_stage:
        _watch(first_chunk.vision_model, clock(TOWER))
    return clock


def _watch(tower: nn.Module, span: Span) -> None:
    """Let ``span`` measure the tower's forward and, if something in it is trained, its backward."""

    def begin_backward(module: Any, inputs: Any, made: Any) -> None:
        span.stop()
        if made.pooler_output.requires_grad:
            made.pooler_output.register_hook(lambda grad: span.start())

    tower.register_forward_pre_hook(lambda module, inputs: span.start())
    tower.register_forward_hook(begin_backward)
    trained = [(name, parameter) for name, parameter in tower.named_parameters() if parameter.requires_grad]
    if trained:
        # Find the parameter whose gradient is complete last. Backward runs against the order of the forward pass, in
        # which blocks come first, then DeepStack's mergers, then the merger.
        _, last = min(trained, key=lambda item: (is_merger(item[0]), item[0].startswith("merger.")))
        last.register_post_accumulate_grad_hook(lambda parameter: span.stop())


def image_features(tower: nn.Module, images: ImageInput) -> tuple[Tensor, list[Tensor]]:
    """Return [N, H] for the tokens of ``images.rows``, and DeepStack's [N, H] for each of the first decoder layers."""
    made = tower(images.patches, grid_thw=images.grids, return_dict=True)
    deeper = getattr(made, "deepstack_features", None) or []
    return made.pooler_output[images.sources], [features[images.sources] for features in deeper]

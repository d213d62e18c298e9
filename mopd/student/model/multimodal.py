"""Additions that let a Megatron model take images: the tower's features in place of the image tokens' embeddings, a
rope of three axes, and DeepStack's features added after the first layers.

Letters: S tokens of a sequence, B sequences, N image tokens, H channels, D channels of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from torch import Tensor, nn

from mopd.student.vision import ImageInput, image_features


class InterleavedRotary(MultimodalRotaryEmbedding):
    """Qwen3-VL's rope: of every three frequencies one is the time's, one the height's and one the width's, as long as
    height and width have any; the rest is the time's. Megatron's rope puts the axes one after another."""

    def forward(self, position_ids: Tensor, mrope_section: list[int], cp_group: Any = None) -> Tensor:
        """Return the angles [S, B, 1, D] of ``position_ids`` [3, B, S]."""
        each = position_ids.to(self.inv_freq)[..., None] * self.inv_freq
        angles = each[0]
        for axis in (1, 2):
            own = slice(axis, 3 * mrope_section[axis], 3)
            angles[..., own] = each[axis][..., own]
        return torch.cat((angles, angles), dim=-1).transpose(0, 1)[:, :, None].contiguous()


def with_images(
    embedded: Tensor, tower: nn.Module, images: ImageInput | None, *, sequence_parallel: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the decoder's input from ``embedded`` [S, B, H] and, if the tower has them, DeepStack's features
    [layers, S, B, H], zero where no image is; under sequence parallelism this rank's part of S of both."""

    def share(hidden: Tensor) -> Tensor:
        # Backward gathers the gradient: every tensor-parallel rank's tower needs all of it.
        return scatter_to_sequence_parallel_region(hidden) if sequence_parallel else hidden

    if images is None:
        return share(embedded), None
    features, deeper = image_features(tower, images)
    placed = share(_placed(features, images.rows, embedded))
    if not deeper:
        return placed, None
    empty = torch.zeros_like(embedded)
    return placed, torch.stack([share(_placed(each, images.rows, empty)) for each in deeper])


def _placed(features: Tensor, rows: Tensor, into: Tensor) -> Tensor:
    """Return ``into`` [S, B, H] with ``features`` [N, H] in its flat ``rows`` [N]."""
    return into.flatten(0, 1).index_copy(0, rows, features.to(into.dtype)).view_as(into)


def add_deepstack(layers: Any, num_features: int) -> None:
    """Add one feature to the output of each of the first ``num_features`` layers.

    Features come to a layer as ``context``, which self-attention ignores: Megatron's schedule and recomputation carry
    it, and its gradient, with the micro-batch that it belongs to.
    """

    def adder(number: int) -> Any:
        def add(layer: Any, inputs: Any, output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
            hidden, context = output
            return output if context is None else (hidden + context[number], context)

        return add

    for number in range(num_features):
        layers[number].register_forward_hook(adder(number))

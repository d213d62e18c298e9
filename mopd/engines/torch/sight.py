"""Images in a transformers model: features of its vision tower, and the positions of text and images.

State that transformers would keep on the module between calls (``rope_deltas``) is passed as arguments instead.
Shapes: B sequences, S padded length, F features (tokens of an image), H hidden.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mopd.base.types import PromptImage
from mopd.data.image_processor import ImageProcessor
from mopd.data.mrope import mrope_positions
from mopd.engines.torch.decoding import SeenBatch
from mopd.engines.vision import EngineVision

MAX_KEPT_BYTES = 2**28
"""Bytes of features kept for later requests about the same images."""
_Key = tuple[bytes, tuple[int, int, int]]
"""Digest and grid of an image."""


@dataclass(frozen=True, slots=True)
class _Features:
    """A vision tower's output in the form that the model reads; one tensor [F, H] for each image."""

    pooler_output: list[Tensor]
    deepstack_features: list[list[Tensor]]
    """Features of each DeepStack layer."""


class VisionFeatures:
    """Vision tower of one model, with a cache of features. An image's features depend only on the image and the
    weights: each is computed alone, and kept until the weights change."""

    def __init__(self, model: PreTrainedModel, sight: EngineVision) -> None:
        self._model, self._sight = model, sight
        self._processor = ImageProcessor(sight.processing)
        self._kept: OrderedDict[_Key, tuple[Tensor, ...]] = OrderedDict()
        self._kept_bytes = 0

    def forget(self) -> None:
        """Drop all features: the weights have changed."""
        self._kept.clear()
        self._kept_bytes = 0

    def see(
        self, tokens: Sequence[Sequence[int]], images: Sequence[Sequence[PromptImage]], *, width: int, pad_left: bool
    ) -> SeenBatch:
        """Return positions and features for sequences padded to ``width``. ``ValueError`` for an image that differs
        from its description; ``UserError`` for one that cannot be read."""
        position_ids = torch.zeros(3, len(tokens), width, dtype=torch.int64)
        dims = self._sight.dims
        for row, (sequence, own) in enumerate(zip(tokens, images, strict=True)):
            positions = mrope_positions(
                np.asarray(sequence, dtype=np.int64),
                [image.grid for image in own],
                image_token_id=dims.image_token_id,
                merge_size=dims.spatial_merge_size,
            )
            place = slice(width - len(sequence), width) if pad_left else slice(0, len(sequence))
            position_ids[:, row, place] = torch.from_numpy(positions)
        features = [self._features(image) for own in images for image in own]
        extra = {"mm_encoder_outputs": {"image": _as_output(features)}} if features else {}
        device = self._model.device
        barred = torch.tensor(dims.token_ids, device=device)
        return SeenBatch(position_ids=position_ids.to(device), extra=extra, barred=barred)

    def _features(self, image: PromptImage) -> tuple[Tensor, ...]:
        """Return [F, H] features of the tower's end and, in families that have them, of its DeepStack layers."""
        key = (image.digest, image.grid)
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
            return kept
        patches, grids = self._processor.patches([image.load()])
        if tuple(grids[0].tolist()) != tuple(image.grid):
            raise ValueError(
                f"image {image.digest.hex()} has the grid {grids[0].tolist()} here, {list(image.grid)} for who asks: "
                "give both sides one processor and one data.max_pixels"
            )
        device = self._model.device
        # the inner model's method: the outer one only forwards to it
        inner: Any = self._model.base_model
        seen = inner.get_image_features(patches.to(device), grids.to(device), return_dict=True)
        features = (seen.pooler_output[0], *(level[0] for level in getattr(seen, "deepstack_features", ())))
        self._kept[key] = features
        self._kept_bytes += _num_bytes(features)
        while self._kept_bytes > MAX_KEPT_BYTES:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= _num_bytes(oldest)
        return features


def _num_bytes(features: tuple[Tensor, ...]) -> int:
    return sum(level.nbytes for level in features)


def _as_output(features: Sequence[tuple[Tensor, ...]]) -> _Features:
    """Return features in the form of the model's own ``get_image_features`` for all images of a batch."""
    last, *levels = zip(*features, strict=True)
    return _Features(list(last), [list(level) for level in levels])

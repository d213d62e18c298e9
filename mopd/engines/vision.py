"""The image side of an engine's model, and the check that a request's images fit its tokens. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mopd.base.types import PromptImage
from mopd.conversion.models.config_keys import read_config
from mopd.conversion.models.dims import VisionDims
from mopd.conversion.models.reading import read_dims
from mopd.conversion.models.vision_config import VISION_FORMATS
from mopd.data.image_processing import ImageProcessing, read_image_processing
from mopd.data.mrope import image_starts
from mopd.engines.interface import Images, refuse_images


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineVision:
    """Vision dimensions and image processing of a model that sees images."""

    dims: VisionDims
    processing: ImageProcessing

    def starts(self, tokens: Any, images: Sequence[PromptImage]) -> list[int]:
        """Return where each image's placeholders begin in ``tokens`` [L], integers of any kind; ``ValueError`` if the
        placeholders are not those of ``images``."""
        return image_starts(
            np.asarray(tokens, dtype=np.int64),
            [image.grid for image in images],
            image_token_id=self.dims.image_token_id,
            merge_size=self.dims.spatial_merge_size,
        )


def read_vision(folder: Path, max_pixels: int | None) -> EngineVision | None:
    """Read the vision side of a Hugging Face folder; ``None`` for a text model. ``max_pixels`` as in
    ``read_image_processing``.

    Raises:
        UserError: its config or its image processor cannot be used.
    """
    if read_config(folder).get("model_type") not in VISION_FORMATS:
        return None
    dims = read_dims(folder).vision
    assert dims is not None
    return EngineVision(dims=dims, processing=read_image_processing(folder, max_pixels))


def check_images(sight: EngineVision | None, tokens: Sequence[Any], images: Images, *, name: str) -> None:
    """Raise unless every image has its placeholders and every placeholder its image.

    Raises:
        EngineRejected: the model of ``name`` sees no images.
        ValueError: images and placeholders do not fit; names the sequence.
    """
    if sight is None:
        refuse_images(images, name)
        return
    for i, sequence in enumerate(tokens):
        try:
            sight.starts(sequence, images[i] if images is not None else ())
        except ValueError as error:
            raise ValueError(f"sequence {i}: {error}") from error

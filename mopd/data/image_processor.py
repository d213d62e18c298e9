"""Patches of encoded images, made by the processor that vLLM uses: transformers' class on top of torchvision.

Pillow's resizing gives other pixels, which changes log-probs by some hundredths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mopd.base.types import UserError
from mopd.data.image_files import digest_of, read_rgb
from mopd.data.image_processing import ImageProcessing


class ImageProcessor:
    """Converter from encoded images to patches. Keeps no state between calls: any thread may call it."""

    def __init__(self, processing: ImageProcessing) -> None:
        """Import torchvision, which a run without images does not need. Raise ``UserError`` if it is missing."""
        try:
            from transformers import Qwen2VLImageProcessor

            self._processor: Any = Qwen2VLImageProcessor(
                size={"shortest_edge": processing.min_pixels, "longest_edge": processing.max_pixels},
                patch_size=processing.patch_size,
                temporal_patch_size=processing.temporal_patch_size,
                merge_size=processing.merge_size,
                image_mean=list(processing.mean),
                image_std=list(processing.std),
                rescale_factor=processing.rescale_factor,
                resample=processing.resample,
            )
        except ImportError as error:
            raise UserError("images need the torchvision package: run pip install 'mopd[vision]'") from error
        self.processing = processing

    def patches(self, files: Sequence[bytes]) -> tuple[Tensor, Tensor]:
        """Return patches [P, C * T * p * p] fp32 of all ``files`` one after the other, and their grids [N, 3] int64.

        Raises:
            UserError: a file is no image that is taken, or damaged; names its digest.
        """
        width = 3 * self.processing.temporal_patch_size * self.processing.patch_size**2
        patches, grids = [torch.empty(0, width)], [torch.empty(0, 3, dtype=torch.int64)]
        for content in files:
            image = read_rgb(content, f"image {digest_of(content).hex()}")
            # One at a time, so that a file's result does not depend on its neighbours.
            made = self._processor.preprocess(image, return_tensors="pt")
            patches.append(made["pixel_values"].float())
            grids.append(made["image_grid_thw"].long())
        return torch.cat(patches), torch.cat(grids)

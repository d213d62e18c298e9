"""Conversion of image references to a micro-batch's images: positions on every rank, patches on the first stage."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mopd.config.schema import Recipe
from mopd.conversion.models.dims import VisionDims
from mopd.data.image_processing import read_image_processing
from mopd.data.image_processor import ImageProcessor
from mopd.data.image_refs import image_refs_from_tensor
from mopd.data.images import ImageStore
from mopd.data.mrope import image_starts, mrope_positions
from mopd.student.token_layout import TokenLayout
from mopd.student.vision import ImageInput

Sequences = Sequence[tuple[Tensor, Tensor]]
"""Fields ``tokens`` [L] and ``images`` [N, 8] of each sample."""


class StudentImages:
    """Image handling of one rank of a vision-language student. Any thread may call it."""

    def __init__(self, recipe: Recipe, vision: VisionDims, *, has_tower: bool) -> None:
        """``has_tower``: the rank runs the vision tower and therefore also reads image files.

        Raises:
            UserError: ``has_tower``, and the processor's settings or torchvision are missing.
        """
        self._ids = {"image_token_id": vision.image_token_id, "merge_size": vision.spatial_merge_size}
        self._reads: tuple[ImageStore, ImageProcessor] | None = None
        if has_tower:
            processing = read_image_processing(Path(recipe.student.model), recipe.data.max_pixels)
            self._reads = ImageStore(recipe.data.train, recipe.data), ImageProcessor(processing)

    def position_ids(self, samples: Sequences, texts: Tensor, token_layout: TokenLayout) -> Tensor:
        """Return the positions [3, T] of ``samples``. ``texts`` [T] are text positions, which stay in rows of no
        sample.

        Raises:
            ValueError: a sample's image tokens do not match its images.
        """
        positions = texts.repeat(3, 1)
        for i, (tokens, images) in enumerate(samples):
            grids = [ref.grid for ref in image_refs_from_tensor(images)]
            own = mrope_positions(tokens.numpy(), grids, **self._ids)
            positions[:, token_layout.rows(i, 0, len(tokens))] = torch.from_numpy(own)
        return positions

    def read(self, samples: Sequences, token_layout: TokenLayout) -> ImageInput | None:
        """Return the images of ``samples`` on the CPU, each file read once; ``None`` if there are none or the rank has
        no tower.

        Raises:
            UserError: a file has changed since its prompt was loaded, or is damaged; names file and row.
        """
        if self._reads is None:
            return None
        store, processor = self._reads
        offsets: dict[tuple[bytes, tuple[int, int, int]], int] = {}
        files, rows, sources, total = [], [], [], 0
        for i, (tokens, images) in enumerate(samples):
            refs = image_refs_from_tensor(images)
            starts = image_starts(tokens.numpy(), [ref.grid for ref in refs], **self._ids)
            for ref, start in zip(refs, starts, strict=True):
                _, height, width = ref.grid
                num_tokens, key = height * width // self._ids["merge_size"] ** 2, (ref.digest, ref.grid)
                if key not in offsets:
                    offsets[key] = total
                    total += num_tokens
                    files.append(store.prompt_image(ref).load())  # raises with file and row if damaged
                rows.append(token_layout.firsts[i] + (start + np.arange(num_tokens)) * token_layout.step)
                sources.append(offsets[key] + np.arange(num_tokens))
        if not files:
            return None
        patches, grids = processor.patches(files)
        if [tuple(grid) for grid in grids.tolist()] != [grid for _, grid in offsets]:
            raise RuntimeError(f"the processor makes grids {grids.tolist()} where the prompts have {list(offsets)}")
        # Image tokens of other context-parallel ranks are dropped; their features are computed on every rank.
        places = token_layout.local(torch.from_numpy(np.concatenate(rows)))
        is_own = places >= 0
        return ImageInput(
            patches=patches,
            grids=grids,
            rows=places[is_own],
            sources=torch.from_numpy(np.concatenate(sources))[is_own],
        )

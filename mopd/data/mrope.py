"""Positions of text and images for multimodal rotary embeddings (Qwen2.5-VL and Qwen3-VL). Integers only; no torch.

A text token stands at (p, p, p) in time, height and width. The tokens of an image that begins at p stand at (p, p +
row, p + column), row by row, and the following text goes on at p + the longer of its two sides. With an image of 2 x 3
merged patches (``i``)::

    tokens   a  b  i  i  i  i  i  i  c
    time     0  1  2  2  2  2  2  2  5
    height   0  1  2  2  2  3  3  3  5
    width    0  1  2  3  4  2  3  4  5
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Grid = tuple[int, int, int]
"""(1, height, width) of an image in patches, before they are merged."""
Integers = NDArray[np.int64]


def image_starts(tokens: Integers, grids: Sequence[Grid], *, image_token_id: int, merge_size: int) -> list[int]:
    """Return where each image's tokens begin among ``tokens`` [L].

    Raises:
        ValueError: the image tokens are not those of these images, one after another.
    """
    places = np.flatnonzero(tokens == image_token_id)
    sizes = [height * width // merge_size**2 for _, height, width in grids]
    if len(places) != sum(sizes):
        raise ValueError(f"{len(places)} image tokens for {len(sizes)} images that have {sum(sizes)}")
    starts = []
    for begin, end in pairwise(np.cumsum([0, *sizes]).tolist()):
        if places[end - 1] - places[begin] != end - begin - 1:
            raise ValueError(f"other tokens stand between those of an image, from {places[begin]} to {places[end - 1]}")
        starts.append(int(places[begin]))
    return starts


def mrope_positions(tokens: Integers, grids: Sequence[Grid], *, image_token_id: int, merge_size: int) -> Integers:
    """Return [3, L] positions in time, height and width of ``tokens`` [L], whose image tokens are expanded: one for
    each merged patch. The next token would stand at the largest of them + 1.

    Raises:
        ValueError: as ``image_starts`` does.
    """
    starts = image_starts(tokens, grids, image_token_id=image_token_id, merge_size=merge_size)
    positions = np.empty((3, len(tokens)), dtype=np.int64)
    done = following = 0  # tokens with positions; position of the next token
    for start, (_, height, width) in zip(starts, grids, strict=True):
        rows, columns = height // merge_size, width // merge_size
        positions[:, done:start] = np.arange(following, following + start - done)
        following += start - done
        done = start + rows * columns
        positions[:, start:done] = following
        positions[1, start:done] += np.repeat(np.arange(rows), columns)
        positions[2, start:done] += np.tile(np.arange(columns), rows)
        following += max(rows, columns)
    positions[:, done:] = np.arange(following, following + len(tokens) - done)
    return positions

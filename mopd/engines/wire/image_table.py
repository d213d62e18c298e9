"""Images of a request by digest: the files themselves travel once (``mopd.engines.wire.images``).

One row of 8 int32 for each image, in order of the sequences and of their places in them::

    sequence · digest as 4 little-endian words · grid (frames, height, width in patches)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mopd.base.types import PromptImage

COLUMNS = 8
MAX_IMAGES = 4096
"""Most images of one request."""
MAX_SIDE = 2**15
"""Largest height or width of an image grid, in patches."""

Array = np.ndarray[Any, Any]
NamedImage = tuple[bytes, tuple[int, int, int]]
"""Digest and grid of an image."""


def to_table(images: Sequence[Sequence[PromptImage]] | None) -> Array:
    """Return the images of each sequence as [8 * M] int32; empty for none."""
    rows = [
        [sequence, *np.frombuffer(image.digest, dtype="<i4").tolist(), *image.grid]
        for sequence, own in enumerate(images or ())
        for image in own
    ]
    return np.array(rows, dtype=np.int32).reshape(-1)


def from_table(table: Array, num_sequences: int) -> list[list[NamedImage]]:
    """Undo ``to_table`` for each sequence; ``ValueError`` for a table that cannot be one."""
    if len(table) % COLUMNS or len(table) > MAX_IMAGES * COLUMNS:
        raise ValueError(f"{len(table)} numbers of images: {COLUMNS} for each of at most {MAX_IMAGES}")
    rows = table.reshape(-1, COLUMNS)
    sequences, grids = rows[:, 0], rows[:, 5:]
    if len(rows) and not (sequences[0] >= 0 and sequences[-1] < num_sequences and (np.diff(sequences) >= 0).all()):
        raise ValueError(f"images belong to other sequences than the {num_sequences} that came, or are not in order")
    if not ((grids >= 1) & (grids <= MAX_SIDE)).all() or not (grids[:, 0] == 1).all():
        raise ValueError("an image's grid is not one frame of positive sides")
    found: list[list[NamedImage]] = [[] for _ in range(num_sequences)]
    for row in rows:
        t, height, width = row[5:].tolist()
        found[int(row[0])].append((row[1:5].astype("<i4").tobytes(), (t, height, width)))
    return found

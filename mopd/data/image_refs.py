"""Conversion of image references to a field of the data plane, and back."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from mopd.base.types import ImageRef


def image_refs_to_tensor(refs: Sequence[ImageRef]) -> Tensor:
    """Return [N, 8] int64: file, row, number, digest as two numbers (big-endian, signed), grid; [0, 8] if empty."""
    rows = [[ref.file, ref.row, ref.number, *struct.unpack(">qq", ref.digest), *ref.grid] for ref in refs]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 8)


def image_refs_from_tensor(images: Tensor) -> tuple[ImageRef, ...]:
    """Return the references of a tensor that ``image_refs_to_tensor`` made."""
    return tuple(
        ImageRef(file=file, row=row, number=number, digest=struct.pack(">qq", high, low), grid=(t, h, w))
        for file, row, number, high, low, t, h, w in images.tolist()
    )

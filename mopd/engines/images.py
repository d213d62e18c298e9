"""Sequences and the images they hold: joined on their way through queues and routers, split again for an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from mopd.base.types import PromptImage
from mopd.engines.interface import EngineRejected, Images

NO_VISION = "the model sees no images: route rows with images to one that does"
SequenceT = TypeVar("SequenceT")
Item = tuple[SequenceT, int, tuple[PromptImage, ...]]
"""A sequence, its number (prompt length or seed) and its images."""


def join(sequences: Sequence[SequenceT], numbers: Sequence[int], images: Images) -> list[Item[SequenceT]]:
    """Return one item per sequence; ``ValueError`` unless every sequence has its number and its images."""
    if images is None:
        return [(sequence, number, ()) for sequence, number in zip(sequences, numbers, strict=True)]
    return [(sequence, number, tuple(own)) for sequence, number, own in zip(sequences, numbers, images, strict=True)]


def split(items: Sequence[Item[SequenceT]]) -> tuple[list[SequenceT], list[int], Images]:
    """Undo ``join``; the images are ``None`` if no sequence has one."""
    images = [own for _, _, own in items]
    return [sequence for sequence, _, _ in items], [number for _, number, _ in items], images if any(images) else None


def refuse_images(images: Images, name: str, *, because: str = NO_VISION) -> None:
    """Raise ``EngineRejected`` for any image: engine ``name`` sees none and would answer as if there were none."""
    if images is not None and any(images):
        raise EngineRejected(f"{name}: {because}")

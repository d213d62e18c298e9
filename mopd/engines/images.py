"""Images beside the sequences that hold them: together on their way through queues and routers, apart for an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from mopd.engines.interface import EngineRejected, Images
from mopd.types import PromptImage

NO_VISION = "the model sees no images: route rows with images to one that does"
SequenceT = TypeVar("SequenceT")
Item = tuple[SequenceT, int, tuple[PromptImage, ...]]
"""A sequence, its prompt's length or its seed, and its images."""


def join(sequences: Sequence[SequenceT], numbers: Sequence[int], images: Images) -> list[Item[SequenceT]]:
    """One item per sequence; ``ValueError`` where not every sequence has its number and its images."""
    if images is None:
        return [(sequence, number, ()) for sequence, number in zip(sequences, numbers, strict=True)]
    return [(sequence, number, tuple(own)) for sequence, number, own in zip(sequences, numbers, images, strict=True)]


def split(items: Sequence[Item[SequenceT]]) -> tuple[list[SequenceT], list[int], Images]:
    """Inverse of ``join``; images are ``None`` where no sequence has one."""
    images = [own for _, _, own in items]
    return [sequence for sequence, _, _ in items], [number for _, number, _ in items], images if any(images) else None


def refuse_images(images: Images, name: str, *, because: str = NO_VISION) -> None:
    """``EngineRejected`` for any: the engine ``name`` sees none, and would answer as if they were not there."""
    if images is not None and any(images):
        raise EngineRejected(f"{name}: {because}")

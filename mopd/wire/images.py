"""Encoded image files on their way to a server, which knows them by their hashes from then on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mopd.config.data import MAX_IMAGE_BYTES
from mopd.wire.limits import MIB
from mopd.wire.messages import Array, Message, WireError, array_field, split_points

MAX_FILES = 256
"""Of one message."""
MAX_BODY_BYTES = MAX_IMAGE_BYTES + MIB
"""Of one message: the largest file and what stands around it, or smaller ones."""


@dataclass(frozen=True, kw_only=True)
class ImageFiles(Message):
    """Files as they are, end to end."""

    kind: ClassVar[str] = "images"
    lengths: Array = array_field("<i4")
    """[n] int32, bytes of each."""
    content: Array = array_field("<u1")
    """Their bytes."""

    def check(self) -> None:
        """See ``Message.check``."""
        if not 1 <= len(self.lengths) <= MAX_FILES:
            raise WireError(f"{len(self.lengths)} files: send 1 to {MAX_FILES}")
        if ((self.lengths < 1) | (self.lengths > MAX_IMAGE_BYTES)).any():
            raise WireError(f"a file has not 1 to {MAX_IMAGE_BYTES} bytes")
        if int(self.lengths.sum(dtype=np.int64)) != len(self.content):
            raise WireError(f"lengths add up to {int(self.lengths.sum())} but {len(self.content)} bytes came")

    @classmethod
    def of(cls, files: Sequence[bytes]) -> ImageFiles:
        """A message with these files."""
        lengths = np.array([len(file) for file in files], dtype=np.int32)
        return cls(lengths=lengths, content=np.frombuffer(b"".join(files), dtype=np.uint8))

    @property
    def files(self) -> list[bytes]:
        """Each by itself."""
        return [part.tobytes() for part in np.split(self.content, split_points(self.lengths))]


@dataclass(frozen=True, kw_only=True)
class ImagesKept(Message):
    """The server has them."""

    kind: ClassVar[str] = "kept"
    num_files: int

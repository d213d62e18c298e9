"""Encoded image files on their way to a server, which knows them by their hashes from then on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mopd.config.data import MAX_IMAGE_BYTES
from mopd.engines.wire.messages import MIB, Array, Message, WireError, array_field, split_points

MAX_FILES = 256
"""Most files of one message."""
MAX_BODY_BYTES = MAX_IMAGE_BYTES + MIB
"""Largest body of one message: the largest file and its frame, or smaller files."""


@dataclass(frozen=True, kw_only=True)
class ImageFiles(Message):
    """Image files, unchanged and end to end."""

    kind: ClassVar[str] = "images"
    lengths: Array = array_field("<i4")
    """[n] int32, bytes of each file."""
    content: Array = array_field("<u1")
    """[sum of ``lengths``] uint8, the files' bytes."""

    def check(self) -> None:
        """Raise ``WireError`` unless the lengths are possible and add up to the content."""
        if not 1 <= len(self.lengths) <= MAX_FILES:
            raise WireError(f"{len(self.lengths)} files: send 1 to {MAX_FILES}")
        if ((self.lengths < 1) | (self.lengths > MAX_IMAGE_BYTES)).any():
            raise WireError(f"a file has not 1 to {MAX_IMAGE_BYTES} bytes")
        if int(self.lengths.sum(dtype=np.int64)) != len(self.content):
            raise WireError(f"lengths add up to {int(self.lengths.sum())} but {len(self.content)} bytes came")

    @classmethod
    def of(cls, files: Sequence[bytes]) -> ImageFiles:
        """Build a message of these files."""
        lengths = np.array([len(file) for file in files], dtype=np.int32)
        return cls(lengths=lengths, content=np.frombuffer(b"".join(files), dtype=np.uint8))

    @property
    def files(self) -> list[bytes]:
        """The files, each by itself."""
        return [part.tobytes() for part in np.split(self.content, split_points(self.lengths))]


@dataclass(frozen=True, kw_only=True)
class ImagesKept(Message):
    """Answer to ``ImageFiles``: the server keeps them."""

    kind: ClassVar[str] = "kept"
    num_files: int

"""Cache of encoded images that clients have sent, by their hashes.

Every kept file can be used: a damaged one, or one of an unsupported kind, is refused when it arrives. A request holds
the files that it names, whatever is dropped later.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

from mopd.base.text import one_line
from mopd.base.types import PromptImage, UserError
from mopd.engines.interface import NO_VISION, EngineRejected, Images
from mopd.engines.vision import EngineVision, check_images
from mopd.engines.wire.image_table import Array, from_table
from mopd.serving.errors import Refusal, bad_request

MAX_KEPT_BYTES = 2**29
"""Bytes of kept files; beyond them the least recently requested images are dropped."""

_CachedImage = tuple[bytes, int, int]
"""File, height and width."""


class ImageCache:
    """Kept images of one server. Not thread-safe: use from one event loop."""

    def __init__(self, sight: EngineVision | None, name: str, *, max_bytes: int = MAX_KEPT_BYTES) -> None:
        """``sight`` is the engine's, ``name`` its model's."""
        self._vision, self._name, self._max_bytes = sight, name, max_bytes
        self._files: OrderedDict[bytes, _CachedImage] = OrderedDict()
        self._decoding = asyncio.Lock()
        self.num_bytes = 0

    def require_vision(self) -> None:
        """Raise ``Refusal`` 400 if the engine's model sees no images."""
        if self._vision is None:
            raise bad_request(f"{self._name}: {NO_VISION}")

    async def add(self, files: Sequence[bytes]) -> None:
        """Keep these files. ``Refusal`` 400 for the first one that cannot be used; those before it are kept."""
        from mopd.data.image_files import digest_of, image_size, read_rgb  # Pillow, which models of text never need

        for content in files:
            digest = digest_of(content)
            if digest in self._files:
                self._files.move_to_end(digest)
                continue
            place = f"image {digest.hex()}"
            try:
                async with self._decoding:  # one decoded image at a time
                    await asyncio.to_thread(read_rgb, content, place)
                height, width = image_size(content, place)
            except UserError as error:
                raise bad_request(one_line(error)) from error
            self._files[digest] = (content, height, width)
            self.num_bytes += len(content)
            self._make_room()

    def of(self, table: Array, sequences: Sequence[Any]) -> Images:
        """Return the images that a request's ``table`` names, checked against its ``sequences`` [L].

        Raises:
            Refusal: 428 with the digests of files that are not here; 400 for what can never be answered.
        """
        named = from_table(table, len(sequences))
        if not any(named):
            self._check(sequences, None)
            return None
        self.require_vision()
        unknown = {digest for own in named for digest, _ in own if digest not in self._files}
        if unknown:
            message = f"{len(unknown)} images are not here: send them to /v1/images and ask again"
            raise Refusal(428, "unknown_images", message, digests=[digest.hex() for digest in sorted(unknown)])
        images = [[self._image(digest, grid) for digest, grid in own] for own in named]
        self._check(sequences, images)
        return images

    def _image(self, digest: bytes, grid: tuple[int, int, int]) -> PromptImage:
        assert self._vision is not None
        content, height, width = self._files[digest]
        self._files.move_to_end(digest)
        own = self._vision.processing.grid(height, width)
        if own != grid:
            raise bad_request(
                f"image {digest.hex()} has the grid {list(own)} here, {list(grid)} for who asks: give both sides one "
                "processor and one data.max_pixels"
            )
        return PromptImage(digest=digest, grid=grid, load=partial(bytes, content))

    def _check(self, sequences: Sequence[Any], images: Images) -> None:
        if self._vision is not None:  # a bad request must not spoil the call that it shares
            try:
                check_images(self._vision, sequences, images, name=self._name)
            except (ValueError, EngineRejected) as error:
                raise bad_request(one_line(error)) from error

    def _make_room(self) -> None:
        while self.num_bytes > self._max_bytes and len(self._files) > 1:
            _, (content, _, _) = self._files.popitem(last=False)
            self.num_bytes -= len(content)

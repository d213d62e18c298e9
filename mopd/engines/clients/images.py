"""Image files on their way to one server: each is sent once for all requests, and again if the server misses it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TypeVar

from mopd.base.types import PromptImage
from mopd.config.data import MAX_IMAGE_BYTES
from mopd.engines.interface import EngineRejected, EngineUnavailable, Images
from mopd.engines.wire.images import MAX_FILES, ImageFiles
from mopd.engines.wire.messages import encode_aside

MAX_KNOWN = 2**18
"""Digests remembered as sent, 16 bytes each."""
MAX_ROUNDS = 4
"""Times that missing images are sent for one request. A server that misses them still has no room for all of them."""

T = TypeVar("T")


class UnknownImages(EngineRejected):
    """HTTP 428: the server does not have, or no longer has, the files of these ``digests``."""

    def __init__(self, message: str, digests: Collection[bytes]) -> None:
        super().__init__(message)
        self.digests = digests


class ImageSender:
    """Sends image files to one server and remembers which it has. Belongs to the event loop of its first call."""

    def __init__(self, post: Callable[[bytes], Awaitable[object]], name: str) -> None:
        """Keep ``post``, which sends the body of one ``ImageFiles`` message, and ``name``, the server's in errors."""
        self._post, self._name = post, name
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._turn = asyncio.Lock()

    async def asked(self, images: Images, ask: Callable[[], Awaitable[T]]) -> T:
        """Provide the server with ``images`` and return ``ask()``. Raises what sending them and ``ask`` raise."""
        wanted = {image.digest: image for own in images or () for image in own}
        if not wanted:
            return await ask()
        for _ in range(MAX_ROUNDS):
            await self._provide(wanted)
            try:
                return await ask()
            except UnknownImages as unknown:
                for digest in unknown.digests:
                    self._known.pop(digest, None)
        raise EngineUnavailable(f"{self._name}: misses images that it was sent {MAX_ROUNDS} times: it has no room")

    async def _provide(self, wanted: Mapping[bytes, PromptImage]) -> None:
        async with self._turn:  # who waits here finds the files that another caller has sent meanwhile
            files: dict[bytes, bytes] = {}
            for image in [image for digest, image in wanted.items() if digest not in self._known]:
                content = await asyncio.to_thread(image.load)
                if files and (len(files) == MAX_FILES or _size(files) + len(content) > MAX_IMAGE_BYTES):
                    await self._send_files(files)
                    files = {}
                files[image.digest] = content
            if files:
                await self._send_files(files)

    async def _send_files(self, files: Mapping[bytes, bytes]) -> None:
        await self._post(await encode_aside(ImageFiles.of([*files.values()])))
        self._known.update(dict.fromkeys(files))
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)


def _size(files: Mapping[bytes, bytes]) -> int:
    return sum(map(len, files.values()))

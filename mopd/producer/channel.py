"""Calls in both directions between two processes over one pair of sockets that nobody else can reach.

A message is a msgpack head and raw frames, which follow in pieces::

    <uint32 bytes of the head> <uint32 frames> <uint64 bytes of each frame> head
    <uint32 0> <uint32 1> <uint64 bytes of the piece> piece      the next bytes of the frames, in order
    head: ["call", number, name, arguments], ["tell", 0, name, arguments],
          ["answer", number, value] or ["error", number, kind, text]

Between two pieces other messages may stand, so that none waits for a model's weights. One message's frames are on their
way at a time; a message with frames that comes before the last piece takes the place of the one that was given up.

The end of either process ends every call that waits for it, at once.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from mopd.data_plane.frames import packed, unpacked
from mopd.tasks import Tasks
from mopd.types import CutOffError, NonFiniteError, UserError

Frames = Sequence[bytes]
Handler = Callable[..., Awaitable[Any]]
"""Called with the arguments of a call, and ``frames`` where it came with any; returns a plain value."""

MAX_HEAD_BYTES = 2**28
"""The domains of all rows of a data set are in the largest."""
MAX_FRAMES = 2**16
MAX_FRAME_BYTES = 2**30
BUFFER_BYTES = 2**20
PIECE_BYTES = 2**20
"""What a message that comes meanwhile waits for: half a millisecond, where each piece costs 50 us."""
_ERRORS: dict[str, type[UserError]] = {cls.__name__: cls for cls in (UserError, CutOffError, NonFiniteError)}


class PeerEnded(RuntimeError):
    """The other process is gone."""


class Channel:
    """One end. Belongs to one event loop."""

    def __init__(self, peer: str, handlers: Mapping[str, Handler]) -> None:
        """``peer`` names the other process in messages; ``handlers`` are what it may call."""
        self.peer = peer
        self._handlers = dict(handlers)
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._sending, self._sending_frames = asyncio.Lock(), asyncio.Lock()
        self._arriving: _Arriving | None = None
        self._ended: BaseException | None = None
        self._is_open = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self.num_calls = 0
        self.bytes_moved = 0
        """Of calls and answers, in both directions."""

    def answer(self, handlers: Mapping[str, Handler]) -> None:
        """More that the other process may call from now on."""
        self._handlers |= handlers

    async def run(self, end: socket.socket) -> None:
        """Serve until the other end is closed; ``PeerEnded`` then, in every call that waits too."""
        try:
            reader, self._writer = await asyncio.open_connection(sock=end, limit=BUFFER_BYTES)
            self._is_open.set()
            async with Tasks() as tasks:
                await tasks.unless_failed(self._receive(reader, tasks))
        except (EOFError, ConnectionError) as error:
            self._end(PeerEnded(f"{self.peer} has ended"))
            raise PeerEnded(f"{self.peer} has ended") from error
        except BaseException as error:
            self._end(error)
            raise
        finally:
            if self._writer is not None:
                self._writer.close()

    async def call(self, name: str, *arguments: Any, frames: Frames = ()) -> Any:
        """What the other end's handler returns. A handler has deadlines of its own.

        Raises:
            UserError: as the handler raised it.
            PeerEnded: there is nobody to answer.
            RuntimeError: any other error of the handler, with its traceback.
        """
        number = next(self._numbers)
        future = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self.num_calls += 1
        try:
            await self._send(["call", number, name, arguments], frames)
            return await future
        finally:
            del self._waiting[number]
            if future.done() and not future.cancelled():
                future.exception()  # where sending has raised the same

    async def tell(self, name: str, *arguments: Any) -> None:
        """A call that nobody waits for."""
        await self._send(["tell", 0, name, arguments])

    async def _receive(self, reader: asyncio.StreamReader, tasks: Tasks) -> None:
        while True:
            message = await self._next(reader)
            if message is None:
                continue
            (kind, number, *rest), frames = message
            if kind in ("call", "tell"):
                name, arguments = rest
                tasks.start(self._answer(number if kind == "call" else None, name, arguments, frames))
            elif number in self._waiting:  # else its caller has gone away
                self._settle(self._waiting[number], kind, rest)

    async def _next(self, reader: asyncio.StreamReader) -> tuple[Sequence[Any], Frames] | None:
        """Head and frames of a message that is whole with what comes next, if one is."""
        head_bytes, num_frames = struct.unpack("<II", await reader.readexactly(8))
        if head_bytes > MAX_HEAD_BYTES or num_frames > MAX_FRAMES:
            raise RuntimeError(f"{self.peer} sent a message of {head_bytes} bytes and {num_frames} frames")
        sizes = struct.unpack(f"<{num_frames}Q", await reader.readexactly(8 * num_frames))
        if any(size > MAX_FRAME_BYTES for size in sizes):
            raise RuntimeError(f"{self.peer} sent a frame of {max(sizes)} bytes")
        self.bytes_moved += 8 + head_bytes + 8 * num_frames
        if head_bytes:
            head = unpacked(await reader.readexactly(head_bytes))
            if not sizes:
                return head, ()
            self._arriving = _Arriving(head, sizes)
        elif self._arriving is None or len(sizes) != 1 or not 0 < sizes[0] <= PIECE_BYTES:
            raise RuntimeError(f"{self.peer} sent a piece of no frame")
        else:
            self._arriving.add(await reader.readexactly(sizes[0]))
            self.bytes_moved += sizes[0]
        if not self._arriving.is_whole:
            return None
        whole, self._arriving = self._arriving, None
        return whole.head, whole.frames

    def _settle(self, future: asyncio.Future[Any], kind: str, rest: Sequence[Any]) -> None:
        if future.done():
            return
        if kind == "answer":
            future.set_result(rest[0])
            return
        error, text = rest
        if error in _ERRORS:
            future.set_exception(_ERRORS[error](text))
        else:
            future.set_exception(RuntimeError(f"in {self.peer}:\n{text}"))

    async def _answer(self, number: int | None, name: str, arguments: Sequence[Any], frames: Frames) -> None:
        try:
            given = {"frames": frames} if frames else {}
            value = await self._handlers[name](*arguments, **given)
        except UserError as error:
            kind = next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _ERRORS)
            head = ["error", number, kind, str(error)]
        except Exception as error:  # is raised in the caller
            head = ["error", number, "", "".join(traceback.format_exception(error))]
        else:
            head = ["answer", number, value]
        if number is not None:
            await self._send(head)
        elif head[0] == "error":
            raise RuntimeError(head[3])

    async def _send(self, head: Sequence[Any], frames: Frames = ()) -> None:
        await self._is_open.wait()  # ``run`` is about to begin, or has ended
        if self._ended is not None or self._writer is None or self._writer.is_closing():
            raise PeerEnded(f"{self.peer} has ended") from self._ended
        body = packed(head)
        sizes = [len(frame) for frame in frames]
        start = struct.pack(f"<II{len(frames)}Q", len(body), len(frames), *sizes) + body
        if not frames:
            await self._write(start)
            return
        async with self._sending_frames:
            await self._write(start)
            for frame in frames:
                view = memoryview(frame)
                for first in range(0, len(view), PIECE_BYTES):
                    piece = view[first : first + PIECE_BYTES]
                    await self._write(struct.pack("<IIQ", 0, 1, len(piece)), piece)

    async def _write(self, *parts: bytes | memoryview) -> None:
        """All of them, with nothing between; returns when there is room for more. Whoever came first is next."""
        assert self._writer is not None
        self.bytes_moved += sum(map(len, parts))
        try:
            async with self._sending:
                for part in parts:
                    self._writer.write(part)
                await self._writer.drain()
        except ConnectionError as error:
            raise PeerEnded(f"{self.peer} has ended") from error

    def _end(self, error: BaseException) -> None:
        self._ended = error
        self._is_open.set()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(PeerEnded(f"{self.peer} has ended"))


class _Arriving:
    """A message whose frames are on their way."""

    def __init__(self, head: Sequence[Any], sizes: Sequence[int]) -> None:
        self.head, self._sizes = head, sizes
        self.frames: list[bytes] = []
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        """In ``_pieces``."""
        self._close_frames()

    @property
    def is_whole(self) -> bool:
        """Nothing more comes."""
        return len(self.frames) == len(self._sizes)

    def add(self, piece: bytes) -> None:
        """The next bytes. ``RuntimeError`` for more than the frame has."""
        self._pieces.append(piece)
        self._num_bytes += len(piece)
        if self._num_bytes > self._sizes[len(self.frames)]:
            raise RuntimeError(f"a frame of {self._sizes[len(self.frames)]} bytes has {self._num_bytes}")
        self._close_frames()

    def _close_frames(self) -> None:
        """Those that are complete; one of no bytes is at once."""
        while not self.is_whole and self._num_bytes == self._sizes[len(self.frames)]:
            self.frames.append(b"".join(self._pieces))
            self._pieces, self._num_bytes = [], 0

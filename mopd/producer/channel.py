"""Calls in both directions between two processes over one pair of sockets that nobody else can reach.

A message is a msgpack head and raw frames::

    <uint32 bytes of the head> <uint32 frames> <uint64 bytes of each frame> head frames
    head: ["call", number, name, arguments], ["tell", 0, name, arguments],
          ["answer", number, value] or ["error", number, kind, text]

The end of either process ends every call that waits for it, at once. A call has no deadline, as its handler may wait
for several things, each with a deadline: both ends tell that they are ``alive``, and one that is silent is given up.
"""

from __future__ import annotations

import asyncio
import itertools
import math
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
BEAT_S = 10.0
"""Each end says so often that it is there."""
_ERRORS: dict[str, type[UserError]] = {cls.__name__: cls for cls in (UserError, CutOffError, NonFiniteError)}


class PeerEnded(RuntimeError):
    """The other process is gone."""


class Channel:
    """One end. Belongs to one event loop."""

    def __init__(self, peer: str, handlers: Mapping[str, Handler], *, silent_s: float = math.inf) -> None:
        """``peer`` names the other process in messages; ``handlers`` are what it may call; ``silent_s``: how
        long it may say nothing, as its event loop is busy."""
        self.peer, self._silent_s = peer, silent_s
        self._handlers: dict[str, Handler] = {"alive": self._note_life, **handlers}
        self._has_spoken = False
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._sending = asyncio.Lock()
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
        """Serve until the other end is closed; ``PeerEnded`` then, in every call that waits too. ``UserError`` when
        it is silent."""
        try:
            reader, self._writer = await asyncio.open_connection(sock=end, limit=BUFFER_BYTES)
            self._is_open.set()
            async with Tasks() as tasks:
                tasks.start(self._beat())
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

    async def _note_life(self) -> None:
        self._has_spoken = True

    async def _beat(self) -> None:
        """Counts what this end sees, not seconds: while its own event loop was busy, it has heard nothing."""
        num_silent = 0
        while num_silent * BEAT_S <= self._silent_s:
            await asyncio.sleep(BEAT_S)
            num_silent, self._has_spoken = 0 if self._has_spoken else num_silent + 1, False
            await self.tell("alive")
        raise UserError(f"{self.peer} gave no sign of life for {self._silent_s:g} s: it was stopped, or hangs")

    async def _receive(self, reader: asyncio.StreamReader, tasks: Tasks) -> None:
        while True:
            head_bytes, num_frames = struct.unpack("<II", await reader.readexactly(8))
            if head_bytes > MAX_HEAD_BYTES or num_frames > MAX_FRAMES:
                raise RuntimeError(f"{self.peer} sent a message of {head_bytes} bytes and {num_frames} frames")
            sizes = struct.unpack(f"<{num_frames}Q", await reader.readexactly(8 * num_frames))
            if any(size > MAX_FRAME_BYTES for size in sizes):
                raise RuntimeError(f"{self.peer} sent a frame of {max(sizes)} bytes")
            kind, number, *rest = unpacked(await reader.readexactly(head_bytes))
            frames = [await reader.readexactly(size) for size in sizes]
            self.bytes_moved += 8 + head_bytes + sum(sizes) + 8 * num_frames
            if kind in ("call", "tell"):
                name, arguments = rest
                tasks.start(self._answer(number if kind == "call" else None, name, arguments, frames))
            elif number in self._waiting:  # else its caller has gone away
                self._settle(self._waiting[number], kind, rest)

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
        self.bytes_moved += 8 + len(body) + sum(sizes) + 8 * len(sizes)
        try:
            async with self._sending:
                self._writer.write(struct.pack(f"<II{len(frames)}Q", len(body), len(frames), *sizes) + body)
                for frame in frames:
                    self._writer.write(frame)
                    await self._writer.drain()
                await self._writer.drain()
        except ConnectionError as error:
            raise PeerEnded(f"{self.peer} has ended") from error

    def _end(self, error: BaseException) -> None:
        self._ended = error
        self._is_open.set()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(PeerEnded(f"{self.peer} has ended"))

"""The link between the orchestrator and rank 0: a pair of sockets that nobody else can reach, one end in each process.

::

    orchestrator                                    rank 0, main thread
      {call, kwargs}  ─────────────────────────>      executes it with the other ranks
      <─── {more} + frame, as often as needed ──      weights, chunk by chunk
      <───────────────────────── {value} + frames     what the call gave
      beat, every few seconds  ────────────────>      waits as long as beats come
      {end} or {error}  ───────────────────────>      leaves; the run ends

A message is ``<uint32 bytes of the head> <uint32 frames> <uint64 bytes of each frame>``, the head as JSON, and the raw
frames; a beat is a message without a head. One call is under way at a time. The death of either process closes the
link.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from mopd.base.files.writing import refusal
from mopd.base.types import CutOffError, NonFiniteError, UserError

Frames = Sequence[bytes | memoryview]

MAX_HEAD_BYTES = 2**28
"""The domains of a data set, or a step's plan, are in the largest."""
MAX_FRAME_BYTES = 2**30
_BEAT = struct.pack("<II", 0, 0)
_ERRORS: dict[str, type[UserError]] = {cls.__name__: cls for cls in (UserError, CutOffError, NonFiniteError)}


class LinkEnded(RuntimeError):
    """The other process is gone."""


class RankLink:
    """One end. One thread sends and one receives at a time; ``beat`` may come from a third."""

    def __init__(self, end: socket.socket, peer: str, *, silent_s: float | None = None) -> None:
        """``peer`` names the other process in messages; ``silent_s`` is the longest time that it may say nothing."""
        self._end, self.peer, self._silent_s = end, peer, silent_s
        end.settimeout(silent_s)
        self._sending = threading.Lock()
        self.on_sign: Callable[[], None] = lambda: None
        """Called for each message and beat that comes."""
        self.bytes_received = 0
        self.is_busy = False
        """This end was asked for something that it has not answered."""

    def set_silence(self, seconds: float) -> None:
        """Wait for so long from now on."""
        self._silent_s = seconds
        self._end.settimeout(seconds)

    def send(self, head: dict[str, Any], frames: Frames = ()) -> None:
        """Send one message; returns when the kernel has taken it.

        Raises:
            LinkEnded: nobody will read it.
        """
        body = json.dumps(head).encode()
        sizes = [len(frame) for frame in frames]
        start = struct.pack(f"<II{len(sizes)}Q", len(body), len(sizes), *sizes) + body
        with self._sending:
            try:
                self._end.sendall(start)
                for frame in frames:
                    self._end.sendall(frame)
            except TimeoutError as error:
                raise self._silent() from error
            except OSError as error:
                raise LinkEnded(f"{self.peer} has ended") from error

    def beat(self) -> None:
        """Give a sign of life, unless many wait unread. ``LinkEnded`` where nobody will read it."""
        with self._sending, contextlib.suppress(BlockingIOError):
            try:
                self._end.send(_BEAT, socket.MSG_DONTWAIT)
            except BlockingIOError:
                raise
            except OSError as error:
                raise LinkEnded(f"{self.peer} has ended") from error

    def receive(self) -> tuple[dict[str, Any], list[bytes]]:
        """Return head and frames of the next message that is no beat.

        Raises:
            LinkEnded: the other process closed its end.
            UserError: it gave no sign of life for ``silent_s``.
        """
        while True:
            head_bytes, num_frames = struct.unpack("<II", self._exactly(8))
            self.on_sign()
            if not head_bytes:
                continue
            sizes = struct.unpack(f"<{num_frames}Q", self._exactly(8 * num_frames))
            if head_bytes > MAX_HEAD_BYTES or any(size > MAX_FRAME_BYTES for size in sizes):
                raise RuntimeError(f"{self.peer} sent a message of {head_bytes} bytes and frames of {list(sizes)[:8]}")
            head: dict[str, Any] = json.loads(self._exactly(head_bytes))
            return head, [self._exactly(size) for size in sizes]

    def next_command(self) -> dict[str, Any]:
        """On rank 0: head of the orchestrator's next message, a call or the ``end``.

        Raises:
            UserError, RuntimeError: what ended the orchestrator, which said so; and as ``receive``.
        """
        head, _ = self.receive()
        if "error" in head:
            raise error_of(head, self.peer)
        self.is_busy = "call" in head
        return head

    def answer(self, value: Any, frames: Frames = ()) -> None:
        """What the last call gave; raises as ``send``."""
        self.is_busy = False
        self.send({"value": value}, frames)

    def close(self) -> None:
        """End the link, also for a thread that waits in ``receive``."""
        with contextlib.suppress(OSError):  # the other end is gone already
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def _exactly(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            try:
                part = self._end.recv(size, socket.MSG_WAITALL)
            except TimeoutError as error:
                raise self._silent() from error
            except OSError as error:
                raise LinkEnded(f"{self.peer} has ended") from error
            if not part:
                raise LinkEnded(f"{self.peer} has ended")
            parts.append(part)
            size -= len(part)
            self.bytes_received += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _silent(self) -> UserError:
        return UserError(
            f"{self.peer} gave no sign of life for {self._silent_s:g} s (schedule.wait_timeout_s): it was stopped, or "
            "hangs"
        )


def error_head(error: BaseException) -> dict[str, Any]:
    """A message that says why its sender ends; a full disk's error is one that the user can cure."""
    error = error if isinstance(error, UserError) else refusal(error) or error
    if isinstance(error, UserError):
        kind = next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _ERRORS)
        return {"error": kind, "text": str(error)}
    return {"error": "", "text": "".join(traceback.format_exception(error))}


def error_of(head: dict[str, Any], peer: str) -> Exception:
    """The inverse of ``error_head``: the user error as it was raised, any other one with its traceback as text."""
    if head["error"]:
        return _ERRORS[head["error"]](head["text"])
    return RuntimeError(f"in {peer}:\n{head['text']}")

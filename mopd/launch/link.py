"""The link between the orchestrator and rank 0: a pair of sockets that no other process can reach.

::

    orchestrator                                    rank 0, main thread
      {call, kwargs}  ─────────────────────────>      executes it with the other ranks
      <─── {more} + frame, as often as needed ──      weights, part by part
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
from mopd.base.types import CutOffError, LostError, NonFiniteError, UserError

Frames = Sequence[bytes | memoryview]

_BEAT = struct.pack("<II", 0, 0)
_ERRORS: dict[str, type[UserError]] = {cls.__name__: cls for cls in (UserError, CutOffError, LostError, NonFiniteError)}


class LinkEnded(RuntimeError):
    """The other process has ended."""


class RankLink:
    """One end of the link. One thread sends and one receives at a time; a third may call ``beat``."""

    def __init__(self, end: socket.socket, peer: str, *, silent_s: float | None = None) -> None:
        """``peer`` names the other process in messages; ``silent_s`` is the longest time that it may say nothing."""
        self._end, self.peer, self._silent_s = end, peer, silent_s
        end.settimeout(silent_s)
        self._sending = threading.Lock()
        self.on_sign: Callable[[], None] = lambda: None
        """Called for each message and beat that comes."""
        self.is_busy = False
        """Whether a call of the other end is unanswered."""

    def set_silence(self, seconds: float) -> None:
        """Set the longest silence of the other process."""
        self._silent_s = seconds
        self._end.settimeout(seconds)

    def send(self, head: dict[str, Any], frames: Frames = ()) -> None:
        """Send one message; returns when the kernel has taken it.

        Raises:
            LinkEnded: the other process has ended.
            UserError: it has not read for ``silent_s``.
        """
        body = json.dumps(head).encode()
        sizes = [len(frame) for frame in frames]
        start = struct.pack(f"<II{len(sizes)}Q", len(body), len(sizes), *sizes) + body
        with self._sending:
            try:
                self._end.sendall(start)
                for frame in frames:
                    self._end.sendall(frame)
            except OSError as error:
                raise self._lost(error) from error

    def beat(self) -> None:
        """Give a sign of life, unless many wait unread. ``LinkEnded`` where the other process has ended."""
        with self._sending:
            try:
                self._end.send(_BEAT, socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass
            except OSError as error:
                raise self._lost(None) from error

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
            head: dict[str, Any] = json.loads(self._exactly(head_bytes))
            return head, [self._exactly(size) for size in sizes]

    def next_command(self) -> dict[str, Any]:
        """Return, on rank 0, the head of the orchestrator's next message: a call or the ``end``.

        Raises:
            UserError, RuntimeError: what ended the orchestrator, which said so; and as ``receive``.
        """
        head, _ = self.receive()
        if "error" in head:
            raise error_of(head, self.peer)
        self.is_busy = "call" in head
        return head

    def answer(self, value: Any, frames: Frames = ()) -> None:
        """Answer the last call; raises as ``send``."""
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
            except OSError as error:
                raise self._lost(error) from error
            if not part:
                raise self._lost(None)
            parts.append(part)
            size -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _lost(self, error: OSError | None) -> Exception:
        if isinstance(error, TimeoutError):
            return LostError(
                f"{self.peer} gave no sign of life for {self._silent_s:g} s (schedule.wait_timeout_s): it was stopped, "
                "or hangs"
            )
        return LinkEnded(f"{self.peer} has ended")


def error_head(error: BaseException) -> dict[str, Any]:
    """Return the head of a message that says why its sender ends; a full disk's error is the user's to cure."""
    error = error if isinstance(error, UserError) else refusal(error) or error
    if isinstance(error, UserError):
        kind = next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _ERRORS)
        return {"error": kind, "text": str(error)}
    return {"error": "", "text": "".join(traceback.format_exception(error))}


def error_of(head: dict[str, Any], peer: str) -> Exception:
    """Invert ``error_head``: return the user error as it was raised, any other one with its traceback as text."""
    if head["error"]:
        return _ERRORS[head["error"]](head["text"])
    return RuntimeError(f"in {peer}:\n{head['text']}")

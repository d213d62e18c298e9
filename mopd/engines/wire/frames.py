"""Several messages in one body, each of which can be used before the last one is there."""

from __future__ import annotations

from mopd.engines.wire.messages import WireError

FRAME_HEAD_BYTES = 4


def frame(body: bytes) -> bytes:
    """Return a message as part of a stream: its length in 4 little-endian bytes, then the message."""
    return len(body).to_bytes(FRAME_HEAD_BYTES, "little") + body


class FrameReader:
    """Cuts a stream of frames into messages."""

    def __init__(self, *, max_bytes: int) -> None:
        """Start an empty stream. ``max_bytes`` bounds one message, and with it the bytes kept here."""
        self._max_bytes = max_bytes
        self._rest = bytearray()

    def feed(self, part: bytes) -> list[bytes]:
        """Return the messages that are complete with ``part``; ``WireError`` for one longer than ``max_bytes``."""
        self._rest += part
        found: list[bytes] = []
        while len(self._rest) >= FRAME_HEAD_BYTES:
            size = int.from_bytes(self._rest[:FRAME_HEAD_BYTES], "little")
            if size > self._max_bytes:
                raise WireError(f"a message of {size} bytes in a stream: at most {self._max_bytes} can be right")
            if len(self._rest) < FRAME_HEAD_BYTES + size:
                break
            found.append(bytes(self._rest[FRAME_HEAD_BYTES : FRAME_HEAD_BYTES + size]))
            del self._rest[: FRAME_HEAD_BYTES + size]
        return found

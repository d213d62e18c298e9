"""Messages one after the other in one body, so that each can be used before the last one is there."""

from __future__ import annotations

from mopd.wire.messages import WireError

FRAME_HEAD_BYTES = 4


def frame(body: bytes) -> bytes:
    """A message within a stream: its length in 4 little-endian bytes, and the message."""
    return len(body).to_bytes(FRAME_HEAD_BYTES, "little") + body


class FrameReader:
    """Cuts a stream into the messages that ``frame`` put there."""

    def __init__(self, *, max_bytes: int) -> None:
        """``max_bytes`` bounds one message, and with it what waits here."""
        self._max_bytes = max_bytes
        self._rest = bytearray()

    def feed(self, part: bytes) -> list[bytes]:
        """The messages that are complete with ``part``; ``WireError`` for one that announces too much."""
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

"""Bodies in and out, with limits and deadlines: a slow or dishonest client holds no memory and no place for long."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from fastapi import Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from mopd.serving.errors import Refusal, bad_request, busy, too_large

logger = logging.getLogger(__name__)
SLICE_BYTES = 2**20
DISCARD_S = 2.0
"""Time to read away a refused body: a connection closed over unread bytes is reset, and the refusal lost."""
NUM_BODIES = 4
"""Bodies of the greatest size that may arrive at a time."""


class BodyReader:
    """Reads bodies within a limit each and a limit together."""

    def __init__(self, *, max_body_bytes: int, timeout_s: float) -> None:
        self._max_body_bytes, self._timeout_s = max_body_bytes, timeout_s
        self._arriving_bytes = 0

    async def read(self, request: Request) -> bytes:
        """The whole body.

        Raises:
            Refusal: 411 without a length, 413 above the limit, 429 when too much arrives at once, 408 when it is slow.
        """
        size = _content_length(request)
        if size > self._max_body_bytes:
            raise too_large(f"a body of {size} bytes: this server takes {self._max_body_bytes}")
        if self._arriving_bytes + size > NUM_BODIES * self._max_body_bytes:
            raise busy(f"{self._arriving_bytes} bytes of other bodies are arriving", retry_after_s=1.0)
        self._arriving_bytes += size
        try:
            return await asyncio.wait_for(_collect(request), self._timeout_s)
        except asyncio.TimeoutError as error:
            raise Refusal(408, "body_timeout", f"the body did not arrive within {self._timeout_s} s") from error
        except ClientDisconnect as error:
            raise Refusal(499, "client_gone", "the client went away") from error
        finally:
            self._arriving_bytes -= size


async def _collect(request: Request) -> bytes:
    return b"".join([part async for part in request.stream()])


async def discard(request: Request) -> None:
    """Read away what is left of a refused body, for a moment."""

    async def read_away() -> None:
        async for _ in request.stream():
            pass

    try:
        await asyncio.wait_for(read_away(), DISCARD_S)
    except (asyncio.TimeoutError, ClientDisconnect, RuntimeError):
        return  # slow, gone, or read before: the refusal is sent all the same


async def disconnected(request: Request) -> None:
    """Returns when the client is gone. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class SlicedResponse(Response):
    """A body that leaves slice by slice, each with a deadline; ``on_end`` is called however it ends."""

    def __init__(self, body: bytes, media_type: str, *, slice_timeout_s: float, on_end: Callable[[], None]) -> None:
        super().__init__(body, media_type=media_type)
        self._slice_timeout_s, self._on_end = slice_timeout_s, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. A client that does not read loses its connection."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            view = memoryview(self.body)
            for start in range(0, len(view), SLICE_BYTES):
                message = {
                    "type": "http.response.body",
                    "body": bytes(view[start : start + SLICE_BYTES]),
                    "more_body": start + SLICE_BYTES < len(view),
                }
                await asyncio.wait_for(send(message), self._slice_timeout_s)
        except asyncio.TimeoutError:  # uvicorn closes a connection whose answer is not complete
            logger.warning("a client did not read its answer for %g s", self._slice_timeout_s)
        finally:
            self._on_end()


def read_deadline(request: Request, header: str, longest_s: float) -> float:
    """``time.monotonic()`` at which nobody waits any more; ``Refusal`` 400 for a header that is no positive number."""
    text = request.headers.get(header)
    if text is None:
        return time.monotonic() + longest_s
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise bad_request(f"{header} is {text[:40]!r}: send a positive number of seconds")
    return time.monotonic() + min(seconds, longest_s)


def _content_length(request: Request) -> int:
    text = request.headers.get("content-length")
    if text is None or not text.isdecimal():
        raise Refusal(411, "length_required", "send a Content-Length")
    return int(text)

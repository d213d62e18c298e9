"""Bodies in and out, with limits and deadlines: a slow or dishonest client holds no memory and no place for long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from mopd.base.hardware import give_back_freed_memory
from mopd.engines.wire.messages import DEADLINE_HEADER
from mopd.serving.admission import ServerLimits
from mopd.serving.errors import Refusal, bad_request, busy, too_large

T = TypeVar("T")
SLICE_BYTES = 2**16
ARRIVING_BYTES = 2**23
"""Memory budget for request bodies being received. One body of the maximum size is always admitted."""

TRIM_EVERY_BYTES = 2**20
"""Bytes of read bodies after which freed memory is returned to the system: hundreds of thousands of tokens, whose work
takes far longer."""


class BodyReader:
    """Reads request bodies within one limit for each and one for all together. Bytes count when they have arrived, not
    when they are announced: a client that only announces holds nothing."""

    def __init__(self, limits: ServerLimits, *, max_arriving_bytes: int) -> None:
        self._limits, self._max_arriving_bytes = limits, max_arriving_bytes
        self._arrived_bytes = self._passed_bytes = 0
        self._arriving: set[asyncio.Future[bytearray]] = set()
        self._closed_because: Refusal | None = None

    @asynccontextmanager
    async def read(self, request: Request, max_bytes: int) -> AsyncIterator[bytearray]:
        """Yield the whole body, of at most ``max_bytes``. It counts until the context ends: decode it there, and drop
        it.

        Raises:
            Refusal: 411 without a length, 413 above the limit, 429 when too much arrives at once, 408 when it is slow,
                503 when the server is about to end.
        """
        text = request.headers.get("content-length")
        if text is None:
            raise Refusal(411, "length_required", "send a Content-Length")
        size = int(text)  # h11 accepts only 1 to 20 digits
        if size > max_bytes:
            raise too_large(f"a body of {size} bytes: this server takes {max_bytes}")
        if self._closed_because is not None:
            raise self._closed_because
        body = bytearray()  # a list of parts would cost much more than the bytes of small ones
        collecting = asyncio.ensure_future(self._collect(request, body))
        self._arriving.add(collecting)
        try:
            yield await self._in_time(collecting)
        finally:
            self._arriving.discard(collecting)
            self._arrived_bytes -= len(body)
            self._passed_bytes += len(body)
            if self._passed_bytes >= TRIM_EVERY_BYTES:
                self._passed_bytes = 0
                give_back_freed_memory()

    def close(self, reason: Refusal) -> None:
        """Refuse bodies that have not arrived yet, and all later ones."""
        self._closed_because = reason
        for collecting in self._arriving:
            collecting.cancel()

    async def _in_time(self, collecting: asyncio.Future[bytearray]) -> bytearray:
        try:
            return await asyncio.wait_for(collecting, self._limits.body_timeout_s)
        except asyncio.TimeoutError as error:
            longest_s, silence_s = self._limits.body_timeout_s, self._limits.stall_timeout_s
            message = f"the body did not arrive within {longest_s:g} s, or nothing of it for {silence_s:g} s"
            raise Refusal(408, "body_timeout", message) from error
        except ClientDisconnect as error:
            raise Refusal(499, "client_gone", "the client went away") from error
        except asyncio.CancelledError:
            if self._closed_because is not None:
                raise self._closed_because from None
            raise

    async def _collect(self, request: Request, body: bytearray) -> bytearray:
        parts = request.stream()
        while True:
            part = await asyncio.wait_for(anext(parts, None), self._limits.stall_timeout_s)
            if part is None:
                return body
            others = self._arrived_bytes - len(body)
            # a body that arrives alone is never turned away: the largest one would otherwise have no chance
            if self._arrived_bytes + len(part) > self._max_arriving_bytes and others:
                raise busy(f"{others} bytes of other bodies are arriving", retry_after_s=1.0)
            body += part
            self._arrived_bytes += len(part)


@asynccontextmanager
async def working(
    request: Request, call: Coroutine[Any, Any, T]
) -> AsyncIterator[tuple[asyncio.Task[T], asyncio.Task[None]]]:
    """Yield the running call, and a task that ends when the client has gone; cancel both at the context's end. The
    request's body must have been read."""
    tasks = asyncio.create_task(call), asyncio.create_task(_disconnected(request))
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def with_deadline(request: Request, deadline: float, call: Coroutine[Any, Any, T]) -> T:
    """Return the call's result; cancel it at the deadline (``Refusal`` 504) or when the client has gone (499). The
    request's body must have been read."""
    async with working(request, call) as (task, gone):
        timeout_s = max(0.0, deadline - time.monotonic())
        await asyncio.wait({task, gone}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise Refusal(499, "client_gone", "the client went away")
        raise Refusal(504, "deadline", "the deadline passed before the engine was done")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class SlicedResponse(Response):
    """A response that leaves slice by slice; ``on_end`` is called however it ends. A client that does not read it loses
    its connection (``connections``)."""

    def __init__(self, body: bytes, media_type: str, *, on_end: Callable[[], None]) -> None:
        super().__init__(body, media_type=media_type)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send_slices(send, bytes(self.body), more_body=False)
        finally:
            self._on_end()


async def send_slices(send: Send, body: bytes, *, more_body: bool) -> None:
    """Send a body, or with ``more_body`` a part of one, in slices that a client takes one by one."""
    view = memoryview(body)
    for start in range(0, len(view), SLICE_BYTES):
        is_last = start + SLICE_BYTES >= len(view)
        part = bytes(view[start : start + SLICE_BYTES])
        await send({"type": "http.response.body", "body": part, "more_body": more_body or not is_last})


def read_deadline(request: Request, longest_s: float) -> float:
    """Return the ``time.monotonic()`` of the client's deadline; ``Refusal`` 400 for a header that is no positive
    number."""
    text = request.headers.get(DEADLINE_HEADER)
    if text is None:
        return time.monotonic() + longest_s
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise bad_request(f"{DEADLINE_HEADER} is {text[:40]!r}: send a positive number of seconds")
    return time.monotonic() + min(seconds, longest_s)

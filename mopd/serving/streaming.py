"""The answer to a request for responses: each leaves as soon as it is complete, short ones before long ones.

::

    engine ── on_response(i, response) ──> queue ──> frame ──> client        before the first frame: an HTTP status
       └── error ─────────────────────> status, or after the first frame another one that says why the rest is missing
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np
from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from mopd.engines.interface import Generation, ResponseCallback
from mopd.engines.wire.messages import CONTENT_TYPE, GenerateAnswer, GenerateFailure, GenerateRequest, encode, frame
from mopd.serving.admission import Reservation
from mopd.serving.bodies import send_slices, working
from mopd.serving.errors import Refusal
from mopd.serving.metrics import ServerMetrics

MAX_MESSAGE_CHARACTERS = 1000
logger = logging.getLogger(__name__)


async def frames_of(
    message: GenerateRequest,
    draw: Callable[[ResponseCallback], Awaitable[list[Generation]]],
    *,
    request: Request,
    deadline: float,
    reservation: Reservation,
    metrics: ServerMetrics,
) -> AsyncIterator[bytes]:
    """Yield a frame for each response, in the order in which they end.

    ``draw`` is cancelled when the client has gone, at the deadline and when the iterator is closed. Room in the queue
    is released with each frame, and at the end.

    Raises:
        Refusal: 499, 504, or what ``draw`` raises.
    """
    checksum = message.checksum
    done: asyncio.Queue[tuple[int, Generation] | None] = asyncio.Queue()
    known: set[int] = set()

    def on_response(i: int, generation: Generation) -> None:
        known.add(i)
        done.put_nowait((i, generation))

    async def work() -> None:
        for i, generation in enumerate(await draw(on_response)):
            if i not in known:
                on_response(i, generation)

    try:
        async with working(request, work()) as (task, gone):
            for ending in (task, gone):
                # `None` wakes the loop below when the engine or the client has ended; responses queued before it are
                # sent first
                ending.add_done_callback(lambda _: done.put_nowait(None))
            for _ in range(len(message.lengths)):
                item = await _next(done, deadline)
                if item is None:
                    if not task.done():
                        raise Refusal(499, "client_gone", "the client went away")
                    await task
                    raise RuntimeError(f"the engine answered {len(known)} of {len(message.lengths)} samples")
                i, generation = item
                metrics.generated_tokens.inc(len(generation.tokens))
                yield frame(encode(_answer(checksum, i, generation)))
                reservation.release(num_tokens=int(message.lengths[i]), num_sequences=1)
    finally:
        reservation.release()


async def _next(done: asyncio.Queue[tuple[int, Generation] | None], deadline: float) -> tuple[int, Generation] | None:
    if not done.empty():
        return done.get_nowait()
    try:
        return await asyncio.wait_for(done.get(), max(0.0, deadline - time.monotonic()))
    except asyncio.TimeoutError as error:
        raise Refusal(504, "deadline", "the deadline passed before the engine was done") from error


def _answer(checksum: bytes, i: int, generation: Generation) -> GenerateAnswer:
    routes = generation.routes
    return GenerateAnswer(
        request_checksum=checksum,
        index=i,
        finish_reason=generation.finish_reason,
        tokens=generation.tokens.numpy().astype(np.int32),
        logprobs=generation.logprobs.numpy(),
        token_versions=generation.token_versions.numpy(),
        top_ids=np.zeros(0, np.int32) if generation.top_ids is None else generation.top_ids.reshape(-1).numpy(),
        routes=np.zeros(0, np.uint8) if routes is None else routes.numpy().reshape(-1).view(np.uint8),
    )


class StreamedResponse(Response):
    """Status 200 and an unknown number of frames. A client that does not read them loses its connection
    (``connections``)."""

    def __init__(self, first: bytes, rest: AsyncIterator[bytes], checksum: bytes, metrics: ServerMetrics) -> None:
        self.status_code, self.media_type, self.background = 200, CONTENT_TYPE, None
        self.init_headers()  # without a body: no Content-Length
        self._first, self._rest, self._checksum, self._metrics = first, rest, checksum, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the frames; ``rest`` is closed however it ends."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._send(send, self._first)
            try:
                async for part in self._rest:
                    await self._send(send, part)
            except Refusal as refusal:
                await self._fail(send, refusal)
            except Exception:
                logger.exception("/v1/generate failed")
                await self._fail(send, Refusal(500, "internal_error", "a fault of the server: its log has it"))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._rest.aclose()  # type: ignore[attr-defined]  # of a generator

    async def _send(self, send: Send, part: bytes) -> None:
        self._metrics.sent_bytes.inc(len(part))
        await send_slices(send, part, more_body=True)

    async def _fail(self, send: Send, refusal: Refusal) -> None:
        message = str(refusal)[:MAX_MESSAGE_CHARACTERS]
        failure = GenerateFailure(request_checksum=self._checksum, status=refusal.status, message=message)
        await self._send(send, frame(encode(failure)))

"""Checks of every request before its handler: it comes from no web page, and it says how long its body is."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mopd.serving.errors import Refusal

CLOSE = (b"connection", b"close")
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


class RequestChecks:
    """ASGI middleware that applies the checks. A request that is answered before its body was read ends its connection,
    and the answer says so: the bytes on their way cannot be taken for the next request."""

    def __init__(self, app: ASGIApp, *, is_open: bool) -> None:
        """Wrap ``app``. ``is_open``: there is no token, so that a web page on this machine could use the server."""
        self._app, self._is_open = app, is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request and pass it on, or answer with its refusal."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        is_started = False
        is_unread = b"transfer-encoding" in headers or headers.get(b"content-length", b"0").strip(b"0") != b""

        async def receive_and_see() -> Message:
            nonlocal is_unread
            message = await receive()
            is_unread = is_unread and message["type"] == "http.request" and message.get("more_body", False)
            return message

        async def send_and_close(message: Message) -> None:
            nonlocal is_started
            is_started = True
            if message["type"] == "http.response.start" and is_unread:
                message = {**message, "headers": [*message["headers"], CLOSE]}
            await send(message)

        refusal = self._refusal(headers)
        app = self._app if refusal is None else refusal.response()
        try:
            await app(scope, receive_and_see, send_and_close)
        except asyncio.CancelledError:  # uvicorn's, once the shutdown has waited long enough
            if not is_started:
                late = Refusal(503, "draining", "the server ended before the answer was ready")
                await late.response()(scope, receive, send)

    def _refusal(self, headers: dict[bytes, bytes]) -> Refusal | None:
        if b"transfer-encoding" in headers:
            return Refusal(411, "length_required", "send a Content-Length, no Transfer-Encoding")
        if self._is_open and b"origin" in headers:
            message = "requests of web pages (Origin) are refused: use another client, or start with --token-file"
            return Refusal(403, "forbidden", message)
        return None

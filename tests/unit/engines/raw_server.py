"""An HTTP server whose answers are bytes that a test makes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

Answer = Callable[[str, bytes], bytes]
"""``answer(path, body)`` returns status line, headers and body."""


def response(body: bytes, status: str = "200 OK", extra: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{extra}\r\n".encode() + body


@asynccontextmanager
async def serving(answer: Answer, heads: list[str] | None = None) -> AsyncIterator[str]:
    """Serve on this event loop and yield the URL. Heads of requests are added to ``heads``."""
    handlers: set[asyncio.Task[None] | None] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.add(asyncio.current_task())
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                sizes = [
                    int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-length")
                ]
                body = await reader.readexactly(sizes[0] if sizes else 0)
                if heads is not None:
                    heads.append(head)
                writer.write(answer(head.split()[1], body))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await asyncio.gather(*filter(None, handlers))  # they end with their clients, which have closed

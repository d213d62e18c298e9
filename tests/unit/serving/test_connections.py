"""Connections that end at the worst moment."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from mopd.serving.admission import ServerLimits
from mopd.serving.server import LINGER_S, Connection, ServerConfig

RESET_AT_CLOSE = struct.pack("ii", 1, 0)
"""``SO_LINGER`` with no time to linger."""
HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\ncontent-length: 100\r\n\r\nhalf a body"


def test_a_client_that_resets_between_its_refusal_and_the_close(capsys: pytest.CaptureFixture[str]) -> None:
    """The server is about to close its side of a socket whose other side is gone, and has not heard of it."""

    async def scenario() -> list[str]:
        loop = asyncio.get_running_loop()
        complaints: list[str] = []
        loop.set_exception_handler(lambda _, context: complaints.append(str(context)))
        client = socket.socket()
        answered = asyncio.Event()

        async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
            headers = [(b"content-length", b"2"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": 413, "headers": headers})
            await send({"type": "http.response.body", "body": b"no", "more_body": True})
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
            client.close()
            try:
                await send({"type": "http.response.body"})
            finally:
                answered.set()

        config = ServerConfig(FastAPI(), ServerLimits(max_tokens_per_request=16, max_queued_tokens=16))
        config.load()
        config.loaded_app = refuse
        state = ServerState()
        server = await loop.create_server(lambda: Connection(config, state, {}), "127.0.0.1")
        client.setblocking(False)
        await loop.sock_connect(client, server.sockets[0].getsockname())
        await loop.sock_sendall(client, HEAD)
        await asyncio.wait_for(answered.wait(), 10)
        deadline = loop.time() + LINGER_S / 2
        while state.connections and loop.time() < deadline:
            await asyncio.sleep(0.01)
        assert not state.connections
        server.close()
        return complaints

    assert asyncio.run(scenario()) == []
    assert capsys.readouterr().err == ""


def test_a_request_that_is_all_there_is_taken_in_few_pieces() -> None:
    """It lies in the socket's memory before the server looks: each piece is a turn of the loop."""
    body, pieces, bodies = bytes(range(256)) * 128, [], []

    class Noting(Connection):
        def data_received(self, data: bytes) -> None:
            pieces.append(len(data))
            super().data_received(data)

    async def keep(scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        parts = [message["body"]]
        while message["more_body"]:
            message = await receive()
            parts.append(message["body"])
        bodies.append(b"".join(parts))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def scenario() -> bytes:
        loop = asyncio.get_running_loop()
        config = ServerConfig(FastAPI(), ServerLimits(max_tokens_per_request=16, max_queued_tokens=16))
        config.load()
        config.loaded_app = keep
        state = ServerState()
        server = await loop.create_server(lambda: Noting(config, state, {}), "127.0.0.1")
        with socket.create_connection(server.sockets[0].getsockname(), 10) as client:
            head = f"POST / HTTP/1.1\r\nHost: localhost\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            client.sendall(head.encode() + body)
            client.setblocking(False)
            answer = b""
            while part := await asyncio.wait_for(loop.sock_recv(client, 4096), 10):
                answer += part
        server.close()
        return answer

    assert asyncio.run(scenario()).endswith(b"\r\n\r\nok")
    assert bodies == [body] and len(pieces) < 32

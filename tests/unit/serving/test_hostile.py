"""What is no honest request: each one gets its status in one readable line, no traceback, and the server lives on."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mopd.config.groups import TorchEngineConfig
from mopd.engines.torch.engine import TorchEngine
from tests.fixtures.servers import RunningServer, running_server, wait_until
from tests.unit.serving.test_limits import PROPAGATES, TOKEN, assert_lives, complaints, connect, post

HOST = b"host: localhost\r\n"
SCORE = b"POST /v1/score HTTP/1.1\r\n" + HOST
GET = b"GET /info HTTP/1.1\r\n" + HOST
TLS_HELLO = bytes.fromhex("16030100a5010000a10303") + bytes(range(150))


@pytest.fixture(scope="module")
def open_server(folder: Path) -> Iterator[RunningServer]:
    """A teacher without a token."""
    limits = {"head_timeout_s": 0.6, "stall_timeout_s": 0.6, "body_timeout_s": 1.0}
    engine = TorchEngine.from_pretrained(folder, TorchEngineConfig(dtype="float32"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(*PROPAGATES)
        with running_server(engine, limits=limits) as running:
            yield running


@pytest.fixture(scope="module")
def closed_server(folder: Path) -> Iterator[RunningServer]:
    """The same with a token."""
    with running_server(
        TorchEngine.from_pretrained(folder, TorchEngineConfig(dtype="float32")), token=TOKEN
    ) as running:
        yield running


def answer(running: RunningServer, request: bytes) -> tuple[int, str]:
    """Status and text of the first answer to raw bytes; what is sent after it does not matter."""
    with connect(running) as client:
        with contextlib.suppress(OSError):  # answered and closed before all was sent
            client.sendall(request)
        response, length = b"", None
        while part := client.recv(65536):
            response += part
            head, _, body = response.partition(b"\r\n\r\n")
            length = next((line[16:] for line in head.split(b"\r\n") if line.startswith(b"content-length: ")), None)
            if length is not None and len(body) >= int(length):
                break
    head, _, body = response.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), body[: int(length or 0)].decode()


HEADS: dict[str, tuple[bytes, int | set[int]]] = {
    "HTTP/0.9": (b"GET /health\r\n\r\n", 400),
    "HTTP/1.0 without host": (b"GET /info HTTP/1.0\r\n\r\n", 400),
    "HTTP/1.1 without host": (b"GET /info HTTP/1.1\r\n\r\n", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400, 404}),
    "TLS": (TLS_HELLO, 400),
    "nothing but newlines": (b"\r\n" * 50, 400),
    "two hosts": (GET + HOST + b"\r\n", 400),
    "another host": (b"GET /info HTTP/1.1\r\nhost: evil.example\r\n\r\n", 400),
    "a name that begins with ours": (b"GET /info HTTP/1.1\r\nhost: localhost.evil.example\r\n\r\n", 400),
    "a web page": (SCORE + b"origin: http://evil.example\r\ncontent-length: 1\r\n\r\nx", 403),
    "a page in a frame": (SCORE + b"origin: null\r\ncontent-length: 1\r\n\r\nx", 403),
    "a page begins an update": (
        b"POST /v1/weights/begin HTTP/1.1\r\n" + HOST + b"origin: https://a.example\r\ncontent-length: 0\r\n\r\n",
        403,
    ),
    "a long head in one piece": (GET + b"x: " + b"y" * 40_000 + b"\r\n\r\n", 431),
    "many headers": (GET + b"a:\r\n" * 60_000 + b"\r\n", 431),
    "a huge URL": (b"GET /" + b"u" * 100_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 431),
    "a header without end": (GET + b"x" * 100_000, 431),
    "a path upwards": (b"GET /../../etc/passwd HTTP/1.1\r\n" + HOST + b"\r\n", 404),
    "an absolute URL": (b"GET http://evil.example/info HTTP/1.1\r\n" + HOST + b"\r\n", 404),
    "an unknown path": (b"GET /v2/score HTTP/1.1\r\n" + HOST + b"\r\n", 404),
    "GET of a POST path": (b"GET /v1/score HTTP/1.1\r\n" + HOST + b"\r\n", 405),
    "websocket": (
        b"GET /info HTTP/1.1\r\n" + HOST + b"connection: upgrade\r\nupgrade: websocket\r\n"
        b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
        200,
    ),
    "no length": (SCORE + b"\r\n", 411),
    "a negative length": (SCORE + b"content-length: -1\r\n\r\n", 400),
    "a length of 5,000 digits": (SCORE + b"content-length: " + b"9" * 5000 + b"\r\n\r\n", 400),
    "a length of 20 digits": (SCORE + b"content-length: " + b"9" * 20 + b"\r\n\r\n", 413),
    "two lengths": (SCORE + b"content-length: 1\r\ncontent-length: 2\r\n\r\nx", 400),
    "chunks": (SCORE + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 100_000 + b"0\r\n\r\n", 411),
    "a chunk without end": (SCORE + b"transfer-encoding: chunked\r\n\r\nfffffff\r\n" + b"x" * 10**6, 411),
    "chunks and a length": (SCORE + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n", 411),
    "chunked GET": (GET + b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n", 411),
    "gzip": (SCORE + b"transfer-encoding: gzip\r\ncontent-length: 1\r\n\r\nx", {400, 411, 501}),
    "two transfer encodings": (SCORE + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n", 501),
    "a body that is too long": (SCORE + b"content-length: 67108865\r\n\r\n" + b"x" * 10**6, 413),
    "expectation of too much": (SCORE + b"expect: 100-continue\r\ncontent-length: 67108865\r\n\r\n", 413),
    "GET with a body": (GET + b"content-length: 100\r\n\r\nabc", 200),
    "garbage after a request": (GET + b"\r\n" + b"\xff" * 1000, 200),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads(open_server: RunningServer, caplog: pytest.LogCaptureFixture, name: str) -> None:
    request, expected = HEADS[name]
    status, text = answer(open_server, request)
    assert status in (expected if isinstance(expected, set) else {expected}), text
    assert "\n" not in text.strip() and len(text) < 2000
    assert post(open_server, "/v1/score", b"x").status_code == 400
    assert not complaints(caplog)


@pytest.mark.parametrize(
    ("headers", "query"),
    [
        ({}, ""),
        ({}, f"?token={TOKEN}&authorization=Bearer {TOKEN}"),
        ({"authorization": TOKEN}, ""),
        ({"authorization": f"bearer {TOKEN}"}, ""),
        ({"authorization": f"Basic {TOKEN}"}, ""),
        ({"authorization": f"Bearer {TOKEN[:-1]}"}, ""),
        ({"authorization": b"Bearer \xe9\xff"}, ""),
        ({"authorization": "Bearer " + "x" * 10_000}, ""),
    ],
)
def test_without_the_token(closed_server: RunningServer, headers: Any, query: str) -> None:
    for path in ("/info", "/metrics"):
        assert httpx.get(f"{closed_server.url}{path}{query}", headers=headers, trust_env=False).status_code == 401
    response = httpx.post(
        f"{closed_server.url}/v1/score{query}", content=b"x" * 10**6, headers=headers, trust_env=False
    )
    assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
    assert httpx.get(f"{closed_server.url}/health", trust_env=False).json() == {"status": "ok"}


def test_a_token_opens_for_any_name_and_any_page(closed_server: RunningServer) -> None:
    """The secret says enough: no page knows it."""
    headers = {"authorization": f"Bearer {TOKEN}", "host": "teacher.example:8000", "origin": "http://teacher.example"}
    assert httpx.get(f"{closed_server.url}/info", headers=headers, trust_env=False).status_code == 200


def test_half_heads_end(open_server: RunningServer) -> None:
    """The first of a connection, also without a byte, and a later one; each hears why."""
    requests = (b"", b"GET", GET, GET + b"\r\n" + GET)
    clients = [connect(open_server) for _ in requests]
    start = time.monotonic()
    for client, request in zip(clients, requests, strict=True):
        client.sendall(request)
    for client, request in zip(clients, requests, strict=True):
        heard = b""
        while part := client.recv(65536):
            heard += part
        assert b"HTTP/1.1 408" in heard and b"the head of the request did not arrive within 0.6 s" in heard, request
        client.close()
    assert time.monotonic() - start > 0.5


def test_more_connections_than_there_may_be(engine: TorchEngine) -> None:
    """Who has asked before and asks again at once is served; the silent ones make room, long before they are late."""
    limits = {"head_timeout_s": 120.0, "max_connections": 60}
    with running_server(engine, limits=limits) as running, httpx.Client(trust_env=False, timeout=30.0) as honest:
        assert honest.get(f"{running.url}/health").status_code == 200
        silent = [connect(running) for _ in range(200)]
        assert honest.get(f"{running.url}/health").status_code == 200
        assert httpx.get(f"{running.url}/health", trust_env=False, timeout=30.0).status_code == 200
        num_closed = 0
        for client in silent:
            client.settimeout(0.001)
            with contextlib.suppress(TimeoutError):
                try:
                    num_closed += client.recv(1) == b""
                except ConnectionResetError:
                    num_closed += 1
            client.close()
    assert num_closed >= 200 - 60


def test_answers_that_nobody_reads(open_server: RunningServer) -> None:
    """Thousands of pipelined requests: the connection is closed when its answers stay unread."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = open_server.url.removeprefix("http://").split(":")
        client.connect((host, int(port)))
        client.settimeout(60)
        with pytest.raises(ConnectionError):  # closed while we send, not a send that nobody takes
            while True:
                client.sendall(b"GET /metrics HTTP/1.1\r\n" + HOST + b"\r\n")
        assert_lives(open_server)


def test_pipelined_requests_are_answered_in_order(open_server: RunningServer) -> None:
    with connect(open_server) as client:
        post_one = SCORE + b"content-length: 1\r\n\r\nx"
        client.sendall(GET + b"\r\n" + post_one + b"GET /nowhere HTTP/1.1\r\nconnection: close\r\n" + HOST + b"\r\n")
        heard = b""
        while part := client.recv(65536):
            heard += part
    assert re.findall(rb"HTTP/1.1 (\d+)", heard) == [b"200", b"400", b"404"]


def test_a_refused_body_does_not_become_the_next_request(open_server: RunningServer) -> None:
    """Bytes of a body that nobody reads are not taken for a request, and do not arrive for ever."""
    inner = b"GET /info HTTP/1.1\r\n" + HOST + b"\r\n"
    with connect(open_server) as client:
        client.sendall(SCORE + b"content-length: 99999999\r\n\r\n" + inner)
        heard = b""
        try:
            while True:
                client.sendall(b"x" * 100)
                client.settimeout(0.05)
                try:
                    part = client.recv(65536)
                except TimeoutError:
                    continue
                heard += part
        except OSError:
            pass
    assert heard.count(b"HTTP/1.1") == 1 and b"413" in heard and b"connection: close" in heard
    assert json.loads(heard.partition(b"\r\n\r\n")[2])["error"]["type"] == "too_large"


def test_the_server_is_as_before(open_server: RunningServer, closed_server: RunningServer) -> None:
    assert_lives(open_server)
    for running in (open_server, closed_server):
        wait_until(lambda server=running.server: server._bodies._arrived_bytes == 0)

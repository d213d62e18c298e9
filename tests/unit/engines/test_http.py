"""Clients before servers that do what they should not: one error of the right kind, in time, on one line, no secret."""

from __future__ import annotations

import asyncio
import functools
import gzip
import itertools
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
import torch

from mopd.base.text import one_line
from mopd.base.types import UserError
from mopd.config.placements import ExternalConfig
from mopd.config.values import check_server_url, shown_url
from mopd.engines.clients.openai import OpenAIScorer
from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.interface import (
    MAX_RETRY_AFTER_S,
    CorruptAnswer,
    EngineBusy,
    EngineError,
    EngineRejected,
    EngineUnavailable,
    EngineUnreachable,
    ToScore,
)

TOKEN = "a-secret-token-of-mine"
TOKENS = torch.tensor([3, 1, 4, 1])
Reply = bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]


def answer(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def converse(reply: Reply, kind: str, timeout_s: float = 5.0) -> tuple[EngineError, list[bytes]]:
    """The error of a scoring request to a server that says ``reply``, and the heads that it was sent."""
    heads: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            if isinstance(reply, bytes):
                writer.write(reply)
                await writer.drain()
            else:
                await reply(writer)
            await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    engine: Any
    if kind == "mopd":
        engine = RemoteEngine(url, token=TOKEN, timeout_s=timeout_s, name="math.0")
    else:
        settings = {"served_model_name": "m", "vocab_size": 6, "max_positions": 16}
        engine = OpenAIScorer(url, token=TOKEN, timeout_s=timeout_s, name="math.0", **settings)
        engine._is_listed = True
    try:
        with pytest.raises(EngineError) as caught:
            await engine.score(ToScore([TOKENS], [1], top_k=2, temperature=1.0))
    finally:
        await engine.close()
        server.close()
    text = str(caught.value)
    assert text.startswith("math.0: ") and text.isprintable() and len(text) < 600, text
    assert TOKEN not in text
    return caught.value, heads


def talk(reply: Reply, kind: str) -> tuple[EngineError, list[bytes]]:
    return asyncio.run(converse(reply, kind))


async def trickle(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.02)


async def slow_head(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    for i in itertools.count():
        writer.write(f"x-{i}: y\r\n".encode())
        await writer.drain()
        await asyncio.sleep(0.02)


async def wait_and_wait(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.001)


async def endless(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        await writer.drain()


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()


async def reset(writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()


async def break_off(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
    await writer.drain()
    writer.close()


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
DEEP = b"[" * 100_000 + b"]" * 100_000
DIGITS = b'{"error": {"message": "full", "retry_after_s": 1' + b"0" * 400 + b"}}"

REPLIES: dict[str, tuple[Reply, type[EngineError]]] = {
    "nothing": (b"", EngineUnavailable),
    "no HTTP": (b"\0\xff\x1b[31m\r\n\r\n", EngineUnavailable),
    "HTTP/9": (b"HTTP/9.9 200 OK\r\n\r\n", EngineUnavailable),
    "HTML": (answer(b"<html>Sign in</html>", "200 OK", "content-type: text/html"), EngineUnavailable),
    "204": (b"HTTP/1.1 204 No Content\r\n\r\n", EngineUnavailable),
    "an empty body": (answer(b""), EngineUnavailable),
    "half a body": (answer(b"{}")[:-1], EngineUnavailable),
    "two lengths": (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n{}", EngineUnavailable),
    "a long head": (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 200_000 + b"\r\n\r\n", EngineUnavailable),
    "odd chunks": (CHUNKED + b"zz\r\nx\r\n0\r\n\r\n", EngineUnavailable),
    "a chunk of 2^80": (CHUNKED + b"f" * 20 + b"\r\nx", EngineUnavailable),
    "a redirect": (answer(b"", "307 Temporary Redirect", "location: http://127.0.0.1:9/v1/score"), EngineUnavailable),
    "gzip": (answer(gzip.compress(bytes(10**6)), "200 OK", "content-encoding: gzip"), EngineUnavailable),
    "deep JSON": (answer(DEEP), EngineUnavailable),
    "deep JSON refuses": (answer(DEEP, "400 Bad Request"), EngineRejected),
    "NaN": (answer(b'{"choices": [NaN]}'), EngineUnavailable),
    "400 digits": (answer(b"1" * 400), EngineUnavailable),
    "400 digits of a pause": (answer(DIGITS, "429 Too Many Requests"), EngineBusy),
    "not UTF-8": (answer(b'{"error": {"message": "\xff"}}', "500 X"), EngineUnavailable),
    "a surrogate": (answer(b'{"error": {"message": "\\ud800"}}', "500 X"), EngineUnavailable),
    "a terminal's words": (answer(b'{"error": {"message": "\\u001b[31m\\r\\nred"}}', "500 X"), EngineUnavailable),
    "a long message": (answer(b'{"error": {"message": "' + b"x" * 10**5 + b'"}}', "400 X"), EngineRejected),
    "a message of lists": (answer(b'{"error": {"message": [[1], {}]}}', "403 X"), EngineRejected),
    "our token": (answer(json.dumps({"error": {"message": f"no {TOKEN}!"}}).encode(), "401 X"), EngineRejected),
    "our token as text": (answer(f"Bearer {TOKEN}".encode(), "403 X"), EngineRejected),
    "a password": (answer(b'{"error": {"message": "see http://me:hunter2@h/?k=hunter2"}}', "503 X"), EngineUnreachable),
    "a gateway's deadline": (answer(b"<html>", "504 X"), EngineUnreachable),
    "taken, and hung up": (hang_up, EngineUnreachable),
    "taken, and reset": (reset, EngineUnreachable),
    "broken off": (break_off, EngineUnavailable),
    "a long refusal": (answer(b"x" * 2**21, "500 X"), EngineUnavailable),
    "a trickle": (trickle, EngineUnavailable),
    "a head without end": (slow_head, EngineUnavailable),
    "wait, and wait": (wait_and_wait, EngineUnavailable),
    "a body without end": (endless, EngineUnavailable),
}
SLOW = ("nothing", "HTTP/9", "a chunk of 2^80", "a trickle", "a head without end", "wait, and wait", "half a body")


KINDS = ("mopd", "openai")


@functools.cache
def slow_talks() -> dict[tuple[str, str], tuple[EngineError, list[bytes]]]:
    """By name and kind, all at a time: their deadline, which passes, leaves time to connect and to ask."""
    talks = [(name, kind) for name in SLOW for kind in KINDS]

    async def work() -> list[tuple[EngineError, list[bytes]]]:
        return await asyncio.gather(*(converse(REPLIES[name][0], kind, 5.0) for name, kind in talks))

    return dict(zip(talks, asyncio.run(work()), strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", REPLIES)
def test_whatever_a_server_says_one_error_comes_of_it(name: str, kind: str) -> None:
    reply, expected = REPLIES[name]
    error, heads = slow_talks()[name, kind] if name in SLOW else talk(reply, kind)
    assert type(error) is expected or (type(error) is CorruptAnswer and expected is EngineUnavailable), error
    assert len(heads) == 1 and b"accept-encoding: identity" in heads[0].lower()  # nothing followed, nothing repeated
    if name == "a password":
        assert "hunter2" not in one_line(error)


@pytest.mark.parametrize("kind", [httpx.ConnectError, httpx.ConnectTimeout, httpx.ReadError, httpx.WriteError])
def test_a_server_that_no_connection_reaches_is_away(kind: type[httpx.TransportError]) -> None:
    """As the network of another machine reports it, minutes later than a test may take."""

    def broken(request: httpx.Request) -> httpx.Response:
        raise kind("all attempts failed")

    async def work() -> None:
        engine = RemoteEngine("http://10.0.0.3:8000", timeout_s=600.0, name="math.0")
        await engine._http._client.aclose()
        engine._http._client = httpx.AsyncClient(transport=httpx.MockTransport(broken), base_url="http://10.0.0.3:8000")
        with pytest.raises(EngineUnreachable, match=f"math.0: /v1/score: {kind.__name__}: all attempts failed"):
            await engine.score(ToScore([TOKENS], [1], top_k=2, temperature=1.0))
        await engine.close()

    asyncio.run(work())


PAUSES = {"2.5": 2.5, "0": 0.0, "1e9": MAX_RETRY_AFTER_S, "-0.0": 0.0}
PAUSES |= dict.fromkeys(["-1", "1e999", "NaN", "Infinity", '"7"', "true", "null", "[]", "1" + "0" * 400], 1.0)


@pytest.mark.parametrize(("said", "believed"), PAUSES.items())
def test_a_pause_is_bounded(said: str, believed: float) -> None:
    body = f'{{"error": {{"message": "full", "retry_after_s": {said}}}}}'.encode()
    error, _ = talk(answer(body, "429 Too Many Requests"), "mopd")
    assert isinstance(error, EngineBusy) and error.retry_after_s == believed


@pytest.mark.parametrize(
    ("said", "believed"),
    [("7", 7.0), ("9" * 15, MAX_RETRY_AFTER_S), *((said, 1.0) for said in ("9" * 400, "-7", "1e9", "inf", "soon"))],
)
def test_a_pause_in_a_header_is_bounded(said: str, believed: float) -> None:
    error, _ = talk(answer(b"{}", "429 Too Many Requests", f"retry-after: {said}"), "openai")
    assert isinstance(error, EngineBusy) and error.retry_after_s == believed


GOOD_URLS = (
    "http://h http://h:8000 https://teacher.example.org:65535/math/ http://127.0.0.1:1 http://[::1]:8000 "
    "http://my_service:8000/v1 http://xn--bcher-kva.example."
)
BAD_TEXT = (
    "h:8000 ftp://h file:///etc/passwd javascript:alert(1) HTTP://h http:/h http:///h http:// http://:8000 http://h: "
    "http://h:0 http://h:65536 http://h:-1 http://h:1:2 http://h:x http://h:８０ http://[::1 http://::1:80 "
    "http://[fe80::1%25eth0] http://[1.2.3.4] http://a..b http://-a http://bücher.example http://h\\other "
    "http://h/\x1b[31m http://h?token=hunter2 http://h/#hunter2 http://me:hunter2@h http://hunter2@h "
    "http://me:hunter2/x@h http://me:hunter2?x@h http://me:hunter2@h:99999 me:hunter2@h ftp://me:hunter2@h"
)
BAD_URLS = BAD_TEXT.split()
BAD_URLS += ["", "http://h\0", "http://h\nhost: other", "http://h x"]
BAD_URLS += [f"http://{'a' * 64}", f"http://{'a.' * 200}b", f"http://h/{'x' * 3000}"]
BAD_URLS += ["http://10.0.0.555", "http://00.0.0.5:80", "http://10.0.0.58000."]  # no addresses
BAD_URLS += [f"http://{'a.' * 126}bc"]  # one more than a name may have


@pytest.mark.parametrize("url", [*GOOD_URLS.split(), f"http://{'a.' * 126}b"])
def test_urls_of_servers(url: str) -> None:
    check_server_url(url)
    assert shown_url(url) == url
    ExternalConfig(type="external", urls=(url,))
    asyncio.run(RemoteEngine(url, timeout_s=1.0).close())


@pytest.mark.parametrize("url", BAD_URLS)
def test_other_urls_are_refused_without_telling_a_secret(url: str) -> None:
    with pytest.raises(ValueError, match=r"^urls has '") as in_recipe:
        ExternalConfig(type="external", urls=(url,))
    with pytest.raises(UserError) as in_client:
        RemoteEngine(url, timeout_s=1.0)
    with pytest.raises(UserError):
        OpenAIScorer(url, served_model_name=None, vocab_size=6, max_positions=16, timeout_s=1.0)
    for error in (in_recipe.value, in_client.value):
        assert "hunter2" not in str(error) and str(error).isprintable() and len(str(error)) < 600


@pytest.mark.parametrize("token", ["", " x", "a\r\nb: c", "schlüssel", "a\0b", "x\x1b"])
def test_tokens_that_no_header_can_hold(token: str) -> None:
    with pytest.raises(UserError, match=r"math\.0: the access token is not one word of ASCII") as caught:
        RemoteEngine("http://h", token=token, timeout_s=1.0, name="math.0")
    assert not token.strip() or token not in str(caught.value)


def test_no_proxy_no_netrc_and_no_cookie(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async def work() -> list[bytes]:
        heads: list[bytes] = []

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for _ in range(2):
                heads.append(await reader.readuntil(b"\r\n\r\n"))
                writer.write(answer(b"{}", "200 OK", "set-cookie: a=b; Path=/"))
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        engine = RemoteEngine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout_s=5.0)
        await engine.health(timeout_s=5.0)
        await engine.health(timeout_s=5.0)
        await engine.close()
        server.close()
        return heads

    heads = asyncio.run(work())
    assert len(heads) == 2 and all(b"cookie" not in head.lower() for head in heads)

"""HTTP client for an engine server: one connection pool, every call bounded in time and size, every failure one line.

Whatever a server does (silence, a trickle, endless or compressed bodies, redirects, no HTTP at all), a call ends by its
deadline with the body of a 200 or an ``EngineError``. Messages hold neither the token nor any other secret.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack

import httpx

from mopd.base.files.json_text import parse_json
from mopd.base.text import one_line
from mopd.base.types import UserError
from mopd.config.values import check_server_url, shown_url
from mopd.engines.interface import (
    CorruptAnswer,
    EngineBusy,
    EngineError,
    EngineRejected,
    EngineUnavailable,
    EngineUnreachable,
    StaleWeights,
)

MAX_CONNECTIONS = 512
"""Connections to one engine; further calls wait for one within their deadline. More than the requests that any engine
is given at a time: a request stays open until its longest response has ended, and vLLM runs 256 sequences."""
KEPT_CONNECTIONS = 64
"""Beyond so many, idle ones are closed: httpx looks at every connection for each request and, where all are kept, at
every pair of idle ones (13 ms of the processor for each of 512 requests that end together, against 0.5 ms)."""
UNREACHABLE = (httpx.codes.BAD_GATEWAY, httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.GATEWAY_TIMEOUT)
"""Statuses of a proxy whose server is gone, and of a server that starts, ends or has lost its engine. 500 is none: who
says so has taken the request and failed at it, as at every other attempt if the request is at fault."""
DISCONNECTED = "Server disconnected"
"""How httpcore's ``RemoteProtocolError`` begins where nothing came, in the place of what is no HTTP."""
MAX_SMALL_BYTES = 2**20
"""Limit of answers without arrays, errors included."""
SLICE_BYTES = 2**20
"""Bytes of a body that are handed to the socket at once: asyncio copies what does not fit there, twice, and blocks the
event loop meanwhile (60 ms for 64 MiB)."""
MAX_MESSAGE_CHARACTERS = 300
"""Longest quotation of a server's words in an error."""

_Take = Callable[[bytes], None] | None


class UnknownImages(EngineRejected):
    """HTTP 428: the server does not have, or no longer has, the files of these ``digests``."""

    def __init__(self, message: str, digests: Collection[bytes]) -> None:
        super().__init__(message)
        self.digests = digests


class HttpClient:
    """Client of one server. It belongs to the event loop of its first call, never retries and follows no redirect."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None,
        timeout_s: float,
        name: str | None,
        content_type: str,
        deadline_header: str | None = None,
    ) -> None:
        """Configure the client without contacting the server.

        Args:
            url: ``http(s)://host[:port][/path]``.
            token: sent as ``Authorization: Bearer …``.
            timeout_s: limit of each call as a whole.
            name: the server's in errors; ``None``: the URL.
            content_type: of the bodies that are sent.
            deadline_header: request header that carries the seconds left; ``None``: none is sent.

        Raises:
            UserError: the URL or the token cannot be used.
        """
        self.name = shown_url(url) if name is None else name
        try:
            check_server_url(url)
        except ValueError as error:
            raise UserError(f"server URL {error}") from error
        if token is not None and not (token.isascii() and token.isprintable() and token.strip() == token != ""):
            raise UserError(f"{self.name}: the access token is not one word of ASCII characters: write another")
        self._token, self._timeout_s = token, timeout_s
        self._content_type, self._deadline_header = content_type, deadline_header
        # A compressed body could be far larger than it looks: none is asked for, and none is read.
        headers = {"accept-encoding": "identity"}
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        self._client = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            verify=url.startswith("https:"),  # reading the certificates takes longer than a request
            timeout=None,  # asyncio.wait_for bounds every call as a whole
            limits=httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=KEPT_CONNECTIONS),
            follow_redirects=False,  # the token is for this server
            trust_env=False,  # no proxy between replicas because of a variable somewhere
        )

    async def call(
        self,
        method: str,
        path: str,
        content: bytes | None,
        longest: int,
        *,
        timeout_s: float | None = None,
        take: Callable[[bytes], None] | None = None,
    ) -> bytes:
        """Return the body of a 200, at most ``longest`` bytes. With ``take``, pass the parts to it as they arrive and
        return no bytes; an error that it raises ends the call.

        Raises:
            EngineUnreachable: no connection, or one that ended before the answer began; 502, 503, 504.
            EngineUnavailable: broken off, deadline, any other 5xx, redirect, too long, not HTTP.
            EngineBusy, StaleWeights, EngineRejected: 429, 409, any other 4xx.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            work = self._exchange(method, path, content, longest, timeout_s, take)
            return await asyncio.wait_for(work, timeout_s)
        except asyncio.TimeoutError as error:
            raise EngineUnavailable(f"{self.name}: no answer to {path} within {timeout_s:g} s") from error
        except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, OSError, UnicodeError) as error:
            raise EngineUnavailable(f"{self.name}: {path}: {type(error).__name__}: {self.shown(error)}") from error

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    def corrupt(self, problem: object) -> CorruptAnswer:
        """Return the error for an answer that cannot be right."""
        return CorruptAnswer(f"{self.name}: corrupt answer: {self.shown(problem)}")

    def shown(self, said: object) -> str:
        """Return foreign text fit for a message: one short line, without our token."""
        text = said if isinstance(said, (str, BaseException)) else repr(said)
        line = one_line(text)
        if self._token is not None:
            line = line.replace(self._token, "…")
        return line if len(line) <= MAX_MESSAGE_CHARACTERS else f"{line[:MAX_MESSAGE_CHARACTERS]}…"

    async def _exchange(
        self, method: str, path: str, content: bytes | None, longest: int, timeout_s: float, take: _Take
    ) -> bytes:
        headers = {} if self._deadline_header is None else {self._deadline_header: f"{timeout_s:.3f}"}
        if content is not None:
            headers |= {"content-type": self._content_type, "content-length": str(len(content))}
        sent = content if content is None or len(content) <= SLICE_BYTES else _slices(content)
        async with AsyncExitStack() as exchange:
            begin = self._client.stream(method, path, content=sent, headers=headers)
            try:
                response = await exchange.enter_async_context(begin)
            except (httpx.NetworkError, httpx.ConnectTimeout, httpx.RemoteProtocolError) as error:
                if isinstance(error, httpx.RemoteProtocolError) and not str(error).startswith(DISCONNECTED):
                    raise
                raise EngineUnreachable(f"{self.name}: {path}: {type(error).__name__}: {self.shown(error)}") from error
            self._client.cookies.clear()  # whoever answers is told nothing about earlier answers
            is_good = response.status_code == httpx.codes.OK
            longest = longest if is_good else MAX_SMALL_BYTES
            encoding = response.headers.get("content-encoding", "identity")
            if encoding.lower() != "identity":
                raise self.corrupt(f"the answer to {path} is encoded as {encoding!r:.40}, which was not asked for")
            parts: list[bytes] = []
            size = 0
            async for part in response.aiter_raw():
                size += len(part)
                if size > longest:
                    raise self.corrupt(f"the answer to {path} is longer than {longest} bytes")
                if take is not None and is_good:
                    take(part)
                else:
                    parts.append(part)
        if is_good:
            return b"".join(parts)
        said, retry_after_s, digests = _read_refusal(b"".join(parts))
        if response.status_code == httpx.codes.PRECONDITION_REQUIRED and digests:
            raise UnknownImages(f"{self.name}: {path}: HTTP 428: {self.shown(said)}", digests)
        header = response.headers.get("retry-after", "")  # its other form, a date, is not read
        if retry_after_s is None and header.isascii() and header.isdecimal() and len(header) < 20:
            retry_after_s = int(header)
        raise self.refusal(path, response.status_code, said, retry_after_s)

    def refusal(self, path: str, status: int, said: object, retry_after_s: object = None) -> EngineError:
        """Return the error that an HTTP status stands for, with the text that the server ``said``."""
        message = f"{self.name}: {path}: HTTP {status}: {self.shown(said)}"
        if status == httpx.codes.TOO_MANY_REQUESTS:
            return EngineBusy(message, retry_after_s=retry_after_s)
        if status == httpx.codes.CONFLICT:
            return StaleWeights(message)
        if 400 <= status < 500 and status != httpx.codes.REQUEST_TIMEOUT:
            return EngineRejected(message)
        return (EngineUnreachable if status in UNREACHABLE else EngineUnavailable)(message)


async def _slices(content: bytes) -> AsyncIterator[bytes]:
    """Yield the bytes of ``content`` in order, ``SLICE_BYTES`` at a time."""
    view = memoryview(content)
    for start in range(0, len(view), SLICE_BYTES):
        yield bytes(view[start : start + SLICE_BYTES])


def _read_refusal(body: bytes) -> tuple[object, object, list[bytes]]:
    """Return ``(message, retry_after_s, digests)`` of an error's JSON body, ours or OpenAI's, or the first bytes of
    another."""
    try:
        said = parse_json(body, max_values=10_000)
    except ValueError:
        return repr(body[:200]), None, []
    error = said.get("error", said) if isinstance(said, dict) else None
    if not isinstance(error, dict) or "message" not in error:
        return repr(body[:200]), None, []
    named = error.get("digests")
    digests = [bytes.fromhex(text) for text in named if _is_digest(text)] if isinstance(named, list) else []
    return error["message"], error.get("retry_after_s"), digests


def _is_digest(text: object) -> bool:
    return isinstance(text, str) and re.fullmatch("[0-9a-f]{32}", text) is not None

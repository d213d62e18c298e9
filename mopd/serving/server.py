"""uvicorn around one engine: announces when it answers, drains on SIGTERM, ends when the engine is dead.

Each connection has limits that hold before a token has been shown, on top of uvicorn's own protocol::

    connect ─ head (size, deadline) ─ body ─ answer (deadline while the client does not read) ─┬─ next head …
       │                                                                                       │
       └─ too many connections: the one that has waited longest for a head gives way           └─ close (deadline)

Limits of bodies are in ``bodies.BodyReader``, which knows what may come.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, cast

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from mopd.base.types import UserError
from mopd.serving.address import BACKLOG, Address
from mopd.serving.admission import ServerLimits
from mopd.serving.app import EngineServer, Served, create_app
from mopd.serving.errors import Refusal
from mopd.serving.registration import Registrar

CLOSE_TIMEOUT_S = 10.0


async def serve(served: Served, address: Address, listener: socket.socket, registrar: Registrar | None = None) -> int:
    """Serve on ``listener`` until SIGTERM, or until the engine is dead; close the engine and return the exit code. A
    ``registrar`` registers the server with a run while it takes requests.

    Raises:
        UserError: the server could not be announced.
    """

    def end() -> None:
        server.should_exit = True

    def announce() -> None:
        url = address.announce(listener)
        if registrar is not None:
            registrar.begin(url, served.manifest or {})

    def leave() -> None:
        if registrar is not None:
            registrar.end()
        engine_server.drain()

    engine_server = EngineServer(dataclasses.replace(served, on_dead=end))
    config = ServerConfig(create_app(engine_server), served.limits)
    server = _Server(config, on_ready=announce, on_exit=leave)
    try:
        await server.serve(sockets=[listener])
    finally:
        if registrar is not None:
            registrar.end()
        await asyncio.wait_for(served.host.engine.close(), CLOSE_TIMEOUT_S)
    if server.refused is not None:
        raise server.refused
    if server.interrupted:
        raise KeyboardInterrupt
    return int(engine_server.admission.closed_kind == "dead" or not server.started)


class _Server(uvicorn.Server):
    """uvicorn's server that announces when it answers, and ends normally on SIGTERM."""

    def __init__(self, config: uvicorn.Config, *, on_ready: Callable[[], None], on_exit: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready, self._on_exit = on_ready, on_exit
        self.interrupted = False
        self.refused: UserError | OSError | None = None
        """Why the server could not be announced."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._loop = asyncio.get_running_loop()
        for listener in sockets or ():
            listener.listen(BACKLOG)  # uvicorn's backlog is also how many it accepts at once
        if self.started:
            try:
                self._on_ready()
            except (UserError, OSError) as error:  # `serve` raises it after an orderly shutdown
                self.refused, self.should_exit = error, True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals as uvicorn does, but do not raise them once more after the shutdown: a drained server ended
        well."""
        before = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.interrupted = self.interrupted or sig == signal.SIGINT
        self._loop.call_soon_threadsafe(self._on_exit)
        super().handle_exit(sig, frame)


MAX_HEAD_BYTES = 2**14
"""Longest request line and headers together."""
END_OF_HEAD = re.compile(rb"\n\r?\n")
READ_BYTES = 2**16
"""Bytes that are taken from a socket at a time."""
KEEP_ALIVE_S = 75
"""Seconds that an idle connection stays open, longer than clients keep theirs (httpx: 5 s): a server that closes first
loses a request on its way."""
LINGER_S = 2.0
"""Seconds to read away the rest of a refused request: closed over unread bytes, a connection is reset, the refusal
lost."""
ACCEPT_AT_ONCE = 128
"""Connections that are accepted before any of them is looked at."""


class ServerConfig(uvicorn.Config):
    """uvicorn's configuration of an engine server, with the limits that its connections keep."""

    def __init__(self, app: FastAPI, limits: ServerLimits) -> None:
        super().__init__(
            app,
            http=Connection,
            ws="none",
            lifespan="on",
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(limits.drain_timeout_s),
            backlog=ACCEPT_AT_ONCE,
        )
        self.limits = limits
        self.without_head: dict[Connection, None] = {}
        """Connections that have never sent a head, oldest first; they are the first to be closed."""
        self.between_requests: dict[Connection, None] = {}
        """Connections that wait for another request, longest first."""


class _ClosingTransport:
    """A transport whose ``close`` ends in bounded time, and leaves a refused client the time to read its refusal."""

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        self._transport, self._connection = transport, connection
        self._is_closing = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Return whether ``close`` was called, here or on the transport itself."""
        return self._is_closing or self._transport.is_closing()

    def close(self) -> None:
        """Send what is left; a client that is still sending gets ``LINGER_S`` to end."""
        if self.is_closing():
            return
        self._is_closing = True
        self._connection.forget()
        if self._connection.is_receiving:
            self._transport.resume_reading()  # data_received drops it
            try:
                self._transport.write_eof()
            except OSError:  # the client was gone before this loop learnt of it: nothing to linger for
                return self._transport.abort()
            self._connection.abort_in(LINGER_S)
        else:
            self._transport.close()
            self._connection.abort_in(self._connection.limits.stall_timeout_s)


class Connection(H11Protocol):
    """uvicorn's protocol for one connection, with deadlines."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shared = cast(ServerConfig, self.config)
        self.limits = self._shared.limits
        self._pending = b""
        """Bytes that h11 has not seen yet, mostly of the request after the one that is being answered."""
        self._head_alarm: asyncio.TimerHandle | None = None
        self._stall_alarm: asyncio.TimerHandle | None = None
        self._close_alarm: asyncio.TimerHandle | None = None

    @property
    def is_receiving(self) -> bool:
        """Whether the client is still sending a request, or something that is none."""
        return self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

    @property
    def _waits_for_head(self) -> bool:
        return self.conn.their_state is h11.IDLE and not self.transport.is_closing()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline of the first head, and make room if there are too many connections."""
        super().connection_made(cast(asyncio.Transport, _ClosingTransport(transport, self)))
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]  # asyncio's 256 KiB would pass through four buffers
        # asyncio sets it only where the listener's protocol number is given; without it a body waits 40 ms for the ack
        # of its head
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._head_alarm = self.loop.call_later(self.limits.head_timeout_s, self._head_is_late)
        if len(self.connections) > self.limits.max_connections:
            self._make_room()
        self._shared.without_head[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all deadlines of the connection."""
        super().connection_lost(exc)
        for alarm in (self._head_alarm, self._stall_alarm, self._close_alarm, self.timeout_keep_alive_task):
            if alarm is not None:
                alarm.cancel()
        self.forget()

    def eof_received(self) -> None:
        """Bound the rest of the answer: the client sends no more, and asyncio closes when it has read what is left."""
        self.abort_in(self.limits.stall_timeout_s)

    def data_received(self, data: bytes) -> None:
        """Take bytes of the client. After a refusal that closes the connection they are dropped unread."""
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self._pending += data
        self.handle_events()

    def handle_events(self) -> None:
        """Feed h11 piece by piece: a head within its limit, nothing of the next request before this one is answered."""
        super().handle_events()
        while self._pending and not self.transport.is_closing():
            if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY) or (
                self.conn.their_state is h11.SEND_BODY and _is_chunked(self.headers)  # refused: its length is unknown
            ):
                self.flow.pause_reading()
                break
            room = len(self._pending) if self.conn.their_state is h11.SEND_BODY else self._rest_of_head()
            self.conn.receive_data(self._pending[:room])
            self._pending = self._pending[room:]
            super().handle_events()
        self._watch_head()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP. uvicorn calls this while it handles h11's error."""
        error = sys.exc_info()[1]
        status = getattr(error, "error_status_hint", 400)
        kind = "too_large" if status == 431 else "bad_request"
        self._refuse(Refusal(status, kind, f"not a valid HTTP request: {str(error)[:200]}"))

    def pause_writing(self) -> None:
        """Start the deadline of a client that does not read: it then loses its connection."""
        super().pause_writing()
        self._stall_alarm = self.loop.call_later(self.limits.stall_timeout_s, self._abort)

    def resume_writing(self) -> None:
        """Cancel that deadline: the client reads again."""
        super().resume_writing()
        if self._stall_alarm is not None:
            self._stall_alarm.cancel()

    def shutdown(self) -> None:
        """End with the server: a client that does not read now does not hold it up."""
        if not self.transport.is_closing():
            super().shutdown()
        if self.transport.get_write_buffer_size():
            self.abort_in(LINGER_S)

    def abort_in(self, seconds: float) -> None:
        """Close in at most ``seconds``, whatever was not sent or read."""
        if self._close_alarm is not None:
            self._close_alarm.cancel()
        self._close_alarm = self.loop.call_later(seconds, self._abort)

    def forget(self) -> None:
        """Drop pending bytes and take the connection off the lists of waiting ones."""
        self._pending = b""
        self._shared.without_head.pop(self, None)
        self._shared.between_requests.pop(self, None)

    def _abort(self) -> None:
        self.forget()
        self.transport.abort()

    def _watch_head(self) -> None:
        """Set or cancel the head's deadline: it runs from the head's first byte, for a connection's first head from the
        start."""
        if not self._waits_for_head:
            self._shared.without_head.pop(self, None)
            self._shared.between_requests.pop(self, None)
            if self._head_alarm is not None:
                self._head_alarm.cancel()
                self._head_alarm = None
        elif self._head_alarm is None:
            self._shared.between_requests[self] = None
            if self.conn.trailing_data[0]:
                self._head_alarm = self.loop.call_later(self.limits.head_timeout_s, self._head_is_late)

    def _head_is_late(self) -> None:
        if self._waits_for_head:
            seconds = self.limits.head_timeout_s
            self._refuse(Refusal(408, "head_timeout", f"the head of the request did not arrive within {seconds:g} s"))

    def _rest_of_head(self) -> int:
        """Return the number of pending bytes to the end of the head, or just beyond its limit.

        The body's limit is applied later: whether it may come is known when the head has been read.
        """
        begun = self.conn.trailing_data[0]
        room = MAX_HEAD_BYTES + 1 - len(begun)
        overlap = begun[-3:]
        end = END_OF_HEAD.search(overlap + self._pending[:room])
        return room if end is None else max(1, end.end() - len(overlap))

    def _make_room(self) -> None:
        """Close the connection that has waited longest for a head, first such as never sent one; if none waits, this
        one."""
        for waiting in (self._shared.without_head, self._shared.between_requests):
            if waiting:
                return next(iter(waiting))._abort()
        self._abort()

    def _refuse(self, refusal: Refusal) -> None:
        """Answer instead of the application, and close. An answer that is being sent is cut off."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = refusal.response()
            headers = [*response.raw_headers, (b"connection", b"close")]
            parts = (h11.Response(status_code=refusal.status, headers=headers), h11.Data(data=bytes(response.body)))
            for part in (*parts, h11.EndOfMessage()):
                self.transport.write(self.conn.send(part))
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


def _is_chunked(headers: list[tuple[bytes, bytes]]) -> bool:
    return any(name == b"transfer-encoding" for name, _ in headers)

"""uvicorn around one engine: announces when it answers, drains on SIGTERM, ends when the engine is dead."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from mopd.base.types import UserError
from mopd.serving.address import BACKLOG, Address
from mopd.serving.app import EngineServer, Served, create_app
from mopd.serving.connections import ServerConfig
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

    def tell() -> None:
        url = address.announce(listener)
        if registrar is not None:
            registrar.begin(url, served.manifest or {})

    def leave() -> None:
        if registrar is not None:
            registrar.end()
        engine_server.drain()

    engine_server = EngineServer(dataclasses.replace(served, on_dead=end))
    config = ServerConfig(create_app(engine_server), served.limits)
    server = _Server(config, on_ready=tell, on_exit=leave)
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

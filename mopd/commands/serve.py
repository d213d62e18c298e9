"""``mopd serve``: one engine behind one HTTP server, in this process, until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import uvicorn

from mopd.config.engines import TorchEngineConfig
from mopd.conversion.hf.manifest import HASHES, make_manifest
from mopd.data.tokenizer import load_tokenizer
from mopd.launch.failure import close_standard_input
from mopd.placement.engine_file import EngineFile
from mopd.placement.engine_loading import load_engine
from mopd.run.manifests import hash_cache
from mopd.serving.address import BACKLOG, Address
from mopd.serving.admission import ServerLimits
from mopd.serving.app import EngineServer, Served, create_app
from mopd.serving.connections import ServerConfig
from mopd.serving.host import CanClose, DirectHost, EngineHost, ThreadHost
from mopd.serving.request_checks import LOOPBACK_NAMES
from mopd.types import UserError

logger = logging.getLogger(__name__)
MAX_CONNECTIONS = 2048
CLOSE_TIMEOUT_S = 10.0


def serve(file: EngineFile, address: Address, listener: socket.socket, token: str | None) -> int:
    """Load the engine, serve on ``listener`` until SIGTERM or until the engine is dead; returns the exit code.

    Raises:
        UserError: the model cannot be loaded, or the ready file not be written.
    """
    _log_to_terminal(file.label)
    close_standard_input()
    code, is_computing = asyncio.run(_serve(file, address, listener, token))
    if is_computing:  # the interpreter would wait for the thread, which nobody waits for any more
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


async def _serve(file: EngineFile, address: Address, listener: socket.socket, token: str | None) -> tuple[int, bool]:
    """``(exit code, whether a call still runs in the engine's thread)``."""
    loop = asyncio.get_running_loop()
    manifest = await loop.run_in_executor(None, _manifest, file)
    host = await start_host(file)
    died = asyncio.Event()
    served = Served(
        role=file.role,
        name=file.name,
        host=host,
        limits=server_limits(file),
        manifest=manifest,
        tokenizer=_tokenizer(file.model),
        token=token,
        names=(*LOOPBACK_NAMES, address.host),
        on_dead=died.set,
    )
    engine_server = EngineServer(served)
    config = ServerConfig(create_app(engine_server), served.limits)
    server = _Server(config, on_ready=lambda: address.announce(listener), on_exit=engine_server.drain)

    async def stop_when_dead() -> None:
        await died.wait()
        server.should_exit = True

    watch = asyncio.create_task(stop_when_dead())
    try:
        await server.serve(sockets=[listener])
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await _close_engine(host)
    if server.refused is not None:
        raise server.refused
    if server.interrupted:
        raise KeyboardInterrupt
    failed = died.is_set() or not server.started
    return int(failed), isinstance(host, ThreadHost) and host.is_computing


async def start_host(file: EngineFile) -> EngineHost:
    """The engine of a file, loaded, in its host. ``UserError`` if the model cannot be loaded."""
    engine = await load_engine(file, "cuda" if torch.cuda.is_available() else "cpu")
    if isinstance(file.engine, TorchEngineConfig):
        return ThreadHost(engine, max_batch_tokens=file.engine.max_tokens_per_batch)
    return DirectHost(engine)


def server_limits(file: EngineFile) -> ServerLimits:
    """Limits that follow from the file and the system."""
    token_bytes = 32 * file.max_tokens_per_request + 2**20  # id, length, prompt length or seed, of the shortest samples
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ServerLimits(
        max_tokens_per_request=file.max_tokens_per_request,
        max_queued_tokens=max(file.max_queued_tokens, file.max_tokens_per_request),
        max_top_k=file.max_logprobs,
        max_body_bytes=token_bytes,
        max_connections=min(MAX_CONNECTIONS, num_files // 2),  # the rest is for the engine, and for accepting
        request_timeout_s=file.request_timeout_s,
    )


class _Server(uvicorn.Server):
    """Tells when it answers, and ends normally on SIGTERM."""

    def __init__(self, config: uvicorn.Config, *, on_ready: Callable[[], None], on_exit: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready, self._on_exit = on_ready, on_exit
        self.interrupted = False
        self.refused: UserError | OSError | None = None
        """Why nobody could be told that the server answers."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._loop = asyncio.get_running_loop()
        for listener in sockets or ():
            listener.listen(BACKLOG)  # uvicorn's backlog is also how many it accepts at once
        if self.started:
            try:
                self._on_ready()
            except (UserError, OSError) as error:  # raised by the caller of ``serve``, after a shutdown in order
                self.refused, self.should_exit = error, True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Without raising the signal once more after the shutdown, as uvicorn does: a drained server ended well."""
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


def _manifest(file: EngineFile) -> dict[str, str]:
    manifest = make_manifest(Path(file.model), cache_file=hash_cache()).to_json()
    return {name: manifest[name] for name in HASHES}


def _tokenizer(model: str) -> Any:
    """For text prompts of ``/v1/completions``; None for a folder without tokenizer files, which scores all the same."""
    if not any(Path(model).glob("*tokenizer*")) and not any(Path(model).glob("vocab*")):
        return None
    return load_tokenizer(model)


async def _close_engine(host: EngineHost) -> None:
    if isinstance(host.engine, CanClose):
        await asyncio.wait_for(host.engine.close(), CLOSE_TIMEOUT_S)


def _log_to_terminal(label: str) -> None:
    logging.basicConfig(level=logging.WARNING, format=f"{label}: %(message)s", force=True)
    logging.getLogger("mopd").setLevel(logging.INFO)

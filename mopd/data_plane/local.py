"""The local plane: every field of every sample in the memory of one process, which serves readers in others.

The server is ZeroMQ, in a thread of its own, so that the event loop may compute::

    reader (DEALER) ── [head: {number, sample_ids, fields}] ──────────> server (ROUTER)
           <── [head: {number, fields | error}] [frame] [frame] … ──

On one machine the socket has an abstract name in the kernel, and other users are refused. Between machines it is TCP,
encrypted, and refuses readers without the keys of the address (CURVE).
"""

from __future__ import annotations

import logging
import os
import secrets
import socket as sockets
import threading
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import zmq
import zmq.auth.thread
from torch import Tensor

from mopd.base.tasks import THREAD_END_S
from mopd.base.text import message_of
from mopd.base.types import SampleMeta, UserError
from mopd.data_plane.frames import FrameError, packed, to_frames, unpacked
from mopd.data_plane.interface import Storage, check_read

logger = logging.getLogger(__name__)

Read = Callable[[Sequence[int], Sequence[str]], dict[str, list[Tensor]]]

MAX_REQUEST_BYTES = 2**22
"""Largest message to the server: the ids of some hundred thousand samples."""
HEARTBEAT_MS = 5_000
HEARTBEAT_TIMEOUT_MS = 30_000
"""Silence after which the other end of a TCP connection counts as gone although nothing was closed."""


class LocalDataPlane(Storage):
    """Storage in this process's memory. Read from any thread, written to on one event loop."""

    def __init__(self) -> None:
        super().__init__()
        self._metas: dict[int, SampleMeta] = {}
        self._fields: dict[int, dict[str, Tensor]] = {}
        self._writing = threading.Lock()
        self._server: SampleServer | None = None

    def serve(self, *, host: str | None) -> None:
        """Start serving readers in other processes: on this machine, or also on others, which reach this one as
        ``host``.

        Raises:
            UserError: nothing can listen there.
        """
        self._server = SampleServer(self._read, host=host)

    @property
    def address(self) -> dict[str, Any]:
        """Address of the server that ``serve`` has started."""
        assert self._server is not None, "serve() has been called"
        return self._server.address

    def reader(self) -> DirectReader:
        """Return a reader for this process."""
        return DirectReader(self._read)

    async def get(self, sample_ids: Sequence[int], fields: Sequence[str]) -> dict[str, list[Tensor]]:
        return self._read(sample_ids, fields)

    async def close(self) -> None:
        """End the server and forget everything."""
        if self._server is not None:
            self._server.close()
            self._server = None
        await self._remove(list(self._metas))
        await super().close()

    def _read(self, sample_ids: Sequence[int], fields: Sequence[str]) -> dict[str, list[Tensor]]:
        """Return fields; called from any thread."""
        with self._writing:
            check_read(sample_ids, fields, self._fields)
            return {name: [self._fields[i][name] for i in sample_ids] for name in fields}

    async def _add(self, metas: Sequence[SampleMeta], tensors: Mapping[str, list[Tensor]]) -> None:
        # Readers in other threads see a sample with all its fields or not at all.
        with self._writing:
            for i, meta in enumerate(metas):
                self._metas[meta.sample_id] = meta
                self._fields[meta.sample_id] = {name: values[i] for name, values in tensors.items()}

    async def _extend(self, sample_ids: Sequence[int], tensors: Mapping[str, list[Tensor]]) -> None:
        with self._writing:
            for name, values in tensors.items():
                for sample_id, value in zip(sample_ids, values, strict=True):
                    self._fields[sample_id][name] = value

    async def _metas_of(self, sample_ids: Sequence[int], fields: Sequence[str]) -> list[SampleMeta]:
        return [self._metas[i] for i in sample_ids]

    async def _remove(self, sample_ids: Sequence[int]) -> None:
        with self._writing:
            for sample_id in sample_ids:
                del self._metas[sample_id], self._fields[sample_id]


class DirectReader:
    """Implementation of ``Reader`` in the storage's own process; nothing is copied."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self.bytes_received = 0

    def fetch(
        self, sample_ids: Sequence[int], fields: Sequence[str], *, waited_s: float = 0.0
    ) -> dict[str, list[Tensor]]:
        """Return the storage's own tensors."""
        values = self._read(sample_ids, fields)
        self.bytes_received += sum(tensor.nbytes for tensors in values.values() for tensor in tensors)
        return values

    def close(self) -> None:
        """Do nothing: there is no connection."""


class SampleServer:
    """Server that answers readers until ``close``."""

    def __init__(self, read: Read, *, host: str | None) -> None:
        """Listen and start the thread.

        Args:
            read: returns fields of samples, or raises ``KeyError``; called in the server's thread.
            host: the name or number of this machine that readers on others use; ``None``: all are on this machine.

        Raises:
            UserError: nothing can listen there.
        """
        self._read = read
        self._context = zmq.Context()
        self._auth: Any = None
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self._router.setsockopt(zmq.SNDHWM, 0)  # unlimited: an answer must not be dropped; a reader has one request
        self._router.setsockopt(zmq.LINGER, 0)
        try:
            self.address = self._bind_name() if host is None else self._bind_host(host)
            stop = f"inproc://stop-{id(self)}"
            self._stopped = self._context.socket(zmq.PAIR)
            self._stopped.bind(stop)
            self._stop = self._context.socket(zmq.PAIR)
            self._stop.connect(stop)
        except BaseException:
            self._end()
            raise
        self._thread = threading.Thread(target=self._serve, name="samples", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and close the socket."""
        self._stop.send(b"")
        self._thread.join(THREAD_END_S)
        if self._thread.is_alive():
            raise RuntimeError(f"the data plane's thread did not end within {THREAD_END_S:g} s")
        self._end()

    def _end(self) -> None:
        if self._auth is not None:
            self._auth.stop()
        self._context.destroy(linger=0)

    def _bind_name(self) -> dict[str, Any]:
        """Listen under an abstract name, no file: the kernel removes it with this process, however that ends."""
        url = f"ipc://@mopd-samples-{secrets.token_hex(16)}"
        self._router.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())  # an abstract name has no file mode
        self._router.bind(url)
        return {"type": "local", "url": url, "pid": os.getpid()}

    def _bind_host(self, host: str) -> dict[str, Any]:
        """Listen on TCP for readers that know the server's public key and hold the one accepted pair of keys."""
        own_public, own_secret = zmq.curve_keypair()
        reader_public, reader_secret = zmq.curve_keypair()
        provider = SimpleNamespace(callback=lambda domain, key: key == reader_public)
        self._auth = zmq.auth.thread.ThreadAuthenticator(self._context)
        self._auth.start()
        self._auth.configure_curve_callback("*", credentials_provider=provider)
        self._router.curve_server = True
        self._router.curve_secretkey, self._router.curve_publickey = own_secret, own_public
        self._router.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._router.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        try:
            family, *_, (number, *_) = sockets.getaddrinfo(host, 0, type=sockets.SOCK_STREAM)[0]
            self._router.setsockopt(zmq.IPV6, family == sockets.AF_INET6)
            self._router.bind(f"tcp://[{number}]:*" if family == sockets.AF_INET6 else f"tcp://{number}:*")
        except (OSError, zmq.ZMQError) as error:
            raise UserError(
                f"data plane: cannot listen on {host!r}, the address of rank 0's machine: {error}"
            ) from error
        return {
            "type": "local",
            "url": self._router.getsockopt_string(zmq.LAST_ENDPOINT),
            "pid": os.getpid(),
            "server_key": own_public.decode(),
            "public_key": reader_public.decode(),
            "secret_key": reader_secret.decode(),
        }

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._stopped, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stopped in ready:
                return
            reader, *request = self._router.recv_multipart()
            try:
                answer = self._answer(request)
            except FrameError as error:  # none of our readers sent it: no answer, and the others get theirs
                logger.warning("data plane: a question that is none: %s", error)
                continue
            self._router.send_multipart([reader, *answer], copy=False)

    def _answer(self, request: Sequence[bytes]) -> list[Any]:
        if len(request) != 1:
            raise FrameError(f"{len(request)} parts")
        asked = unpacked(request[0])
        if not isinstance(asked, dict) or asked.keys() != {"number", "sample_ids", "fields"}:
            raise FrameError("unknown keys")
        ids, names = asked["sample_ids"], asked["fields"]
        if not _is_list_of(ids, int) or not _is_list_of(names, str) or type(asked["number"]) is not int:
            raise FrameError("unknown types")
        try:
            head, frames = to_frames(self._read(ids, names))
        except KeyError as error:
            return [packed({"number": asked["number"], "error": message_of(error)})]
        return [packed({"number": asked["number"], "fields": head}), *frames]


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)

"""Readers in other processes than the storage's: of the local plane over its socket (``local.py``), or of the queue."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import zmq
from torch import Tensor
from zmq.utils.monitor import recv_monitor_message

from mopd.base.types import UserError
from mopd.data_plane.frames import FrameError, from_frames, packed, unpacked
from mopd.data_plane.interface import Reader, StorageEnded
from mopd.data_plane.local import HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS
from mopd.data_plane.queue_plane import QueueReader

MAX_FRAME_BYTES = 2**33
"""Largest frame, one tensor; a connection that brings a larger one is closed."""
CONNECTED = zmq.EVENT_HANDSHAKE_SUCCEEDED
ENDED = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
"""Events after which the storage is gone. Nothing connects twice: a storage does not come back within a run."""


class SocketReader:
    """Implementation of ``Reader`` over a socket."""

    def __init__(self, address: dict[str, Any], *, timeout_s: float) -> None:
        """Connect; ``timeout_s`` is the deadline of that and of each command's reads together.

        Raises:
            UserError: no answer from the address, or the keys are wrong.
        """
        self.bytes_received = 0
        self._url: str = address["url"]
        self._pid: int = address["pid"]
        self._timeout_s = timeout_s
        self._number = 0
        self._has_ended = False
        """Remembered, because ZeroMQ reports the end only once, and may accept requests for a moment longer."""
        self._turn = threading.Lock()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        if "server_key" in address:
            self._socket.curve_serverkey = address["server_key"].encode()
            self._socket.curve_publickey = address["public_key"].encode()
            self._socket.curve_secretkey = address["secret_key"].encode()
            self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
            self._socket.setsockopt(zmq.IPV6, "[" in self._url)
        self._monitor = self._socket.get_monitor_socket(CONNECTED | ENDED)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        try:
            self._socket.connect(self._url)
            self._wait(time.monotonic() + timeout_s, self._is_connected)
        except BaseException:
            self.close()
            raise

    def fetch(
        self, sample_ids: Sequence[int], fields: Sequence[str], *, waited_s: float = 0.0
    ) -> dict[str, list[Tensor]]:
        """Return fields as CPU tensors in the order of ``sample_ids``."""
        with self._turn:
            if self._has_ended:
                raise self._ended()
            self._number += 1
            request = {"number": self._number, "sample_ids": list(sample_ids), "fields": list(fields)}
            deadline = time.monotonic() + self._timeout_s - waited_s
            try:
                # Blocking, this would wait for ever on a socket without a connection.
                self._socket.send(packed(request), zmq.NOBLOCK)
            except zmq.Again:
                raise self._ended() from None
            fields_of: dict[str, list[Tensor]] = self._wait(deadline, self._receive)
            return fields_of

    def close(self) -> None:
        """Close the socket and its context."""
        self._context.destroy(linger=0)

    def _wait(self, deadline: float, step: Any) -> Any:
        """Call ``step`` with each event until it returns something other than None, and return that."""
        while True:
            left = deadline - time.monotonic()
            ready = dict(self._poller.poll(max(0, round(1000 * left))))
            result = step(ready) if ready else None
            if result is not None:
                return result
            if left <= 0:
                raise UserError(
                    f"data plane: process {self._pid}, which holds the samples, did not answer within "
                    f"{self._timeout_s:g} s (schedule.wait_timeout_s): see its last lines"
                )

    def _is_connected(self, ready: dict[Any, int]) -> bool:
        self._require_no_end()
        return True

    def _receive(self, ready: dict[Any, int]) -> dict[str, list[Tensor]] | None:
        if self._socket not in ready:
            self._require_no_end()
            return None
        first, *rest = self._socket.recv_multipart(copy=False)
        frames = [frame.buffer for frame in rest]
        try:
            head = unpacked(first.buffer)
            # A late answer to a request that ran out of time has another number.
            if not isinstance(head, dict) or head.get("number") != self._number:
                raise FrameError("an answer to another question")
            if "error" in head:
                raise KeyError(head["error"])
            values = from_frames(head["fields"], frames)
        except FrameError as error:
            raise UserError(f"data plane: process {self._pid} answered what cannot be read: {error}") from error
        self.bytes_received += len(first) + sum(frame.nbytes for frame in frames)
        return values

    def _require_no_end(self) -> None:
        """Read the waiting monitor event; raise ``StorageEnded`` if it is an end."""
        if not recv_monitor_message(self._monitor)["event"] & CONNECTED:
            self._has_ended = True
            raise self._ended()

    def _ended(self) -> StorageEnded:
        return StorageEnded(
            f"data plane: process {self._pid}, which holds the samples, has ended or lets nobody in ({self._url}): see "
            "its last lines"
        )


def open_reader(address: dict[str, Any], *, timeout_s: float) -> Reader:
    """Return the reader for a storage's ``Storage.address`` in another process; ``timeout_s`` is the deadline of each
    wait.

    Raises:
        UserError: no answer from the address.
    """
    return (QueueReader if address["type"] == "transfer_queue" else SocketReader)(address, timeout_s=timeout_s)

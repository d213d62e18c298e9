"""torch's store between processes that share a secret: an entry that none of them signed is refused.

``TCPStore`` asks for no password, so anyone who reaches its port may write into it. A stranger can still delete and
overwrite entries, which ends the waits for them; what it writes is never read as an address, a rank or a word.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import Store, TCPStore

from mopd.weights.signing import read_signed, sign


def listening_store(host: str, port: int, *, timeout_s: float) -> TCPStore:
    """Open the store in this process, on one address alone (``port`` 0: a free one): ``TCPStore`` itself would listen
    on every network. ``OSError`` if the address is not one of this machine, or taken."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(address)
    listener.listen(socket.SOMAXCONN)
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


class SignedStore(Store):
    """Signs each value together with its key, and checks the signature of each value that it reads.

    C++ calls it too: gloo reads the addresses of its peers here. Keep a reference as long as a process group uses it,
    since pybind finds these methods through the Python object alone. The extended calls of a store (``append``,
    ``multi_get``) stay unimplemented, so that torch reads and writes by ``get`` and ``set``. Counters (``add``) are
    numbers that the server itself changes: they are not signed, and nothing but a count may be read from them.
    """

    def __init__(self, store: Store, secret: str) -> None:
        super().__init__()
        self._inner, self._secret = store, secret

    @property
    def port(self) -> int:
        """TCP port of the server."""
        assert isinstance(self._inner, TCPStore)
        return self._inner.port

    def set(self, key: str, value: str | bytes) -> None:
        """Write a signed value."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._inner.set(key, sign(self._secret, key, data) + data)  # type: ignore[arg-type]  # bytes are allowed

    def get(self, key: str) -> bytes:
        """Wait for a value and return it; ``ForgedEntry`` if it was not signed."""
        return read_signed(self._secret, key, bytes(self._inner.get(key)))

    def add(self, key: str, amount: int) -> int:
        """Change a counter, unsigned."""
        return self._inner.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist, by whatever writer."""
        return self._inner.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist, by whatever writer."""
        if timeout is None:
            self._inner.wait(keys)
        else:
            self._inner.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        """Remove an entry."""
        return self._inner.delete_key(key)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the deadline of ``get`` and ``wait``."""
        self._inner.set_timeout(timeout)

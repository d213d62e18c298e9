"""torch's store between processes that share a secret: an entry that none of them signed is refused.

``TCPStore`` asks nobody for a password, so whoever reaches its port may write into it. A stranger can still delete and
overwrite entries, which ends what waits for them; what it writes is never read as an address, a rank or a word.
"""

from __future__ import annotations

import hashlib
import hmac
from datetime import timedelta

from torch.distributed import Store

DIGEST_BYTES = hashlib.sha256().digest_size


class ForgedEntry(RuntimeError):
    """An entry of the store that no holder of the secret wrote."""


class SignedStore(Store):
    """Signs each value together with its key (HMAC-SHA256), and checks that of each value that it reads.

    C++ calls it too: gloo reads the addresses of its peers here. Keep a reference as long as a process group uses it,
    since pybind finds these methods through the Python object alone. The extended calls of a store (``append``,
    ``multi_get``) stay unimplemented, so that torch reads and writes by ``get`` and ``set``. Counters (``add``) are
    numbers that the server itself changes: they are not signed, and nothing but a count may be read from them.
    """

    def __init__(self, store: Store, secret: str) -> None:
        super().__init__()
        self._inner, self._secret = store, secret.encode()

    def set(self, key: str, value: str | bytes) -> None:
        """Write a signed value."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._inner.set(key, sign(self._secret, key, data) + data)  # type: ignore[arg-type]  # bytes are allowed

    def get(self, key: str) -> bytes:
        """Wait for a value; ``ForgedEntry`` for one that was not signed."""
        signed = bytes(self._inner.get(key))
        digest, data = signed[:DIGEST_BYTES], signed[DIGEST_BYTES:]
        if not hmac.compare_digest(digest, sign(self._secret, key, data)):
            raise ForgedEntry(f"the store's entry {key[:200]!r} is not signed with this run's secret")
        return data

    def add(self, key: str, amount: int) -> int:
        """Change a counter, unsigned."""
        return self._inner.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        """Whether all are there, whoever wrote them."""
        return self._inner.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until all are there, whoever wrote them."""
        if timeout is None:
            self._inner.wait(keys)
        else:
            self._inner.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        """Remove an entry."""
        return self._inner.delete_key(key)

    def set_timeout(self, timeout: timedelta) -> None:
        """Deadline of ``get`` and ``wait``."""
        self._inner.set_timeout(timeout)


def sign(secret: bytes, name: str, data: bytes) -> bytes:
    """[``DIGEST_BYTES``] that only a holder of the secret can make for this name and these bytes."""
    return hmac.digest(secret, len(name.encode()).to_bytes(4, "little") + name.encode() + data, "sha256")

"""Signatures with a shared secret, for entries of a store that anyone may write into."""

from __future__ import annotations

import hashlib
import hmac

DIGEST_BYTES = hashlib.sha256().digest_size


class ForgedEntry(RuntimeError):
    """An entry of the store that was not written by a holder of the secret."""


def sign(secret: str, name: str, data: bytes) -> bytes:
    """Return [``DIGEST_BYTES``] that only a holder of the secret can make for name and data (HMAC-SHA256)."""
    key = name.encode()
    return hmac.digest(secret.encode(), len(key).to_bytes(4, "little") + key + data, "sha256")


def read_signed(secret: str, name: str, signed: bytes) -> bytes:
    """Return the data behind its signature; ``ForgedEntry`` if the signature does not fit."""
    digest, data = signed[:DIGEST_BYTES], signed[DIGEST_BYTES:]
    if not hmac.compare_digest(digest, sign(secret, name, data)):
        raise ForgedEntry(f"the store's entry {name[:200]!r} is not signed with this run's secret")
    return data

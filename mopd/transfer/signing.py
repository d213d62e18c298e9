"""Signatures with a shared secret, for entries of a store that anybody may write into."""

from __future__ import annotations

import hashlib
import hmac

DIGEST_BYTES = hashlib.sha256().digest_size


class ForgedEntry(RuntimeError):
    """An entry of the store that no holder of the secret wrote."""


def sign(secret: str, name: str, data: bytes) -> bytes:
    """[``DIGEST_BYTES``] that only a holder of the secret can make for this name and these bytes (HMAC-SHA256)."""
    key = name.encode()
    return hmac.digest(secret.encode(), len(key).to_bytes(4, "little") + key + data, "sha256")


def read_signed(secret: str, name: str, signed: bytes) -> bytes:
    """The data behind its signature; ``ForgedEntry`` where that is another."""
    digest, data = signed[:DIGEST_BYTES], signed[DIGEST_BYTES:]
    if not hmac.compare_digest(digest, sign(secret, name, data)):
        raise ForgedEntry(f"the store's entry {name[:200]!r} is not signed with this run's secret")
    return data

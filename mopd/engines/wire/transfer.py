"""Control messages of a weight update whose tensors travel over a process group.

======  ============================================  ==========================  ==================
step    what it does                                  answered when               answered by
======  ============================================  ==========================  ==================
join    agrees once on group, names, shapes, dtypes   the group has met           ``WeightVersion``
start   stops the engine; then the buckets travel     it waits for the first one  ``WeightVersion``
finish  ends one update                               the new weights serve       ``WeightReceived``
======  ============================================  ==========================  ==================
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from mopd.engines.wire.messages import Array, Message, WireError, array_field

MAX_WORLD = 65536
MAX_BUCKET_BYTES = 2**34
MAX_TIMEOUT_S = 86400.0
MAX_MEMORY_CHARS = 2**16
MAX_SENDERS = 1024


@dataclass(frozen=True, kw_only=True)
class WeightJoin(Message):
    """Request to enter a group; the server leaves its previous one."""

    kind: ClassVar[str] = "weight_join"
    group_id: str
    port: int
    """TCP port of the group's store, on the machine that both run on."""
    first_rank: int
    """Rank of the engine's first worker in the group; the others follow."""
    world_size: int
    bucket_bytes: int
    timeout_s: float
    """Deadline of each operation of the group."""
    secret: str = field(repr=False)
    """Secret of the group's members, which protects them from foreign entries in its store."""
    tensors: Array = array_field("|u1")
    """JSON: ``[name, dtype, shape]`` of each tensor, in their order of arrival."""
    memory: str
    """Handles of rank 0's memory if buckets are read there (``mopd.weights.memory``); empty if they travel."""
    shares: tuple[int, ...] = ()
    """Number of tensors of each of several senders, in order; empty for one sender."""

    def check(self) -> None:
        """Raise ``WireError`` for a field out of range, or for ``shares`` together with ``memory``."""
        if not 1 <= len(self.group_id) <= 64:
            raise WireError("group_id is not text of 1 to 64 characters")
        if not 16 <= len(self.secret) <= 64:
            raise WireError("secret is not text of 16 to 64 characters")
        if not 1 <= self.port < 2**16:
            raise WireError(f"port is {self.port}")
        if not 2 <= self.world_size <= MAX_WORLD or not 1 <= self.first_rank < self.world_size:
            raise WireError(f"first_rank is {self.first_rank} of {self.world_size}")
        if not 1 <= self.bucket_bytes <= MAX_BUCKET_BYTES:
            raise WireError(f"bucket_bytes is {self.bucket_bytes}")
        if not 0 < self.timeout_s <= MAX_TIMEOUT_S:
            raise WireError(f"timeout_s is {self.timeout_s}")
        if len(self.shares) > MAX_SENDERS or any(type(share) is not int or share < 1 for share in self.shares):
            raise WireError(f"shares are not up to {MAX_SENDERS} numbers of 1 or more")
        if self.shares and self.memory:
            raise WireError("both shares and memory are given")
        if len(self.memory) > MAX_MEMORY_CHARS:
            raise WireError(f"memory has {len(self.memory)} characters, the limit is {MAX_MEMORY_CHARS}")


@dataclass(frozen=True, kw_only=True)
class WeightStart(Message):
    """Request to stop and wait for the weights. Once it is answered, the old ones never answer again."""

    kind: ClassVar[str] = "weight_start"
    group_id: str
    weight_version: int
    verify: bool
    """Whether the digest of each bucket is compared."""
    on_running: str
    """``finish`` or ``continue`` (``mopd.engines.interface.OnRunning``)."""
    patience_s: float
    """Deadline of the first bucket in seconds: other engines may still be busy."""

    def check(self) -> None:
        """Raise ``WireError`` for a field out of range."""
        if self.weight_version < 0:
            raise WireError(f"weight_version is {self.weight_version}: set 0 or more")
        if not 0 < self.patience_s <= MAX_TIMEOUT_S:
            raise WireError(f"patience_s is {self.patience_s}")
        if self.on_running not in ("finish", "continue"):
            raise WireError("on_running is neither finish nor continue")


@dataclass(frozen=True, kw_only=True)
class WeightFinish(Message):
    """Notice that everything was sent; answered when the new weights serve."""

    kind: ClassVar[str] = "weight_finish"
    group_id: str
    weight_version: int


@dataclass(frozen=True, kw_only=True)
class WeightReceived(Message):
    """Answer to ``WeightFinish``: the new weights serve."""

    kind: ClassVar[str] = "weight_received"
    weight_version: int
    wait_s: float
    """Seconds in which the engine had nothing to load."""
    load_s: float
    """Remaining seconds, from the first bucket to the last change."""

    def check(self) -> None:
        """Raise ``WireError`` for negative times."""
        if min(self.wait_s, self.load_s) < 0:
            raise WireError(f"wait_s is {self.wait_s} and load_s {self.load_s}: times are not negative")

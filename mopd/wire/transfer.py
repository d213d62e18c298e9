"""Control of a weight update whose tensors travel by another way than these messages: join, start, finish.

``join`` agrees once on the group and on names, shapes and dtypes; every update is ``start``, which is answered when the
engine waits for the first bucket, then the buckets, then ``finish``, which is answered when the new weights serve. The
first two are answered by ``WeightVersion``, the last by ``WeightReceived``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from mopd.wire.messages import Array, Message, WireError, array_field

MAX_WORLD = 65536
MAX_BUCKET_BYTES = 2**34
MAX_TIMEOUT_S = 86400.0
MAX_MEMORY_CHARS = 2**16
MAX_SENDERS = 1024


@dataclass(frozen=True, kw_only=True)
class WeightJoin(Message):
    """Come into a group; one that the server was in before is left."""

    kind: ClassVar[str] = "weight_join"
    group_id: str
    port: int
    """Of the group's store, on the machine that both run on."""
    first_rank: int
    """Of the engine's first worker in the group; the others follow."""
    world_size: int
    bucket_bytes: int
    timeout_s: float
    """Deadline of each operation of the group."""
    secret: str = field(repr=False)
    """Known to the group's members alone, against what others write into its store."""
    tensors: Array = array_field("|u1")
    """JSON: ``[name, dtype, shape]`` each, in the order in which they will come."""
    memory: str
    """Handles of rank 0's memory, where buckets are read there (``mopd.transfer.memory``); empty where they travel."""
    shares: tuple[int, ...] = ()
    """Tensors of each of several senders, in order; empty where there is one."""

    def check(self) -> None:
        """See ``Message.check``."""
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
    """Stop, and wait for the weights. From the answer on the old ones never answer again."""

    kind: ClassVar[str] = "weight_start"
    group_id: str
    weight_version: int
    verify: bool
    """Compare the digest of each bucket."""
    on_running: str
    """``finish`` or ``continue``: see ``mopd.engines.interface.OnRunning``."""
    patience_s: float
    """Deadline of the first bucket: other engines may still be busy."""

    def check(self) -> None:
        """See ``Message.check``."""
        if self.weight_version < 0:
            raise WireError(f"weight_version is {self.weight_version}: set 0 or more")
        if not 0 < self.patience_s <= MAX_TIMEOUT_S:
            raise WireError(f"patience_s is {self.patience_s}")
        if self.on_running not in ("finish", "continue"):
            raise WireError("on_running is neither finish nor continue")


@dataclass(frozen=True, kw_only=True)
class WeightFinish(Message):
    """Everything was sent: answer when it serves."""

    kind: ClassVar[str] = "weight_finish"
    group_id: str
    weight_version: int


@dataclass(frozen=True, kw_only=True)
class WeightReceived(Message):
    """The new weights answer."""

    kind: ClassVar[str] = "weight_received"
    weight_version: int
    wait_s: float
    """Seconds in which the engine had nothing to load."""
    load_s: float
    """The other seconds, from the first bucket to the last change."""

    def check(self) -> None:
        """See ``Message.check``."""
        if min(self.wait_s, self.load_s) < 0:
            raise WireError(f"wait_s is {self.wait_s} and load_s {self.load_s}: times are not negative")

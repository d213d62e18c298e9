"""Messages of a weight update, and one version of the weights as such messages (``StagedWeights``). The tensors travel
over a process group, or in messages of their own (``part``).

======  =============================================  ===========================  ==================
step    what it does                                   answered when                answered by
======  =============================================  ===========================  ==================
join    agrees on group, names, shapes, dtypes         the group has met            ``WeightVersion``
part    brings one part, where there is no group       it is kept aside             ``WeightVersion``
start   stops the engine; a group's parts travel then  it waits for the first part  ``WeightVersion``
finish  ends one update                                the new weights serve        ``WeightReceived``
======  =============================================  ===========================  ==================
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from mopd.base.files.json_text import parse_json
from mopd.engines.interface import TakesWeights
from mopd.engines.wire.messages import Array, Message, WireError, array_field, decode, encode
from mopd.weights.carrying import PART_BYTES, LocalGroup, Staging, TravellingParts, staged_order
from mopd.weights.group import GroupOrder
from mopd.weights.parts import TensorMeta, from_json, to_json
from mopd.weights.receiving import check_fit
from mopd.weights.sending import send

MIN_PART_BYTES = 2**14
"""Least bytes of such a part: a server lists all of them before the first one comes."""
MAX_WORLD = 65536
MAX_BUCKET_BYTES = 2**34
MAX_TIMEOUT_S = 86400.0
MAX_MEMORY_CHARS = 2**16
MAX_HOST_CHARS = 256
MAX_INTERFACE_CHARS = 16
"""Linux: length of an interface's name with the byte behind it (IFNAMSIZ)."""


@dataclass(frozen=True, kw_only=True)
class WeightJoin(GroupOrder, Message):
    """Request to enter a group; the server leaves its previous one. ``is_staged``: there is none, and the parts come in
    messages."""

    kind: ClassVar[str] = "weight_join"
    first_rank: int
    """Rank of the engine's first worker in the group; the others follow."""
    tensors: Array = array_field("|u1")
    """JSON: ``[name, dtype, shape, sender]`` of each tensor, in their order of arrival."""

    def check(self) -> None:
        """Raise ``WireError`` for a field out of range."""
        if not 1 <= len(self.group_id) <= 64:
            raise WireError("group_id is not text of 1 to 64 characters")
        if self.is_staged:
            if not MIN_PART_BYTES <= self.bucket_bytes == self.large_bytes <= PART_BYTES:
                raise WireError(f"bucket_bytes is {self.bucket_bytes}: parts have {MIN_PART_BYTES} to {PART_BYTES}")
            return
        if not 16 <= len(self.secret) <= 64:
            raise WireError("secret is not text of 16 to 64 characters")
        if not 1 <= self.port < 2**16:
            raise WireError(f"port is {self.port}")
        if not 1 <= len(self.host) <= MAX_HOST_CHARS or len(self.interface) >= MAX_INTERFACE_CHARS:
            raise WireError("host or interface is no name")
        if min(self.num_senders, self.num_receivers) < 1 or self.size > MAX_WORLD:
            raise WireError(f"{self.num_senders} senders and {self.num_receivers} receivers are no group")
        if not self.num_senders <= self.first_rank < self.size:
            raise WireError(f"first_rank is {self.first_rank} of {self.size}")
        if not 1 <= self.bucket_bytes <= MAX_BUCKET_BYTES or not 1 <= self.large_bytes <= MAX_BUCKET_BYTES:
            raise WireError(f"bucket_bytes is {self.bucket_bytes}, large_bytes {self.large_bytes}")
        if not 0 < self.timeout_s <= MAX_TIMEOUT_S:
            raise WireError(f"timeout_s is {self.timeout_s}")
        if len(self.memory) > MAX_MEMORY_CHARS:
            raise WireError(f"memory has {len(self.memory)} characters, the limit is {MAX_MEMORY_CHARS}")


@dataclass(frozen=True, kw_only=True)
class WeightPart(Message):
    """One part of the weights, in the order of ``mopd.weights.parts.cut_parts``."""

    kind: ClassVar[str] = "weight_part"
    group_id: str
    index: int
    """0, 1, 2, …: a part out of turn is refused."""
    digest: int
    """``mopd.weights.parts.digest`` of the data, by the sender."""
    data: Array = array_field("|u1")
    """[bytes] uint8."""

    def check(self) -> None:
        """Raise ``WireError`` for a number that is no int64."""
        if not -(2**63) <= self.digest < 2**63:
            raise WireError("digest is no int64")


@dataclass(frozen=True, kw_only=True)
class WeightVersion(Message):
    """Answer of the server: the version of the weights that it has now (an update in progress does not count)."""

    kind: ClassVar[str] = "weight_version"
    weight_version: int


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


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedWeights:
    """One version of the weights, ready for the wire: made once, sent as often as replicas need it."""

    weight_version: int
    group_id: str
    tensors: bytes
    """JSON of what travels (``mopd.weights.parts.to_json``)."""
    bucket_bytes: int
    bodies: tuple[bytes, ...]
    """Encoded ``WeightPart`` messages; together the whole model."""

    @classmethod
    def pack(
        cls, weight_version: int, tensors: bytes, frames: list[bytes], *, bucket_bytes: int = PART_BYTES
    ) -> StagedWeights:
        """Encode the bytes of parts, and behind them those of their digests, as a sender handed them on. ``frames`` is
        emptied meanwhile: there is one copy of the model."""
        group_id = secrets.token_hex(8)
        frames.reverse()
        sums = np.frombuffer(frames.pop(0), dtype=np.int64).tolist() if frames else []
        bodies = tuple(
            encode(
                WeightPart(group_id=group_id, index=i, digest=same, data=np.frombuffer(frames.pop(), dtype=np.uint8))
            )
            for i, same in enumerate(sums)
        )
        return cls(
            weight_version=weight_version, group_id=group_id, tensors=tensors, bucket_bytes=bucket_bytes, bodies=bodies
        )

    @property
    def order(self) -> GroupOrder:
        """The order of which the parts are."""
        return staged_order(self.group_id, bucket_bytes=self.bucket_bytes)

    def collected(self, *, num_receivers: int = 1) -> tuple[Staging, list[TensorMeta]]:
        """Return what a server has once all parts have come, and the tensors' metas."""
        metas = from_json(parse_json(self.tensors))
        staging = Staging(replace(self.order, num_receivers=num_receivers), metas)
        for body in self.bodies:
            part = decode(body, WeightPart)
            staging.add(part.index, part.digest, torch.from_numpy(part.data))
        return staging, metas


def stage_updates(
    weights: Iterable[tuple[str, Tensor]],
    weight_version: int,
    *,
    bucket_bytes: int = PART_BYTES,
    into: Mapping[str, Tensor] = MappingProxyType({}),
) -> StagedWeights:
    """Read the stream to its end, into host memory, floats in the dtypes of ``into`` where it has them. Raises
    ``NonFiniteError`` as ``mopd.weights.sending.send``."""
    if not isinstance(weights, Collection):  # a stream may reuse its memory
        weights = [(name, tensor.detach().clone()) for name, tensor in weights]

    def dtype_of(name: str, tensor: Tensor) -> torch.dtype:
        slot = into.get(name, tensor)
        is_cast = slot.is_floating_point() and tensor.is_floating_point()
        return slot.dtype if is_cast else tensor.dtype

    metas = [TensorMeta(name, dtype_of(name, tensor), tuple(tensor.shape)) for name, tensor in weights]
    frames: list[bytes] = []
    group = LocalGroup(
        staged_order(bucket_bytes=bucket_bytes), 0, lambda buffer: frames.append(buffer.numpy().tobytes())
    )
    send(TravellingParts(group), metas, ((name, tensor.detach()) for name, tensor in weights), verify=True)
    return StagedWeights.pack(weight_version, to_json(metas), frames, bucket_bytes=bucket_bytes)


async def load_staged(engine: TakesWeights, staged: StagedWeights) -> None:
    """Give an engine of this process these weights, as a server does once it has all parts. ``ValueError`` if they are
    not its model's; the old ones answer on."""
    staging, metas = staged.collected(num_receivers=(await engine.info()).num_workers)
    with closing(staging):
        check_fit(metas, engine.weight_slots, name=engine.name)
        await engine.incoming.join(staging.order, 1, metas)
        await engine.incoming.receive(staged.weight_version, verify=False, patience_s=0.0, ready=lambda: None)

"""One version of the weights as the messages that bring it to a server (``mopd.engines.wire.transfer``)."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from mopd.base.files.json_text import parse_json
from mopd.engines.interface import TakesWeights
from mopd.engines.wire.messages import decode, encode
from mopd.engines.wire.transfer import WeightPart
from mopd.weights.carrying import TravellingParts
from mopd.weights.group import GroupOrder
from mopd.weights.parts import TensorMeta, from_json, to_json
from mopd.weights.receiving import check_fit
from mopd.weights.sending import send
from mopd.weights.staging import PART_BYTES, LocalGroup, Staging, staged_order


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

"""Sending one version of the weights to several servers at once."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

from torch import Tensor

from mopd.wire.codec import Message, encode
from mopd.wire.weights import TensorLedger, WeightAbort, WeightBegin, WeightChunk, WeightCommit, cut

Step = Literal["begin", "chunk", "commit", "abort"]


class WeightTarget(Protocol):
    """One server that takes weights."""

    name: str
    weight_version: int
    """Set here when the server has committed."""

    async def push(self, step: Step, body: bytes) -> int:
        """Send one message of an update; returns the version that the server has. Raises when it does not take it."""
        ...


async def push_weights(
    targets: Sequence[WeightTarget], weights: Iterable[tuple[str, Tensor]], weight_version: int
) -> list[Exception | None]:
    """Stream the weights to every target; a target that fails is left behind, the others go on.

    The stream is read once, chunk by chunk, and to its end even when every target has failed: it may be a collective
    operation in which other ranks take part. Returns each target's error, ``None`` where it now serves
    ``weight_version``.
    """
    update_id = secrets.token_hex(8)
    errors: list[Exception | None] = [None] * len(targets)

    async def tell_all(step: Step, message: Message) -> None:
        body = await asyncio.to_thread(encode, message)
        healthy = [i for i, error in enumerate(errors) if error is None]
        results = await asyncio.gather(
            *(_tell(targets[i], step, body, weight_version) for i in healthy), return_exceptions=True
        )
        for i, result in zip(healthy, results, strict=True):
            if isinstance(result, Exception):
                errors[i] = result
            elif result is not None:
                raise result  # a cancellation

    await tell_all("begin", WeightBegin(update_id=update_id, weight_version=weight_version))
    ledger = TensorLedger()
    try:
        for index, (pieces, data) in enumerate(cut(weights, ledger)):
            await tell_all("chunk", WeightChunk(update_id=update_id, index=index, pieces=pieces, data=data))
    except BaseException:
        await tell_all("abort", WeightAbort(update_id=update_id))
        raise
    commit = WeightCommit(update_id=update_id, num_tensors=ledger.num_tensors, digest=ledger.digest)
    await tell_all("commit", commit)
    for target, error in zip(targets, errors, strict=True):
        if error is None:
            target.weight_version = weight_version
    return errors


async def _tell(target: WeightTarget, step: Step, body: bytes, weight_version: int) -> None:
    given = await target.push(step, body)
    if step == "commit" and given != weight_version:
        raise RuntimeError(f"{target.name}: has weights {given} after {weight_version} were sent")

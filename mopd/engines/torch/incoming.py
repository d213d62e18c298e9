"""Reception of weights over a process group into the memory of a torch engine's model."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from mopd.engines.interface import Reception, WeightsLost
from mopd.weights.buckets import TensorMeta
from mopd.weights.group import GroupOrder, TransferFailed
from mopd.weights.mapped import open_receiver
from mopd.weights.receiving import Receiver, check_fit


class _TorchModel(Protocol):
    name: str

    @property
    def weight_slots(self) -> Mapping[str, Tensor]: ...
    async def swap_weights(self, prepared: Iterable[tuple[str, Tensor]], weight_version: int) -> None: ...


class TorchIncoming:
    """Implements ``Incoming`` (``mopd.engines.interface``) for ``TorchEngine``."""

    def __init__(self, engine: _TorchModel) -> None:
        self._engine = engine
        self._receiver: Receiver | None = None
        self._given_up = threading.Event()
        """Set by ``leave`` or a later ``join``: ends the last ``join``."""

    async def join(self, order: GroupOrder, first_rank: int, metas: Sequence[TensorMeta]) -> None:
        """Leave the previous group and enter a new one, in another thread."""
        slots = self._engine.weight_slots
        check_fit(metas, slots, name=self._engine.name)
        # ends a `join` of another group that still waits
        self._given_up.set()
        given_up = self._given_up = threading.Event()  # made before the first await: a `leave` during it ends this join
        await self._close()
        try:
            self._receiver = await asyncio.to_thread(
                open_receiver,
                order,
                first_rank,
                metas,
                keeps_views=False,
                slots=slots,
                device=next(iter(slots.values())).device,
                given_up=given_up,
            )
        except TransferFailed as error:
            raise WeightsLost(f"{self._engine.name}: {error}") from error

    async def receive(
        self, weight_version: int, *, verify: bool, patience_s: float, ready: Callable[[], object]
    ) -> Reception:
        """Replace all weights by what the group sends. Blocks the event loop: no call may run meanwhile."""
        receiver, began = self._receiver, time.perf_counter()
        if receiver is None:
            raise WeightsLost(f"{self._engine.name} is in no group")
        ready()
        try:
            tensors = receiver.tensors(verify=verify, patience_s=patience_s)
            await self._engine.swap_weights(tensors, weight_version)
        except TransferFailed as error:
            raise WeightsLost(f"{self._engine.name}: {error}") from error
        return Reception(wait_s=receiver.wait_s, load_s=time.perf_counter() - began - receiver.wait_s)

    async def leave(self) -> None:
        """Leave the group; a waiting ``join`` ends at once."""
        self._given_up.set()
        await self._close()

    async def _close(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            await asyncio.to_thread(receiver.close)  # waits for a reception in progress

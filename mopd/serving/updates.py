"""Versioned weight updates of a rollout server: begin, chunks, commit. Half an update never serves.

::

    serving v ──begin──> serving v, v+1 kept aside ──commit──> serving v, v+1 looked at ──> swap ──ok──> serving v+1
        ▲                     │ a wrong tensor, or                │ refused: NaN,             │ failed half way
        │                     │ silence for update_timeout_s      │ missing tensors           └──> no weights: work is
        └─────────────────────┴───────────────────────────────────┘                                refused (409) until
                                                                                                   an update succeeds
    swap, finish:    what runs ends under v, then the weights change; nothing is let in (429) before an engine that
                     keeps its own queue (vLLM), in others what waits is answered under v+1
    swap, continue:  the weights change at once; what runs is frozen and goes on under v+1, or is handed back
    a new begin replaces the update before it (its sender died)
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from mopd.engines.interface import OnRunning
from mopd.serving.admission import Admission
from mopd.serving.errors import Refusal, bad_request, busy, stale_weights
from mopd.serving.host import EngineHost
from mopd.wire.messages import WireError
from mopd.wire.weights import NO_CONSTANTS, Staging, WeightBegin, WeightChunk, WeightCommit

RETRY_AFTER_S = 0.2
"""Of requests that are turned away while what runs ends."""
_NO_UPDATE = "no such weight update: it was replaced, or silent for too long"


@dataclass(slots=True)
class _Update:
    update_id: str
    weight_version: int
    staging: Staging
    silence: asyncio.TimerHandle
    """Fires when the sender has said nothing for too long."""


class WeightUpdates:
    """The version that a server answers with, and the update on its way."""

    def __init__(self, host: EngineHost, admission: Admission, *, has_weights: bool, fixed: bool) -> None:
        """``has_weights`` tells that the engine can answer now; ``fixed`` weights (a teacher's) are never updated."""
        self._host, self._admission = host, admission
        self._has_weights, self._fixed = has_weights, fixed
        self._weight_version = -1
        self._constants = NO_CONSTANTS
        self._update: _Update | None = None
        self._is_loading = False

    @property
    def is_running(self) -> bool:
        """An update is on its way or being loaded."""
        return self._update is not None or self._is_loading

    @property
    def weight_version(self) -> int:
        """Version of the weights that answer; -1 for the checkpoint's, or none."""
        return self._weight_version

    @property
    def constants(self) -> bytes:
        """Digest of those in the weights that answer; empty for none. An update need not bring them again."""
        return self._constants.digest

    def require(self, weight_version: int) -> None:
        """``Refusal`` 409 unless the engine answers with exactly this version."""
        if self._weight_version > weight_version:
            raise stale_weights(f"the server has weights {self._weight_version}, not {weight_version}")
        self.require_at_least(weight_version)

    def require_at_least(self, weight_version: int) -> None:
        """``Refusal`` 409 if the engine has older weights."""
        if not self._has_weights:
            raise stale_weights("the server has no weights yet")
        if weight_version > self._weight_version:
            raise stale_weights(f"the server has weights {self._weight_version}, not {weight_version}")

    def require_receiving(self) -> None:
        """``Refusal`` 409 unless an update is on its way, 403 where none can be."""
        self._require_updatable()
        if self._update is None:
            raise stale_weights(_NO_UPDATE)

    def begin(self, message: WeightBegin) -> None:
        """From now on chunks can come."""
        self._require_updatable()
        self._admission.require_open()
        self.drop()
        self._update = _Update(
            update_id=message.update_id,
            weight_version=message.weight_version,
            staging=Staging(self._host.engine.weight_slots, message, self._constants),
            silence=self._alarm(),
        )

    def add(self, chunk: WeightChunk) -> None:
        """Keep a chunk aside. A bad one ends the update (400)."""
        update = self._current(chunk.update_id, of_chunk=True)
        try:
            update.staging.add(chunk)
        except WireError as error:
            self.drop()
            raise bad_request(str(error)) from error
        update.silence.cancel()
        update.silence = self._alarm()

    async def commit(self, message: WeightCommit) -> None:
        """Swap in what arrived if it is all there, and serve it."""
        update = self._current(message.update_id)
        try:
            tensors = update.staging.finish(message)
        except WireError as error:
            self.drop()
            raise bad_request(str(error)) from error
        update.silence.cancel()
        self._update = None
        self._is_loading = True
        try:
            kept = update.staging.kept
            async with self._host.engine.prepared_weights(tensors.items(), kept=kept) as prepared:
                on_running: OnRunning = "continue" if message.on_running == "continue" else "finish"
                if on_running == "continue" or self._host.swaps_between_calls:
                    self._admission.require_open()
                    await self._swap(prepared, update, on_running)
                else:
                    await self._swap_when_idle(prepared, update)
        finally:
            self._is_loading = False

    async def _swap_when_idle(self, prepared: Any, update: _Update) -> None:
        reason = busy(f"weights {update.weight_version} wait for what runs", retry_after_s=RETRY_AFTER_S)
        self._admission.pause(reason)
        try:
            await self._admission.wait_idle(self._admission.limits.request_timeout_s)
            await self._swap(prepared, update, "finish")
        finally:
            self._admission.resume()

    async def _swap(self, prepared: Any, update: _Update, on_running: OnRunning) -> None:
        """Requests that come meanwhile wait for the engine, and are answered with the new weights. A failure leaves
        none, constants neither: half of them may be new."""
        weight_version = update.weight_version
        try:
            await self._host.swap_weights(prepared, weight_version, on_running=on_running)
            if self._host.engine.weight_version != weight_version:
                raise RuntimeError(
                    f"the engine has weights {self._host.engine.weight_version} after {weight_version} were loaded"
                )
        except BaseException:
            self._has_weights, self._weight_version, self._constants = False, -1, NO_CONSTANTS
            raise
        self._has_weights, self._weight_version, self._constants = True, weight_version, update.staging.constants

    def _require_updatable(self) -> None:
        if self._fixed:
            raise Refusal(403, "forbidden", "this server's weights are fixed: only a rollout server takes new ones")
        if self._is_loading:
            raise stale_weights("an update is being loaded")

    def _current(self, update_id: str, *, of_chunk: bool = False) -> _Update:
        self._require_updatable()
        update = self._update
        if update is None or not (update_id == update.update_id or (of_chunk and update_id in update.staging.ids)):
            raise stale_weights(_NO_UPDATE)
        return update

    def _alarm(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._admission.limits.update_timeout_s, self.drop)

    def drop(self) -> None:
        """Forget the update, if there is one."""
        if self._update is not None:
            self._update.silence.cancel()
            self._update = None

"""Versioned weight updates of a rollout server: begin, chunks, commit. An incomplete update never serves.

::

    serving v ──begin──> serving v, v+1 kept aside ──commit──> serving v, v+1 checked ────> swap ──ok──> serving v+1
        ▲                     │ a wrong tensor, or                │ refused: NaN,             │ failed half way
        │                     │ silence for update_timeout_s      │ missing tensors           └──> no weights: work is
        └─────────────────────┴───────────────────────────────────┘                                refused (409) until
                                                                                                   an update succeeds
    swap, finish:    running requests end under v, then the weights change; nothing is admitted (429) before an engine
                     that keeps its own queue (vLLM); with others, waiting requests are answered under v+1
    swap, continue:  the weights change at once; running requests are frozen and go on under v+1, or are handed back
    a new begin replaces the update before it (its sender died)

With a group (``engines/wire/transfer.py``) the weights go straight into the engine, which loses the old ones first::

    serving v ──start──> no weights ──buckets──> finish: serving v+1        a failure leaves none (409), until an update
                  ▲ after running requests, as above                        succeeds, by whichever way
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from mopd.base.files.json_text import parse_json
from mopd.base.text import one_line
from mopd.engines.interface import Reception, WeightsLost
from mopd.engines.wire.messages import WireError
from mopd.engines.wire.transfer import WeightFinish, WeightJoin, WeightReceived, WeightStart
from mopd.engines.wire.weights import Staging, WeightBegin, WeightChunk, WeightCommit, WeightVersion
from mopd.serving.admission import Admission
from mopd.serving.errors import Refusal, bad_request, busy, stale_weights
from mopd.serving.host import EngineHost
from mopd.weights.group import GroupOrder
from mopd.weights.parts import from_json

logger = logging.getLogger(__name__)

SMALL_BYTES = 2**16
"""Limit of bodies that hold no tensors."""
RETRY_AFTER_S = 0.2
"""Pause in seconds for requests that are turned away while running ones end."""
MAX_JOIN_BYTES, MAX_JOIN_VALUES = 2**24, 2_000_000
"""Bytes and values of the list of tensors: some hundred thousand tensors."""
QUIT_S = 3.0
"""Seconds for waiting work to end after its group was left."""
CONTINUE = "continue"
"""What a message's ``on_running`` says where running requests need not end first; whatever else: they do."""
_NO_UPDATE = "no such weight update: it was replaced, or silent for too long"


@dataclass(slots=True)
class _Update:
    """An update whose chunks are arriving."""

    update_id: str
    weight_version: int
    staging: Staging
    silence: asyncio.TimerHandle
    """Timer that drops the update when its sender is silent for too long."""


class WeightUpdates:
    """The version that a server answers with, and the update in progress."""

    def __init__(self, host: EngineHost, admission: Admission, *, fixed: bool) -> None:
        """``fixed`` weights (a teacher's) are there from the start and never updated."""
        self._host, self._admission = host, admission
        self._has_weights = self._fixed = fixed
        self.weight_version = -1
        """Version of the weights that answer; -1 for the checkpoint's, or none."""
        self._update: _Update | None = None
        self._is_loading = False
        self._group_id = self._received_from = ""
        self._num_joins = 0
        self._joining: asyncio.Future[None] | None = None
        self._reception: asyncio.Task[Reception] | None = None
        self._leaving: asyncio.Future[None] | None = None  # a reference, so that the task is not collected

    @property
    def is_running(self) -> bool:
        """Whether an update is arriving or being loaded."""
        return self._update is not None or self._is_loading

    @property
    def version(self) -> WeightVersion:
        """The message that names the serving weights."""
        return WeightVersion(weight_version=self.weight_version)

    def require(self, weight_version: int) -> None:
        """Raise ``Refusal`` 409 unless the engine answers with exactly this version."""
        if self.weight_version > weight_version:
            raise stale_weights(f"the server has weights {self.weight_version}, not {weight_version}")
        self.require_at_least(weight_version)

    def require_at_least(self, weight_version: int) -> None:
        """Raise ``Refusal`` 409 if the engine has older weights."""
        if not self._has_weights:
            raise stale_weights("the server has no weights yet")
        if weight_version > self.weight_version:
            raise stale_weights(f"the server has weights {self.weight_version}, not {weight_version}")

    def require_receiving(self) -> None:
        """Raise ``Refusal`` 409 unless an update is arriving, 403 if the weights are fixed."""
        self.require_updatable()
        if self._update is None:
            raise stale_weights(_NO_UPDATE)

    async def begin(self, message: WeightBegin) -> None:
        """Begin an update: its chunks may come from now on. It replaces one that is arriving."""
        self.require_updatable()
        self._admission.require_open_to_weights()
        self.drop()
        self._update = _Update(
            update_id=message.update_id,
            weight_version=message.weight_version,
            staging=Staging(self._host.engine.weight_slots, message.update_id),
            silence=self._alarm(),
        )

    async def add(self, chunk: WeightChunk) -> None:
        """Keep a chunk aside. A bad one ends the update (400)."""
        update = self._current(chunk.update_id)
        try:
            update.staging.add(chunk)
        except WireError as error:
            self.drop()
            raise bad_request(str(error)) from error
        update.silence.cancel()
        update.silence = self._alarm()

    async def commit(self, message: WeightCommit) -> None:
        """Swap in what arrived, if it is complete, and serve it."""
        update = self._current(message.update_id)
        try:
            tensors = update.staging.finish(message)
        except WireError as error:
            self.drop()
            raise bad_request(str(error)) from error
        update.silence.cancel()
        # from here on a new `begin` is refused until these weights are loaded or refused
        self._update = None
        self._is_loading = True
        try:
            async with (
                self._host.engine.prepare_weights(tensors.items()) as prepared,
                self._ready_to_swap(update.weight_version, message.on_running),
            ):
                await self._swap(prepared, update, interrupt=message.on_running == CONTINUE)
        finally:
            self._is_loading = False

    async def join(self, message: WeightJoin) -> None:
        """Enter a group and return when it has met; the engine works meanwhile. What another group does here ends
        first.

        Raises:
            Refusal: 409 if another group comes before the list of tensors is read, or this one does not meet.
            ValueError: the list of tensors is none.
        """
        number = self._num_joins = self._num_joins + 1
        await self._quit_group()
        text = message.tensors.tobytes()
        metas = await asyncio.to_thread(lambda: from_json(parse_json(text, max_values=MAX_JOIN_VALUES)))
        if number != self._num_joins:
            raise stale_weights("another group came")
        self.require_updatable()
        self._admission.require_open_to_weights()
        self.drop()
        self._is_loading = True
        self._joining = asyncio.get_running_loop().create_future()
        order = GroupOrder(**{field.name: getattr(message, field.name) for field in dataclasses.fields(GroupOrder)})
        try:
            await self._host.engine.incoming.join(order, message.first_rank, metas)
        except WeightsLost as error:
            raise stale_weights(one_line(error)) from error
        finally:
            self._is_loading = False
            self._joining.set_result(None)
        self._group_id = message.group_id

    async def _quit_group(self) -> None:
        """End what runs for the previous group, whose sender begins anew or is gone. Waits ``QUIT_S`` at most; what
        still runs then makes ``require_updatable`` refuse."""
        self._group_id = self._received_from = ""
        waiting = [work for work in (self._joining, self._reception) if work is not None and not work.done()]
        if waiting:
            self._leaving = asyncio.ensure_future(self._host.engine.incoming.leave())
            await asyncio.wait([self._leaving, *waiting], timeout=QUIT_S)

    async def start(self, message: WeightStart) -> None:
        """Stop the engine and return when it waits for the first bucket."""
        self.require_updatable()
        self._require_group(message.group_id)
        self._admission.require_open_to_weights()
        self.drop()
        self._is_loading, self._received_from = True, message.group_id
        ready = asyncio.Event()
        self._reception = asyncio.create_task(self._receive(message, ready.set))
        # retrieves its error: `finish`, which would report it to the sender, may never be called
        self._reception.add_done_callback(lambda task: task.cancelled() or task.exception())
        waiting = asyncio.create_task(ready.wait())
        try:
            await asyncio.wait({waiting, self._reception}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if not ready.is_set():
            await self._reception

    async def finish(self, message: WeightFinish) -> WeightReceived:
        """Return when the new weights answer. Also reports an error that closed the group meanwhile."""
        # a failed reception has left the group: its own group may still ask for the outcome
        if message.group_id != self._received_from:
            self._require_group(message.group_id)
        if self._reception is None:
            raise stale_weights(_NO_UPDATE)
        # shielded: a sender that gives up waiting must not cancel a reception that is half done
        reception = await asyncio.shield(self._reception)
        if self.weight_version != message.weight_version:
            raise stale_weights(_NO_UPDATE)
        return WeightReceived(weight_version=self.weight_version, wait_s=reception.wait_s, load_s=reception.load_s)

    async def _receive(self, message: WeightStart, ready: Callable[[], None]) -> Reception:
        """Receive the weights and serve them. A failure leaves the engine without weights."""
        loop = asyncio.get_running_loop()

        def stopped() -> None:
            self._lose()
            ready()

        async def receive() -> Reception:
            return await self._host.engine.incoming.receive(
                message.weight_version,
                verify=message.verify,
                patience_s=message.patience_s,
                ready=lambda: loop.call_soon_threadsafe(stopped),
            )

        try:
            async with self._ready_to_swap(message.weight_version, message.on_running):
                reception = await self._host.between_calls(receive, interrupt=message.on_running == CONTINUE)
                self._has_weights, self.weight_version = True, message.weight_version
                return reception
        except WeightsLost as error:
            self._group_id = ""
            logger.warning("weights %d did not arrive: %s", message.weight_version, one_line(error))
            raise stale_weights(f"weights {message.weight_version} did not arrive: {one_line(error)}") from error
        finally:
            self._is_loading = False

    @asynccontextmanager
    async def _ready_to_swap(self, weight_version: int, on_running: str) -> AsyncIterator[None]:
        """Wait until the weights may change. Where running requests have to end first, nothing is admitted until the
        context ends."""
        # an engine that sleeps runs nothing: there is nothing to wait for
        if on_running == CONTINUE or self._host.swaps_between_calls or self._admission.takes_weights:
            self._admission.require_open_to_weights()
            yield
            return
        self._admission.pause(busy(f"weights {weight_version} wait for what runs", retry_after_s=RETRY_AFTER_S))
        try:
            await self._admission.wait_idle(self._admission.limits.request_timeout_s)
            yield
        finally:
            self._admission.resume()

    def _require_group(self, group_id: str) -> None:
        if not group_id or group_id != self._group_id:
            raise stale_weights("the server is not in this group: it was left, or closed by a failure")

    def forget(self) -> None:
        """Record that the engine, which sleeps, has lost the weights of updates."""
        if not self._fixed:
            self._lose()

    def _lose(self) -> None:
        self._has_weights, self.weight_version = False, -1

    async def _swap(self, prepared: Any, update: _Update, *, interrupt: bool) -> None:
        """Swap in prepared weights. Requests that come meanwhile wait for the engine, and are answered with the new
        ones.

        A failure leaves no weights: half of them may be new.
        """
        version, engine = update.weight_version, self._host.engine
        try:
            await self._host.between_calls(lambda: engine.swap_weights(prepared, version), interrupt=interrupt)
            if engine.weight_version != version:
                raise RuntimeError(f"the engine has weights {engine.weight_version} after {version} were loaded")
        except BaseException:
            self._lose()
            raise
        self._has_weights, self.weight_version = True, version

    def require_updatable(self) -> None:
        """Raise ``Refusal`` 403 if the weights are fixed, 409 while an update is being loaded."""
        self.require_not_fixed()
        if self._is_loading:
            raise stale_weights("an update is being loaded")

    def require_not_fixed(self) -> None:
        """Raise ``Refusal`` 403 if the weights are fixed."""
        if self._fixed:
            raise Refusal(403, "forbidden", "this server's weights are fixed: only a rollout server takes new ones")

    def _current(self, update_id: str) -> _Update:
        self.require_updatable()
        update = self._update
        if update is None or update_id != update.update_id:
            raise stale_weights(_NO_UPDATE)
        return update

    def _alarm(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._admission.limits.update_timeout_s, self.drop)

    async def close(self) -> None:
        """Drop the update that is arriving and leave the group: what waits there fails."""
        self.drop()
        await self._quit_group()

    def drop(self) -> None:
        """Drop the update that is arriving, if there is one."""
        if self._update is not None:
            self._update.silence.cancel()
            self._update = None

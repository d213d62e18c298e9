"""Versioned weight updates of a rollout server (``engines/wire/weights.py``). An incomplete update never serves.

::

    serving v ──join──> serving v ──start──> no weights ──parts──> finish: serving v+1   a failure leaves none (409)
                          │      ▲ after running requests                                until an update succeeds
                          └─part─┘ without a group: they are kept aside; a wrong one, or silence for update_timeout_s,
                                   ends the update, and v serves

    start, finish:    running requests end under v, then the weights change; nothing is admitted (429) before an engine
                      that keeps its own queue (vLLM); with others, waiting requests are answered under v+1
    start, continue:  the weights change at once; running requests are frozen and go on under v+1, or are handed back
    a new join replaces the update before it (its sender died)
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import torch

from mopd.base.files.json_text import parse_json
from mopd.base.text import one_line
from mopd.engines.interface import Reception, WeightsLost
from mopd.engines.wire.weights import WeightFinish, WeightJoin, WeightPart, WeightReceived, WeightStart, WeightVersion
from mopd.serving.admission import Admission
from mopd.serving.errors import Refusal, bad_request, busy, stale_weights
from mopd.serving.host import EngineHost
from mopd.weights.carrying import Staging, staged_order
from mopd.weights.group import GroupOrder
from mopd.weights.parts import from_json
from mopd.weights.receiving import check_fit

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


class WeightUpdates:
    """The version that a server answers with, and the update in progress."""

    def __init__(self, host: EngineHost, admission: Admission, *, fixed: bool) -> None:
        """``fixed`` weights (a teacher's) are there from the start and never updated."""
        self._host, self._admission = host, admission
        self._has_weights = self._fixed = fixed
        self.weight_version = -1
        """Version of the weights that answer; -1 for the checkpoint's, or none."""
        self._staging: Staging | None = None
        """Parts of an update that come in messages."""
        self._silence: asyncio.TimerHandle | None = None
        """Timer that drops them when their sender is silent for too long."""
        self._is_loading = False
        self._group_id = self._received_from = ""
        self._num_joins = 0
        self._joining: asyncio.Future[None] | None = None
        self._reception: asyncio.Task[Reception] | None = None
        self._leaving: asyncio.Future[None] | None = None  # a reference, so that the task is not collected

    @property
    def is_running(self) -> bool:
        """Whether an update is arriving or being loaded."""
        return self._staging is not None or self._is_loading

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
        """Raise ``Refusal`` 409 unless parts of an update are arriving, 403 if the weights are fixed."""
        self.require_updatable()
        if self._staging is None:
            raise stale_weights(_NO_UPDATE)

    async def add(self, part: WeightPart) -> None:
        """Keep a part aside. A bad one ends the update (400)."""
        self.require_receiving()
        self._require_group(part.group_id)
        assert self._staging is not None
        try:
            # beside the event loop, which answers requests meanwhile
            await asyncio.to_thread(self._staging.add, part.index, part.digest, torch.from_numpy(part.data))
        except ValueError as error:
            self.drop()
            raise bad_request(one_line(error)) from error
        self._expect_parts()

    async def join(self, message: WeightJoin) -> None:
        """Enter a group and return when it has met, or when there is memory for the parts; the engine works meanwhile.
        What another group does here ends first.

        Raises:
            Refusal: 409 if another group comes before the list of tensors is read, or this one does not meet.
            ValueError: the list of tensors is none, or not the model's.
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
        engine = self._host.engine
        try:
            check_fit(metas, engine.weight_slots, name=engine.name)
            if order.is_staged:
                num_workers = (await engine.info()).num_workers
                order = staged_order(message.group_id, num_receivers=num_workers, bucket_bytes=message.bucket_bytes)
                self._staging = await asyncio.to_thread(Staging, order, metas)
                order = self._staging.order
            await engine.incoming.join(order, message.first_rank, metas)
        except BaseException as error:
            self.drop()
            if isinstance(error, WeightsLost):
                raise stale_weights(one_line(error)) from error
            raise
        finally:
            self._is_loading = False
            self._joining.set_result(None)
        self._group_id = message.group_id
        if order.is_staged:
            self._expect_parts()

    async def _quit_group(self) -> None:
        """End what runs for the previous group, whose sender begins anew or is gone. Waits ``QUIT_S`` at most; what
        still runs then makes ``require_updatable`` refuse."""
        self._group_id = self._received_from = ""
        self.drop()
        waiting = [work for work in (self._joining, self._reception) if work is not None and not work.done()]
        if waiting:
            self._leaving = asyncio.ensure_future(self._host.engine.incoming.leave())
            await asyncio.wait([self._leaving, *waiting], timeout=QUIT_S)

    async def start(self, message: WeightStart) -> None:
        """Stop the engine and return when it waits for the first bucket."""
        self.require_updatable()
        self._require_group(message.group_id)
        self._admission.require_open_to_weights()
        if self._staging is not None and not self._staging.is_complete:
            raise bad_request(f"{self._staging.num_filled} parts of the update came: send all, then start")
        self._expect_parts(False)
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
                verify=message.verify and self._staging is None,
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
            self.drop()

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

    def require_updatable(self) -> None:
        """Raise ``Refusal`` 403 if the weights are fixed, 409 while an update is being loaded."""
        self.require_not_fixed()
        if self._is_loading:
            raise stale_weights("an update is being loaded")

    def require_not_fixed(self) -> None:
        """Raise ``Refusal`` 403 if the weights are fixed."""
        if self._fixed:
            raise Refusal(403, "forbidden", "this server's weights are fixed: only a rollout server takes new ones")

    def _expect_parts(self, expected: bool = True) -> None:
        """Begin to wait for the next part anew, or wait for none any more."""
        if self._silence is not None:
            self._silence.cancel()
        seconds = self._admission.limits.update_timeout_s
        self._silence = asyncio.get_running_loop().call_later(seconds, self.drop) if expected else None

    async def close(self) -> None:
        """Drop the update that is arriving and leave the group: what waits there fails."""
        await self._quit_group()

    def drop(self) -> None:
        """Drop the parts that have arrived, if there are any."""
        staging, self._staging = self._staging, None
        if staging is not None:
            self._expect_parts(False)
            self._group_id = ""
            staging.close()

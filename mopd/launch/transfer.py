"""Rank 0 gives the student's weights to the rollout's engines over a process group that it leads.

::

    lacking? ──> same replicas as last time: the group stays; others: a new store, join ∥ meet
      ▲            start (they stop) ──> buckets, from the student's thread ──> finish (the new weights answer)
      └── some failed: the group is closed, those that answered are tried again, the others are left to ``Repair``
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from mopd.config.groups import VllmEngineConfig
from mopd.config.schema import Recipe
from mopd.config.weights import BucketsConfig, CollectiveConfig, IpcConfig
from mopd.launch.stages import waiting_s
from mopd.student.weights import hf_tensors
from mopd.student.worker import StudentWorker
from mopd.transfer.buckets import TensorMeta, to_json
from mopd.transfer.group import GroupOrder, GroupStore, TransferFailed, TransferGroup
from mopd.transfer.mapped import mapped_bytes, send_mapped
from mopd.transfer.memory import SharedMemory
from mopd.transfer.sending import Sent, send
from mopd.transfer.stages import Words, of_sender

logger = logging.getLogger(__name__)
T = TypeVar("T")

_CPU = torch.device("cpu")
MAX_ATTEMPTS = 4
"""Of one update; a replica that fails in all of them is left without."""
InThread = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs something in the student's thread."""


class Targets(Protocol):
    """See ``mopd.replicas.transfer.TransferTargets``."""

    async def lacking(self, weight_version: int | None) -> list[str]: ...
    async def join(self, names: Sequence[str], order: Mapping[str, Any], tensors: bytes) -> dict[str, str]: ...
    async def start(self, names: Sequence[str], order: Mapping[str, Any]) -> dict[str, str]: ...
    async def finish(self, names: Sequence[str], order: Mapping[str, Any]) -> tuple[dict[str, str], float]: ...
    async def published(self, weight_version: int | None) -> None: ...


class Transfer:
    """One update at a time. Belongs to rank 0's event loop."""

    def __init__(
        self,
        targets: Targets,
        cfg: BucketsConfig,
        metas: Sequence[TensorMeta],
        *,
        num_workers: int,
        device: torch.device = _CPU,
        num_constants: int = 0,
        shares: Sequence[int] = (),
        checks_values: bool = True,
    ) -> None:
        """``metas``: every weight of the student, as it will travel; ``num_workers``: of one replica; ``device`` of
        rank 0's parameters; ``num_constants``: how many of the first of ``metas`` no step changes; ``shares``:
        how many of ``metas`` each pipeline stage sends, where each sends its own; without ``checks_values`` whoever
        changes the weights looks for NaN among them, and an update does when it is verified."""
        self._targets, self._cfg, self._metas, self._num_workers = targets, cfg, metas, num_workers
        self._group: TransferGroup | None = None
        self._order: GroupOrder | None = None
        self._memory: SharedMemory | None = None
        self._device = device
        self._bucket_bytes = cfg.bucket_mib * 2**20
        self._checks_values = checks_values
        self._names: list[str] = []
        self._num_updates = 0
        self._num_constants, self._have_constants = num_constants, False
        self.shares = tuple(shares)
        """Of senders, if there are several."""
        self.join_stages: Callable[[dict[str, Any]], None] = _no_stages
        """Tells the other senders ``StageSender.join``, in the student's thread."""
        self.current: dict[str, Any] = {}
        """What the other senders are told in the update under way: ``StageSender.send``."""
        self._words: Words | None = None
        self._numbers: dict[str, float] = {}

    def take_numbers(self) -> dict[str, float]:
        """Metrics of the last update since the last call."""
        numbers, self._numbers = self._numbers, {}
        return numbers

    async def publish(
        self,
        weight_version: int,
        read: Callable[[], Iterable[tuple[str, Tensor]]],
        in_thread: InThread,
        *,
        only_missing: bool = False,
        read_trained: Callable[[], Iterable[tuple[str, Tensor]]] | None = None,
    ) -> None:
        """Returns when every replica that can answers with these weights. ``read`` begins a stream of all of them, in
        the student's thread, ``read_trained`` of those that steps change: a group is sent the others once.
        ``only_missing``: to those alone that have older weights than the router asks for.

        Raises:
            UserError: a replica's model has other weights; ``NonFiniteError`` for a value that is no number.
        """
        asked = None if only_missing else weight_version
        lost: set[str] = set()
        began = time.monotonic()
        for attempt in range(MAX_ATTEMPTS):
            names = [name for name in await self._targets.lacking(asked) if name not in lost]
            if not names:
                break
            verify = attempt > 0 or self._num_updates % self._cfg.verify_every == 0
            failures = await self._attempt(names, weight_version, verify, read, read_trained, in_thread)
            lost |= {name for name, kind in failures.items() if kind == "lost"}
            if failures:
                await self.close()
        if left := await self._targets.lacking(asked):
            logger.warning("weights %d did not reach %s", weight_version, ", ".join(left))
        self._num_updates += 1
        if self._numbers:
            self._numbers["timing/weights_update_s"] = time.monotonic() - began
        await self._targets.published(asked)

    def send_constants(self) -> None:
        """With the next update: they may be others now."""
        self._have_constants = False

    async def close(self) -> None:
        """Leave the group, until the next update makes another."""
        group, self._group = self._group, None
        memory, self._memory = self._memory, None
        if group is not None:
            await asyncio.to_thread(group.close)
        if memory is not None:
            memory.close()

    async def _attempt(
        self,
        names: list[str],
        weight_version: int,
        verify: bool,
        read: Callable[[], Iterable[tuple[str, Tensor]]],
        read_trained: Callable[[], Iterable[tuple[str, Tensor]]] | None,
        in_thread: InThread,
    ) -> dict[str, str]:
        """Who has not got them, and why not."""
        failures = await self._meet(names, in_thread)
        if failures:
            return failures
        assert self._group is not None and self._order is not None
        group, order = (
            self._group,
            {
                "group_id": self._order.group_id,
                "weight_version": weight_version,
                "timeout_s": self._cfg.timeout_s,
            },
        )
        failures = await self._targets.start(names, {**order, "verify": verify})
        if failures:
            return failures

        skipped = 0 if read_trained is None or not self._have_constants else self._num_constants
        memory = self._memory
        how = {"verify": verify, "checks_values": self._checks_values}
        self.current = {"update": self.current.get("update", 0) + 1, **how}

        def work() -> Sent:
            stream = read_trained() if skipped and read_trained is not None else read()
            send_all = partial(send, group) if memory is None else partial(send_mapped, group, memory)
            options: Any = {"bucket_bytes": self._bucket_bytes, "num_skipped": skipped, **how}
            if not self.shares:
                return send_all(self._metas, stream, **options)
            with self._first_of_several():
                return send_all(self._metas[: self.shares[0]], stream, **options)

        began = time.monotonic()
        try:
            sent: Sent | None = await in_thread(work)
        except TransferFailed as error:
            logger.warning("weights %d were not sent to the end: %s", weight_version, error)
            sent = None
        failures, load_s = await self._targets.finish(names, order)
        self._have_constants = not failures
        if sent is not None:
            seconds = time.monotonic() - began
            num_bytes = sum(meta.num_bytes for meta in self._metas[skipped:])
            self._numbers = {
                "timing/weights_gather_s": sent.gather_s,
                "timing/weights_send_s": sent.send_s,
                "timing/weights_load_s": load_s,
                "rate/weights_mib_per_s": num_bytes / 2**20 / seconds,
            }
        return failures

    @contextmanager
    def _first_of_several(self) -> Iterator[None]:
        """The block sends rank 0's share; afterwards all others are sent. ``TransferFailed`` if they are not."""
        assert self._words is not None and self._order is not None
        update, is_good = self.current["update"], False
        try:
            yield
            is_good = True
        finally:
            self._words.pass_on(update, 1, is_good=is_good)
        self._words.wait(update, len(self.shares), waiting_s(self._order))

    async def _meet(self, names: list[str], in_thread: InThread) -> dict[str, str]:
        """The group of exactly these, in this order."""
        if self._group is not None and not self._group.is_over and names == self._names:
            return {}
        await self.close()
        timeout_s = self._cfg.timeout_s
        store = GroupStore(timeout_s)
        num_receivers = len(names) * self._num_workers
        if isinstance(self._cfg, IpcConfig):
            metas = self._metas, self._metas[self._num_constants :]
            size = max(mapped_bytes(announced, self._bucket_bytes) for announced in metas)
            self._memory = SharedMemory(size, self._device)
        order = GroupOrder(
            group_id=secrets.token_hex(8),
            port=store.port,
            world_size=1 + num_receivers,
            bucket_bytes=self._bucket_bytes,
            timeout_s=timeout_s,
            secret=secrets.token_hex(32),
            memory="" if self._memory is None else self._memory.handles(num_receivers),
            shares=self.shares,
        )
        told, own, tensors = asdict(order), order, to_json(self._metas)
        if self.shares:
            self._words, own = Words(order, store), of_sender(order, 0)
            joining = {"order": told, "tensors": tensors.decode()}
            await in_thread(lambda: self.join_stages(joining))
        given_up = threading.Event()
        device = self._device if self._memory is None else _CPU  # of signals where engines map the memory
        meeting = asyncio.ensure_future(asyncio.to_thread(_meet, own, store, given_up, device))
        failures: dict[str, str] | None = None
        try:
            failures = await self._targets.join(names, told, tensors)
        finally:
            if failures != {}:
                given_up.set()  # those that came are told so
                if self._words is not None:
                    self._words.call_off()
        group = await meeting
        if group is None or failures:
            if group is not None:
                group.close()
            return failures or dict.fromkeys(names, "refused")
        self._group, self._order, self._names, self._have_constants = group, order, names, False
        return {}


def _no_stages(joining: dict[str, Any]) -> None:
    raise RuntimeError("nobody speaks to the ranks of the other stages")


def _meet(
    order: GroupOrder, store: GroupStore, given_up: threading.Event, device: torch.device
) -> TransferGroup | None:
    try:
        return TransferGroup(order, 0, store, given_up=given_up, device=device)
    except TransferFailed as error:
        logger.warning("a group for the weights did not meet: %s", error)
        return None


def open_transfer(recipe: Recipe, worker: StudentWorker, targets: Targets) -> Transfer | None:
    """The collective of a recipe that asks for it."""
    cfg, engine = recipe.weight_sync, recipe.rollout.engine
    if not isinstance(cfg, BucketsConfig):
        return None
    num_workers = engine.tensor_parallel_size if isinstance(engine, VllmEngineConfig) else 1
    student, rollout = getattr(torch, recipe.student.dtype), getattr(torch, engine.dtype)
    smaller = rollout if rollout.itemsize < student.itemsize else student  # cast before it travels
    metas = [
        TensorMeta(name, smaller if dtype == student else dtype, shape)
        for name, dtype, shape in hf_tensors(worker.dims, student)
    ]
    metas.sort(key=lambda meta: meta.name not in worker.constants)
    shares: list[int] = []
    if isinstance(cfg, CollectiveConfig) and worker.layout.pp_size > 1 and is_one_node():
        names = [name for name, _, _ in hf_tensors(worker.dims, student)]
        stages = dict(zip(names, worker.weight_stages(), strict=True))
        metas.sort(key=lambda meta: stages[meta.name])
        shares = [list(stages.values()).count(stage) for stage in range(worker.layout.pp_size)]
    # replicas on shared GPUs lose theirs in every turn
    num_constants = 0 if recipe.shares_gpus else len(worker.constants)
    return Transfer(
        targets,
        cfg,
        metas,
        num_workers=num_workers,
        device=worker.layout.device,
        num_constants=num_constants,
        shares=shares,
        checks_values=smaller != student,  # a cast may overflow; of its own dtype each rank does, in ``optim_step``
    )


def is_one_node() -> bool:
    """All ranks can reach rank 0's loopback: torchrun has one agent, or there is none."""
    return os.environ.get("GROUP_WORLD_SIZE", "1") == "1"

"""A rank's part when weights go to the rollout's engines by a group: the first rank of the student sends them, or the
first of each pipeline stage its stage's, in turn; all others help to gather them."""

from __future__ import annotations

import collections
import itertools
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from mopd.config.schema import Recipe
from mopd.config.weights import BucketsConfig, CollectiveConfig
from mopd.student.parallel import Layout
from mopd.student.weights import hf_tensors
from mopd.student.worker import StudentWorker, WeightPart
from mopd.weights.buckets import TensorMeta, from_json, to_json
from mopd.weights.group import GroupOrder, TransferFailed, TransferGroup
from mopd.weights.mapped import send_mapped
from mopd.weights.memory import SharedMemory
from mopd.weights.sending import send
from mopd.weights.stages import SenderSignals, of_sender

logger = logging.getLogger(__name__)


class HasWeights(Protocol):
    """What is needed of ``StudentWorker``."""

    layout: Layout
    constants: frozenset[str]

    def weights(self, part: WeightPart, *, in_place: bool, by_stage: bool) -> Iterator[tuple[str, Tensor]]: ...


class StageSender:
    """Follows ``share_memory``, ``join_weights``, ``send_weights`` and ``leave_weights``, which every rank is told."""

    def __init__(self, worker: HasWeights, *, longest_s: float = math.inf) -> None:
        """``longest_s``: of a wait for the stages before, while this stage's other ranks wait in a collective."""
        self._worker, self._longest_s = worker, longest_s
        self._memory: SharedMemory | None = None
        self._group: TransferGroup | None = None
        self._words: SenderSignals | None = None
        self._metas: Sequence[TensorMeta] = ()
        self._order: GroupOrder | None = None

    def share_memory(self, num_bytes: int, num_receivers: int) -> str:
        """Make memory that so many receivers may read (``ipc``), on the first rank; returns its handles."""
        if not self._is_first:
            return ""
        self._memory = SharedMemory(num_bytes, self._worker.layout.device)
        return self._memory.handles(num_receivers)

    def join(self, order: Mapping[str, Any], tensors: str) -> bool:
        """Enter the group of this stage, if this rank sends in it, and leave the one before. Returns whether all came.

        Args:
            order: fields of ``GroupOrder``.
            tensors: JSON of all that travel, in the order of the senders.
        """
        self._close_group()
        layout = self._worker.layout
        self._order = whole = GroupOrder(**{**order, "shares": tuple(order["shares"])})
        if layout.copy != 0 or layout.tp_rank != 0 or not (self._is_first or whole.shares):
            return True
        metas = from_json(json.loads(tensors))
        mine = whole
        if whole.shares:
            start = sum(whole.shares[: layout.pp_rank])
            metas, mine = metas[start : start + whole.shares[layout.pp_rank]], of_sender(whole, layout.pp_rank)
        self._metas = metas
        try:
            self._words = SenderSignals(whole)
            # Of signals where engines map the memory.
            device = torch.device("cpu") if whole.memory else layout.device
            self._group = TransferGroup(mine, 0, given_up=self._words, device=device)
        except TransferFailed as error:
            logger.warning("a group for the weights of stage %d did not meet: %s", layout.pp_rank, error)
            return False
        return True

    def send(self, update: int, verify: bool, checks_values: bool, num_skipped: int = 0) -> dict[str, float] | None:
        """Send this rank's share of an update, the first ``num_skipped`` tensors left out; seconds of it where all
        senders are through, ``None`` where one failed, which is said to the next sender. Raises ``NonFiniteError``."""
        stream = self._stream(num_skipped)
        group, words, order = self._group, self._words, self._order
        if group is None or words is None or order is None:
            _exhaust(stream)
            return None
        stage, sent = self._worker.layout.pp_rank, None
        options = {"verify": verify, "checks_values": checks_values, "num_skipped": num_skipped if stage == 0 else 0}
        send_all = partial(send, group) if self._memory is None else partial(send_mapped, group, self._memory)
        try:
            if stage:
                words.wait(update, stage, min(turn_timeout_s(order), self._longest_s))
            sent = send_all(self._metas, stream, bucket_bytes=order.bucket_bytes, **options)
        except TransferFailed as error:
            logger.warning("stage %d did not send its weights: %s", stage, error)
            group.settle()
        finally:
            _exhaust(stream)  # ranks that gather together stay in step
            is_through = not order.shares or self._pass_on(words, order, update, is_good=sent is not None)
        return {"gather_s": sent.gather_s, "send_s": sent.send_s} if sent is not None and is_through else None

    def leave(self) -> None:
        """Leave the group, and free the memory that receivers read."""
        self._close_group()
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    @property
    def _is_first(self) -> bool:
        layout = self._worker.layout
        return (layout.copy, layout.tp_rank, layout.pp_rank) == (0, 0, 0)

    def _close_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _stream(self, num_skipped: int) -> Iterator[tuple[str, Tensor]]:
        """What this rank sends: what no step changes is the first rank's, which all others help to gather at once."""
        by_stage = self._order is not None and bool(self._order.shares)
        gather = partial(self._worker.weights, in_place=True)
        constants = gather("constants", by_stage=False) if self._worker.constants and not num_skipped else iter(())
        trained = gather("trained", by_stage=by_stage)
        if not self._is_first:
            _exhaust(constants)
            return trained
        return itertools.chain(constants, trained)

    def _pass_on(self, words: SenderSignals, order: GroupOrder, update: int, *, is_good: bool) -> bool:
        """Give the turn to the next of several senders; after a good share wait on the first rank until the senders
        behind it are through. Returns ``False`` if whoever orders the update is gone, or one of them failed."""
        try:
            words.pass_on(update, self._worker.layout.pp_rank + 1, is_good=is_good)
            if is_good and self._is_first:
                words.wait(update, len(order.shares), turn_timeout_s(order))
        except TransferFailed as error:
            logger.warning("the weights were not sent to the end: %s", error)
            return False
        return True


def _exhaust(stream: Iterator[Any]) -> None:
    """Take part in gathering the weights of ``stream`` and drop them."""
    collections.deque(stream, maxlen=0)


def turn_timeout_s(order: GroupOrder) -> float:
    """Longest that a sender waits for those before it: as long as none of their operations takes longer than it may.
    Whoever fails says so long before, and with a rank that dies the run ends."""
    return order.timeout_s * (1 + sum(order.shares))


def announced(recipe: Recipe, worker: StudentWorker, *, is_one_node: bool) -> dict[str, Any] | None:
    """What the student will send by a group, as JSON: arguments of ``mopd.orchestrator.transfer.Transfer``; ``None`` of
    a recipe whose weights go by HTTP. ``is_one_node``: all ranks can reach rank 0's loopback."""
    cfg, engine = recipe.weight_sync, recipe.rollout.engine
    if not isinstance(cfg, BucketsConfig):
        return None
    student, rollout = getattr(torch, recipe.student.dtype), getattr(torch, engine.dtype)
    smaller = rollout if rollout.itemsize < student.itemsize else student  # cast before it travels
    metas = [
        TensorMeta(name, smaller if dtype == student else dtype, shape)
        for name, dtype, shape in hf_tensors(worker.dims, student)
    ]
    names = [meta.name for meta in metas]
    metas.sort(key=lambda meta: meta.name not in worker.constants)
    shares: list[int] = []
    if isinstance(cfg, CollectiveConfig) and worker.layout.pp_size > 1 and is_one_node:
        stages = dict(zip(names, worker.weight_stages(), strict=True))
        metas.sort(key=lambda meta: stages[meta.name])
        shares = [list(stages.values()).count(stage) for stage in range(worker.layout.pp_size)]
    return {
        "tensors": to_json(metas).decode(),
        # replicas on shared GPUs lose theirs in every turn
        "num_constants": 0 if recipe.shares_gpus else len(worker.constants),
        "shares": shares,
        # a cast may overflow; of its own dtype each rank looks for NaN in ``optim_step``
        "checks_values": smaller != student,
    }

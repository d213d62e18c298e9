"""A rank that is not rank 0 when weights go to the rollout by a collective: if it is the first of a pipeline stage it
sends its stage's, in its turn; else it helps to gather them."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from mopd.student.parallel import Layout
from mopd.student.worker import WeightPart
from mopd.transfer.buckets import TensorMeta, from_json
from mopd.transfer.group import GroupOrder, TransferFailed, TransferGroup
from mopd.transfer.sending import send
from mopd.transfer.stages import Words, of_sender

logger = logging.getLogger(__name__)


class HasWeights(Protocol):
    """What is needed of ``StudentWorker``."""

    layout: Layout

    def weights(self, part: WeightPart, *, in_place: bool, by_stage: bool) -> Iterator[tuple[str, Tensor]]: ...


class StageSender:
    """Follows rank 0's ``join_weights`` and ``send_weights``."""

    def __init__(self, worker: HasWeights, *, longest_s: float = math.inf) -> None:
        """``longest_s``: of a wait for the stages before, while this stage's other ranks wait in a collective."""
        self._worker, self._longest_s = worker, longest_s
        self._group: TransferGroup | None = None
        self._words: Words | None = None
        self._metas: Sequence[TensorMeta] = ()
        self._order: GroupOrder | None = None

    def join(self, order: Mapping[str, Any], tensors: str) -> None:
        """Into the group of this stage, if this is its first rank; out of the one before. ``order``: fields of
        ``GroupOrder``; ``tensors``: JSON of all that travel. A group that does not meet is rank 0's to know: nobody
        will be told to start."""
        group, self._group = self._group, None
        if group is not None:
            group.close()
        layout = self._worker.layout
        if layout.copy != 0 or layout.tp_rank != 0:
            return
        self._order = whole = GroupOrder(**{**order, "shares": tuple(order["shares"])})
        start = sum(whole.shares[: layout.pp_rank])
        self._metas = from_json(json.loads(tensors))[start : start + whole.shares[layout.pp_rank]]
        try:
            self._words = Words(whole)
            mine = of_sender(whole, layout.pp_rank)
            self._group = TransferGroup(mine, 0, given_up=self._words, device=layout.device)
        except TransferFailed as error:
            logger.warning("stage %d has no group for the weights: %s", layout.pp_rank, error)

    def send(self, update: int, verify: bool, checks_values: bool) -> None:
        """Its share of an update; what fails is said to the next sender, and rank 0 hears it from the last."""
        stream = self._worker.weights("trained", in_place=True, by_stage=True)
        if self._group is None or self._words is None or self._order is None:
            for _ in stream:
                pass
            return
        stage, is_good = self._worker.layout.pp_rank, False
        try:
            self._words.wait(update, stage, min(waiting_s(self._order), self._longest_s))
            size = self._order.bucket_bytes
            send(self._group, self._metas, stream, bucket_bytes=size, verify=verify, checks_values=checks_values)
            is_good = True
        except TransferFailed as error:
            logger.warning("stage %d did not send its weights: %s", stage, error)
            self._group.settle()
        finally:
            for _ in stream:  # ranks that gather together stay in step
                pass
            self._words.pass_on(update, stage + 1, is_good=is_good)


def waiting_s(order: GroupOrder) -> float:
    """Longest that a sender waits for those before it: as long as none of their operations takes longer than it may.
    Whoever fails says so long before, and with a rank that dies the run ends."""
    return order.timeout_s * (1 + sum(order.shares))

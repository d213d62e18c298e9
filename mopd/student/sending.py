"""A rank's part when weights go to the rollout's engines by a group: the ranks of ``hf_senders`` send what they have,
all others help to gather it. By memory that engines map (``ipc``) the first rank alone sends."""

from __future__ import annotations

import collections
import itertools
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from mopd.config.schema import Recipe
from mopd.config.weights import BucketsConfig, IpcConfig
from mopd.conversion.models.adapter_updates import sends_adapters
from mopd.conversion.models.dims import ModelDims
from mopd.student.parallel import Layout
from mopd.student.weights import adapter_tensors, hf_tensors, num_senders, own_sender
from mopd.student.worker import StudentWorker, WeightPart
from mopd.weights.carrying import LocalGroup, MappedParts, Parts, TravellingParts, staged_order
from mopd.weights.group import GroupOrder, TransferFailed, TransferGroup
from mopd.weights.memory import SharedMemory
from mopd.weights.parts import TensorMeta, from_json, to_json
from mopd.weights.sending import Stream, send

logger = logging.getLogger(__name__)

LARGE_BYTES = 2**20
"""Smallest tensor, in bytes, that leaves a CPU's memory without a copy into a bucket. A message of this size takes
0.5 ms over a CPU's loopback, of which 0.1 ms is the fixed cost of every message. On CUDA a copy on the device costs
less than another broadcast, so that all that fits into a bucket goes there."""


class HasWeights(Protocol):
    """What is needed of ``StudentWorker``."""

    layout: Layout
    dims: ModelDims
    constants: frozenset[str]

    def weights(
        self, part: WeightPart, *, in_place: bool, ema: float | None = None
    ) -> Iterator[tuple[str, Tensor]]: ...

    def sender_weights(self, part: WeightPart) -> Iterator[tuple[str, Tensor | None]]: ...

    def adapter_weights(self, *, ema: float | None = None) -> Iterator[tuple[str, Tensor]]: ...


class WeightSender:
    """Follows ``share_memory``, ``join_weights``, ``send_weights`` and ``leave_weights``, which every rank is told."""

    def __init__(self, worker: HasWeights, *, longest_s: float = math.inf, adapters: bool = False) -> None:
        """``longest_s``: of a wait for other senders, while the ranks beside this one wait in a collective.
        ``adapters``: they alone are sent, by the first rank (``sends_adapters``)."""
        self._worker, self._longest_s, self._adapters = worker, longest_s, adapters
        self._memory: SharedMemory | None = None
        self._carrier: Parts | None = None
        self._metas: list[TensorMeta] = []
        self._is_mapped = False

    def share_memory(self, num_bytes: int, num_receivers: int) -> str:
        """Make memory that so many receivers may read (``ipc``), on the first rank; returns its handles."""
        if not self._is_first:
            return ""
        self._memory = SharedMemory(num_bytes, self._worker.layout.device)
        return self._memory.handles(num_receivers)

    def join(self, order: Mapping[str, Any], tensors: str) -> bool:
        """Enter a group, if this rank sends in it, and leave the one before. Returns whether all came.

        Args:
            order: fields of ``GroupOrder``.
            tensors: JSON of all that travel, in their order.
        """
        self._close_group()
        told, worker = GroupOrder(**order), self._worker
        self._is_mapped = bool(told.memory)
        is_alone = self._is_mapped or self._adapters
        rank = (0 if self._is_first else None) if is_alone else own_sender(worker.dims, worker.layout)
        if rank is None:
            return True
        self._metas = from_json(json.loads(tensors))
        try:
            if self._memory is not None:
                self._carrier = MappedParts(TransferGroup(told, rank), self._memory.buffer, self._memory.device)
            else:
                self._carrier = TravellingParts(TransferGroup(told, rank, device=worker.layout.device))
        except TransferFailed as error:
            logger.warning("a group for the weights did not meet, says sender %d: %s", rank, error)
            return False
        return True

    def send(self, verify: bool, checks_values: bool, num_skipped: int = 0) -> dict[str, float] | None:
        """Send this rank's share of an update, the first ``num_skipped`` tensors left out. Returns seconds of it,
        on the first rank once all is sent; ``None`` after a failure. Raises ``NonFiniteError``."""
        stream, carrier = self._stream(num_skipped, by_first=self._is_mapped or self._adapters), self._carrier
        if carrier is None:
            collections.deque(stream, maxlen=0)  # takes part in gathering
            return None
        try:
            sent = send(
                carrier,
                self._metas,
                stream,
                verify=verify,
                checks_values=checks_values,
                num_skipped=num_skipped,
                longest_turn_s=self._longest_s,
            )
        except TransferFailed as error:
            logger.warning("sender %d did not send its weights: %s", carrier.group.rank, error)
            return None
        return {"gather_s": sent.gather_s, "send_s": sent.send_s}

    def hand_on(self, tensors: str, give: Callable[[Tensor], None], ema: float | None = None) -> str:
        """Give the whole model to ``give`` on the first rank, in parts, [bytes] uint8 on the CPU, and their digests at
        the end; all others help to gather. ``tensors`` as in ``join``; returns them with the first rank as the one
        sender. ``ema``: decay of the average that stands for the weights, if one does. Raises ``NonFiniteError``."""
        stream = self._stream(0, by_first=True, ema=ema)
        if not self._is_first:
            collections.deque(stream, maxlen=0)
            return ""
        metas = [replace(meta, sender=0) for meta in from_json(json.loads(tensors))]
        send(TravellingParts(LocalGroup(staged_order(), 0, give)), metas, stream, verify=True)
        return to_json(metas).decode()

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
        carrier, self._carrier = self._carrier, None
        if carrier is not None:
            carrier.group.close()

    def _stream(self, num_skipped: int, *, by_first: bool, ema: float | None = None) -> Stream:
        if self._adapters:
            yield from self._worker.adapter_weights(ema=ema)
            return
        parts: list[WeightPart] = ["constants"] if self._worker.constants and not num_skipped else []
        for part in (*parts, "trained"):
            if by_first:
                yield from self._worker.weights(part, in_place=True, ema=ema)
            else:
                yield from self._worker.sender_weights(part)


def announced(recipe: Recipe, worker: StudentWorker) -> dict[str, Any]:
    """What the student will send, as JSON: arguments of the orchestrator's ``Transfer``."""
    cfg, engine = recipe.weight_sync, recipe.rollout.engine
    student, rollout = getattr(torch, recipe.student.dtype), getattr(torch, engine.dtype)
    smaller = rollout if rollout.itemsize < student.itemsize else student  # cast before it travels
    is_mapped = isinstance(cfg, IpcConfig)
    lora = recipe.student.lora if sends_adapters(recipe, worker.dims) else None
    is_alone = is_mapped or lora is not None
    senders = itertools.repeat(0) if is_alone else worker.weight_senders()
    tensors = hf_tensors(worker.dims, student)
    if lora is not None:
        tensors = ((name, student, shape) for name, shape in adapter_tensors(worker.dims, lora))
    metas = [
        TensorMeta(name, smaller if dtype == student else dtype, shape, sender)
        for (name, dtype, shape), sender in zip(tensors, senders, strict=False)
    ]
    metas.sort(key=lambda meta: lora is None and meta.name not in worker.constants)
    copies = is_mapped or worker.layout.device.type == "cuda"
    return {
        "tensors": to_json(metas).decode(),
        "num_senders": 1 if is_alone else num_senders(worker.dims, worker.layout),
        "large_bytes": cfg.bucket_mib * 2**20 if isinstance(cfg, BucketsConfig) and copies else LARGE_BYTES,
        # replicas on shared GPUs lose theirs in every turn
        "num_constants": 0 if recipe.shares_gpus or lora is not None else len(worker.constants),
        # a cast may overflow; of its own dtype each rank looks for NaN in ``optim_step``
        "checks_values": smaller != student,
    }

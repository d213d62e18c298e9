"""The way of the student's weights to the rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mopd.config.placements import AutoPlacementConfig, LocalConfig, Placement
from mopd.config.values import Checked, Count, Seconds, at_least

MAX_BUCKET_MIB = 2**14


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoSyncConfig:
    """``http``, but where the rollout is ``local`` and nothing computes on GPUs ``ipc`` with ``share_gpus_with``, else
    ``collective``, unless the student would wait for responses under way (``max_staleness`` above 0 and
    ``on_new_weights: finish``)."""

    type: Literal["auto"] = "auto"
    """The way's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpConfig:
    """Read into host memory, sent to each server in pieces and kept aside there: the student and the engines go on
    meanwhile. Works everywhere."""

    type: Literal["http"]
    """The way's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketsConfig(Checked):
    """Keys of the ways in buckets. Student and engines wait for a transfer, and no process keeps a copy of the
    model."""

    bucket_mib: Annotated[int, at_least(1, MAX_BUCKET_MIB)] = 64
    """Size of a bucket; there are two on each side, or two in all."""
    verify_every: Count = 100
    """Updates from one whose buckets are compared by their digests to the next; the first one is."""
    timeout_s: Seconds = 60.0
    """Longest that one side waits for the other, for a bucket, or for engines to come into the group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveConfig(BucketsConfig):
    """Broadcast from the student's rank 0 into the memory of all rollout engines at once, in buckets, without a copy of
    the model anywhere; student and engines wait for it (docs/weights.md). Over gloo on a CPU, over NCCL on CUDA, which
    has not been run; where ``rollout.placement`` is ``local``."""

    type: Literal["collective"]
    """The way's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IpcConfig(BucketsConfig):
    """Read by the rollout engines in two buckets of rank 0's own memory, which they map: shared memory on a CPU, CUDA
    IPC on a GPU. Where ``rollout.placement`` is ``local``; on CUDA it also takes ``share_gpus_with: student`` and a
    student of one rank, as engines see their own GPU alone."""

    type: Literal["ipc"]
    """The way's name."""


WeightSync = AutoSyncConfig | HttpConfig | CollectiveConfig | IpcConfig


def check_weight_sync(way: WeightSync, placement: Placement) -> None:
    """``ValueError`` for a rollout that weights cannot reach in this ``way``."""
    if isinstance(way, CollectiveConfig) and isinstance(placement, LocalConfig) and placement.share_gpus_with:
        raise ValueError(
            "weight_sync.type is 'collective', but rollout.placement.share_gpus_with puts two processes on one GPU, "
            "which NCCL refuses: set weight_sync.type: ipc"
        )
    if isinstance(way, BucketsConfig) and not isinstance(placement, (LocalConfig, AutoPlacementConfig)):
        raise ValueError(
            f"weight_sync.type is {way.type!r}, but rollout.placement.type is {placement.type!r}: the engines must be "
            "processes of rank 0's machine: set placement.type: local, or weight_sync.type: http"
        )

"""How the student's weights reach the rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mopd.config.placements import AutoPlacementConfig, InProcessConfig, LocalConfig, Placement
from mopd.config.values import Checked, Count, Seconds, at_least

MAX_BUCKET_MIB = 2**14
MAX_INTERFACE_CHARACTERS = 15
"""Linux's limit (IFNAMSIZ)."""


def check_interface(name: str, value: str) -> None:
    """``ValueError`` unless ``value`` may name a network interface."""
    is_name = value.isascii() and value.isprintable() and not set(value) & set(" /:")
    if not (is_name and 1 <= len(value) <= MAX_INTERFACE_CHARACTERS):
        raise ValueError(
            f"{name} is {value!r}: set it to a network interface's name, as `ip link` lists them, of at most "
            f"{MAX_INTERFACE_CHARACTERS} characters"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoSyncConfig:
    """``collective``, or ``http`` where engines cannot join or with ``on_new_weights: finish``; with shared GPUs
    ``ipc`` or ``http``."""

    type: Literal["auto"] = "auto"
    """The way's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpConfig:
    """Works everywhere (docs/weights.md)."""

    type: Literal["http"]
    """The way's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketsConfig(Checked):
    """Keys of the ways in buckets."""

    bucket_mib: Annotated[int, at_least(1, MAX_BUCKET_MIB)] = 64
    """Size of one of two buckets."""
    verify_every: Count = 100
    """Updates between comparisons of digests."""
    timeout_s: Seconds = 60.0
    """Deadline of one wait."""
    interface: Annotated[str, check_interface] | None = None
    """Network interface; absent: the orchestrator's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveConfig(BucketsConfig):
    """From all ranks to all engines at once, over gloo or NCCL (docs/weights.md)."""

    type: Literal["collective"]
    """The way's name."""
    or_http: bool = False
    """Go on by HTTP if no engine can join."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IpcConfig(BucketsConfig):
    """Engines map two buckets of rank 0's memory; needs placement ``local``, on CUDA also ``share_gpus_with`` and a
    student of one rank."""

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
    if isinstance(way, BucketsConfig) and isinstance(placement, InProcessConfig):
        raise ValueError(
            f"weight_sync.type is {way.type!r}, but rollout.placement.type is 'in_process', whose engine is given the "
            "weights directly: set placement.type: local, or leave weight_sync out"
        )
    if isinstance(way, IpcConfig) and not isinstance(placement, (LocalConfig, AutoPlacementConfig)):
        raise ValueError(
            f"weight_sync.type is 'ipc', but rollout.placement.type is {placement.type!r}: engines that map the "
            "student's memory are processes of its machine: set placement.type: local, or weight_sync.type: collective"
        )

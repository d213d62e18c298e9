"""Where the replicas of a group run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mopd.config.values import (
    MAX_PROCESSES,
    MAX_REPLICAS,
    Checked,
    Processes,
    Seconds,
    at_least,
    check_server_url,
    check_unrepeated,
    require_at_least,
)

MAX_THREADS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoPlacementConfig:
    """``in_process`` without CUDA; with it ``local`` where enough GPUs are free. Always ``local`` with
    ``schedule.max_staleness`` above 0."""

    type: Literal["auto"] = "auto"
    """Placement type; ``mopd config`` prints what it becomes, and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InProcessConfig:
    """In the orchestrator, on rank 0's GPU."""

    type: Literal["in_process"] = "in_process"
    """Placement type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalConfig(Checked):
    """Child processes on this machine, one engine server each."""

    type: Literal["local"]
    """Placement type."""
    gpus: tuple[int, ...] = ()
    """GPUs of this group by number; empty: the lowest free ones."""
    num_threads: Annotated[int, at_least(1, MAX_THREADS)] | None = None
    """CPU threads of one replica; absent: an equal share of the cores."""
    share_gpus_with: Literal["student"] | None = None
    """Rollout only: replicas take turns with the trainer ranks on their GPUs
    (docs/teachers.md#gpus-of-student-and-rollout)."""
    python: str | None = None
    """Python interpreter of the servers; absent: mopd's."""
    startup_timeout_s: Seconds = 600.0
    """Deadline for a server to load its model and answer."""

    def check(self) -> None:
        check_unrepeated("gpus", self.gpus)
        for gpu in self.gpus:
            require_at_least("gpus", gpu, 0, MAX_PROCESSES)
        if self.gpus and self.share_gpus_with is not None:
            raise ValueError(
                f"gpus is {list(self.gpus)}, but share_gpus_with: {self.share_gpus_with} puts the replicas on the "
                "trainer ranks' GPUs, in their order: remove gpus"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RayConfig(Checked):
    """Actors on a Ray cluster, every replica on one node."""

    type: Literal["ray"]
    """Placement type."""
    address: str | None = None
    """Address of the cluster (``host:port``, or ``auto`` on one of its nodes); absent: a cluster on this machine for
    this run."""
    num_cpus: Processes = 1
    """CPUs of one replica, as Ray counts them."""
    num_gpus: Annotated[int, at_least(0, MAX_PROCESSES)] = 0
    """GPUs of one replica; at least ``engine.tensor_parallel_size`` where there are GPUs."""
    python: str | None = None
    """As with ``local``, on every node."""
    shared_pool: str | None = None
    """Name of a pool of GPUs that several groups share by turns."""
    startup_timeout_s: Seconds = 600.0
    """As with ``local``, placement included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExternalConfig(Checked):
    """Servers that the run does not start (docs/server.md); ``mopd serve`` alone reads the ``engine`` beside it."""

    type: Literal["external"]
    """Placement type."""
    urls: tuple[str, ...]
    """One URL per replica, as in ``http://host:8000``."""
    protocol: Literal["mopd", "openai", "sglang"] = "mopd"
    """``mopd serve``, a stock vLLM server, or a stock SGLang server. Stock servers serve teachers only, at
    temperature 1."""
    token_file: str | None = None
    """File with the servers' access token."""
    served_model_name: str | None = None
    """Model name to ask an ``openai`` server for; absent: the only one that it lists."""
    startup_timeout_s: Seconds = 60.0
    """Deadline for the servers' first answers."""

    def check(self) -> None:
        if not self.urls:
            raise ValueError("urls is empty: name at least one server")
        for url in self.urls:
            try:
                check_server_url(url)
            except ValueError as error:
                raise ValueError(f"urls has {error}") from error
        check_unrepeated("urls", self.urls)
        if self.served_model_name is not None and self.protocol != "openai":
            raise ValueError(
                f"served_model_name is set but protocol is {self.protocol!r}: remove it or set protocol: openai"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RegisteredConfig(Checked):
    """Servers that register with the run (docs/teachers.md#servers-that-register)."""

    type: Literal["registered"]
    """Placement type."""
    min_replicas: Annotated[int, at_least(1, MAX_REPLICAS)] = 1
    """Servers without which the run neither begins nor goes on."""
    python: str | None = None
    """As with ``local``."""
    startup_timeout_s: Seconds = 600.0
    """Deadline for ``min_replicas`` servers, at the start and after a loss."""


Placement = AutoPlacementConfig | InProcessConfig | LocalConfig | RayConfig | ExternalConfig | RegisteredConfig

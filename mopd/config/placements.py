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
    """``local`` with ``max_staleness``, or where enough GPUs are free; else ``in_process``."""

    type: Literal["auto"] = "auto"
    """Placement type; ``mopd config`` prints what it becomes, and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InProcessConfig:
    """In the orchestrator, on rank 0's GPU."""

    type: Literal["in_process"] = "in_process"
    """Placement type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalConfig(Checked):
    """Engine servers on this machine."""

    type: Literal["local"]
    """Placement type."""
    gpus: tuple[int, ...] = ()
    """GPUs by number; empty: the lowest free ones."""
    num_threads: Annotated[int, at_least(1, MAX_THREADS)] | None = None
    """CPU threads of one replica; absent: an equal share."""
    share_gpus_with: Literal["student"] | None = None
    """Rollout only: take turns with the trainer ranks (docs/teachers.md#gpus-of-student-and-rollout)."""
    python: str | None = None
    """The servers' Python; absent: mopd's."""
    startup_timeout_s: Seconds = 600.0
    """Deadline for loading the model."""

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
    """Actors on a Ray cluster, each replica on one node."""

    type: Literal["ray"]
    """Placement type."""
    address: str | None = None
    """``host:port``, or ``auto`` on its nodes; absent: a cluster of this run."""
    num_cpus: Processes = 1
    """CPUs of one replica."""
    num_gpus: Annotated[int, at_least(0, MAX_PROCESSES)] = 0
    """GPUs of one replica, at least ``engine.tensor_parallel_size``."""
    python: str | None = None
    """The servers' Python; absent: mopd's."""
    shared_pool: str | None = None
    """Pool of GPUs that groups share by turns."""
    startup_timeout_s: Seconds = 600.0
    """As with ``local``, placement included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExternalConfig(Checked):
    """Servers that others start (docs/server.md)."""

    type: Literal["external"]
    """Placement type."""
    urls: tuple[str, ...]
    """One per replica, as ``http://host:8000``."""
    protocol: Literal["mopd", "openai", "sglang"] = "mopd"
    """``mopd serve``, or a stock vLLM or SGLang server: teachers only, at temperature 1."""
    token_file: str | None = None
    """File with their access token."""
    served_model_name: str | None = None
    """With ``openai``: its model; absent: the only one."""
    startup_timeout_s: Seconds = 60.0
    """Deadline for first answers."""

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
    """Servers without which the run waits."""
    python: str | None = None
    """The servers' Python; absent: mopd's."""
    startup_timeout_s: Seconds = 600.0
    """Deadline for them, at the start and after a loss."""


Placement = AutoPlacementConfig | InProcessConfig | LocalConfig | RayConfig | ExternalConfig | RegisteredConfig

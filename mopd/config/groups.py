"""Groups of engine replicas: what teachers and the rollout have in common, and the teachers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mopd.config.engines import Engine, TorchEngineConfig, VllmEngineConfig
from mopd.config.numbers import MAX_REPLICAS, MAX_SECONDS, require_at_least, require_positive, require_seconds
from mopd.config.placement import ExternalConfig, InProcessConfig, LocalConfig, Placement, RayConfig
from mopd.config.texts import check_name, check_unrepeated

MAX_ATTEMPTS = 1000
"""Of one request; the wait between them doubles."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingConfig:
    """How requests are cut, spread over a group's replicas, repeated and given up."""

    max_tokens_per_request: int = 16384
    """Tokens of one request; a larger batch of samples is cut."""
    max_inflight_tokens: int = 131072
    """Tokens that one replica holds unanswered; more wait at the router."""
    request_timeout_s: float = 600.0
    """Deadline of one request to one replica."""
    max_attempts: int = 4
    """Tries of one request over all replicas, the first one included."""
    backoff_s: float = 0.5
    """Wait before the second try; it doubles with each further one."""
    breaker_failures: int = 3
    """Failures in a row after which a replica is left alone."""
    breaker_reset_s: float = 10.0
    """How long it is left alone before one request tries it again."""
    hedge_after_s: float | None = None
    """Send a request that takes longer than this to a second replica too, and take the first answer; absent: never."""
    wire_dtype: Literal["float32", "float16"] = "float32"
    """Dtype of log-probs on the wire from a server."""

    def __post_init__(self) -> None:
        for name in ("max_tokens_per_request", "max_inflight_tokens", "breaker_failures"):
            require_at_least(name, getattr(self, name), 1)
        require_at_least("max_attempts", self.max_attempts, 1, MAX_ATTEMPTS)
        require_seconds("request_timeout_s", self.request_timeout_s)
        require_at_least("backoff_s", self.backoff_s, 0, MAX_SECONDS)
        require_at_least("breaker_reset_s", self.breaker_reset_s, 0, MAX_SECONDS)
        if self.hedge_after_s is not None:
            require_seconds("hedge_after_s", self.hedge_after_s)
        if self.max_inflight_tokens < self.max_tokens_per_request:
            raise ValueError(
                f"max_inflight_tokens is {self.max_inflight_tokens} and max_tokens_per_request "
                f"{self.max_tokens_per_request}: set max_inflight_tokens to at least max_tokens_per_request"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineGroupConfig:
    """Replicas of one model behind one router."""

    engine: Engine = TorchEngineConfig()
    """Engine that runs the model."""
    placement: Placement = InProcessConfig()
    """Where the replicas run."""
    replicas: int = 1
    """Copies of the engine, each with its own resources; with ``external`` the URLs are counted instead."""
    routing: RoutingConfig = RoutingConfig()
    """How requests reach the replicas."""

    def __post_init__(self) -> None:
        self.check_group()

    def check_group(self) -> None:
        """What the engine, the placement and the number of replicas ask of one another; ``ValueError``."""
        require_at_least("replicas", self.replicas, 1, MAX_REPLICAS)
        if isinstance(self.placement, ExternalConfig) and self.replicas not in (1, len(self.placement.urls)):
            raise ValueError(
                f"replicas is {self.replicas} but placement.urls names {len(self.placement.urls)} servers: "
                "remove replicas"
            )
        size = self.engine.tensor_parallel_size if isinstance(self.engine, VllmEngineConfig) else 1
        if isinstance(self.placement, LocalConfig) and self.placement.gpus:
            needed = size * self.replicas
            if len(self.placement.gpus) != needed:
                raise ValueError(
                    f"placement.gpus names {len(self.placement.gpus)} GPUs, but {self.replicas} replicas of "
                    f"tensor_parallel_size {size} need {needed}: name {needed}"
                )
        if isinstance(self.placement, RayConfig):
            self._check_ray(self.placement, size)

    def _check_ray(self, placement: RayConfig, size: int) -> None:
        if 0 < placement.num_gpus < size:
            raise ValueError(
                f"placement.num_gpus is {placement.num_gpus} but engine.tensor_parallel_size is {size}: "
                f"set num_gpus: {size}"
            )
        can_sleep = isinstance(self.engine, VllmEngineConfig) and placement.num_gpus > 0
        if placement.shared_pool is not None and not can_sleep:
            raise ValueError(
                f"placement.shared_pool is {placement.shared_pool!r}, but only engine.type vllm with "
                "placement.num_gpus of 1 or more can sleep: remove shared_pool"
            )

    @property
    def num_replicas(self) -> int:
        """Replicas that there will be."""
        return len(self.placement.urls) if isinstance(self.placement, ExternalConfig) else self.replicas

    @property
    def scores_at_temperature_1_only(self) -> bool:
        """vLLM's prompt log-probs know no temperature."""
        if isinstance(self.placement, ExternalConfig):
            return self.placement.protocol == "openai"
        return isinstance(self.engine, VllmEngineConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherDefaultsConfig(EngineGroupConfig):
    """What every teacher inherits; a teacher's own keys win, key by key."""

    def check_group(self) -> None:
        """Only what is wrong by itself: a teacher may override either side of a clash, and is checked complete."""
        require_at_least("replicas", self.replicas, 1, MAX_REPLICAS)


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherConfig(EngineGroupConfig):
    """One standalone domain expert and the domains that it answers for."""

    model: str
    """Folder of the teacher's Hugging Face checkpoint; config and tokenizer are enough for ``protocol: openai``."""
    domains: tuple[str, ...] = ()
    """Values of the data's domain column that go to this teacher; may be empty for the default teacher only."""
    default: bool = False
    """Also answers for every domain that no teacher names. At most one teacher."""
    weight: float | None = None
    """Share in domains that several teachers name (an ensemble), relative to the others' weights; all of them set
    one."""

    def __post_init__(self) -> None:
        self.check_group()
        if not self.domains and not self.default:
            raise ValueError(
                "domains is empty: name at least one value of the data's domain column, or set default: true"
            )
        for domain in self.domains:
            try:
                check_name(domain)
            except ValueError as error:
                raise ValueError(f"domains: name {error}") from None
        check_unrepeated("domains", self.domains)
        if self.weight is not None:
            require_positive("weight", self.weight)

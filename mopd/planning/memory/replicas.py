"""Memory of one engine replica on each of its GPUs, and how many sequences it has room for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mopd.config.groups import EngineGroupConfig, SglangEngineConfig, VllmEngineConfig
from mopd.conversion.models.dims import ModelDims
from mopd.planning.devices import SHARES, Cluster, gib
from mopd.planning.memory.shards import BYTES, total_weights
from mopd.planning.memory.stored import StoredFormat, engine_format, weights_bytes
from mopd.planning.workload import Workload

VLLM_BYTES_PER_LOGIT = 6.5
"""vLLM's prompt log-probs hold [tokens, vocabulary] of bf16 logits and fp32 log-probs: 7.5 GiB at 8,192 tokens of a
vocabulary of 152 k, seen with vLLM 0.32; it does not reserve them."""
TORCH_ROWS = 1024
"""Rows of logits that the torch engine scores at a time."""
TORCH_BYTES_PER_LOGIT = 12
"""Bytes of fp32 for each of them: the logit, its exponential and a chunk's copy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaPlan:
    """Plan of one replica; bytes are those of each of its GPUs, or of its process without any."""

    gpus: int
    tensor_parallel_size: int = 1
    """GPUs that share each layer."""
    gpus_per_node: int = 1
    """Most of them that are on one node."""
    parts: Mapping[str, int]
    """weights, adapters, cache, reserve, scoring -> bytes."""
    sequences: int
    """Sequences of mean length that it can work on at a time."""
    longest: int
    """Tokens of one sequence that the cache holds; below the recipe's longest it cannot work."""
    cache_tokens: int
    weight_bytes: float
    """Bytes of a weight, on average."""
    number_bytes: float
    """Bytes of a number in the cache of keys and values."""
    stored: str = ""
    """Name of the format of quantised weights."""
    problems: tuple[tuple[str, str], ...] = field(default=())
    """Key below the group, and what is wrong with it."""

    @property
    def num_bytes(self) -> int:
        return sum(self.parts.values())


def scoring_rows(engine: VllmEngineConfig) -> int:
    """Return the most prompt tokens whose log-probs vLLM holds at a time."""
    return min(engine.max_num_batched_tokens, engine.max_scoring_tokens)


def kv_bytes(dims: ModelDims, size: float) -> int:
    """Return the bytes of one token's keys and values in all layers; of latent attention the compressed ones."""
    if dims.mla is not None:
        return round(dims.num_layers * (dims.mla.kv_lora_rank + dims.mla.qk_rope_head_dim) * size)
    return round(2 * dims.num_attention_layers * dims.num_query_groups * dims.head_dim * size)


def state_bytes(dims: ModelDims, size: float) -> int:
    """Return the bytes of one sequence's states of gated delta nets, whatever its length; 0 without any."""
    return 0 if dims.delta is None else round(sum(dims.delta.layers) * dims.delta.state_size * size)


def plan_replica(
    group: EngineGroupConfig,
    dims: ModelDims,
    work: Workload,
    cluster: Cluster,
    *,
    scores: bool,
    samples: float,
    stored: StoredFormat | None = None,
    adapters: Sequence[int] = (),
) -> ReplicaPlan:
    """Plan one replica of a group whose engine and dtype are settled.

    Args:
        scores: it is a teacher's; else it draws.
        samples: samples of a step that come to one replica.
        stored: of a checkpoint that is quantised.
        adapters: weights of each adapter that it keeps.
    """
    if isinstance(group.engine, SglangEngineConfig):
        plan = plan_replica(as_vllm(group), dims, work, cluster, scores=scores, samples=samples, stored=stored)
        return replace(plan, problems=tuple((_of_sglang(key), _of_sglang(text)) for key, text in plan.problems))
    if isinstance(group.engine, VllmEngineConfig):
        return _vllm(
            group.engine, dims, work, cluster, scores=scores, samples=samples, stored=stored, adapters=adapters
        )
    engine, size = group.engine, BYTES[group.engine.dtype]
    budget = getattr(engine, "max_tokens_per_batch", 65_536)
    tokens = round(min(budget, max(1.0, samples) * work.max_tokens))
    layer = 4 * dims.hidden_size + 3 * max(dims.ffn_hidden_size, dims.head_dim * dims.num_attention_heads)
    drawn = max(1, tokens // work.max_tokens)
    rows = min(TORCH_ROWS, tokens) if scores else drawn
    parts = {
        "weights": weights_bytes(dims, size, stored),
        "adapters": sum(adapters) * size,
        "cache": 0 if scores else tokens * kv_bytes(dims, size) + drawn * state_bytes(dims, size),
        "reserve": tokens * layer * size,
        "scoring" if scores else "logits": rows * dims.vocab_size * TORCH_BYTES_PER_LOGIT,
    }
    at_once = max(1, budget // work.max_tokens)
    return ReplicaPlan(
        gpus=1, parts=parts, sequences=at_once, longest=budget, cache_tokens=tokens,
        weight_bytes=parts["weights"] / total_weights(dims), number_bytes=size, stored=stored.name if stored else "",
    )  # fmt: skip


def as_vllm(group: EngineGroupConfig) -> EngineGroupConfig:
    """Return the group with vLLM in the place of SGLang, as which it is reckoned; any other group as it is."""
    own = group.engine
    if not isinstance(own, SglangEngineConfig):
        return group
    engine = VllmEngineConfig(
        type="vllm",
        dtype=own.dtype,
        tensor_parallel_size=own.tensor_parallel_size,
        gpu_memory_utilization=own.mem_fraction_static,
        max_num_seqs=own.max_running_requests,
    )
    return replace(group, engine=engine)


def _of_sglang(text: str) -> str:
    """Return a problem of vLLM's keys in SGLang's."""
    return text.replace("gpu_memory_utilization", "mem_fraction_static").replace(
        "max_num_batched_tokens", "extra.chunked_prefill_size"
    )


def _vllm(
    engine: VllmEngineConfig,
    dims: ModelDims,
    work: Workload,
    cluster: Cluster,
    *,
    scores: bool,
    samples: float,
    stored: StoredFormat | None,
    adapters: Sequence[int],
) -> ReplicaPlan:
    """vLLM takes ``gpu_memory_utilization`` of a GPU, and what weights, adapters and reserve leave of it is the cache.
    Each adapter has room for the largest, and one more is empty; every GPU keeps one matrix of each pair whole."""
    tp, stages, size = engine.tensor_parallel_size, engine.pipeline_parallel_size, BYTES[engine.dtype]
    memory_bytes = cluster.memory_bytes
    stored, number_bytes, unknown = engine_format(stored, engine.extra)
    in_all, number_bytes = weights_bytes(dims, size, stored), number_bytes or size
    weights, reserve = in_all // engine.num_gpus, int(SHARES["vllm_reserve_bytes"].value)
    beside = round((len(adapters) + 1) * max(adapters) * size) // stages if adapters else 0
    own = int(engine.gpu_memory_utilization * memory_bytes)
    # Latent keys are whole on every GPU of a stage, and so is a key head that there are more GPUs than.
    heads = 1 if dims.mla is not None else min(tp, dims.num_query_groups)
    each = max(1, kv_bytes(dims, number_bytes) // (heads * stages))
    states = state_bytes(dims, size) // engine.num_gpus
    if engine.kv_cache_memory_bytes is None:
        cache = max(0, own - weights - beside - reserve)
    else:
        cache, reserve = engine.kv_cache_memory_bytes, min(reserve, memory_bytes // 4)
    longest = engine.max_model_len or work.max_tokens
    scoring = 0
    if scores:
        # its runner scores a prompt by the chunks in which it schedules it
        tokens = min(scoring_rows(engine), max(1.0, samples) * work.max_tokens)
        scoring = int(tokens * dims.vocab_size * VLLM_BYTES_PER_LOGIT)
    parts = {"weights": weights, "adapters": beside, "cache": cache, "reserve": reserve, "scoring": scoring}
    problems = [*unknown, *_problems(engine, dims, cluster, parts, room_tokens=cache // each, longest=longest)]
    room = max(1, min(engine.max_num_seqs, int(cache / (each * work.length + states))))
    return ReplicaPlan(
        gpus=engine.num_gpus,
        tensor_parallel_size=tp,
        gpus_per_node=min(engine.num_gpus, cluster.gpus_per_node or engine.num_gpus),
        parts=parts,
        sequences=room,
        longest=longest,
        cache_tokens=cache // each,
        weight_bytes=in_all / total_weights(dims),
        number_bytes=number_bytes,
        stored=stored.name if stored else "",
        problems=tuple(problems),
    )


def _problems(
    engine: VllmEngineConfig,
    dims: ModelDims,
    cluster: Cluster,
    parts: Mapping[str, int],
    *,
    room_tokens: int,
    longest: int,
) -> Iterator[tuple[str, str]]:
    """Yield what does not divide the model or does not fit a GPU, by key below the group."""
    tp, stages, degree = engine.tensor_parallel_size, engine.pipeline_parallel_size, "engine.tensor_parallel_size"
    weights, cache, reserve, scoring = (parts[name] for name in ("weights", "cache", "reserve", "scoring"))
    weights += parts["adapters"]
    memory_bytes, usable_bytes = cluster.memory_bytes, cluster.usable_bytes
    if dims.num_attention_heads % tp:
        text = f"{tp} does not divide the model's {dims.num_attention_heads} attention heads: set a divisor of them"
        yield degree, text
    if stages > dims.num_layers:
        text = f"{stages} stages, and the model has {dims.num_layers} layers: set at most that"
        yield "engine.pipeline_parallel_size", text
    if room_tokens < longest:
        left = (
            f"{tp}: weights ({gib(weights)} on each GPU) and {gib(reserve)} in reserve leave {gib(cache)} of "
            f"{engine.gpu_memory_utilization:g} x {gib(memory_bytes)} for the cache, room for {room_tokens} "
            f"tokens where one sequence has {longest}"
        )
        yield degree, f"{left}: raise it, or gpu_memory_utilization"
    if weights + cache + reserve + scoring > usable_bytes:
        beside = (
            f", and the prompt log-probs of max_num_batched_tokens {engine.max_num_batched_tokens} x {dims.vocab_size} "
            f"take {gib(scoring)} beside it: lower it, or max_num_batched_tokens"
        )
        taken = (
            f"{engine.gpu_memory_utilization:g} of {gib(memory_bytes)} leaves "
            f"{gib(usable_bytes - weights - cache - reserve)} of the {gib(usable_bytes)} that a plan fills"
        )
        yield "engine.gpu_memory_utilization", taken + (beside if scoring else ": lower it")

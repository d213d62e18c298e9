"""Seconds of each stage by roofline: operations, bytes of memory, calls, links; whichever takes longest.

training     3 x forward (4 x with full recompute) + what is not overlapped: routing and exchange of experts, pipeline
             bubble, data-parallel sums, the optimizer's pass over its states
forward      2 operations a weight and token, 2 q a token of context and layer for scores and their sums; of a gated
             delta net, whose state has one size, as many for every token
scoring      forward, sums of tensor parallelism, and passes over fp32 logits [rows, vocabulary], one more for the most
             probable ids where the payload has them
drawing      a step of decoding reads the weights once and every sequence's cache; as many steps as the longest
             response has, or as the tokens need at full room; with staleness n as many sequences as n + 1 steps have;
             a pass over fp32 logits [sequences, vocabulary] where it tells most probable ids

Updates of the rollout's weights are in ``updates.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mopd.config.groups import EngineGroupConfig, VllmEngineConfig
from mopd.config.schema import Recipe
from mopd.config.student import StudentConfig
from mopd.conversion.models.dims import DeltaDims, ModelDims
from mopd.planning.devices import Rates
from mopd.planning.memory import shards
from mopd.planning.memory.activations import DELTA_CHUNK, MicroBatchSize
from mopd.planning.memory.replicas import VLLM_BYTES_PER_LOGIT, ReplicaPlan, kv_bytes, scoring_rows
from mopd.planning.traffic import exchanged_bytes
from mopd.planning.vision import slowest_stage, tower_flops, trained_tower_flops
from mopd.planning.workload import Workload

TORCH_CALLS_PER_LAYER = 60
"""Operations of one layer of a transformers model in one forward pass, counted with torch.profiler."""
STEP_CALLS = 40
"""Operations of a forward pass outside its layers, of drawing or of looking up log-probs."""
LOCAL_CALLS_PER_LAYER = 130
"""Operations of one of Megatron's local layers, forward and backward, counted likewise."""
COLLECTIVES_PER_LAYER = 4
"""Tensor-parallel collectives of a layer, forward and backward; embedding, head and loss have about as many as a
layer."""
HOST_PASSES = 3
"""Passes over states in host memory: they are read and written, gradients (a third of them) likewise, weights sent
back."""
SCORE_PASSES, TOP_PASSES = 2, 1
"""Passes over fp32 logits: for log-sum-exp and the look-up of ids, and for the most probable ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTime:
    """Time of one stage."""

    capacity_s: float
    """Seconds for a step's samples, when it never lacks work."""
    step_s: float
    """Seconds for one step's samples alone, the longest response included."""
    bound: str
    """Resource that takes the time: operations, memory, calls, links."""


def forward_flops(dims: ModelDims, *, tokens: float, context: float, rows: float) -> float:
    """Return the operations of a forward pass over ``tokens`` that see ``context`` tokens on average, with ``rows`` of
    logits."""
    q = dims.num_attention_heads * dims.head_dim
    layers = 2.0 * shards.active(dims) * tokens + 4.0 * q * context * dims.num_attention_layers * tokens
    if dims.delta is not None:
        layers += _delta_flops(dims.delta) * sum(dims.delta.layers) * tokens
    return layers + 2.0 * dims.vocab_size * dims.hidden_size * rows


def _delta_flops(delta: DeltaDims) -> float:
    """Return the operations of a gated delta net for each token, beside those of its weights: three products with the
    state, and those among a chunk's tokens."""
    keys, values = delta.key_head_dim, delta.value_head_dim
    return delta.num_value_heads * (6.0 * keys * values + DELTA_CHUNK * (5 * keys + 3 * values))


def head_layers(dims: ModelDims, work: Workload) -> float:
    """Return the number of layers that take as long as the LM head does for a step's samples, without padding."""
    layers = forward_flops(dims, tokens=work.tokens, context=work.length / 2, rows=0)
    return forward_flops(dims, tokens=0, context=0, rows=work.rows) / layers * dims.num_layers


def training_time(
    recipe: Recipe, dims: ModelDims, work: Workload, batch: MicroBatchSize, rates: Rates, per_node: int
) -> dict[str, float]:
    """Return the seconds of the parts of a step of the trainer."""
    student = recipe.student
    parallel = student.parallel
    tp, pp, dp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, parallel.data_parallel_size
    stage = parallel.ranks_per_stage
    length = work.length * dp * batch.padded_tokens / work.tokens
    of_layers = forward_flops(dims, tokens=dp * batch.padded_tokens, context=length / 2, rows=0) / dims.num_layers
    head = forward_flops(dims, tokens=0, context=0, rows=work.rows) / of_layers
    repeats = 4 if student.recompute == "full" else 3
    if student.lora is not None:  # frozen weights have no gradient
        repeats -= 1
    speed = rates.train if dims.moe is None else rates.train_moe
    seen = trained_tower_flops(student, dims, work.image_tokens, repeats=repeats) * work.samples
    # Tensor-parallel ranks share a layer, not the tower.
    busy, beside = slowest_stage(dims, parallel, tower_layers=seen * tp / (repeats * of_layers), head_layers=head)
    layers = max(map(len, shards.own_layers(dims, parallel)))
    tensors = shards.num_tensors(dims, parallel)
    calls = batch.in_step * layers * LOCAL_CALLS_PER_LAYER * repeats / 3 * rates.call_s
    if tp > 1:
        latency = rates.collective_s if tp <= per_node else rates.network_collective_s
        calls += batch.in_step * layers * COLLECTIVES_PER_LAYER * latency
    each = repeats * of_layers / (stage * speed)
    parts = {"forward_backward": max(busy * each, calls)}
    if beside:
        parts["vision_tower"] = beside * each
    if rates.sums is not None and tp > 1:
        border = batch.padded_tokens / parallel.context_parallel_size * dims.hidden_size * shards.BYTES[student.dtype]
        sums = batch.in_step * rates.collective_s + border / rates.sums
        parts["tensor_parallel"] = COLLECTIVES_PER_LAYER * (layers + 1) * sums
    chunks = parallel.virtual_pipeline_model_parallel_size
    if dims.moe is not None:
        passes = batch.in_step * shards.max_expert_layers(dims, parallel) * repeats
        parts["experts"] = passes * rates.expert_layer_s
        parts["exchange"] = _exchange_s(dims, student, batch.padded_tokens, rates, per_node)
    parts["bubble"] = sum(parts.values()) * (pp - 1) / (batch.in_step * chunks)
    own = shards.student_shard(dims, student, 0)
    copies = parallel.num_copies
    if copies > 1:
        size = shards.BYTES[student.dtype] if student.optimizer.use_distributed_optimizer else shards.GRADIENT_BYTES
        moved = (copies - 1) / copies * sum(own.trained(student.vision.freeze)) * (shards.GRADIENT_BYTES + size)
        speed = rates.link if parallel.world_size <= per_node else rates.network
        parts["gradients"] = moved / speed
    sizes = shards.tensor_bytes(own, student)
    passes = 2 * sizes["optimizer"] + 2 * sizes["gradients"] + sizes["weights"]
    on_host = student.optimizer.offload_fraction
    parts["optimizer"] = max(passes / rates.bandwidth, tensors * rates.tensor_s * (1 - on_host))
    if on_host:
        parts["optimizer_on_host"] = HOST_PASSES * shards.offloaded_bytes(own, student) / rates.host
    return parts


def _exchange_s(dims: ModelDims, student: StudentConfig, tokens: int, rates: Rates, per_node: int) -> float:
    """Return the seconds in which a rank's copies of tokens go to their experts and come back: those of other nodes
    over its adapter, beside those of its own."""
    parallel = student.parallel
    ranks, inside = parallel.expert_model_parallel_size, parallel.expert_model_parallel_size
    if per_node:
        inside = max(1, min(ranks, per_node // parallel.resolved_expert_tensor_parallel_size))
    moved = exchanged_bytes(dims, student, tokens=tokens)
    return moved * max((inside - 1) / ranks / rates.link, (ranks - inside) / ranks / rates.network)


def drawing_time(
    group: EngineGroupConfig,
    dims: ModelDims,
    work: Workload,
    own: ReplicaPlan,
    rates: Rates,
    max_staleness: int,
    replicas: int,
    *,
    tells_top: bool,
) -> StageTime:
    """Return the time of ``replicas`` that share the drawing of a step's samples evenly. ``max_staleness`` steps more
    may be under way beside it. With ``tells_top`` each token comes with the most probable ids of its place."""
    samples, token_bytes = work.samples / replicas, kv_bytes(dims, own.number_bytes)
    at_once = max(1.0, min(samples * (max_staleness + 1), own.sequences))
    context = work.prompt_tokens + work.response_tokens / 2

    def step_s(sequences: float) -> tuple[float, str]:
        flops = forward_flops(dims, tokens=sequences, context=context, rows=sequences)
        read = _read_weights(dims, sequences) * own.weight_bytes + sequences * context * token_bytes
        times = {
            "operations": flops / (own.gpus * _forward_rate(dims, rates)),
            "memory": read / (own.gpus * rates.bandwidth),
            "calls": _step_cost(group, dims, own, rates),
        }
        bound = max(times, key=times.__getitem__)
        # An engine with a scheduler of its own prepares a step while nothing else of it runs.
        extra = rates.decode_step_s if isinstance(group.engine, VllmEngineConfig) else 0.0
        extra += tells_top * TOP_PASSES * 4 * sequences * dims.vocab_size / rates.bandwidth
        return max(times.values()) + extra, bound

    full, bound = step_s(at_once)
    prompt = forward_flops(dims, tokens=samples * work.prompt_tokens, context=work.prompt_tokens / 2, rows=samples)
    prompt += samples * tower_flops(dims, work.image_tokens)
    prefill = prompt / (own.gpus * _forward_rate(dims, rates))
    prefill += _sums_s(dims, samples * work.prompt_tokens * shards.BYTES[group.engine.dtype], own, rates)
    if isinstance(group.engine, VllmEngineConfig):
        rows = samples * work.response_tokens / at_once
        capacity = rows * full
        if max_staleness:
            # A response that lasts as long as all steps that are under way together bounds each of them.
            share = work.longest_response / (max_staleness + 1)
            beside, _ = step_s(max(1.0, min(at_once, samples * work.response_tokens / share)))
            capacity = max(capacity, share * beside)
        alone, _ = step_s(max(1.0, at_once / 8))
        tail = max(0.0, work.longest_response - rows)
        return StageTime(capacity_s=prefill + capacity, step_s=prefill + rows * full + tail * alone, bound=bound)
    # A batch of the torch engine goes on until its longest response ends; rows that have ended leave it late.
    rounds = math.ceil(samples / at_once) * work.longest_response * full
    return StageTime(capacity_s=prefill + rounds, step_s=prefill + rounds, bound=bound)


def scoring_time(
    group: EngineGroupConfig,
    dims: ModelDims,
    work: Workload,
    own: ReplicaPlan,
    rates: Rates,
    share: float,
    replicas: int,
    *,
    finds_top: bool,
) -> StageTime:
    """Return the time of scoring one teacher's ``share`` of a step's samples on so many ``replicas``. With
    ``finds_top`` it is asked for its own most probable ids, not only for log-probs at ids that are given."""
    samples = work.samples * share / replicas
    rows = samples * work.response_tokens
    flops = forward_flops(dims, tokens=samples * work.length, context=work.length / 2, rows=rows)
    flops += samples * tower_flops(dims, work.image_tokens)
    logits = rows * dims.vocab_size * (VLLM_BYTES_PER_LOGIT if isinstance(group.engine, VllmEngineConfig) else 4)
    passes = SCORE_PASSES + TOP_PASSES * finds_top
    batches = max(1.0, samples * work.length / _tokens_per_batch(group))
    read = batches * _read_weights(dims, samples * work.length) * own.weight_bytes
    times = {
        "operations": flops / (own.gpus * _forward_rate(dims, rates)) + passes * logits / rates.bandwidth,
        "memory": read / rates.bandwidth / own.gpus,
        "calls": batches * _step_cost(group, dims, own, rates),
    }
    seconds = max(times.values())
    seconds += _sums_s(dims, samples * work.length * shards.BYTES[group.engine.dtype], own, rates)
    return StageTime(capacity_s=seconds, step_s=seconds, bound=max(times, key=times.__getitem__))


def _forward_rate(dims: ModelDims, rates: Rates) -> float:
    return rates.prefill if dims.moe is None else rates.prefill_moe


def _sums_s(dims: ModelDims, element_bytes: float, own: ReplicaPlan, rates: Rates) -> float:
    """Return the seconds of the sums over the GPUs that share a layer, two a layer, and of the way from stage to stage,
    of hidden states of so many bytes for each of their numbers. Between nodes all adapters of a node carry together."""
    tp, stages = own.tensor_parallel_size, own.gpus // own.tensor_parallel_size
    link = min(rates.link, own.gpus_per_node * rates.network) if tp > own.gpus_per_node else rates.link
    sums = 2 * dims.num_layers / stages * 2 * (tp - 1) / tp / link
    borders = 0.0 if stages == 1 else 1 / (tp * rates.network if own.gpus > own.gpus_per_node else rates.link)
    return (sums + borders) * dims.hidden_size * element_bytes


def _step_cost(group: EngineGroupConfig, dims: ModelDims, own: ReplicaPlan, rates: Rates) -> float:
    """Return the seconds of calls and collectives in a forward pass over few tokens."""
    is_graph = isinstance(group.engine, VllmEngineConfig) and not group.engine.enforce_eager
    calls = 0.0 if is_graph else (dims.num_layers * TORCH_CALLS_PER_LAYER + STEP_CALLS) * rates.call_s
    latency = rates.network_collective_s if own.tensor_parallel_size > own.gpus_per_node else rates.collective_s
    return calls + (2 * dims.num_layers * latency if own.tensor_parallel_size > 1 else 0.0)


def _read_weights(dims: ModelDims, tokens: float) -> float:
    """Return the weights that a pass over ``tokens`` of text reads: of experts those that some token goes to, if they
    choose evenly."""
    total = shards.total_weights(dims) - shards.tower_weights(dims)
    if dims.moe is None:
        return float(total)
    experts = shards.expert_weights(dims)
    missed: float = (1 - dims.moe.experts_per_token / dims.moe.num_experts) ** tokens
    return total - experts * missed


def _tokens_per_batch(group: EngineGroupConfig) -> int:
    if isinstance(group.engine, VllmEngineConfig):
        return scoring_rows(group.engine)
    return int(getattr(group.engine, "max_tokens_per_batch", 65_536))

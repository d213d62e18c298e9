"""Bytes that a step moves, link by link, computed from the forms in which they travel (``engines/wire/messages.py``,
the fields of ``data_plane``), not measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mopd.config.groups import EngineGroupConfig
from mopd.config.payloads import Asked
from mopd.config.placements import InProcessConfig
from mopd.config.schema import Recipe
from mopd.config.student import StudentConfig
from mopd.config.weights import BucketsConfig
from mopd.conversion.models.adapter_updates import sends_adapters
from mopd.conversion.models.dims import ModelDims
from mopd.planning.memory.shards import (
    BYTES,
    GRADIENT_BYTES,
    max_expert_layers,
    own_layers,
    student_shard,
    update_bytes,
)
from mopd.planning.workload import (
    HIDDEN_BYTES,
    ID_BYTES,
    LOGPROB_BYTES,
    TOKEN_BYTES,
    Workload,
    route_bytes,
    sample_bytes,
    share_of_group,
    student_ids,
)

REQUEST_HEAD, ANSWER_HEAD, DRAW_HEAD = 180, 170, 290
"""Bytes of msgpack around the arrays of one request for scores, of one answer, and of one request for responses."""
RESPONSE_HEAD = 175
"""Bytes of msgpack around one response of a rollout server."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """Bytes over one kind of link in one step."""

    name: str
    num_bytes: int
    """Bytes of a step, over all replicas or ranks."""
    rows: float = 0.0
    """Response tokens whose samples these are; 0 where no samples travel."""
    each: str
    """Owner of the share ``bytes_each``: ``replica``, ``worker`` of a replica, or ``rank``."""
    bytes_each: int


def score_bytes(
    samples: float, work: Workload, asked: Asked, *, samples_per_request: float, hidden_size: int = 0
) -> int:
    """Return the bytes of one teacher's requests and answers, as its ``payload_bytes`` counts them. Ids that it is
    given travel to it, its own come back, and hidden states of ``hidden_size``."""
    requests = samples / samples_per_request
    request = samples * (ID_BYTES * work.length + 2 * ID_BYTES) + requests * REQUEST_HEAD
    row = asked.width * (ID_BYTES + LOGPROB_BYTES) + LOGPROB_BYTES + hidden_size * HIDDEN_BYTES
    return round(request + samples * (work.response_tokens * row + ID_BYTES) + requests * ANSWER_HEAD)


def draw_bytes(samples: float, work: Workload, *, samples_per_request: float, num_top_ids: int = 0) -> int:
    """Return the bytes of the rollout's requests and responses, each token with ``num_top_ids`` most probable ids."""
    request = samples * (ID_BYTES * work.prompt_tokens + 12) + samples / samples_per_request * DRAW_HEAD
    return round(
        request + samples * (work.response_tokens * ((2 + num_top_ids) * ID_BYTES + LOGPROB_BYTES) + RESPONSE_HEAD)
    )


def last_stage_bytes(recipe: Recipe, work: Workload) -> int:
    """Return the bytes of one sample that ranks of the last stage read; the first stage reads the tokens alone."""
    unread = ID_BYTES * (1 + student_ids(recipe))  # token_versions, student_ids
    correction = getattr(recipe.loss, "correction", None)
    if correction is None and getattr(recipe.loss, "old_logprobs", "") != "rollout":
        unread += LOGPROB_BYTES
    return round(sample_bytes(recipe, work) - unread * work.response_tokens)


def sent_bytes(recipe: Recipe, dims: ModelDims) -> int:
    """Return the bytes that an update brings to each replica of the rollout."""
    return update_bytes(dims, recipe.student, adapters=sends_adapters(recipe, dims))


def links(
    recipe: Recipe, groups: Mapping[str, EngineGroupConfig], dims: ModelDims, work: Workload, *, tokens: int
) -> list[Flow]:
    """Return all flows of a step. ``tokens``: those of one data-parallel rank, padding included."""
    found = list(_flows_of_engines(recipe, groups, dims, work))
    rollout, each = groups.get("rollout"), sent_bytes(recipe, dims) // recipe.schedule.sync_every_steps
    if rollout is not None:
        receivers = 1 if isinstance(rollout.placement, InProcessConfig) else rollout.num_replicas
        by_worker = isinstance(recipe.weight_sync, BucketsConfig)
        receivers *= rollout.gpus_per_replica if by_worker else 1
        whose = "worker" if by_worker else "replica"
        found.append(Flow(name="weights to rollout", num_bytes=each * receivers, each=whose, bytes_each=each))
    dp = recipe.student.parallel.data_parallel_size
    first, last = round(TOKEN_BYTES * work.length * work.samples), last_stage_bytes(recipe, work) * work.samples
    if recipe.student.parallel.pipeline_model_parallel_size > 1:
        found.append(
            Flow(name="fields to first stage", num_bytes=first, rows=work.rows, each="rank", bytes_each=first // dp)
        )
    if routes := route_bytes(recipe, dims, work) * work.samples:  # every stage reads those of all layers
        stages = recipe.student.parallel.pipeline_model_parallel_size
        found.append(Flow(name="routes to ranks", num_bytes=routes * stages, each="rank", bytes_each=routes // dp))
    found.append(Flow(name="fields to last stage", num_bytes=last, rows=work.rows, each="rank", bytes_each=last // dp))
    return found + _between_ranks(recipe, dims, tokens=tokens)


def _flows_of_engines(
    recipe: Recipe, groups: Mapping[str, EngineGroupConfig], dims: ModelDims, work: Workload
) -> Iterator[Flow]:
    for key, group in groups.items():
        if isinstance(group.placement, InProcessConfig):
            continue
        if key == "rollout":
            what, samples = "prompts and responses", float(work.samples)
            per_request = max(1.0, group.routing.max_tokens_per_request / work.prompt_tokens)
            tops = student_ids(recipe)
            total = draw_bytes(work.samples, work, samples_per_request=min(per_request, work.samples), num_top_ids=tops)
            total += work.samples * route_bytes(recipe, dims, work)
        else:
            name = key.removeprefix("teachers.")
            what, samples = "tokens and scores", work.samples * share_of_group(recipe, work, name)
            if samples == 0:
                continue
            # A request is sent as soon as a replica is free: as many samples as came by then, some prompts'.
            joined = max(1.0, group.routing.max_tokens_per_request / work.length)
            per_request = min(joined, max(1.0, float(recipe.rollout.samples_per_prompt)))
            asked, size = recipe.asked[name], work.hidden_sizes.get(name, 0)
            total = score_bytes(samples, work, asked, samples_per_request=per_request, hidden_size=size)
        rows, each = samples * work.response_tokens, total // group.num_replicas
        yield Flow(name=f"{key}: {what}", num_bytes=total, rows=rows, each="replica", bytes_each=each)


def _between_ranks(recipe: Recipe, dims: ModelDims, *, tokens: int) -> list[Flow]:
    """Return what the busiest rank sends in Megatron's collectives: rings move (n - 1) / n of what they reduce or
    gather."""
    student, parallel, size = recipe.student, recipe.student.parallel, BYTES[recipe.student.dtype]
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    cp, world = parallel.context_parallel_size, parallel.world_size
    layers = max(map(len, own_layers(dims, parallel)))
    found = []

    def add(name: str, each: float) -> None:
        if each:
            found.append(Flow(name=name, num_bytes=round(each * world), each="rank", bytes_each=round(each)))

    own_tokens = tokens / cp
    border = own_tokens * dims.hidden_size * size
    repeats = 3 if student.recompute == "full" else 2
    # Two all-reduces (or a gather and a scatter each) of the border in each direction of a layer.
    # Ranks that share a key/value head gather its projection, and scatter the gradient.
    projection = own_tokens * dims.qkv_rows * size if dims.num_query_groups < tp else 0
    add("tensor-parallel", (tp - 1) / tp * (4 * border + projection) * repeats * layers)
    # Keys and values are gathered forward, their gradients summed and scattered backward.
    add("context-parallel", (cp - 1) * own_tokens * 2 * _key_width(dims, tp) * size * repeats * layers)
    borders = 2 * parallel.virtual_pipeline_model_parallel_size if pp > 1 else 0
    add("pipeline", borders * border / (tp if parallel.sequence_parallel else 1))
    own = student_shard(dims, student, 0)
    trained, experts = own.trained(student.vision.freeze)
    shared = parallel.num_copies
    if shared > 1:
        gathers = size if student.optimizer.use_distributed_optimizer else GRADIENT_BYTES
        add("data-parallel", (shared - 1) / shared * trained * (GRADIENT_BYTES + gathers))
    if dims.moe is not None:
        ep, etp = parallel.expert_model_parallel_size, parallel.resolved_expert_tensor_parallel_size
        add("expert-parallel", (ep - 1) / ep * exchanged_bytes(dims, student, tokens=tokens))
        copies = parallel.ranks_per_stage // (ep * etp)
        if copies > 1:
            add("expert data-parallel", (copies - 1) / copies * experts * (GRADIENT_BYTES + size))
    return found


def exchanged_bytes(dims: ModelDims, student: StudentConfig, *, tokens: int) -> float:
    """Return the bytes of the copies that one rank hands to all experts, its own included, and takes back, in a step
    of ``tokens`` of its data-parallel group."""
    if dims.moe is None:
        return 0.0
    parallel, repeats = student.parallel, 3 if student.recompute == "full" else 2
    own = tokens / parallel.context_parallel_size / parallel.tensor_model_parallel_size
    each = own * dims.hidden_size * BYTES[student.dtype] * dims.moe.experts_per_token
    return each * 2 * repeats * max_expert_layers(dims, parallel)


def _key_width(dims: ModelDims, tp: int) -> float:
    """Return the width of the keys of a rank's heads; values are as wide, or padded to it."""
    if dims.mla is None:
        return dims.groups_on_rank(tp) * dims.head_dim
    return dims.num_attention_heads * (dims.mla.qk_nope_head_dim + dims.mla.qk_rope_head_dim) / tp

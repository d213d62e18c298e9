"""Memory of a whole run: every kind of trainer rank and replica, part by part, and what the hosts hold."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mopd.config.groups import VllmEngineConfig
from mopd.config.machine.places import Places, engine_groups
from mopd.config.placements import InProcessConfig
from mopd.config.schema import Recipe
from mopd.config.weights import BucketsConfig, IpcConfig
from mopd.conversion.models.dims import ModelDims
from mopd.planning.devices import SHARES, Cluster
from mopd.planning.memory import shards
from mopd.planning.memory.activations import SUM_BYTES, HeadShape, MicroBatchSize, activation_bytes, micro_batches
from mopd.planning.memory.replicas import ReplicaPlan
from mopd.planning.workload import Workload, route_bytes, sample_bytes

MIB = 2**20
EAGER_BYTES = 12
"""Bytes for each logit, beside it: a loss in eager PyTorch over all logits of a micro-batch holds three fp32 copies of
them (a published vocabulary-parallel loss, measured)."""
HEAD_DEGREES = (1, 2, 4, 8)
ROLLOUT = "rollout"
REPLICAS = "weights kept aside by rollout replicas"
STATES = "optimizer states"
LENT = "optimizer states, lent"
COPY = "copy for a checkpoint"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlan:
    """Plan of every rank of one pipeline stage."""

    stage: int
    num_layers: int
    parts: Mapping[str, int]
    shared: Mapping[str, int]
    """Engines in rank 0's process, by group: they take its memory too."""
    rollout_turn: Mapping[str, int] = field(default_factory=dict)
    """Parts on its GPU while a rollout that shares it draws; then ``parts`` are those of the student's turn."""

    @property
    def training_bytes(self) -> int:
        """Bytes while the student works."""
        return sum(self.parts.values()) + sum(self.shared.values())

    @property
    def num_bytes(self) -> int:
        return max(self.training_bytes, sum(self.rollout_turn.values()))


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPlan:
    """Plan of one node's memory beside its GPUs."""

    component: int
    node: int
    parts: Mapping[str, int]

    @property
    def num_bytes(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadPlan:
    """Plan of the LM head at one tensor-parallel degree, on as many ranks in all."""

    tensor_model_parallel_size: int
    ours_bytes: int
    eager_bytes: int
    """Bytes of the logits, and of what an eager loss holds beside them."""
    rank_bytes: int
    """Bytes of the fullest rank, with our head."""
    fits: bool
    fits_eager: bool


def head_shape(recipe: Recipe, dims: ModelDims, batch: MicroBatchSize) -> HeadShape:
    """Return the shape of the largest micro-batch's head; all of its tokens may be responses."""
    parallel = recipe.student.parallel
    tp = parallel.tensor_model_parallel_size
    responses = batch.sequences * recipe.rollout.max_response_length
    tokens = -(-batch.tokens // parallel.context_parallel_size)
    return HeadShape(
        rows=min(tokens, responses),
        tokens=tokens,
        hidden=dims.hidden_size,
        columns=dims.padded_vocab_size(tp) // tp,
        element=shards.BYTES[recipe.student.dtype],
        ranks=tp,
        splits_sequence=parallel.sequence_parallel,
        copies=shards.BYTES[recipe.student.dtype] < 4
        or recipe.loss.temperature != 1
        or dims.padded_vocab_size(tp) > dims.vocab_size,
        teacher=SUM_BYTES * min(2, len(recipe.teachers)) * recipe.sends_hidden,
    )


def plan_ranks(
    recipe: Recipe, dims: ModelDims, work: Workload, cluster: Cluster, replicas: Mapping[str, ReplicaPlan]
) -> list[RankPlan]:
    """Plan the ranks of each pipeline stage; the first is rank 0's, whose process some engines may share."""
    groups = engine_groups(recipe)
    batch, student = micro_batches(recipe, dims, work), recipe.student
    head = head_shape(recipe, dims, batch)
    stages = student.parallel.pipeline_model_parallel_size
    plans = []
    for stage in range(stages):
        own = shards.student_shard(dims, student, stage)
        parts = dict(shards.tensor_bytes(own, student))
        if recipe.averages:
            parts["averages"] = len(recipe.averages) * shards.average_bytes(own, student)
        parts["activations"] = activation_bytes(dims, student, batch, stage=stage)
        if stage == stages - 1:
            if work.hidden_sizes:
                parts["teacher_heads"] = sum(work.hidden_sizes.values()) * head.columns * head.element
            parts["lm_head"] = head.peak(student.lm_head_memory_budget_mib * MIB)
        if cluster.gpus_per_node:
            fragments = round(SHARES["fragments"].value * sum(parts.values()))
            parts["reserve"] = int(SHARES["rank_reserve_bytes"].value) + fragments
        turn: dict[str, int] = {}
        if recipe.shares_gpus and cluster.gpus_per_node:
            process = int(SHARES["rank_reserve_bytes"].value)
            parts["rollout, asleep"] = process
            turn = {"weights": parts["weights"], "reserve": process, "rollout": replicas["rollout"].num_bytes}
        shared = {}
        if stage == 0:
            shared = {
                key: replicas[key].num_bytes * groups[key].replicas
                for key, group in groups.items()
                if isinstance(group.placement, InProcessConfig)
            }
        num_layers = len(shards.own_layers(dims, student.parallel)[stage])
        plans.append(RankPlan(stage=stage, num_layers=num_layers, parts=parts, shared=shared, rollout_turn=turn))
    return plans


def head_plans(
    recipe: Recipe, dims: ModelDims, work: Workload, cluster: Cluster, replicas: Mapping[str, ReplicaPlan]
) -> list[HeadPlan]:
    """Plan our head beside an eager loss, at every tensor-parallel degree that divides the model and the ranks."""
    plans = []
    degrees = recipe.student.parallel
    ranks = degrees.ranks_per_stage // degrees.context_parallel_size
    for tp in HEAD_DEGREES:
        if ranks % tp or dims.num_query_groups % tp or recipe.samples_per_step % (ranks // tp) or dims.moe is not None:
            continue
        parallel = replace(
            degrees,
            tensor_model_parallel_size=tp,
            data_parallel_size=ranks // tp,
            sequence_parallel=degrees.sequence_parallel and tp > 1,
        )
        own = replace(recipe, student=replace(recipe.student, parallel=parallel))
        head = head_shape(own, dims, micro_batches(own, dims, work))
        rank = max(plan_ranks(own, dims, work, cluster, replicas), key=lambda plan: plan.training_bytes)
        ours = head.peak(recipe.student.lm_head_memory_budget_mib * MIB)
        eager = head.eager(head.element + EAGER_BYTES)
        plans.append(
            HeadPlan(
                tensor_model_parallel_size=tp,
                ours_bytes=ours,
                eager_bytes=eager,
                rank_bytes=rank.training_bytes,
                fits=rank.training_bytes <= cluster.usable_bytes,
                fits_eager=rank.training_bytes - ours + eager <= cluster.usable_bytes,
            )
        )
    return plans


def plan_hosts(
    recipe: Recipe, dims: ModelDims, work: Workload, places: Places, ranks: Sequence[RankPlan]
) -> list[HostPlan]:
    """Plan what processes hold in each node's memory beside GPUs; nodes in order, the student's first."""
    student, parallel = recipe.student, recipe.student.parallel
    held: defaultdict[tuple[int, int], Counter[str]] = defaultdict(Counter)
    rows = places.of("student")
    each = sample_bytes(recipe, work) + route_bytes(recipe, dims, work)
    held[0, 0]["data plane"] += (recipe.schedule.max_staleness + 1) * work.samples * each
    for key, size in _weights_on_hosts(recipe, dims):
        for tenant in places.of(ROLLOUT) if key == REPLICAS else ():
            held[tenant.component, tenant.node][key] += size
        held[0, 0][key] += 0 if key == REPLICAS else size
    copied = shards.checkpoint_bytes(dims, student, len(recipe.averages)) // parallel.pipeline_model_parallel_size
    writers = max(parallel.tensor_model_parallel_size, parallel.expert_ranks)
    for tenant in rows:
        stage, number = divmod(tenant.number, parallel.ranks_per_stage)
        own = held[tenant.component, tenant.node]
        if student.optimizer.offload_fraction:
            own[STATES] += shards.offloaded_bytes(shards.student_shard(dims, student, stage), student)
        if ranks[stage].rollout_turn:
            own[LENT] += ranks[stage].parts["optimizer"]
        if recipe.checkpoint.async_save and number < writers:
            own[COPY] += copied // writers
    return [
        HostPlan(component=component, node=node, parts={name: size for name, size in own.items() if size})
        for (component, node), own in sorted(held.items())
        if own.total()
    ]


def _weights_on_hosts(recipe: Recipe, dims: ModelDims) -> Iterator[tuple[str, int]]:
    """Yield what holds weights on their way to the rollout, and its bytes; ``REPLICAS`` are those of each replica."""
    model = shards.total_weights(dims) * shards.BYTES[recipe.student.dtype]
    if recipe.refreshed:
        yield "weights kept for teachers that are the student", len({*recipe.refreshed.values()}) * model
    if isinstance(recipe.rollout.placement, InProcessConfig):
        yield "weights for the rollout, as they come and as they are loaded", 2 * model
    elif isinstance(recipe.weight_sync, BucketsConfig):
        buckets = 2 * recipe.weight_sync.bucket_mib * MIB
        yield "buckets of weights, of rank 0", buckets
        if not isinstance(recipe.weight_sync, IpcConfig):
            yield REPLICAS, buckets
    else:
        yield "weights kept by the orchestrator", model
        yield "newer weights on their way there", model
        yield REPLICAS, 2 * model if isinstance(recipe.rollout.engine, VllmEngineConfig) else model

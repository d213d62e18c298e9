"""Plan of a recipe on a cluster: places, memory, links, stages, and what cannot work, by key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

from mopd.base.hardware import Hardware
from mopd.base.types import UserError
from mopd.config.groups import EngineGroupConfig
from mopd.config.load import Loaded
from mopd.config.machine.auto import settle
from mopd.config.machine.places import NodePool, Places, engine_groups, path_of, place_recipe
from mopd.config.placements import ExternalConfig, InProcessConfig
from mopd.config.schema import Recipe
from mopd.conversion.models.adapted import check_lora
from mopd.conversion.models.adapter_updates import check_updates, sends_adapters
from mopd.conversion.models.dims import ModelDims, check_layout, check_routes
from mopd.conversion.models.frozen import check_freeze
from mopd.conversion.models.sections import check_sections
from mopd.planning.balance import ROLLOUT, GroupLoad, StepTimes, TrainerLoad, times_of
from mopd.planning.devices import Cluster, Rates, gib
from mopd.planning.memory.activations import micro_batches
from mopd.planning.memory.ranks import (
    COPY,
    LENT,
    STATES,
    HeadPlan,
    HostPlan,
    RankPlan,
    head_plans,
    plan_hosts,
    plan_ranks,
)
from mopd.planning.memory.replicas import ReplicaPlan, as_vllm, plan_replica
from mopd.planning.memory.shards import adapter_weights, checkpoint_bytes, total_weights
from mopd.planning.memory.stored import StoredFormat
from mopd.planning.models import STUDENT
from mopd.planning.stages import drawing_time, scoring_time, training_time
from mopd.planning.traffic import Flow, links
from mopd.planning.updates import WeightUpdate, sender_ranks, weight_update
from mopd.planning.vision import TowerPlan, plan_tower
from mopd.planning.workload import Workload, share_of_group, student_ids

MAX_BALANCED = 256
"""Replicas of a group beyond which no balance is looked for."""


@dataclass(frozen=True, kw_only=True)
class PlanInput:
    """Everything that a plan is made from, rates apart."""

    recipe: Recipe
    """Settled: no ``auto`` is left."""
    models: Mapping[str, ModelDims]
    """``student`` and ``teachers.NAME`` -> sizes."""
    work: Workload
    cluster: Cluster
    stored: Mapping[str, StoredFormat] = field(default_factory=dict)
    """``teachers.NAME`` of quantised weights -> their format."""
    adapters: Mapping[str, int] = field(default_factory=dict)
    """``teachers.NAME`` with an adapter -> its weights."""

    def adapters_of(self, key: str) -> tuple[int, ...]:
        """Return the weights of each adapter that a group's replicas keep beside their model."""
        recipe, student = self.recipe, self.models[STUDENT]
        if key != ROLLOUT:
            names = (f"teachers.{name}" for name in recipe.on_group_of(key.removeprefix("teachers.")))
            return tuple(self.adapters[name] for name in names if name in self.adapters)
        lora = recipe.student.lora
        return () if lora is None or not sends_adapters(recipe, student) else (adapter_weights(student, lora),)

    def dims_of(self, key: str) -> ModelDims:
        """Return the sizes of the model that a group's replicas hold."""
        return self.models[STUDENT if key == ROLLOUT else key]


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The whole plan of a recipe, as ``mopd plan`` shows it."""

    cluster: Cluster
    work: Workload
    places: Places
    ranks: Sequence[RankPlan]
    replicas: Mapping[str, ReplicaPlan]
    """Key of the group -> its replica; groups that run elsewhere are left out."""
    hosts: Sequence[HostPlan]
    """Memory of every node beside its GPUs."""
    links: Sequence[Flow]
    heads: Sequence[HeadPlan]
    trainer: Mapping[str, float]
    """Seconds of the parts of the trainer's step; empty where no rates are known."""
    times: StepTimes | None
    update: WeightUpdate | None
    """Update of the rollout's weights; ``None`` where no rates are known."""
    balanced: Mapping[str, int | None]
    """Fewest replicas of each group that keep up with the trainer; ``None`` if no number does."""
    problems: Sequence[tuple[tuple[str, ...], str]]
    """Key of the recipe, and what is wrong with it."""
    tower: TowerPlan | None
    """The student's vision tower."""
    adapters: int
    """Trained weights of a student with adapters; 0 of one that trains its own."""
    student_weights: int
    checkpoint_bytes: int
    """Bytes of one checkpoint on disk."""
    checkpoints_kept: int
    """Checkpoints that are there at most, but for the one that is being written."""


def settled_for(loaded: Loaded, models: Mapping[str, ModelDims], pool: NodePool, hardware: Hardware) -> Loaded:
    """Return the recipe with every ``auto`` settled as the launcher of node 0, which sees ``hardware``, would do it.

    Raises:
        UserError: what another choice needs.
    """
    num_ranks = place_recipe(loaded.recipe, pool).ranks_per_node
    sizes = {key: total_weights(dims) for key, dims in models.items()}
    try:
        made = settle(loaded.recipe, hardware, num_ranks=num_ranks, num_weights=sizes)
    except ValueError as error:
        raise UserError(f"{loaded.path}: {error}") from error
    return loaded.settled(made.recipe, made.reasons)


def check_models(loaded: Loaded, models: Mapping[str, ModelDims], *, with_layout: bool) -> None:
    """Check that the longest sample has positions, and (``with_layout``) that the student's layout divides the model.

    Raises:
        UserError: file and key.
    """
    recipe = loaded.recipe
    if with_layout:
        try:
            check_layout(models[STUDENT], recipe.student.parallel)
            check_lora(models[STUDENT], recipe.student)
            check_freeze(models[STUDENT], recipe.student)
            check_sections(models[STUDENT], recipe.student)
            check_routes(models[STUDENT], replay_routes=recipe.rollout.replay_routes)
            check_updates(recipe, models[STUDENT])
        except UserError as error:
            raise UserError(f"{loaded.path}: {error}") from error
    longest = recipe.longest_sequence()
    for key, model in models.items():
        teacher = None if key == STUDENT else key.removeprefix("teachers.")
        own, response = recipe.longest_sequence(teacher), recipe.longest_response(teacher)
        if own > model.max_positions:
            section = "data" if own - response == recipe.data.max_prompt_length else f"{key}.view"
            twice = "" if response == recipe.rollout.max_response_length else " (twice, for its own tokenizer)"
            raise UserError(
                f"{loaded.where('rollout', 'max_response_length')}: {section}.max_prompt_length {own - response} + "
                f"rollout.max_response_length {response}{twice} = {own} exceeds the {model.max_positions} positions "
                f"of {key}.model: lower one of them"
            )
    if longest > recipe.student.max_tokens_per_micro_batch and recipe.student.micro_batch_size is None:
        raise UserError(
            f"{loaded.where('student', 'max_tokens_per_micro_batch')}: "
            f"{recipe.student.max_tokens_per_micro_batch} is less than the {longest} tokens of the longest sample "
            "(data.max_prompt_length + rollout.max_response_length): raise it"
        )


def make_plan(given: PlanInput, pool: NodePool, rates: Rates | None) -> RunPlan:
    """Plan a settled recipe on the nodes of ``pool``; without ``rates`` no times."""
    recipe, dims, work, cluster = given.recipe, given.models[STUDENT], given.work, given.cluster
    places, groups = place_recipe(recipe, pool), engine_groups(recipe)
    replicas = {}
    for key, group in groups.items():
        if not isinstance(group.placement, ExternalConfig):
            share = 1.0 if key == ROLLOUT else share_of_group(recipe, work, key.removeprefix("teachers."))
            replicas[key] = replica_of(given, key, group, samples=work.samples * share / group.num_replicas)
    ranks = plan_ranks(recipe, dims, work, cluster, replicas)
    hosts = plan_hosts(recipe, dims, work, places, ranks)
    trainer: Mapping[str, float] = {}
    times: StepTimes | None = None
    update: WeightUpdate | None = None
    balanced: dict[str, int | None] = {}
    if rates is not None:
        nodes = update_nodes(recipe, places)
        if recipe.needs_rollout:
            update = weight_update(recipe, dims, rates, cluster, replicas=recipe.rollout.num_replicas, nodes=nodes)
        layout = trainer_load(given, rates, places.ranks_per_node, nodes=nodes)
        loads = [group_load(given, rates, key, as_vllm(groups[key]), own) for key, own in replicas.items()]
        counts = {stage_of(key): group.num_replicas for key, group in groups.items()}
        in_turn = (stage_of(key) for key, group in groups.items() if isinstance(group.placement, InProcessConfig))
        staleness = recipe.schedule.max_staleness
        times = times_of(layout, loads, counts, max_staleness=staleness, in_turn=frozenset(in_turn))
        trainer = layout.parts
        balanced = {load.name: load.replicas_within(times.trainer_s) for load in loads}
    return RunPlan(
        cluster=cluster,
        work=work,
        places=places,
        ranks=ranks,
        replicas=replicas,
        hosts=hosts,
        links=links(recipe, groups, dims, work, tokens=micro_batches(recipe, dims, work).padded_tokens),
        heads=head_plans(recipe, dims, work, cluster, replicas) if cluster.gpus_per_node else [],
        trainer=trainer,
        times=times,
        update=update,
        balanced=balanced,
        problems=[*places.problems, *_too_large(ranks, replicas, hosts, places, cluster)],
        tower=plan_tower(recipe.student, dims, work.image_tokens),
        adapters=0 if recipe.student.lora is None else adapter_weights(dims, recipe.student.lora),
        student_weights=total_weights(dims),
        checkpoint_bytes=checkpoint_bytes(dims, recipe.student, len(recipe.averages)),
        checkpoints_kept=recipe.checkpoint.keep_last + (recipe.checkpoint.keep_best and recipe.validation is not None),
    )


def stage_of(key: str) -> str:
    """Return the name of a group's stage in reports: ``teachers/NAME`` for the key ``teachers.NAME``."""
    return key.replace(".", "/", 1)


def replica_of(given: PlanInput, key: str, group: EngineGroupConfig, *, samples: float) -> ReplicaPlan:
    """Plan one replica of a group to which so many ``samples`` of a step come."""
    dims, recipe = given.dims_of(key), given.recipe
    longest = recipe.longest_sequence()
    if key != ROLLOUT:
        longest = max(map(recipe.longest_sequence, recipe.on_group_of(key.removeprefix("teachers."))))
    return plan_replica(
        group,
        dims,
        replace(given.work, max_tokens=longest),
        given.cluster,
        scores=key != ROLLOUT,
        samples=samples,
        stored=given.stored.get(key),
        adapters=given.adapters_of(key),
    )


def update_nodes(recipe: Recipe, places: Places) -> int:
    """Return the number of nodes that senders and receivers of the rollout's weights are on."""
    senders = sender_ranks(recipe.student.parallel)
    ranks = [tenant for tenant in places.of("student") if tenant.number in senders]
    own = {(tenant.component, tenant.node) for tenant in [*ranks, *places.of(ROLLOUT)]}
    return len(own) + (recipe.rollout.num_replicas if ROLLOUT in places.elsewhere else 0)


def trainer_load(
    given: PlanInput,
    rates: Rates,
    per_node: int,
    label: str = "",
    keys: Mapping[str, int] | None = None,
    nodes: int = 0,
) -> TrainerLoad:
    """Return the load of the recipe's student layout, whose updates go over so many ``nodes``; in a search, where
    ``label`` and ``keys`` name it, over as few as hold student and rollout."""
    recipe, dims, work = given.recipe, given.models[STUDENT], given.work
    every, ranks = recipe.schedule.sync_every_steps, recipe.student.parallel.world_size

    def sync(replicas: int) -> tuple[float, float]:
        if not recipe.needs_rollout:
            return 0.0, 0.0
        gpus = ranks + replicas * recipe.rollout.gpus_per_replica
        few = min(given.cluster.nodes, -(-gpus // max(1, given.cluster.gpus_per_node)))
        update = weight_update(recipe, dims, rates, given.cluster, replicas=replicas, nodes=nodes or few)
        return update.student_s / every, (update.seconds - update.student_s) / every

    return TrainerLoad(
        gpus=recipe.student.parallel.world_size,
        parts=training_time(recipe, dims, work, micro_batches(recipe, dims, work), rates, per_node),
        sync=sync,
        label=label,
        keys=keys or {},
    )


def group_load(given: PlanInput, rates: Rates, key: str, group: EngineGroupConfig, own: ReplicaPlan) -> GroupLoad:
    """Return the load of one group whose replicas are planned as ``own``."""
    recipe, work, dims, name = given.recipe, given.work, given.dims_of(key), key.removeprefix("teachers.")
    if key == ROLLOUT:
        staleness, tells_top = recipe.schedule.max_staleness, student_ids(recipe) > 0
        time = partial(drawing_time, group, dims, work, own, rates, staleness, tells_top=tells_top)
    else:
        share, finds_top = share_of_group(recipe, work, name), recipe.asked[name].own > 0
        time = partial(scoring_time, group, dims, work, own, rates, share, finds_top=finds_top)
    return GroupLoad(
        name=stage_of(key), gpus=own.gpus, time=lru_cache(maxsize=None)(time), at_most=min(MAX_BALANCED, work.samples)
    )


def _too_large(
    ranks: Sequence[RankPlan],
    replicas: Mapping[str, ReplicaPlan],
    hosts: Sequence[HostPlan],
    places: Places,
    cluster: Cluster,
) -> list[tuple[tuple[str, ...], str]]:
    """Return what does not fit into a GPU or a node's host, or without GPUs into the host's free memory."""
    problems = [
        ((*path_of(key), *below.split(".")), text) for key, plan in replicas.items() for below, text in plan.problems
    ]
    if cluster.gpus_per_node == 0:
        per_stage = len(places.of("student")) // len(ranks)
        total = sum(sum(rank.parts.values()) for rank in ranks) * per_stage + sum(host.num_bytes for host in hosts)
        total += sum(plan.num_bytes * len(places.of(key)) for key, plan in replicas.items())
        if total > cluster.memory_bytes:
            text = f"ranks and replicas need {gib(total)} and the host has {gib(cluster.memory_bytes)} free: "
            problems.append((("student", "model"), f"{text}plan for GPUs with --gpu, or use smaller models"))
        return problems
    most = gib(cluster.usable_bytes)
    for rank in ranks:
        turn = sum(rank.rollout_turn.values())
        if turn > cluster.usable_bytes:
            parts = ", ".join(f"{name} {gib(size)}" for name, size in rank.rollout_turn.items())
            taken = f"{gib(turn)} of a GPU's {most} are taken while the rollout draws ({parts})"
            key = ("rollout", "engine", "gpu_memory_utilization")
            problems.append((key, f"with placement.share_gpus_with {taken}: lower it"))
        elif rank.num_bytes > cluster.usable_bytes:
            parts = ", ".join(f"{name} {gib(size)}" for name, size in {**rank.parts, **rank.shared}.items())
            name = "every rank" if len(ranks) == 1 else f"ranks of pipeline stage {rank.stage}"
            key = ("student", "parallel", "tensor_model_parallel_size")
            problems.append((key, f"{name} needs {gib(rank.num_bytes)} of {most} ({parts}): {_cure(rank)}"))
    full = [host for host in hosts if 0 < cluster.usable_host_bytes < host.num_bytes]
    for host in sorted(full, key=lambda host: -host.num_bytes)[:1]:
        parts = ", ".join(f"{name} {gib(size)}" for name, size in host.parts.items())
        path, cure = _HOST_CURES.get(max(host.parts, key=host.parts.__getitem__), _WEIGHTS_CURE)
        where = f"node {host.node}" + (f" of component {host.component}" if host.component else "")
        text = f"the host of {where} needs {gib(host.num_bytes)} of {gib(cluster.usable_host_bytes)} ({parts}): {cure}"
        problems.append((path, text))
    return problems


_HOST_CURES: dict[str, tuple[tuple[str, ...], str]] = {
    STATES: (("student", "optimizer", "offload_fraction"), "lower it, or give the student more nodes"),
    LENT: (("rollout", "placement", "share_gpus_with"), "give the student more nodes, or the rollout its own GPUs"),
    COPY: (("checkpoint", "async_save"), "set it to false, or give the student more nodes"),
}
_WEIGHTS_CURE: tuple[tuple[str, ...], str] = (
    ("weight_sync", "type"),
    "set collective, which keeps no copy, or lower rollout.replicas",
)


def _cure(rank: RankPlan) -> str:
    """Return what would help most against the largest part."""
    if sum(rank.shared.values()) > sum(rank.parts.values()):
        return "give the engines GPUs of their own (placement), or lower their gpu_memory_utilization"
    largest = max(rank.parts, key=lambda name: rank.parts[name])
    return {
        "activations": "lower student.max_tokens_per_micro_batch, set student.recompute: full, or raise it or "
        "context_parallel_size",
        "lm_head": "lower student.lm_head_memory_budget_mib, or raise it",
        "optimizer": "raise it, pipeline_model_parallel_size, or data_parallel_size (which shares the states), or set "
        "student.optimizer.offload_fraction",
    }.get(largest, "raise it, or pipeline_model_parallel_size")

"""The plan of a recipe on a cluster: places, memory, links, stages, and what cannot work, by key."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mopd.base.hardware import Hardware
from mopd.base.types import UserError
from mopd.config.groups import EngineGroupConfig
from mopd.config.load import Loaded
from mopd.config.machine.auto import settle
from mopd.config.machine.places import NodePool, Places, engine_groups, path_of, place_recipe
from mopd.config.placements import ExternalConfig, InProcessConfig
from mopd.config.schema import Recipe
from mopd.conversion.models.dims import ModelDims, layout_problem
from mopd.conversion.models.stages import stages_of
from mopd.planning.balance import ROLLOUT, GroupLoad, StepTimes, TrainerLoad
from mopd.planning.devices import GIB, Cluster, Rates
from mopd.planning.memory.activations import micro_batches
from mopd.planning.memory.ranks import HeadPlan, RankPlan, head_plans, host_bytes, plan_ranks
from mopd.planning.memory.replicas import ReplicaPlan, plan_replica
from mopd.planning.memory.shards import whole
from mopd.planning.models import STUDENT
from mopd.planning.stages import drawing_time, scoring_time, sending_s, staging_s, training_time
from mopd.planning.traffic import Flow, links
from mopd.planning.vision import TowerPlan, plan_tower
from mopd.planning.workload import Workload

MAX_BALANCED = 256
"""Replicas of a group beyond which no balance is looked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """The same run with one replica more or less of a group."""

    change: str
    gpus: int
    """In all."""
    step_s: float


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """All that ``mopd plan`` knows of a recipe."""

    cluster: Cluster
    work: Workload
    places: Places
    ranks: Sequence[RankPlan]
    replicas: Mapping[str, ReplicaPlan]
    """By key of the group, without those that run elsewhere."""
    hosts: Mapping[str, int]
    links: Sequence[Flow]
    heads: Sequence[HeadPlan]
    trainer: Mapping[str, float]
    """Seconds of the parts of the trainer's step; empty where no rates are known."""
    times: StepTimes | None
    balanced: Mapping[str, int | None]
    alternatives: Sequence[Alternative]
    problems: Sequence[tuple[tuple[str, ...], str]]
    """Key of the recipe, and what is wrong with it."""
    tower: TowerPlan | None
    """The student's vision tower."""


def settled_for(loaded: Loaded, models: Mapping[str, ModelDims], pool: NodePool, hardware: Hardware) -> Loaded:
    """The recipe as the launcher of node 0, which sees ``hardware``, would settle every ``auto``.

    Raises:
        UserError: what another choice needs.
    """
    num_ranks = place_recipe(loaded.recipe, pool).ranks_per_node
    sizes = {key: whole(dims) for key, dims in models.items()}
    try:
        made = settle(loaded.recipe, hardware, num_ranks=num_ranks, num_weights=sizes)
    except ValueError as error:
        raise UserError(f"{loaded.path}: {error}") from error
    return loaded.settled(made.recipe, made.reasons)


def check_models(loaded: Loaded, models: Mapping[str, ModelDims], *, with_layout: bool) -> None:
    """The longest sample has positions, and the student's layout divides the model (``with_layout``).

    Raises:
        UserError: file and key.
    """
    recipe, dims = loaded.recipe, models[STUDENT]
    parallel = recipe.student.parallel
    problem = layout_problem(
        dims,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        stages=stages_of(parallel),
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
    )
    if problem and with_layout:
        raise UserError(f"{loaded.path}: {problem}")
    longest = recipe.data.max_prompt_length + recipe.rollout.max_response_length
    for key, model in models.items():
        if longest > model.max_positions:
            raise UserError(
                f"{loaded.where('rollout', 'max_response_length')}: data.max_prompt_length "
                f"{recipe.data.max_prompt_length} + rollout.max_response_length {recipe.rollout.max_response_length} = "
                f"{longest} exceeds the {model.max_positions} positions of {key}.model: lower one of them"
            )
    if longest > recipe.student.max_tokens_per_micro_batch and recipe.student.micro_batch_size is None:
        raise UserError(
            f"{loaded.where('student', 'max_tokens_per_micro_batch')}: "
            f"{recipe.student.max_tokens_per_micro_batch} is less than the {longest} tokens of the longest sample "
            "(data.max_prompt_length + rollout.max_response_length): raise it"
        )


def make_plan(
    recipe: Recipe,
    models: Mapping[str, ModelDims],
    work: Workload,
    cluster: Cluster,
    pool: NodePool,
    rates: Rates | None,
) -> RunPlan:
    """Plan a settled recipe on the nodes of ``pool``, with the GPUs of ``cluster``; without ``rates`` no times."""
    dims, groups = models[STUDENT], engine_groups(recipe)
    places = place_recipe(recipe, pool)
    replicas = {
        key: _replica(key, group, models, work, cluster)
        for key, group in groups.items()
        if not isinstance(group.placement, ExternalConfig)
    }
    ranks = plan_ranks(recipe, dims, work, cluster, replicas)
    batch = micro_batches(recipe, dims, work)
    hosts = host_bytes(recipe, dims, work)
    if any(rank.rollout_turn for rank in ranks):
        hosts["optimizer states, lent"] = places.ranks_per_node * max(rank.parts["optimizer"] for rank in ranks)
    moved = links(recipe, groups, dims, work, tokens=batch.padded_tokens)
    loads = _loads(recipe, groups, models, work, replicas, rates) if rates is not None else []
    trainer = {} if rates is None else training_time(recipe, dims, work, batch, rates, places.ranks_per_node)
    times = None if rates is None else _times(recipe, dims, groups, loads, trainer, rates)
    return RunPlan(
        cluster=cluster,
        work=work,
        places=places,
        ranks=ranks,
        replicas=replicas,
        hosts=hosts,
        links=moved,
        heads=head_plans(recipe, dims, work, cluster, replicas) if cluster.gpus_per_node else [],
        trainer=trainer,
        times=times,
        balanced={} if times is None else {load.name: load.replicas_within(times.trainer_s) for load in loads},
        alternatives=[] if times is None or rates is None else _alternatives(recipe, dims, groups, loads, times, rates),
        problems=[*places.problems, *_too_large(ranks, replicas, hosts, places, cluster)],
        tower=plan_tower(recipe.student, dims, work.image_tokens),
    )


def trainer_load(
    recipe: Recipe, dims: ModelDims, work: Workload, rates: Rates, per_node: int, label: str, keys: Mapping[str, int]
) -> TrainerLoad:
    """The student's layout of ``recipe`` for the search."""
    parts = training_time(recipe, dims, work, micro_batches(recipe, dims, work), rates, per_node)
    every = recipe.schedule.sync_every_steps
    return TrainerLoad(
        gpus=recipe.student.parallel.world_size,
        seconds=sum(parts.values()),
        staging_s=staging_s(recipe, dims, rates) / every,
        sending_s=lambda replicas: sending_s(recipe, dims, replicas, rates) / every,
        label=label,
        keys=keys,
    )


def group_load(
    recipe: Recipe, key: str, group: EngineGroupConfig, dims: ModelDims, work: Workload, own: ReplicaPlan, rates: Rates
) -> GroupLoad:
    """One group for the search."""
    name = key.removeprefix("teachers.")
    if key == ROLLOUT:
        return GroupLoad(
            name=ROLLOUT,
            gpus=own.gpus,
            time=lambda replicas: drawing_time(group, dims, work, own, replicas, rates),
            at_most=min(MAX_BALANCED, work.samples),
        )
    return GroupLoad(
        name=f"teachers/{name}",
        gpus=own.gpus,
        time=lambda replicas: scoring_time(group, dims, work, work.teacher_shares[name], own, replicas, rates),
        at_most=min(MAX_BALANCED, work.samples),
    )


def _replica(
    key: str, group: EngineGroupConfig, models: Mapping[str, ModelDims], work: Workload, cluster: Cluster
) -> ReplicaPlan:
    scores = key != ROLLOUT
    share = work.teacher_shares[key.removeprefix("teachers.")] if scores else 1.0
    return plan_replica(
        group,
        models[key if scores else STUDENT],
        work,
        memory_bytes=cluster.memory_bytes,
        scores=scores,
        samples=work.samples * share / group.num_replicas,
    )


def _loads(
    recipe: Recipe,
    groups: Mapping[str, EngineGroupConfig],
    models: Mapping[str, ModelDims],
    work: Workload,
    replicas: Mapping[str, ReplicaPlan],
    rates: Rates,
) -> list[GroupLoad]:
    return [
        group_load(recipe, key, groups[key], models[STUDENT if key == ROLLOUT else key], work, own, rates)
        for key, own in replicas.items()
    ]


def _times(
    recipe: Recipe,
    dims: ModelDims,
    groups: Mapping[str, EngineGroupConfig],
    loads: Sequence[GroupLoad],
    trainer: Mapping[str, float],
    rates: Rates,
) -> StepTimes:
    counts = {key.replace(".", "/", 1): group.num_replicas for key, group in groups.items()}
    every = recipe.schedule.sync_every_steps
    return StepTimes(
        groups={load.name: load.time(counts[load.name]) for load in loads},
        trainer_s=sum(trainer.values()),
        staging_s=staging_s(recipe, dims, rates) / every,
        sending_s=sending_s(recipe, dims, recipe.rollout.num_replicas, rates) / every,
        max_staleness=recipe.schedule.max_staleness,
        in_turn=frozenset(
            key.replace(".", "/", 1) for key, group in groups.items() if isinstance(group.placement, InProcessConfig)
        ),
    )


def _alternatives(
    recipe: Recipe,
    dims: ModelDims,
    groups: Mapping[str, EngineGroupConfig],
    loads: Sequence[GroupLoad],
    times: StepTimes,
    rates: Rates,
) -> list[Alternative]:
    """One replica more or less of each group that has GPUs of its own."""
    counts = {key.replace(".", "/", 1): group.num_replicas for key, group in groups.items()}
    own = [
        load for load in loads if load.name not in times.in_turn and not (load.name == ROLLOUT and recipe.shares_gpus)
    ]
    base = recipe.student.parallel.world_size + sum(load.gpus * counts[load.name] for load in own)
    found = []
    for load in own:
        for more in (-1, 1):
            count = counts[load.name] + more
            if count < 1:
                continue
            sending = times.sending_s
            if load.name == ROLLOUT:
                sending = sending_s(recipe, dims, count, rates) / recipe.schedule.sync_every_steps
            changed = dataclasses.replace(
                times, groups={**times.groups, load.name: load.time(count)}, sending_s=sending
            )
            change = f"{load.name} {counts[load.name]} -> {count}"
            found.append(Alternative(change=change, gpus=base + more * load.gpus, step_s=changed.step_s))
    return sorted(found, key=lambda one: one.step_s)


def _too_large(
    ranks: Sequence[RankPlan],
    replicas: Mapping[str, ReplicaPlan],
    hosts: Mapping[str, int],
    places: Places,
    cluster: Cluster,
) -> list[tuple[tuple[str, ...], str]]:
    """What does not fit into a GPU, or without GPUs into the host's free memory."""
    problems = [
        ((*path_of(key), *below.split(".")), text) for key, plan in replicas.items() for below, text in plan.problems
    ]
    if cluster.gpus_per_node == 0:
        per_stage = len(places.of("student")) // len(ranks)
        total = sum(sum(rank.parts.values()) for rank in ranks) * per_stage
        total += sum(plan.num_bytes * len(places.of(key)) for key, plan in replicas.items()) + sum(hosts.values())
        if total > cluster.memory_bytes:
            text = f"ranks and replicas need {_gib(total)} and the host has {_gib(cluster.memory_bytes)} free: "
            problems.append((("student", "model"), f"{text}plan for GPUs with --gpu, or use smaller models"))
        return problems
    for rank in ranks:
        turn = sum(rank.rollout_turn.values())
        if turn > cluster.memory_bytes:
            parts = ", ".join(f"{name} {_gib(size)}" for name, size in rank.rollout_turn.items())
            problems.append(
                (
                    ("rollout", "engine", "gpu_memory_utilization"),
                    f"with placement.share_gpus_with {_gib(turn)} of a GPU's {_gib(cluster.memory_bytes)} are taken "
                    f"while the rollout draws ({parts}): lower it",
                )
            )
        elif rank.num_bytes > cluster.memory_bytes:
            parts = ", ".join(f"{name} {_gib(size)}" for name, size in {**rank.parts, **rank.shared}.items())
            name = "every rank" if len(ranks) == 1 else f"ranks of pipeline stage {rank.stage}"
            problems.append(
                (
                    ("student", "parallel", "tensor_model_parallel_size"),
                    f"{name} needs {_gib(rank.num_bytes)} of {_gib(cluster.memory_bytes)} ({parts}): {_cure(rank)}",
                )
            )
    return problems


def _cure(rank: RankPlan) -> str:
    """What would help most against the largest part."""
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


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"

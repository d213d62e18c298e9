"""Search for the layout of the student and the split of GPUs with which a recipe's step is fastest, of all that fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

from mopd.base.types import UserError
from mopd.config.groups import EngineGroupConfig, VllmEngineConfig
from mopd.config.machine.places import NodePool, engine_groups, place
from mopd.config.placements import ExternalConfig, LocalConfig, RayConfig, RegisteredConfig
from mopd.config.schema import Recipe
from mopd.config.student import ParallelConfig, StudentConfig
from mopd.config.weights import CollectiveConfig, HttpConfig, IpcConfig, WeightSync
from mopd.conversion.models.dims import ModelDims, layout_problem
from mopd.conversion.models.stages import Stages
from mopd.planning.balance import ROLLOUT, GroupLoad, Split, TrainerLoad, ranked, share_out
from mopd.planning.devices import SHARES, Cluster, Rates
from mopd.planning.memory.ranks import RankPlan, plan_hosts, plan_ranks
from mopd.planning.memory.replicas import VLLM_BYTES_PER_LOGIT, ReplicaPlan, scoring_rows
from mopd.planning.memory.shards import student_shard, tensor_bytes
from mopd.planning.models import STUDENT
from mopd.planning.plan import PlanInput, group_load, replica_of, stage_of, trainer_load
from mopd.planning.stages import StageTime, head_layers
from mopd.planning.workload import Workload

T = TypeVar("T")

DEGREES = (1, 2, 4, 8, 16, 32, 64)
STAGES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 32, 64)
SHOWN = 8
OFFLOAD_STEP = 0.05
"""Step in which the share of optimizer states in host memory is tried."""
LAST = "num_layers_in_last_pipeline_stage"
CHUNKS = "virtual_pipeline_model_parallel_size"
POOL = "teachers"
"""Name of the pool of teachers that take turns."""
MIN_SHARE = 0.05
"""Least share of a GPU's memory that a rollout which shares it may take."""
HELPFUL = 0.95
"""Share of a step at which a change is worth a line."""


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """One layout with the best numbers of replicas beside it."""

    split: Split
    keys: Mapping[str, Any]
    """Keys to set, as a tree of the recipe."""
    num_bytes: int
    """Bytes of the fullest GPU."""


@dataclass(frozen=True, kw_only=True)
class Help:
    """A change of what is learned or where, which the search leaves to the user, and the best step with it."""

    change: str
    step_s: float
    bound_by: str


def suggest(given: PlanInput, rates: Rates) -> list[Suggestion]:
    """Return the fastest splits, best first, at most ``SHOWN``; all fit into memory and have a place for every replica.

    Raises:
        UserError: nothing fits into so many GPUs.
    """
    cluster, fitting = given.cluster, _fitting_groups(given)
    found = _search(given, rates, fitting)
    if not found:
        least = {key: own[0].gpus_per_replica for key, own in fitting.items()}
        beside = f"{sum(least.values())} ({', '.join(f'{key} {gpus}' for key, gpus in least.items())})"
        all_gpus = f"{cluster.num_gpus} GPUs ({cluster.nodes} x {cluster.gpus_per_node} {cluster.name})"
        tried = "teachers by turns on GPUs (tried on one node)"
        raise UserError(
            f"--suggest: of {all_gpus} the engines take {beside} at least, and no layout of the student fits the "
            f"others, with full recompute, its optimizer's states in host memory, or {tried} either: give more "
            "--nodes, or lower student.max_tokens_per_micro_batch"
        )
    return found


def _fitting_groups(given: PlanInput) -> dict[str, list[EngineGroupConfig]]:
    """Return each group that needs GPUs at every degree at which it fits."""
    return {
        key: _with_own_gpus(given, key, group)
        for key, group in engine_groups(given.recipe).items()
        if not isinstance(group.placement, ExternalConfig)
    }


def _search(given: PlanInput, rates: Rates, fitting: Mapping[str, Sequence[EngineGroupConfig]]) -> list[Suggestion]:
    lowest = {key: own[0] for key, own in fitting.items()}
    rollouts = fitting.get(ROLLOUT, [])
    found = _splits(given, rates, lowest, rollouts)
    pooled = {} if found else _in_a_pool(given, lowest)  # a turn costs what no rate tells
    return _splits(given, rates, pooled, rollouts) if pooled else found


def _splits(
    given: PlanInput, rates: Rates, lowest: Mapping[str, EngineGroupConfig], rollouts: Sequence[EngineGroupConfig]
) -> list[Suggestion]:
    """Return the best splits with each of the ``rollouts`` in the place of the one of ``lowest``."""
    recipe, cluster = given.recipe, given.cluster
    # Teachers take as few GPUs as hold them; a rollout that shares its weights over more has more room for sequences.
    choices: list[Mapping[str, EngineGroupConfig]] = [{**lowest, ROLLOUT: rollout} for rollout in rollouts]
    least = sum(load.gpus for load in _loads(given, rates, lowest)[0])
    splits = [*_by_turns(given, rates, lowest, rollouts)]
    layouts = list(trainers(given, rates, at_most=cluster.num_gpus - least))
    for groups in choices or [lowest]:
        loads, fullest = _loads(given, rates, groups)
        best = ranked(cluster.num_gpus, layouts, loads, max_staleness=recipe.schedule.max_staleness)
        splits += [(split, groups, max(fullest, split.trainer.num_bytes)) for split in best]
    splits.sort(key=lambda one: (float(f"{one[0].times.step_s:.3g}"), *_plainness(one[0], one[2], cluster)))
    placed = (one for one in splits if _has_places(one[0], one[1], cluster))
    found: dict[tuple[object, ...], Suggestion] = {}  # of equals the plainest
    for split, own, num_bytes in placed:
        equals = (f"{split.times.step_s:.3g}", split.trainer.gpus)
        if equals not in found:
            found[equals] = Suggestion(split=split, keys=_keys(split, own, recipe), num_bytes=num_bytes)
        if len(found) == SHOWN:
            break
    return [*found.values()]


def _loads(given: PlanInput, rates: Rates, groups: Mapping[str, EngineGroupConfig]) -> tuple[list[GroupLoad], int]:
    """Return the groups' loads and the bytes of their fullest GPU. Groups of a pool have the first one's GPUs, and each
    is done when all are."""
    plans = {key: replica_of(given, key, group, samples=given.work.samples) for key, group in groups.items()}
    loads = {key: group_load(given, rates, key, group, plans[key]) for key, group in groups.items()}
    sizes = {key: group.placement.num_gpus for key, group in groups.items() if isinstance(group.placement, RayConfig)}
    together = partial(_one_after_another, [loads[key].time for key in sizes])
    for number, (key, gpus) in enumerate(sizes.items()):
        loads[key] = replace(loads[key], gpus=0 if number else gpus, time=together, at_most=1)
    return [*loads.values()], max((plan.num_bytes for plan in plans.values()), default=0)


def _one_after_another(times: Sequence[Callable[[int], StageTime]], replicas: int) -> StageTime:
    each = [time(replicas) for time in times]
    longest = max(each, key=lambda one: one.step_s)
    seconds = sum(one.capacity_s for one in each), sum(one.step_s for one in each)
    return StageTime(capacity_s=seconds[0], step_s=seconds[1], bound=longest.bound)


def _in_a_pool(given: PlanInput, groups: Mapping[str, EngineGroupConfig]) -> dict[str, EngineGroupConfig]:
    """Return the groups with all teachers by turns on the same GPUs of one node, where those that sleep keep what a
    process has there beside its engine; empty where they do not fit, or there is nothing to share."""
    cluster, teachers = given.cluster, [key for key in groups if key != ROLLOUT]
    if cluster.nodes > 1 or len(teachers) < 2:
        return {}
    asleep = (len(teachers) - 1) * SHARES["rank_reserve_bytes"].value / cluster.memory_bytes
    num_gpus, found = max(groups[key].gpus_per_replica for key in teachers), dict(groups)
    for key in teachers:
        engine = groups[key].engine
        assert isinstance(engine, VllmEngineConfig)
        share = math.floor(100 * (engine.gpu_memory_utilization - asleep)) / 100
        engine = replace(engine, gpu_memory_utilization=max(0.01, share))
        placement = RayConfig(type="ray", num_gpus=num_gpus, shared_pool=POOL)
        found[key] = replace(groups[key], engine=engine, placement=placement)
    plans = (replica_of(given, key, found[key], samples=given.work.samples) for key in teachers)
    return {} if any(plan.problems for plan in plans) else found


def helps(given: PlanInput, rates: Rates, best: Suggestion) -> list[Help]:
    """Return the changes that make the suggested step at least a twentieth faster, the most helpful first: they change
    how old samples may be, or how the weights travel."""
    recipe, found = _apart(given.recipe), list[Help]()
    schedule, sync = recipe.schedule, max(recipe.schedule.sync_every_steps, 1)
    changes: dict[str, dict[str, Any]] = {
        "schedule.sync_every_steps: {sync_every_steps}, max_staleness: {max_staleness}": {
            "schedule": replace(
                schedule, sync_every_steps=4 * sync, max_staleness=max(schedule.max_staleness, 4 * sync - 1)
            )
        },
        "schedule.max_staleness: {max_staleness}": {
            "schedule": replace(schedule, max_staleness=max(1, 2 * schedule.max_staleness))
        },
    }
    if not isinstance(recipe.weight_sync, CollectiveConfig):
        changes["weight_sync.type: collective"] = {"weight_sync": CollectiveConfig(type="collective")}
    for text, change in changes.items():
        own = replace(recipe, **change)
        changed = replace(given, recipe=own)
        others = _search(changed, rates, _fitting_groups(changed))[:1]
        for times in (
            other.split.times for other in others if other.split.times.step_s < HELPFUL * best.split.times.step_s
        ):
            shown = text.format(**{key: getattr(own.schedule, key) for key in ("sync_every_steps", "max_staleness")})
            found.append(Help(change=shown, step_s=times.step_s, bound_by=times.bound_by))
    return sorted(found, key=lambda one: one.step_s)


def _plainness(split: Split, num_bytes: int, cluster: Cluster) -> tuple[float, ...]:
    """Return the order of splits that are equally fast: those that leave a tenth of a GPU's memory, or else most of it,
    then fewest stages, least tensor and expert parallelism, even stages and fewest GPUs first."""
    keys = split.trainer.keys
    return (
        round(max(0.9, num_bytes / cluster.usable_bytes), 2),
        len(split.trainer.student),
        keys["pipeline_model_parallel_size"],
        keys.get(CHUNKS, 1),
        keys["tensor_model_parallel_size"],
        keys["expert_model_parallel_size"],
        int(LAST in keys),
        split.trainer.gpus,
    )


def _with_own_gpus(given: PlanInput, key: str, group: EngineGroupConfig) -> list[EngineGroupConfig]:
    """Return the group with vLLM on GPUs of its own, at every degree at which the model fits, the lowest first."""
    cluster = given.cluster
    engine = group.engine if isinstance(group.engine, VllmEngineConfig) else VllmEngineConfig(type="vllm")
    engine = replace(engine, max_scoring_tokens=max(engine.max_scoring_tokens, given.work.max_tokens))
    if engine.dtype == "auto":
        engine = replace(engine, dtype="bfloat16")
    placement = LocalConfig(type="local") if cluster.nodes == 1 else RegisteredConfig(type="registered")
    if key != ROLLOUT and cluster.gpus_per_node:
        # its prompt log-probs come beside what vLLM takes
        scoring = scoring_rows(engine) * given.dims_of(key).vocab_size * VLLM_BYTES_PER_LOGIT
        room = math.floor(100 * (cluster.usable_bytes - scoring) / cluster.memory_bytes) / 100
        wanted = max(engine.gpu_memory_utilization, VllmEngineConfig(type="vllm").gpu_memory_utilization)
        engine = replace(engine, gpu_memory_utilization=max(0.01, min(wanted, room)))
    found, per_node = list[EngineGroupConfig](), cluster.gpus_per_node
    problems: list[tuple[str, str]] = []
    degrees = [(degree, 1) for degree in DEGREES if degree <= per_node]
    # a stage on each node: sums over all GPUs of a layer stay inside of one
    degrees += [] if key == ROLLOUT else [(per_node, stages) for stages in range(2, cluster.nodes)]
    for degree, stages in degrees:
        if stages > 1 and found:
            break
        sizes = replace(engine, tensor_parallel_size=degree, pipeline_parallel_size=stages)
        own = replace(group, engine=sizes, placement=placement, replicas=1)
        problems = list(replica_of(given, key, own, samples=given.work.samples).problems)
        found += [] if problems else [own]
    if not found:
        below, text = problems[0]
        raise UserError(f"--suggest: {key}.{below}: {text}")
    return found


def _by_turns(
    given: PlanInput, rates: Rates, lowest: Mapping[str, EngineGroupConfig], rollouts: Sequence[EngineGroupConfig]
) -> Iterator[tuple[Split, Mapping[str, EngineGroupConfig], int]]:
    """Yield the best split beside each layout of the student whose GPUs the rollout has by turns, the groups and the
    bytes of the fullest GPU. Such replicas are on one node, and the run is synchronous."""
    recipe, cluster, dims = given.recipe, given.cluster, given.models[STUDENT]
    if cluster.nodes > 1 or recipe.schedule.max_staleness:
        return
    teachers = {key: group for key, group in lowest.items() if key != ROLLOUT}
    loads, others = _loads(given, rates, teachers)
    free = cluster.num_gpus - sum(load.gpus for load in loads)
    shared = LocalConfig(type="local", share_gpus_with="student")
    for group, parallel in itertools.product(rollouts, _layouts(given, free)):
        replicas, stages = parallel.world_size // group.gpus_per_replica, range(parallel.pipeline_model_parallel_size)
        if not replicas:
            continue
        own_student = replace(recipe.student, parallel=parallel)
        held = max(tensor_bytes(student_shard(dims, own_student, stage), own_student)["weights"] for stage in stages)
        left = cluster.usable_bytes - held - int(SHARES["rank_reserve_bytes"].value)
        share = math.floor(100 * left / cluster.memory_bytes) / 100
        if share < MIN_SHARE:
            continue
        assert isinstance(group.engine, VllmEngineConfig)
        engine = replace(group.engine, gpu_memory_utilization=min(group.engine.gpu_memory_utilization, share))
        own = replace(group, engine=engine, placement=shared, replicas=replicas)
        rollout = replace(recipe.rollout, engine=engine, placement=shared, replicas=replicas)
        student, way = replace(recipe.student, parallel=parallel), _way_by_turns(parallel.world_size)
        turned = replace(_apart(recipe), student=student, rollout=rollout, weight_sync=way)
        plan = replica_of(given, ROLLOUT, own, samples=given.work.samples / replicas)
        if plan.problems:
            continue
        drawing = group_load(given, rates, ROLLOUT, own, plan).time
        alone = GroupLoad(name=ROLLOUT, gpus=0, time=partial(_of_all, drawing, replicas), at_most=1)
        for trainer in _fitting(replace(given, recipe=turned), rates, [parallel], {ROLLOUT: plan}):
            fixed = replace(trainer, sync=partial(_of_all, trainer.sync, replicas))
            split = share_out(cluster.num_gpus, fixed, [alone, *loads], max_staleness=0)
            if split is not None:
                counts = {**split.replicas, ROLLOUT: replicas}
                yield replace(split, replicas=counts), {ROLLOUT: own, **teachers}, max(others, trainer.num_bytes)


def _of_all(of: Callable[[int], T], replicas: int, _: int) -> T:
    return of(replicas)


def _way_by_turns(num_ranks: int) -> WeightSync:
    """Return the way of weights that sharing allows: NCCL refuses two processes on one GPU."""
    return IpcConfig(type="ipc") if num_ranks == 1 else HttpConfig(type="http")


def trainers(given: PlanInput, rates: Rates, *, at_most: int) -> Iterator[TrainerLoad]:
    """Yield every layout that divides model and batch and fits, on GPUs of the student's own."""
    yield from _fitting(replace(given, recipe=_apart(given.recipe)), rates, _layouts(given, at_most), {})


def _apart(recipe: Recipe) -> Recipe:
    """Return the recipe with all groups on GPUs of their own."""
    elsewhere, way = LocalConfig(type="local"), recipe.weight_sync
    way = CollectiveConfig(type="collective", or_http=True) if isinstance(way, IpcConfig) else way
    rollout = replace(recipe.rollout, placement=elsewhere)
    teachers = {name: replace(teacher, placement=elsewhere) for name, teacher in recipe.teachers.items()}
    return replace(recipe, rollout=rollout, teachers=teachers, weight_sync=way)


def _fitting(
    given: PlanInput, rates: Rates, layouts: Iterable[ParallelConfig], replicas: Mapping[str, ReplicaPlan]
) -> Iterator[TrainerLoad]:
    """Yield each of the ``layouts`` that fits, beside ``replicas`` that share its GPUs, with the least recompute that
    fits, and with optimizer states on the host only where no recompute does, no more of them than must."""
    recipe, cluster, dims = given.recipe, given.cluster, given.models[STUDENT]
    student, given_offload = recipe.student, recipe.student.optimizer.offload_fraction
    ways: list[tuple[Literal["none", "full"], float | None]] = [("none", given_offload), ("full", given_offload)]
    ways += [("full", None)] if given_offload < 1 and student.optimizer.use_distributed_optimizer else []
    for parallel in layouts:
        ranks = list[RankPlan]()
        for recompute, wanted in ways:
            offload = _least_offload(ranks, given_offload, cluster) if wanted is None else wanted
            optimizer = replace(student.optimizer, offload_fraction=offload)
            own = replace(recipe, student=replace(student, parallel=parallel, recompute=recompute, optimizer=optimizer))
            ranks = plan_ranks(own, dims, given.work, cluster, replicas)
            fullest = max(rank.num_bytes for rank in ranks)
            if fullest <= cluster.usable_bytes and _fits_hosts(replace(given, recipe=own), ranks):
                changed: dict[str, Any] = {"recompute": recompute} if recompute != student.recompute else {}
                changed |= {"optimizer": {"offload_fraction": offload}} if offload != given_offload else {}
                load = trainer_load(
                    replace(given, recipe=own), rates, cluster.gpus_per_node, _label(own.student), _degrees(parallel)
                )
                yield replace(load, student=changed, num_bytes=fullest)
                break


def _least_offload(ranks: Sequence[RankPlan], before: float, cluster: Cluster) -> float:
    """Return the least ``offload_fraction``, a multiple of ``OFFLOAD_STEP``, with which ranks fit that are planned with
    ``before``; 1 where none does."""
    fragments = 1 + SHARES["fragments"].value
    over = (
        (rank.training_bytes - cluster.usable_bytes) / fragments / rank.parts["optimizer"] * (1 - before)
        for rank in ranks
    )
    return min(1.0, round(math.ceil((before + max(over)) / OFFLOAD_STEP + 0.01) * OFFLOAD_STEP, 2))


def _fits_hosts(given: PlanInput, ranks: Sequence[RankPlan]) -> bool:
    """Return whether the nodes' hosts hold what planned ranks keep there, as far as their memory is known."""
    cluster, recipe = given.cluster, given.recipe
    if not cluster.host_bytes:
        return True
    pool = NodePool(gpus_per_node=cluster.gpus_per_node, num_nodes=cluster.nodes)
    places = place({}, recipe.student.parallel.world_size, pool)
    if places.problems:
        return True  # of another kind, which the search looks at beside the engines
    hosts = plan_hosts(recipe, given.models[STUDENT], given.work, places, ranks)
    return all(host.num_bytes <= cluster.usable_host_bytes for host in hosts)


def _degrees(parallel: ParallelConfig) -> dict[str, int]:
    degrees = ("tensor_model", "pipeline_model", "data", "expert_model", "context")
    keys = {f"{name}_parallel_size": getattr(parallel, f"{name}_parallel_size") for name in degrees}
    if parallel.num_layers_in_last_pipeline_stage is not None:
        keys[LAST] = parallel.num_layers_in_last_pipeline_stage
    if parallel.virtual_pipeline_model_parallel_size > 1:
        keys[CHUNKS] = parallel.virtual_pipeline_model_parallel_size
    return keys


def _label(student: StudentConfig) -> str:
    """Return a layout as the table shows it."""
    keys = _degrees(student.parallel)
    label = "TP {} PP {} DP {} EP {}".format(*keys.values())
    label += f" last {keys[LAST]}" if LAST in keys else ""
    label += f" VP {keys[CHUNKS]}" if CHUNKS in keys else ""
    label += f" CP {keys['context_parallel_size']}" if keys["context_parallel_size"] > 1 else ""
    label += "" if student.recompute == "none" else f" recompute {student.recompute}"
    return label + (" offload" if student.optimizer.offload_fraction else "")


def _layouts(given: PlanInput, at_most: int) -> Iterator[ParallelConfig]:
    """Yield the layouts of at most so many GPUs that divide model and batch."""
    recipe, dims = given.recipe, given.models[STUDENT]
    experts, cp = DEGREES if dims.moe is not None else (1,), recipe.student.parallel.context_parallel_size
    for tp, pp, ep in itertools.product(DEGREES, STAGES, experts):
        ways = [(last, 1) for last in _last_stages(dims, given.work, pp)] + [(None, 2)] * (pp > 1)
        for last, chunks in ways:
            stages = Stages(
                pipeline_model_parallel_size=pp,
                num_layers_in_last_pipeline_stage=last,
                virtual_pipeline_model_parallel_size=chunks,
            )
            problem = layout_problem(dims, stages, tp=tp, ep=ep, cp=cp, etp=1 if dims.moe is not None else None)
            if problem or tp > given.cluster.gpus_per_node:
                continue
            for dp in range(1, at_most // (tp * cp * pp) + 1):
                if recipe.samples_per_step % (dp * (pp if chunks > 1 else 1)) or (tp * cp * dp) % ep:
                    continue
                yield ParallelConfig(
                    tensor_model_parallel_size=tp,
                    pipeline_model_parallel_size=pp,
                    context_parallel_size=cp,
                    data_parallel_size=dp,
                    expert_model_parallel_size=ep,
                    expert_tensor_parallel_size=1 if dims.moe is not None and tp > 1 else None,
                    sequence_parallel=tp > 1,
                    num_layers_in_last_pipeline_stage=last,
                    virtual_pipeline_model_parallel_size=chunks,
                )


def _last_stages(dims: ModelDims, work: Workload, pp: int) -> list[int | None]:
    """Return numbers of layers to try for the last of ``pp`` stages: ``None``, as many as the others have, and so many
    fewer that the slowest stage is fastest, the last one with its LM head."""
    if pp == 1:
        return [None]
    head = head_layers(dims, work)
    share = (dims.num_layers + head) / pp
    lasts = {others: dims.num_layers - others * (pp - 1) for others in (math.floor(share), math.ceil(share))}
    others, last = min(lasts.items(), key=lambda one: max(one[0], one[1] + head))
    return [None, last] if 1 <= last < others else [None]


def _has_places(split: Split, groups: Mapping[str, EngineGroupConfig], cluster: Cluster) -> bool:
    placed = {key: replace(group, replicas=split.replicas[stage_of(key)]) for key, group in groups.items()}
    pool = NodePool(gpus_per_node=cluster.gpus_per_node, num_nodes=cluster.nodes)
    return not place(placed, split.trainer.gpus, pool).problems


def _keys(split: Split, groups: Mapping[str, EngineGroupConfig], recipe: Recipe) -> dict[str, Any]:
    """Return what to set; a key that the recipe has and a layout does without is set back."""
    always = (LAST, CHUNKS) if recipe.student.parallel.pipeline_model_parallel_size > 1 else (LAST,)
    keys = split.trainer.keys
    parallel: dict[str, Any] = {key: value for key, value in keys.items() if value > 1 or key in always}
    if keys["tensor_model_parallel_size"] > 1:
        parallel["sequence_parallel"] = True
        if "expert_model_parallel_size" in parallel:
            parallel["expert_tensor_parallel_size"] = 1
    tree: dict[str, Any] = {"student": {"parallel": parallel, **split.trainer.student}, "teachers": {}}
    for key, group in groups.items():
        assert isinstance(group.engine, VllmEngineConfig)
        own: dict[str, Any] = {"engine": {"type": "vllm", "tensor_parallel_size": group.engine.tensor_parallel_size}}
        if group.engine.pipeline_parallel_size > 1:
            own["engine"]["pipeline_parallel_size"] = group.engine.pipeline_parallel_size
        if key != ROLLOUT:
            own["engine"]["gpu_memory_utilization"] = group.engine.gpu_memory_utilization
        if group.engine.max_scoring_tokens > VllmEngineConfig(type="vllm").max_scoring_tokens:
            own["engine"]["max_scoring_tokens"] = group.engine.max_scoring_tokens
        own |= {"placement": {"type": group.placement.type}, "replicas": split.replicas[stage_of(key)]}
        if isinstance(group.placement, RayConfig):
            own["placement"] |= {"num_gpus": group.placement.num_gpus, "shared_pool": POOL}
        if group.shares_gpus:
            own["engine"]["gpu_memory_utilization"] = group.engine.gpu_memory_utilization
            own["placement"]["share_gpus_with"] = STUDENT
            tree["weight_sync"] = {"type": _way_by_turns(split.trainer.gpus).type}
        if key == ROLLOUT:
            tree[ROLLOUT] = own
        else:
            tree["teachers"][key.removeprefix("teachers.")] = own
    return tree

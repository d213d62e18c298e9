"""Search for the layout of the student and the split of GPUs with which a recipe's step is fastest, of all that fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mopd.base.types import UserError
from mopd.config.groups import EngineGroupConfig, VllmEngineConfig
from mopd.config.machine.places import NodePool, engine_groups, place
from mopd.config.placements import ExternalConfig, LocalConfig, RegisteredConfig
from mopd.config.student import ParallelConfig
from mopd.conversion.models.dims import ModelDims, layout_problem
from mopd.conversion.models.stages import Stages
from mopd.planning.balance import ROLLOUT, Split, TrainerLoad, ranked
from mopd.planning.devices import Cluster, Rates
from mopd.planning.memory.ranks import plan_ranks
from mopd.planning.models import STUDENT
from mopd.planning.plan import PlanInput, group_load, replica_of, stage_of, trainer_load
from mopd.planning.stages import head_layers
from mopd.planning.workload import Workload

DEGREES = (1, 2, 4, 8, 16, 32, 64)
SHOWN = 8
LAST = "num_layers_in_last_pipeline_stage"


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """One layout with the best numbers of replicas beside it."""

    split: Split
    keys: Mapping[str, Any]
    """Keys to set, as a tree of the recipe."""


def suggest(given: PlanInput, rates: Rates) -> list[Suggestion]:
    """Return the fastest splits, best first, at most ``SHOWN``; all fit into memory and have a place for every replica.

    Raises:
        UserError: nothing fits into so many GPUs, or the recipe does not split them.
    """
    recipe, cluster = given.recipe, given.cluster
    if recipe.shares_gpus:
        raise UserError("--suggest splits GPUs between student and rollout: remove rollout.placement.share_gpus_with")
    fitting = {
        key: _with_own_gpus(given, key, group)
        for key, group in engine_groups(recipe).items()
        if not isinstance(group.placement, ExternalConfig)
    }
    lowest = {key: own[0] for key, own in fitting.items()}
    # Teachers take as few GPUs as hold them; a rollout that shares its weights over more has more room for sequences.
    choices = [{**lowest, ROLLOUT: rollout} for rollout in fitting.get(ROLLOUT, [])]
    least = sum(group.gpus_per_replica for group in lowest.values())
    trainers = list(_trainers(given, rates, at_most=cluster.num_gpus - least))
    splits: list[tuple[Split, Mapping[str, EngineGroupConfig]]] = []
    for groups in choices or [lowest]:
        plans = {key: replica_of(given, key, group, samples=given.work.samples) for key, group in groups.items()}
        loads = [group_load(given, rates, key, group, plans[key]) for key, group in groups.items()]
        best = ranked(cluster.num_gpus, trainers, loads, max_staleness=recipe.schedule.max_staleness)
        splits += [(split, groups) for split in best]
    splits.sort(key=lambda one: (float(f"{one[0].times.step_s:.3g}"), *_plainness(one[0])))
    placed = ((split, groups) for split, groups in splits if _has_places(split, groups, cluster))
    found = [Suggestion(split=split, keys=_keys(split, groups)) for split, groups in itertools.islice(placed, SHOWN)]
    if not found:
        raise UserError(
            f"--suggest: no layout of the student beside {least} GPUs of engines fits {cluster.nodes} nodes of "
            f"{cluster.gpus_per_node} {cluster.name}: give more --nodes, lower student.max_tokens_per_micro_batch, or "
            "set student.recompute: full"
        )
    return found


def _plainness(split: Split) -> tuple[int, ...]:
    """Return the order of splits that are equally fast: fewest stages, least tensor and expert parallelism, even stages
    and fewest GPUs first."""
    keys = split.trainer.keys
    return (
        keys["pipeline_model_parallel_size"],
        keys["tensor_model_parallel_size"],
        keys["expert_model_parallel_size"],
        int(LAST in keys),
        split.trainer.gpus,
    )


def _with_own_gpus(given: PlanInput, key: str, group: EngineGroupConfig) -> list[EngineGroupConfig]:
    """Return the group with vLLM on GPUs of its own, at every degree at which the model fits, the lowest first."""
    cluster = given.cluster
    engine = group.engine if isinstance(group.engine, VllmEngineConfig) else VllmEngineConfig(type="vllm")
    if engine.dtype == "auto":
        engine = replace(engine, dtype="bfloat16")
    placement = LocalConfig(type="local") if cluster.nodes == 1 else RegisteredConfig(type="registered")
    found, problems = [], list[tuple[str, str]]()
    for degree in (degree for degree in DEGREES if degree <= cluster.gpus_per_node):
        own = replace(group, engine=replace(engine, tensor_parallel_size=degree), placement=placement, replicas=1)
        problems = list(replica_of(given, key, own, samples=given.work.samples).problems)
        found += [] if problems else [own]
    if not found:
        below, text = problems[0]
        raise UserError(f"--suggest: {key}.{below}: {text}")
    return found


def _trainers(given: PlanInput, rates: Rates, *, at_most: int) -> Iterator[TrainerLoad]:
    """Yield every layout that divides model and batch and fits, with full recompute only where nothing else fits."""
    recipe, cluster, elsewhere = given.recipe, given.cluster, LocalConfig(type="local")
    recipe = replace(
        recipe,
        rollout=replace(recipe.rollout, placement=elsewhere),
        teachers={name: replace(teacher, placement=elsewhere) for name, teacher in recipe.teachers.items()},
    )
    for parallel in _layouts(given, at_most):
        for recompute in dict.fromkeys((recipe.student.recompute, "full")):
            own = replace(recipe, student=replace(recipe.student, parallel=parallel, recompute=recompute))
            ranks = plan_ranks(own, given.models[STUDENT], given.work, cluster, {})
            if all(rank.num_bytes <= cluster.memory_bytes for rank in ranks):
                degrees = ("tensor_model", "pipeline_model", "data", "expert_model", "context")
                keys = {f"{name}_parallel_size": getattr(parallel, f"{name}_parallel_size") for name in degrees}
                label = "TP {} PP {} DP {} EP {}".format(*keys.values())
                if parallel.num_layers_in_last_pipeline_stage is not None:
                    keys[LAST] = parallel.num_layers_in_last_pipeline_stage
                    label += f" last {keys[LAST]}"
                label += f" CP {parallel.context_parallel_size}" if parallel.context_parallel_size > 1 else ""
                label += "" if recompute == "none" else f" recompute {recompute}"
                yield trainer_load(replace(given, recipe=own), rates, cluster.gpus_per_node, label, keys)
                break


def _layouts(given: PlanInput, at_most: int) -> Iterator[ParallelConfig]:
    """Yield the layouts of at most so many GPUs that divide model and batch."""
    recipe, dims = given.recipe, given.models[STUDENT]
    experts, cp = DEGREES if dims.moe is not None else (1,), recipe.student.parallel.context_parallel_size
    for tp, pp, ep in itertools.product(DEGREES, DEGREES, experts):
        for last in _last_stages(dims, given.work, pp):
            problem = layout_problem(
                dims,
                tensor_model_parallel_size=tp,
                stages=Stages(pipeline_model_parallel_size=pp, num_layers_in_last_pipeline_stage=last),
                expert_model_parallel_size=ep,
                expert_tensor_parallel_size=1 if dims.moe is not None else None,
            )
            if problem or tp > given.cluster.gpus_per_node:
                continue
            for dp in range(1, at_most // (tp * cp * pp) + 1):
                if recipe.samples_per_step % dp or (tp * cp * dp) % ep:
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


def _keys(split: Split, groups: Mapping[str, EngineGroupConfig]) -> dict[str, Any]:
    parallel: dict[str, Any] = {key: value for key, value in split.trainer.keys.items() if value > 1 or key == LAST}
    if split.trainer.keys["tensor_model_parallel_size"] > 1:
        parallel["sequence_parallel"] = True
        if "expert_model_parallel_size" in parallel:
            parallel["expert_tensor_parallel_size"] = 1
    tree: dict[str, Any] = {"student": {"parallel": parallel}, "teachers": {}}
    if "recompute" in split.trainer.label:
        tree["student"]["recompute"] = split.trainer.label.rpartition(" ")[2]
    for key, group in groups.items():
        own = {
            "engine": {"type": "vllm", "tensor_parallel_size": group.gpus_per_replica},
            "replicas": split.replicas[stage_of(key)],
        }
        if key == ROLLOUT:
            tree[ROLLOUT] = own
        else:
            tree["teachers"][key.removeprefix("teachers.")] = own
    return tree

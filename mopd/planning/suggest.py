"""The layout of the student and the split of GPUs that a recipe's step is fastest with, of all that fit."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mopd.base.types import UserError
from mopd.config.groups import EngineGroupConfig, VllmEngineConfig
from mopd.config.machine.places import NodePool, engine_groups, place
from mopd.config.placements import ExternalConfig, LocalConfig, RegisteredConfig
from mopd.config.schema import Recipe
from mopd.config.student import ParallelConfig
from mopd.conversion.models.dims import ModelDims, layout_problem
from mopd.conversion.models.stages import Stages
from mopd.planning.balance import ROLLOUT, GroupLoad, Split, TrainerLoad, ranked
from mopd.planning.devices import Cluster, Rates
from mopd.planning.memory.ranks import plan_ranks
from mopd.planning.memory.replicas import ReplicaPlan, plan_replica
from mopd.planning.models import STUDENT
from mopd.planning.plan import group_load, trainer_load
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
    """What to set, as a tree of the recipe."""


def suggest(
    recipe: Recipe, models: Mapping[str, ModelDims], work: Workload, cluster: Cluster, rates: Rates
) -> list[Suggestion]:
    """The fastest first, at most ``SHOWN``; every one has room and a place for everybody.

    Raises:
        UserError: nothing fits into so many GPUs, or the recipe does not split them.
    """
    if recipe.shares_gpus:
        raise UserError("--suggest splits GPUs between student and rollout: remove rollout.placement.share_gpus_with")
    wanted = {
        key: group for key, group in engine_groups(recipe).items() if not isinstance(group.placement, ExternalConfig)
    }
    fitting = {key: _with_own_gpus(key, group, models, work, cluster) for key, group in wanted.items()}
    # Teachers take as few GPUs as hold them; a rollout that shares its weights over more has more room for sequences.
    choices = [
        {key: own[0] for key, own in fitting.items()} | {ROLLOUT: rollout} for rollout in fitting.get(ROLLOUT, [])
    ]
    least = sum(own[0].gpus_per_replica for own in fitting.values())
    trainers = list(_trainers(recipe, models[STUDENT], work, cluster, rates, at_most=cluster.num_gpus - least))
    splits: list[tuple[Split, Mapping[str, EngineGroupConfig]]] = []
    for groups in choices or [{key: own[0] for key, own in fitting.items()}]:
        loads = [_load(recipe, key, group, models, work, cluster, rates) for key, group in groups.items()]
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
    """Of splits that are as fast, the one with fewest stages, least tensor and expert parallelism, even stages and
    fewest GPUs."""
    keys = split.trainer.keys
    return (
        keys["pipeline_model_parallel_size"],
        keys["tensor_model_parallel_size"],
        keys["expert_model_parallel_size"],
        int(LAST in keys),
        split.trainer.gpus,
    )


def _with_own_gpus(
    key: str, group: EngineGroupConfig, models: Mapping[str, ModelDims], work: Workload, cluster: Cluster
) -> list[EngineGroupConfig]:
    """vLLM on GPUs of its own, at every degree at which the model fits, the lowest first."""
    dims = models[STUDENT if key == ROLLOUT else key]
    engine = group.engine if isinstance(group.engine, VllmEngineConfig) else VllmEngineConfig(type="vllm")
    if engine.dtype == "auto":
        engine = dataclasses.replace(engine, dtype="bfloat16")
    found, problems = [], list[tuple[str, str]]()
    for degree in (degree for degree in DEGREES if degree <= cluster.gpus_per_node):
        own = dataclasses.replace(
            group,
            engine=dataclasses.replace(engine, tensor_parallel_size=degree),
            placement=LocalConfig(type="local") if cluster.nodes == 1 else RegisteredConfig(type="registered"),
            replicas=1,
        )
        problems = list(_plan(key, own, dims, work, cluster).problems)
        found += [] if problems else [own]
    if not found:
        below, text = problems[0]
        raise UserError(f"--suggest: {key}.{below}: {text}")
    return found


def _load(
    recipe: Recipe,
    key: str,
    group: EngineGroupConfig,
    models: Mapping[str, ModelDims],
    work: Workload,
    cluster: Cluster,
    rates: Rates,
) -> GroupLoad:
    dims = models[STUDENT if key == ROLLOUT else key]
    return group_load(recipe, key, group, dims, work, _plan(key, group, dims, work, cluster), rates)


def _plan(key: str, group: EngineGroupConfig, dims: ModelDims, work: Workload, cluster: Cluster) -> ReplicaPlan:
    return plan_replica(
        group, dims, work, memory_bytes=cluster.memory_bytes, scores=key != ROLLOUT, samples=work.samples
    )


def _trainers(
    recipe: Recipe, dims: ModelDims, work: Workload, cluster: Cluster, rates: Rates, *, at_most: int
) -> Iterator[TrainerLoad]:
    """Every layout that divides model and batch and has room, without recompute where there is room without."""
    for parallel in _layouts(recipe, dims, work, cluster, at_most):
        for recompute in dict.fromkeys((recipe.student.recompute, "full")):
            student = dataclasses.replace(recipe.student, parallel=parallel, recompute=recompute)
            own = dataclasses.replace(
                recipe,
                student=student,
                rollout=_elsewhere(recipe.rollout),
                teachers={name: _elsewhere(teacher) for name, teacher in recipe.teachers.items()},
            )
            if all(rank.num_bytes <= cluster.memory_bytes for rank in plan_ranks(own, dims, work, cluster, {})):
                keys = {
                    "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
                    "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
                    "data_parallel_size": parallel.data_parallel_size,
                    "expert_model_parallel_size": parallel.expert_model_parallel_size,
                    "context_parallel_size": parallel.context_parallel_size,
                }
                label = "TP {} PP {} DP {} EP {}".format(*keys.values())
                if parallel.num_layers_in_last_pipeline_stage is not None:
                    keys[LAST] = parallel.num_layers_in_last_pipeline_stage
                    label += f" last {keys[LAST]}"
                label += f" CP {parallel.context_parallel_size}" if parallel.context_parallel_size > 1 else ""
                label += "" if recompute == "none" else f" recompute {recompute}"
                yield trainer_load(own, dims, work, rates, cluster.gpus_per_node, label, keys)
                break


def _elsewhere(group: Any) -> Any:
    """Not in rank 0's process."""
    return dataclasses.replace(group, placement=LocalConfig(type="local"))


def _layouts(
    recipe: Recipe, dims: ModelDims, work: Workload, cluster: Cluster, at_most: int
) -> Iterator[ParallelConfig]:
    experts, cp = DEGREES if dims.moe is not None else (1,), recipe.student.parallel.context_parallel_size
    for tp, pp, ep in itertools.product(DEGREES, DEGREES, experts):
        for last in _last_stages(dims, work, pp):
            problem = layout_problem(
                dims,
                tensor_model_parallel_size=tp,
                stages=Stages(pipeline_model_parallel_size=pp, num_layers_in_last_pipeline_stage=last),
                expert_model_parallel_size=ep,
                expert_tensor_parallel_size=1 if dims.moe is not None else None,
            )
            if problem or tp > cluster.gpus_per_node:
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
    """Layers of the last of ``pp`` stages: None, as many as the others have, and so many fewer that the slowest stage
    is fastest, the last one with its head."""
    if pp == 1:
        return [None]
    head = head_layers(dims, work)
    share = (dims.num_layers + head) / pp
    lasts = {others: dims.num_layers - others * (pp - 1) for others in (math.floor(share), math.ceil(share))}
    others, last = min(lasts.items(), key=lambda one: max(one[0], one[1] + head))
    return [None, last] if 1 <= last < others else [None]


def _has_places(split: Split, groups: Mapping[str, EngineGroupConfig], cluster: Cluster) -> bool:
    placed = {
        key: dataclasses.replace(group, replicas=split.replicas[key.replace(".", "/", 1)])
        for key, group in groups.items()
    }
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
            "replicas": split.replicas[key.replace(".", "/", 1)],
        }
        if key == ROLLOUT:
            tree[ROLLOUT] = own
        else:
            tree["teachers"][key.removeprefix("teachers.")] = own
    return tree

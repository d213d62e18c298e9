"""The layout of the student and the split of GPUs that a recipe's step is fastest with, of all that fit."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mopd.config.groups import EngineGroupConfig, VllmEngineConfig
from mopd.config.placements import ExternalConfig, LocalConfig, RayConfig
from mopd.config.schema import Recipe
from mopd.config.student import ParallelConfig
from mopd.conversion.models.dims import ModelDims, layout_problem
from mopd.placement.gpus import engine_groups
from mopd.planning.balance import ROLLOUT, GroupLoad, Split, TrainerLoad, ranked
from mopd.planning.devices import Cluster, Rates
from mopd.planning.memory.ranks import plan_ranks
from mopd.planning.memory.replicas import plan_replica
from mopd.planning.models import STUDENT
from mopd.planning.places import place_all
from mopd.planning.plan import group_load, trainer_load
from mopd.planning.workload import Workload
from mopd.types import UserError

DEGREES = (1, 2, 4, 8, 16, 32, 64)
SHOWN = 8


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
        UserError: nothing fits into so many GPUs.
    """
    groups = {
        key: _with_own_gpus(key, group, models, work, cluster)
        for key, group in engine_groups(recipe).items()
        if not isinstance(group.placement, ExternalConfig)
    }
    loads = []
    for key, group in groups.items():
        dims = models[STUDENT if key == ROLLOUT else key]
        own = _plan(key, group, dims, work, cluster)
        loads.append(group_load(recipe, key, group, dims, work, own, rates))
    least = sum(load.gpus for load in loads)
    trainers = list(_trainers(recipe, models[STUDENT], work, cluster, rates, at_most=cluster.num_gpus - least))
    splits = ranked(cluster.num_gpus, trainers, loads, max_staleness=recipe.schedule.max_staleness)
    fitting = (split for split in splits if _has_places(split, groups, loads, cluster))
    found = [Suggestion(split=split, keys=_keys(split, groups, cluster)) for split in itertools.islice(fitting, SHOWN)]
    if not found:
        raise UserError(
            f"--suggest: no layout of the student beside {least} GPUs of engines fits {cluster.nodes} nodes of "
            f"{cluster.gpus_per_node} {cluster.name}: give more --nodes, lower student.max_tokens_per_micro_batch, or "
            "set student.recompute: full"
        )
    return found


def _with_own_gpus(
    key: str, group: EngineGroupConfig, models: Mapping[str, ModelDims], work: Workload, cluster: Cluster
) -> EngineGroupConfig:
    """vLLM at the lowest degree at which the model fits, on GPUs of its own."""
    dims = models[STUDENT if key == ROLLOUT else key]
    engine = group.engine if isinstance(group.engine, VllmEngineConfig) else VllmEngineConfig(type="vllm")
    if engine.dtype == "auto":
        engine = dataclasses.replace(engine, dtype="bfloat16")
    tried = []
    for degree in (degree for degree in DEGREES if degree <= cluster.gpus_per_node):
        own = dataclasses.replace(
            group,
            engine=dataclasses.replace(engine, tensor_parallel_size=degree),
            placement=LocalConfig(type="local") if cluster.nodes == 1 else RayConfig(type="ray", num_gpus=degree),
            replicas=1,
        )
        tried = list(_plan(key, own, dims, work, cluster).problems)
        if not tried:
            return own
    below, text = tried[0]
    raise UserError(f"--suggest: {key}.{below}: {text}")


def _plan(key: str, group: EngineGroupConfig, dims: ModelDims, work: Workload, cluster: Cluster) -> Any:
    return plan_replica(
        group, dims, work, memory_bytes=cluster.memory_bytes, scores=key != ROLLOUT, samples=work.samples
    )


def _trainers(
    recipe: Recipe, dims: ModelDims, work: Workload, cluster: Cluster, rates: Rates, *, at_most: int
) -> Iterator[TrainerLoad]:
    """Every layout that divides model and batch and has room, without recompute where there is room without."""
    for parallel in _layouts(recipe, dims, cluster, at_most):
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
                }
                label = "TP {} PP {} DP {} EP {}".format(*keys.values()) + (
                    "" if recompute == "none" else f" recompute {recompute}"
                )
                yield trainer_load(own, dims, work, rates, cluster.gpus_per_node, label, keys)
                break


def _elsewhere(group: Any) -> Any:
    """Not in rank 0's process."""
    return dataclasses.replace(group, placement=LocalConfig(type="local"))


def _layouts(recipe: Recipe, dims: ModelDims, cluster: Cluster, at_most: int) -> Iterator[ParallelConfig]:
    experts = DEGREES if dims.moe is not None else (1,)
    for tp, pp, ep in itertools.product(DEGREES, DEGREES, experts):
        for dp in range(1, at_most // (tp * pp) + 1):
            if recipe.samples_per_step % dp or tp > cluster.gpus_per_node or (tp * dp) % ep:
                continue
            problem = layout_problem(
                dims,
                tensor_model_parallel_size=tp,
                pipeline_model_parallel_size=pp,
                expert_model_parallel_size=ep,
                expert_tensor_parallel_size=1 if dims.moe is not None else None,
            )
            if problem:
                continue
            yield ParallelConfig(
                tensor_model_parallel_size=tp,
                pipeline_model_parallel_size=pp,
                data_parallel_size=dp,
                expert_model_parallel_size=ep,
                expert_tensor_parallel_size=1 if dims.moe is not None and tp > 1 else None,
                sequence_parallel=tp > 1,
            )


def _has_places(
    split: Split, groups: Mapping[str, EngineGroupConfig], loads: Sequence[GroupLoad], cluster: Cluster
) -> bool:
    counts = {key: split.replicas[load.name] for key, load in zip(groups, loads, strict=True)}
    placed = {key: dataclasses.replace(group, replicas=counts[key]) for key, group in groups.items()}
    return not place_all(placed, split.trainer.gpus, cluster).problems


def _keys(split: Split, groups: Mapping[str, EngineGroupConfig], cluster: Cluster) -> dict[str, Any]:
    parallel: dict[str, Any] = {key: value for key, value in split.trainer.keys.items() if value > 1}
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

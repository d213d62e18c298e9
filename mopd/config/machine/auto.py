"""What each ``auto`` of a recipe becomes on a machine, and why: pure functions of the recipe, a description of the
machine and the models' sizes.

No choice made here is one that the schema then refuses: where a recipe asks for what vLLM cannot do, the engine is
torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from mopd.base.hardware import Hardware
from mopd.config.groups import AutoEngineConfig, EngineGroupConfig, TorchEngineConfig, VllmEngineConfig
from mopd.config.machine.places import engine_groups, room_for_auto
from mopd.config.placements import (
    AutoPlacementConfig,
    ExternalConfig,
    InProcessConfig,
    LocalConfig,
    Placement,
    RayConfig,
    RegisteredConfig,
)
from mopd.config.reading.tree import AUTO, dotted
from mopd.config.schema import Recipe
from mopd.config.weights import AutoSyncConfig, CollectiveConfig, HttpConfig, IpcConfig, WeightSync

Group = TypeVar("Group", bound=EngineGroupConfig)

STUDENT_BYTES = 18
"""Bytes of one weight in training: bf16 weight, fp32 weight and gradient, two fp32 moments of Adam."""
ENGINE_BYTES = 3
"""Bytes of one weight in an engine: bf16, and as much again by half for caches and activations."""
GIB = 2**30
REST_BYTES = 4 * GIB
"""Activations of the student, CUDA's context, fragments."""
MAX_SHARE = 0.8
"""Share of a GPU's memory that may be planned: the sizes are estimates."""
COPIES_IN_MEMORY = 2.5
"""A teacher's weights in host memory while it is compared with its folder: read, cast, and room for its forward."""

MAX_COMPARED = 80 * GIB
"""Weights beyond which ``auto`` reads no teacher's folder: minutes in which all other GPUs wait."""


@dataclass(slots=True)
class Settled:
    """A recipe without ``auto``, and the reason of each value that was one."""

    recipe: Recipe
    reasons: dict[str, str] = field(default_factory=dict)
    """Dotted path -> why it has its value."""


def settle(
    recipe: Recipe, hardware: Hardware, *, num_ranks: int, num_weights: Mapping[str, int | None] | None = None
) -> Settled:
    """Replace every ``auto`` (engines, placements, dtypes, new weights and their way) by a value. ``teacher_defaults``,
    which every teacher has inherited, stays as it is written.

    Args:
        num_ranks: trainer ranks on this machine.
        num_weights: of the models of ``student`` and ``teachers.NAME``; ``None`` and absent ones are not known.

    Raises:
        ValueError: a key that another choice needs, with its dotted path and the cure.
    """
    settled = Settled(recipe)
    if not hardware.without_cuda:
        _check_way_on_gpus(recipe)
    student, automatic = recipe.student, _placement(recipe, hardware, num_ranks, num_weights or {})
    if student.dtype == AUTO:
        settled.reasons["student.dtype"] = hardware.without_cuda or "CUDA"
        student = dataclasses.replace(student, dtype="float32" if hardware.without_cuda else "bfloat16")
    settle_group = partial(_group, recipe, hardware, automatic, settled.reasons)
    rollout = settle_group(("rollout",), recipe.rollout)
    teachers = {name: settle_group(("teachers", name), teacher) for name, teacher in recipe.teachers.items()}
    if recipe.rollout.on_new_weights == AUTO:
        settled.reasons["rollout.on_new_weights"] = f"schedule.max_staleness {recipe.schedule.max_staleness}"
        rollout = dataclasses.replace(rollout, on_new_weights=recipe.on_new_weights)
    way, reason = _weight_sync(recipe, rollout.placement, hardware)
    if reason:
        settled.reasons["weight_sync.type"] = reason
    settled.recipe = dataclasses.replace(recipe, student=student, rollout=rollout, teachers=teachers, weight_sync=way)
    return settled


def _check_way_on_gpus(recipe: Recipe) -> None:
    num_ranks = recipe.student.parallel.world_size
    if isinstance(recipe.weight_sync, IpcConfig) and (num_ranks > 1 or not recipe.shares_gpus):
        raise ValueError(
            "weight_sync.type is 'ipc', but engines see their own GPU alone, and rank 0's memory is on another: set "
            f"rollout.placement.share_gpus_with: student for a student of 1 rank (this one has {num_ranks}), or "
            "weight_sync.type: http"
        )


def _weight_sync(recipe: Recipe, placement: Placement, hardware: Hardware) -> tuple[WeightSync, str]:
    """The way of the weights to a rollout in this ``placement``, and why, if it was ``auto``; it stays so where there
    is none."""
    if not isinstance(recipe.weight_sync, AutoSyncConfig):
        return recipe.weight_sync, ""
    if isinstance(placement, InProcessConfig):
        return recipe.weight_sync, "rollout.placement.type in_process: the engine is given them directly"
    http, staleness = HttpConfig(type="http"), recipe.schedule.max_staleness
    if isinstance(placement, LocalConfig) and placement.share_gpus_with is not None:
        if hardware.without_cuda or (recipe.student.parallel.world_size == 1 and recipe.shares_gpus):
            return IpcConfig(type="ipc"), "rollout.placement.share_gpus_with: nothing is kept for replicas that sleep"
        return http, "rollout.placement.share_gpus_with: NCCL refuses two processes on one GPU"
    if staleness > 0 and recipe.on_new_weights == "finish":
        return http, f"schedule.max_staleness {staleness}: student and engines go on while they travel"
    by = "gloo" if hardware.without_cuda else "NCCL"
    return CollectiveConfig(type="collective", or_http=True), f"straight into the engines' memory, over {by}"


def compares_with_transformers(
    wanted: bool | str, *, weights_bytes: int | None, free_memory_bytes: int
) -> tuple[bool, str]:
    """Decide whether a teacher is compared with a forward of its own folder, and why.

    ``wanted`` is ``preflight.compare_with_transformers``; ``weights_bytes`` those of the folder, ``None`` without any.
    """
    if weights_bytes is None:
        return False, "its folder holds no weights"
    if wanted != AUTO:
        return bool(wanted), f"preflight.compare_with_transformers: {str(wanted).lower()}"
    sizes = f"{weights_bytes / GIB:.1f} GiB of weights, {free_memory_bytes / GIB:.1f} GiB of host memory free"
    if weights_bytes > MAX_COMPARED:
        return False, f"{sizes}, and {MAX_COMPARED / GIB:.0f} GiB are read at most while GPUs wait"
    return COPIES_IN_MEMORY * weights_bytes <= free_memory_bytes, sizes


def _placement(
    recipe: Recipe, hardware: Hardware, num_ranks: int, num_weights: Mapping[str, int | None]
) -> tuple[InProcessConfig | LocalConfig, str]:
    """Return what every ``placement.type: auto`` becomes, one choice for all groups, and why."""
    is_beside = recipe.has_engines_beside
    beside = f"schedule.max_staleness {recipe.schedule.max_staleness}: it works while the student trains"
    if recipe.shares_gpus:
        beside = "rollout.placement.share_gpus_with: it works while the student's memory is lent"
    if hardware.without_cuda:
        return (LocalConfig(type="local"), beside) if is_beside else (InProcessConfig(), hardware.without_cuda)
    free, wanted = room_for_auto(engine_groups(recipe), num_ranks, hardware.num_gpus)
    if wanted <= free:
        return LocalConfig(type="local"), f"{free} of {hardware.num_gpus} GPUs are free, {wanted} wanted"
    needed = _bytes_on_one_gpu(recipe, num_weights)
    memory = hardware.gpu_memory_bytes[0]
    few = f"{free} of {hardware.num_gpus} GPUs are free, {wanted} wanted"
    if needed is not None and needed <= MAX_SHARE * memory and not is_beside:
        fits = f"everything fits on one: about {needed / GIB:.0f} of {memory / GIB:.0f} GiB"
        return InProcessConfig(), f"{few}, and {fits}"
    return LocalConfig(type="local"), few


def _bytes_on_one_gpu(recipe: Recipe, num_weights: Mapping[str, int | None]) -> int | None:
    """Estimate the bytes of rank 0's student and every group that may share its GPU; ``None`` if a size is unknown."""
    parallel = recipe.student.parallel
    shards = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    student = num_weights.get("student")
    sizes = [
        num_weights.get("student" if group is recipe.rollout else key)
        for key, group in engine_groups(recipe).items()
        if isinstance(group.placement, (AutoPlacementConfig, InProcessConfig))
        for _ in range(group.replicas)
    ]
    known = [size for size in sizes if size is not None]
    if student is None or len(known) < len(sizes):
        return None
    logits = recipe.student.lm_head_memory_budget_mib * 2**20
    return STUDENT_BYTES * student // shards + ENGINE_BYTES * sum(known) + logits + REST_BYTES


def _group(
    recipe: Recipe,
    hardware: Hardware,
    automatic: tuple[Placement, str],
    reasons: dict[str, str],
    path: tuple[str, ...],
    group: Group,
) -> Group:
    """Return one group without ``auto``, and add its reasons; ``automatic`` is what ``_placement`` returned."""
    placement = group.placement
    if isinstance(placement, AutoPlacementConfig):
        placement, reasons[dotted((*path, "placement", "type"))] = automatic
    without_cuda = hardware.without_cuda
    if isinstance(placement, RayConfig):
        without_cuda = "" if placement.num_gpus else "placement.num_gpus is 0"
    engine = group.engine
    if isinstance(engine, AutoEngineConfig):
        engine, reasons[dotted((*path, "engine", "type"))] = _engine(group, placement, recipe, hardware, without_cuda)
    if engine.dtype == AUTO:
        reasons[dotted((*path, "engine", "dtype"))] = without_cuda or "CUDA"
        engine = dataclasses.replace(engine, dtype="float32" if without_cuda else "bfloat16")
    try:
        return dataclasses.replace(group, engine=engine, placement=placement)
    except ValueError as error:
        raise ValueError(f"{dotted(path)}.{error}") from error


def _engine(
    group: EngineGroupConfig, placement: Placement, recipe: Recipe, hardware: Hardware, without_cuda: str
) -> tuple[TorchEngineConfig | VllmEngineConfig, str]:
    """Return what ``engine.type: auto`` becomes in this placement, and why."""
    dtype: Any = group.engine.dtype
    torch = TorchEngineConfig(dtype=dtype)
    if without_cuda:
        return torch, without_cuda
    if isinstance(placement, InProcessConfig):
        return torch, "it shares the student's GPU"
    if hardware.vllm is None:
        return torch, "vllm is not installed"
    refusal = _refused_by_vllm(recipe, is_rollout=group is recipe.rollout)
    if refusal:
        return torch, refusal
    longest = max(map(recipe.longest_sequence, [None, *recipe.teachers]))
    vllm = VllmEngineConfig(type="vllm", dtype=dtype)
    vllm = dataclasses.replace(vllm, max_scoring_tokens=max(vllm.max_scoring_tokens, longest))
    is_elsewhere = isinstance(placement, (RayConfig, ExternalConfig, RegisteredConfig))
    where = "CUDA" if is_elsewhere else f"{hardware.num_gpus} GPUs"
    return vllm, f"{where} and vllm {hardware.vllm}"


def _refused_by_vllm(recipe: Recipe, *, is_rollout: bool) -> str:
    """Name what of the recipe vLLM cannot do; empty if it can do all."""
    if not is_rollout:
        temperature = recipe.loss.temperature
        return "" if temperature == 1.0 else f"vllm scores at temperature 1 only, loss.temperature is {temperature}"
    rollout, validation = recipe.rollout, recipe.validation
    if rollout.is_exact:
        return ""
    drawn = [rollout.temperature, *([] if validation is None else [validation.temperature or 1.0])]
    return "" if set(drawn) == {1.0} else "vllm reports log-probs before cuts and penalties at temperature 1 only"

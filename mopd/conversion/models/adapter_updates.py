"""Which of a student's weights its updates bring to engines. No torch in this module."""

from __future__ import annotations

from pathlib import Path

from mopd.base.types import UserError
from mopd.config.groups import AutoEngineConfig, EngineGroupConfig, TorchEngineConfig, VllmEngineConfig
from mopd.config.schema import Recipe
from mopd.conversion.models.adapted import adapted_modules
from mopd.conversion.models.config_keys import QUANTISATION, read_config
from mopd.conversion.models.dims import ModelDims
from mopd.conversion.models.known import FAMILIES


def sends_adapters(recipe: Recipe, dims: ModelDims) -> bool:
    """Return whether updates bring the student's adapters alone: it has some, and every engine that follows it keeps
    the base and takes theirs. Else they are merged into the weights that they stand beside, which travel."""
    lora = recipe.student.lora
    if lora is None or dims.vision is not None:
        return False
    groups = list(_followers(recipe).values())
    if any(group.shares_gpus for group in groups):  # where they sleep, torch engines lose the base
        return False
    if not all(isinstance(group.engine, (TorchEngineConfig, VllmEngineConfig)) for group in groups):
        return False
    if dims.mla is not None and not all(isinstance(group.engine, TorchEngineConfig) for group in groups):
        return False
    return not any(".experts." in one.module for one in adapted_modules(dims, lora.target_modules))


def check_updates(recipe: Recipe, dims: ModelDims) -> None:
    """Refuse a student whose updates its engines cannot take: weights that its folder packs, or experts that it keeps
    in one tensor, which vLLM's and SGLang's loaders copy past the hooks of a reload.

    Raises:
        UserError: one line with the key to set.
    """
    if not FAMILIES[dims.family].stacked_experts:
        return
    config = read_config(Path(recipe.student.model))
    if any(config.get(key) is not None for key in QUANTISATION):
        raise UserError(
            f"student.model {recipe.student.model}: its experts are MXFP4 and a student's are bfloat16: convert the "
            "folder (mopd convert merge NEW FOLDER) and name the new one"
        )
    for key, group in _followers(recipe).items():
        if not isinstance(group.engine, (TorchEngineConfig, AutoEngineConfig)):
            raise UserError(
                f"{key}.engine: only the torch engine takes updates of a student of model_type {dims.family}: set "
                f"{key}.engine.type: torch"
            )


def _followers(recipe: Recipe) -> dict[str, EngineGroupConfig]:
    """Return the engine groups that follow the student, by their keys."""
    rollout: dict[str, EngineGroupConfig] = {"rollout": recipe.rollout} if recipe.needs_rollout else {}
    return rollout | {f"teachers.{name}": recipe.teachers[name] for name in recipe.refreshed}

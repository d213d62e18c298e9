"""Which of a student's weights its updates bring to engines. No torch in this module."""

from __future__ import annotations

from mopd.config.groups import TorchEngineConfig, VllmEngineConfig
from mopd.config.schema import Recipe
from mopd.conversion.models.adapted import adapted_modules
from mopd.conversion.models.dims import ModelDims


def sends_adapters(recipe: Recipe, dims: ModelDims) -> bool:
    """Return whether updates bring the student's adapters alone: it has some, and every engine that follows it keeps
    the base and takes theirs. Else they are merged into the weights that they stand beside, which travel."""
    lora = recipe.student.lora
    if lora is None or dims.vision is not None:
        return False
    groups = [
        *([recipe.rollout] if recipe.needs_rollout else []),
        *(recipe.teachers[name] for name in recipe.refreshed),
    ]
    if any(group.shares_gpus for group in groups):  # where they sleep, torch engines lose the base
        return False
    if not all(isinstance(group.engine, (TorchEngineConfig, VllmEngineConfig)) for group in groups):
        return False
    if dims.mla is not None and not all(isinstance(group.engine, TorchEngineConfig) for group in groups):
        return False
    return not any(".experts." in one.module for one in adapted_modules(dims, lora.target_modules))

"""Which optional packages the sinks of a recipe need; light enough to ask before anything is built."""

from __future__ import annotations

import importlib.util

from mopd.config.schema import Recipe
from mopd.types import UserError


def check_packages(recipe: Recipe) -> None:
    """Raise ``UserError`` if a sink's package is missing; cheap, for use before anything is built."""
    if recipe.metrics.wandb is not None and importlib.util.find_spec("wandb") is None:
        raise UserError(
            "metrics.wandb is set but the wandb package is not installed: run pip install wandb, or remove the section"
        )

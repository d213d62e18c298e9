"""The recipe of each toy: what ``recipes/base/tiny.yaml`` sets, and what its models and answers need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tools.toys import rewards
from tools.toys.grammars import domains_of

ROOT = Path(__file__).parents[2]
CHAIN_REWARD, NO_CALL = (
    {"type": "custom", "path": rewards.__file__, "function": function.__name__}
    for function in (rewards.prefix_share, rewards.no_call)
)
SETTINGS: dict[str, tuple[int, int, int, dict[str, Any], dict[str, float]]] = {
    "stochastic": (100, 48, 16, {}, {}),
    "long": (60, 8, 60, CHAIN_REWARD, {}),
    "conflict": (120, 40, 36, {"type": "exact_match"}, {"short": 1.0, "middle": 2.0, "wide": 2.0}),
    "foreign": (80, 24, 12, CHAIN_REWARD, {}),
    "decision": (80, 16, 32, NO_CALL, {}),
    "shared": (80, 24, 12, CHAIN_REWARD, {}),
    "half": (80, 24, 4, CHAIN_REWARD, {}),
}
"""Toy -> steps, prompts a step, longest response, reward (none: no answer is right), shares of the prompts."""


def write_recipe(toy: str, root: Path) -> None:
    """Write ``recipe.yaml`` of the toy that lies in ``root``."""
    models, (steps, prompts, length, reward, weights) = (root / "models").resolve(), SETTINGS[toy]
    names = [domain.name for domain in domains_of(toy)]
    recipe: dict[str, Any] = {
        "base": str(ROOT / "recipes/base/tiny.yaml"),
        "run_dir": str(root / "run"),
        "student": {"model": str(models / "base")},
        "teachers": {name: {"model": str(models / "teachers" / name), "domains": [name]} for name in names},
        "data": {
            "train": [str(models / "train.jsonl")],
            "validation": [str(models / "validation.jsonl")],
            "domain_weights": weights,
        },
        "rollout": {"max_response_length": length},
        "rewards": {"default": reward} if reward else {},
        "schedule": {"steps": steps, "prompts_per_step": prompts},
        "checkpoint": {"every_steps": 1000, "keep_best": bool(reward)},
        "preflight": {"require_better_teacher": bool(reward)},
        "metrics": {"tensorboard": False},
    }
    drawn = {"temperature": 1.0} if toy == "decision" else {}  # greedy answers would never hold the call
    recipe["validation"] = {"every_steps": 20, **drawn} if reward else None
    (root / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))

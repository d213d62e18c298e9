"""What a run trains on, in words, and where its warm-up ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NAMES = {
    "on_policy": "on-policy",
    "sft_on_teacher": "SFT on the teachers' answers",
    "off_policy_scores": "the teachers' answers, with their scores",
}
"""``objective`` -> its name in reports."""


def objective_of(recipe: Mapping[str, Any]) -> str:
    """Say what a run trains on, from the values of its resolved recipe; those before this key were on-policy."""
    name = NAMES.get(str(recipe.get("objective", "on_policy")), "unknown")
    warm_up = recipe["schedule"].get("warm_up")
    if not isinstance(warm_up, Mapping):
        return name
    return f"{name} after {warm_up.get('steps')} steps of {NAMES.get(str(warm_up.get('objective')), 'unknown')}"


def warm_up_end(recipe: Mapping[str, Any], validations: Sequence[Mapping[str, Any]]) -> str | None:
    """Say where a warm-up ended, and with which rewards where the last validation within it has some; ``None`` for a
    run without."""
    warm_up = recipe["schedule"].get("warm_up")
    if not isinstance(warm_up, Mapping) or type(steps := warm_up.get("steps")) is not int:
        return None
    line = f"warm-up: {NAMES.get(str(warm_up.get('objective')), 'unknown')} up to step {steps}"
    within = [record for record in validations if 0 < record["step"] <= steps]
    if not within:
        return line
    rewards = ", ".join(f"{domain} {reward:.3f}" for domain, reward in sorted(within[-1]["rewards"].items()))
    return f"{line}; rewards at step {within[-1]['step']}: {rewards}"

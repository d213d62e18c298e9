"""What steps that should be the same may differ by."""

from __future__ import annotations

from typing import Any

import pytest

Step = dict[str, Any]
DIFFERENCES = ("k1", "rollout_kl")


def assert_same_step(step: Step, expected: Step, where: str = "") -> None:
    """Loss, gradient norm and metrics within 1e-5.

    ``k1`` and ``rollout_kl`` add up differences of log-probs of either sign, which may all but cancel: 1e-5 for each
    of their tokens. ``k3`` is ruled by the largest exp of one: its relative error is that difference's absolute one,
    1e-4 after a few steps.
    """
    assert step.keys() == expected.keys(), where
    for name, value in expected.items():
        kind, _, domain = name.partition("/")
        if kind == "rate":  # of seconds
            continue
        relative = 1e-4 if kind == "k3" else 1e-5
        absolute = 1e-5 * expected[f"num_tokens/{domain}"] if kind in DIFFERENCES else 1e-6
        assert step[name] == pytest.approx(value, rel=relative, abs=absolute), f"{name} {where}"

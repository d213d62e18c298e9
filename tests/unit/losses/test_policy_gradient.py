"""Clips and corrections of the policy gradient, token by token, with numbers that can be checked by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.losses.on_device import parallel_policy_gradient
from tests.unit.losses.test_correction import with_every_weight


def one_token(probability: float, teacher: float, **options: Any) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, d loss / d log p_y, metrics, for a sampled token of the given probabilities."""
    z = torch.tensor([[math.log(probability), math.log(1 - probability)]], dtype=torch.float64, requires_grad=True)
    for name in ("old_logprobs", "rollout_logprobs", "task_advantage"):
        if name in options:
            options[name] = torch.tensor([options[name]], dtype=torch.float64)
    teacher_logprobs = torch.tensor([math.log(teacher)], dtype=torch.float64)
    loss, metrics = parallel_policy_gradient(z, torch.tensor([0]), teacher_logprobs, **options)
    loss.sum().backward()
    assert z.grad is not None
    return float(loss.detach()), float(z.grad[0, 0]) / (1 - probability), metrics  # dz_y = (1 - p_y) d/dlog p_y


def test_value_and_slope() -> None:
    loss, slope, metrics = one_token(0.25, 0.5)
    assert loss == pytest.approx(-math.log(2))
    assert slope == pytest.approx(-math.log(2))
    assert float(metrics["advantage"]) == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    ("listed", "kl"),
    [
        (0.5, 0.25 * math.log(0.5) + 0.75 * math.log(1.5)),
        (0.0, 0.0),  # nothing is listed: all lies in one bucket
    ],
)
def test_the_kl_to_the_listed_token_and_the_rest_is_the_baseline(listed: float, kl: float) -> None:
    topk = {"topk_ids": torch.tensor([[0]]), "topk_logprobs": torch.tensor([[listed]]).log()}
    _, slope, metrics = one_token(0.25, 0.5, **topk)
    assert float(metrics["baseline"]) == pytest.approx(-kl, abs=1e-7)
    assert slope == pytest.approx(-(math.log(2) + kl), abs=1e-7)


def test_task_advantage_is_added_with_its_weight() -> None:
    _, slope, _ = one_token(0.25, 0.5, task_advantage=3.0, task_reward_weight=0.5)
    assert slope == pytest.approx(-(math.log(2) + 1.5))


@pytest.mark.parametrize(
    ("old", "teacher", "clipped"),
    [
        (0.1, 0.5, True),  # ratio 2.5, advantage > 0: nothing more to gain
        (0.1, 0.05, False),  # ratio 2.5, advantage < 0: must come down
        (0.5, 0.05, True),  # ratio 0.5, advantage < 0: far enough
        (0.5, 0.5, False),  # ratio 0.5, advantage > 0: must go up
        (0.25, 0.5, False),  # ratio 1: minimum of two equal terms must not halve the gradient
    ],
)
def test_clip_stops_only_the_profitable_side(old: float, teacher: float, clipped: bool) -> None:
    advantage, ratio = math.log(teacher / 0.25), 0.25 / old
    loss, slope, metrics = one_token(0.25, teacher, old_logprobs=math.log(old))
    bound = 1.2 if ratio > 1 else 0.8
    assert float(metrics["ratio"]) == pytest.approx(ratio)
    assert float(metrics["clip_fraction"]) == clipped
    assert loss == pytest.approx(-(bound if clipped else ratio) * advantage)
    assert slope == pytest.approx(0 if clipped else -ratio * advantage)


def test_dual_clip_bounds_the_loss_of_bad_tokens() -> None:
    advantage = math.log(0.05 / 0.25)
    loss, slope, metrics = one_token(0.25, 0.05, old_logprobs=math.log(0.05), dual_clip=3.0)
    assert loss == pytest.approx(-3 * advantage)
    assert slope == 0 and float(metrics["clip_fraction"]) == 1
    loss, slope, _ = one_token(0.25, 0.05, old_logprobs=math.log(0.125), dual_clip=3.0)
    assert loss == pytest.approx(-2 * advantage) and slope == pytest.approx(-2 * advantage)
    loss, _, _ = one_token(0.25, 0.9, old_logprobs=math.log(0.25), dual_clip=3.0)
    assert loss == pytest.approx(-math.log(0.9 / 0.25))


@with_every_weight
def test_mismatch_correction(kind: str, rollout: float, weight: float) -> None:
    loss, slope, metrics = one_token(0.25, 0.5, rollout_logprobs=math.log(rollout), correction=(kind, 0.5, 2.0))
    assert float(metrics["correction_weight"]) == pytest.approx(weight)
    assert loss == pytest.approx(-weight * math.log(2))
    assert slope == pytest.approx(-weight * math.log(2))


def test_tis_compares_the_old_student_and_not_the_current_one() -> None:
    _, _, metrics = one_token(
        0.25, 0.5, old_logprobs=math.log(0.22), rollout_logprobs=math.log(0.2), correction=("tis", 0.0, 2.0)
    )
    assert float(metrics["correction_weight"]) == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_ratio_low": 0.0}, "clip_ratio_low is 0.0"),
        ({"dual_clip": 1.0}, "dual_clip is 1.0"),
        ({"correction": ("tis", 0.5, 2.0)}, "needs rollout_logprobs"),
        ({"correction": ("gate", 0.5, 2.0), "rollout_logprobs": 0.0, "old_logprobs": 0.0}, "leave old_logprobs"),
        ({"task_reward_weight": 1.0}, "task_advantage is missing"),
        ({"task_advantage": 1.0}, "task_advantage is given"),
        (
            {
                "baseline": torch.zeros(1),
                "topk_ids": torch.zeros(1, 1, dtype=torch.long),
                "topk_logprobs": torch.ones(1, 1),
            },
            "baseline and topk_ids are both given",
        ),
        ({"topk_ids": torch.zeros(1, 2, dtype=torch.long), "topk_logprobs": torch.ones(1, 1)}, r"\[1, 2\] and"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        one_token(0.25, 0.5, **options)

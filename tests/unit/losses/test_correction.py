"""Samples of another policy: weights of tokens in the sampled estimators, and whole responses that are left out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mopd.losses import kept_sequences
from mopd.losses.sampled import CORRECTIONS, correction_weight
from tests.parity.losses.on_device import parallel_sampled_kl

STUDENT, TEACHER = 0.25, 0.5
DELTA = math.log(STUDENT / TEACHER)
PLAIN = {
    "k2": (DELTA**2 / 2, DELTA),
    "k3": (math.exp(-DELTA) - 1 + DELTA, 1 - math.exp(-DELTA)),
    "k3_reverse": (math.exp(-DELTA) - 1 + DELTA, DELTA),
}
"""Estimator -> its value and its slope in the student's log-prob, without a correction."""


def one_token(estimator: str, rollout: float, **options: Any) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, d loss / d log p_y, metrics."""
    z = torch.tensor([[math.log(STUDENT), math.log(1 - STUDENT)]], dtype=torch.float64, requires_grad=True)
    given = {name: torch.tensor([math.log(p)], dtype=torch.float64) for name, p in (("t", TEACHER), ("r", rollout))}
    loss, metrics = parallel_sampled_kl(
        z, torch.tensor([0]), given["t"], estimator, rollout_logprobs=given["r"], **options
    )
    loss.sum().backward()
    assert z.grad is not None
    return float(loss.detach()), float(z.grad[0, 0]) / (1 - STUDENT), metrics


WEIGHTS = [
    *(("tis", rollout, weight) for rollout, weight in ((0.2, 1.25), (0.05, 2.0), (1.0, 0.25))),
    *((kind, rollout, weight) for kind in ("icepop", "gate") for rollout, weight in ((0.2, 1.25), (0.05, 0), (1.0, 0))),
]
"""Kind of correction with bounds 0.5 and 2, the rollout's probability beside the student's 0.25, and the weight."""
with_every_weight = pytest.mark.parametrize(("kind", "rollout", "weight"), WEIGHTS)


@pytest.mark.parametrize("estimator", PLAIN)
@with_every_weight
def test_weight_of_an_estimator(estimator: str, kind: str, rollout: float, weight: float) -> None:
    loss, slope, metrics = one_token(estimator, rollout, correction=(kind, 0.5, 2.0))
    value, plain = PLAIN[estimator]
    assert float(metrics["correction_weight"]) == pytest.approx(weight)
    assert loss == float(metrics["unweighted_loss"]) == pytest.approx(weight * value)
    assert slope == pytest.approx(weight * plain)


@pytest.mark.parametrize(("low", "high"), [(1.0, 2.0), (0.5, 1.0)])
@pytest.mark.parametrize("kind", CORRECTIONS)
def test_a_ratio_on_the_bound_is_within_it(kind: str, low: float, high: float) -> None:
    same = torch.tensor([-1.5])
    assert correction_weight((kind, low, high), same, same, same).tolist() == [1.0]
    assert kept_sequences(same[None], same[None], torch.tensor([[True]]), low=low, high=high).all()


def test_the_clamp_comes_before_the_weight() -> None:
    loss, slope, metrics = one_token("k2", 0.2, correction=("tis", 0.0, 2.0), loss_max_clamp=0.1)
    assert loss == pytest.approx(0.125) and slope == 0 and float(metrics["clamped"]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"correction": ("tis", 0.5, 2.0), "rollout_logprobs": None}, "needs rollout_logprobs"),
        ({"correction": ("mask", 0.5, 2.0)}, "'mask'"),
        ({"correction": ("gate", 2.0, 0.5)}, "low 2.0 and high 0.5"),
        ({"rollout_logprobs": torch.zeros(3)}, r"rollout_logprobs is torch.float32 \[3\]"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    given = {"rollout_logprobs": torch.zeros(2), **options}
    with pytest.raises(ValueError, match=message):
        parallel_sampled_kl(torch.zeros(2, 5), torch.tensor([1, 2]), torch.zeros(2), "k2", **given)


def test_kept_sequences_by_the_definition() -> None:
    """The n-th root of the product of a response's n ratios, in plain Python, against bounds among such roots."""
    generator = torch.Generator().manual_seed(0)
    current = -3 * torch.rand(40, 9, generator=generator, dtype=torch.float64)
    rollout = current + 0.4 * torch.randn(40, 9, generator=generator, dtype=torch.float64)
    loss_mask = torch.rand(40, 9, generator=generator) > 0.4
    loss_mask[0] = False
    roots = []
    for b in range(40):
        ratios = [math.exp(current[b, s] - rollout[b, s]) for s in range(9) if loss_mask[b, s]]
        roots.append(math.prod(ratios) ** (1 / len(ratios)) if ratios else 1.0)
    low, high = sorted(roots)[9] - 1e-9, sorted(roots)[29] + 1e-9
    kept = kept_sequences(current, rollout.where(loss_mask, math.nan), loss_mask, low=low, high=high)
    assert kept.tolist() == [low <= root <= high for root in roots]
    assert kept.sum() == 21 and kept[0]
    # Token by token in any order, as packed sequences are.
    order = torch.randperm(360, generator=generator)
    flat = (tensor.flatten()[order] for tensor in (current, rollout, loss_mask))
    index = torch.arange(40).repeat_interleave(9)[order]
    assert torch.equal(kept_sequences(*flat, low=low, high=high, sample_index=index, num_samples=40), kept)


def test_a_response_that_holds_no_number_stays() -> None:
    """A mask would hide it from the check that stops the run."""
    current, rollout = torch.zeros(3, 2), torch.zeros(3, 2)
    current[0, 1] = math.nan
    current[1, 0] = -math.inf
    kept = kept_sequences(current, rollout, torch.ones(3, 2, dtype=torch.bool), low=0.9, high=1.1)
    assert kept.tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"low": 1.1}, "low is 1.1 and high 1.1"),
        ({"low": -0.1}, "low is -0.1"),
        ({"loss_mask": torch.ones(2, 3)}, r"loss_mask is torch.float32 \[2, 3\]"),
        ({"sample_index": torch.zeros(2, dtype=torch.long)}, r"sample_index is \[2\] and num_samples 0: pass"),
        ({"rollout_logprobs": torch.zeros(3, 2)}, r"rollout_logprobs \[3, 2\]: pass both as \[2, 3\]"),
    ],
)
def test_misuse_of_kept_sequences(change: dict[str, Any], message: str) -> None:
    good = {"rollout_logprobs": torch.zeros(2, 3), "loss_mask": torch.ones(2, 3, dtype=torch.bool), "low": 0.9}
    with pytest.raises(ValueError, match=message):
        kept_sequences(torch.zeros(2, 3), **{**good, "high": 1.1, **change})

"""Several teachers joined into one distribution, on a vocabulary of twelve, against sums over explicit outcomes.

What a loss then sees is one teacher's rows, so that every layer and layout is that of one teacher. Also: where a joint
distribution has the gradient of the weighted mean of losses, and by what constant its value differs.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mopd.losses import combine
from mopd.losses.combine import Combined
from tests.parity.losses.definitions import rows_and_gradient, topk_loss
from tests.parity.losses.on_device import parallel_topk_distill

VOCAB, ROWS = 12, 6
WEIGHTS = (0.5, 0.2, 0.3)
Distribution = dict[int, float]
"""Probabilities of ids; the rest to 1 is on all others."""


@pytest.fixture
def z() -> Tensor:
    return 2 * torch.randn(ROWS, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


@pytest.fixture
def log_q() -> Tensor:
    """[D, R, V]: teachers that agree in part, one of them surer than the others."""
    generator = torch.Generator().manual_seed(6)
    base = torch.randn(1, ROWS, VOCAB, dtype=torch.float64, generator=generator)
    own = torch.randn(len(WEIGHTS), ROWS, VOCAB, dtype=torch.float64, generator=generator)
    return ((base + own) * torch.tensor([1.0, 2.0, 1.2]).view(-1, 1, 1)).log_softmax(-1)


def entropy(one: Distribution) -> float:
    return -sum(p * math.log(p) for p in [*one.values(), 1 - sum(one.values())] if p > 1e-12)


def joint_of(rule: str, teachers: list[Distribution]) -> Distribution:
    if rule == "lowest_entropy":
        return min(teachers, key=entropy)
    if rule == "mean_probability":
        listed = {i for own in teachers for i in own}
        return {i: sum(w * own.get(i, 0.0) for w, own in zip(WEIGHTS, teachers, strict=True)) for i in listed}
    common = set.intersection(*(set(own) for own in teachers))
    tails = [max(0.0, 1 - sum(own[i] for i in common)) for own in teachers]
    products = {i: math.prod(own[i] ** w for w, own in zip(WEIGHTS, teachers, strict=True)) for i in common}
    rest = math.prod(tail**w for w, tail in zip(WEIGHTS, tails, strict=True))
    total = sum(products.values()) + rest
    return {i: p / total for i, p in products.items()}


def joined(rule: str, log_q: Tensor, k: int) -> tuple[Combined, list[Distribution]]:
    """What the rule makes of the teachers' top k, with a place that holds no id; and its definition, row by row."""
    top = log_q.topk(k, -1)
    ids, logprobs = top.indices.int(), top.values.float()
    logprobs[1, 2, k - 1] = -torch.inf
    of_token = log_q[:, :, 3].float()
    call: Any = getattr(combine, rule)
    found = call(ids, logprobs, of_token, *(() if rule == "lowest_entropy" else (WEIGHTS,)))
    expected = []
    for row in range(ROWS):
        teachers = [
            {int(i): math.exp(x) for i, x in zip(ids[d, row], logprobs[d, row].double().tolist(), strict=True)}
            for d in range(len(WEIGHTS))
        ]
        expected.append(joint_of(rule, [{i: p for i, p in own.items() if p > 0} for own in teachers]))
    return found, expected


RULES = ("mean_probability", "mean_logprob", "lowest_entropy")


@pytest.mark.parametrize("k", [1, 4, VOCAB])
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_its_definition(log_q: Tensor, rule: str, k: int) -> None:
    found, expected = joined(rule, log_q, k)
    assert found.logprobs.shape[1] == (len(WEIGHTS) * k if rule == "mean_probability" else k)
    for ids, logprobs, joint in zip(found.ids, found.logprobs.double(), expected, strict=True):
        kept = logprobs > -torch.inf
        said = dict(zip(ids[kept].tolist(), logprobs[kept].exp().tolist(), strict=True))
        assert said.keys() == joint.keys()
        assert [said[i] for i in joint] == pytest.approx([*joint.values()], abs=1e-7)


@pytest.mark.parametrize("backend", ["chunked", "reference", "triton"])
@pytest.mark.parametrize(("loss", "tail"), [("forward_kl", "bucket"), ("reverse_kl", "generalized"), ("jsd", "bucket")])
@pytest.mark.parametrize("rule", RULES)
def test_loss_and_gradient_are_those_of_the_joint_distribution(
    z: Tensor, log_q: Tensor, rule: str, loss: str, tail: str, backend: str
) -> None:
    found, expected = joined(rule, log_q, 4)
    leaf = z.clone().requires_grad_()
    rows = []
    for own, joint in zip(leaf, expected, strict=True):
        logs = [math.log(p) for p in joint.values()]
        rows.append(topk_loss(own, [*joint], logs, loss=loss, tail=tail))
    (gradient,) = torch.autograd.grad(torch.stack(rows).sum(), leaf)
    dtype = torch.float32 if backend == "triton" else torch.float64
    inp = z.to(dtype).requires_grad_()
    actual, _ = parallel_topk_distill(inp, found.ids, found.logprobs, loss=loss, tail=tail, backend=backend)  # type: ignore[arg-type]
    (slope,) = torch.autograd.grad(actual.sum(), inp)
    torch.testing.assert_close(actual.double(), torch.stack(rows).detach(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(slope.double(), gradient, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("rule", "loss"), [("mean_probability", "forward_kl"), ("mean_logprob", "reverse_kl")])
def test_where_the_weighted_mean_of_losses_is_the_same(z: Tensor, log_q: Tensor, rule: str, loss: str) -> None:
    """On ids that all teachers list: sum_d w_d KL(q_d || p) = KL(mixture || p) + what the teachers disagree, and with
    the arguments exchanged the same of the geometric mean. The other pairs differ."""
    ids = torch.arange(VOCAB - 2).expand(len(WEIGHTS), ROWS, -1).int()
    logprobs = log_q[..., : VOCAB - 2].float()
    weights = torch.tensor(WEIGHTS).expand(ROWS, -1)
    options = {"loss": loss, "tail": "bucket"}
    mean, slope = rows_and_gradient(
        z, ids.transpose(0, 1), logprobs.transpose(0, 1), torch.ones(ROWS), weights, **options
    )
    for name in ("mean_probability", "mean_logprob"):
        found: Combined = getattr(combine, name)(ids, logprobs, log_q[:, :, 0].float(), WEIGHTS)
        value, own = rows_and_gradient(z, found.ids, found.logprobs, torch.ones(ROWS), **options)
        assert float(found.told.min()) > 0.01
        if name == rule:
            torch.testing.assert_close(own, slope, atol=1e-6, rtol=1e-6)
            torch.testing.assert_close(value + found.told, mean, atol=1e-6, rtol=1e-6)
        else:
            assert float((own - slope).abs().max()) > 0.01


def test_the_sampled_token_has_its_joint_log_prob(log_q: Tensor) -> None:
    """Exact where all ids are listed; the geometric mean's by the sum over its outcomes."""
    for rule in ("mean_probability", "mean_logprob"):
        found, _ = joined(rule, log_q, VOCAB)
        rows = [row for row in range(ROWS) if row != 2]
        for row in rows:
            place = found.ids[row].tolist().index(3)
            assert float(found.token_logprobs[row]) == pytest.approx(float(found.logprobs[row, place]), abs=1e-6)
    nothing = torch.empty(len(WEIGHTS), ROWS, 0)
    alone = combine.mean_probability(nothing.int(), nothing, log_q[:, :, 3].float(), WEIGHTS)
    mixture = (log_q[:, :, 3].exp() * torch.tensor(WEIGHTS).unsqueeze(1)).sum(0).log()
    torch.testing.assert_close(alone.token_logprobs.double(), mixture, atol=1e-6, rtol=1e-6)

"""Off-policy correction in the student's objective: equal to its definition, with all logits at once or a few rows at a
time, with the gradient of the hidden states and of the head."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from mopd.config.losses import KLLossConfig, MismatchCorrectionConfig, PolicyGradientConfig, SequenceMaskConfig
from mopd.losses import choose_rows
from mopd.student.batch import LossRows
from mopd.student.model.gpt import LMHead
from mopd.student.objective import Objective
from mopd.student.parallel import Layout

S, B, H, K = 7, 6, 4, 3
VOCAB = 20_000
"""So large that 1 MiB does not hold the logits of a batch."""
BOUNDS = SequenceMaskConfig(low=0.9, high=1.1)
CORRECTIONS = {
    "none": MismatchCorrectionConfig(type="none", sequence=BOUNDS),
    "tis": MismatchCorrectionConfig(type="tis", high=1.05, sequence=BOUNDS),
    "icepop": MismatchCorrectionConfig(type="icepop", low=0.8, high=1.2, sequence=BOUNDS),
    "without a sequence mask": MismatchCorrectionConfig(type="icepop", low=0.8, high=1.2),
}


def losses(correction: MismatchCorrectionConfig) -> dict[str, KLLossConfig | PolicyGradientConfig]:
    return {
        **{name: KLLossConfig(type=name, correction=correction) for name in ("k2", "k3", "k3_reverse")},
        "policy_gradient": PolicyGradientConfig(
            type="policy_gradient", correction=correction, aggregation="sequence_mean"
        ),
    }


@pytest.fixture(scope="module")
def problem() -> dict[str, Tensor]:
    """Every second response was drawn by a policy that is 30 % off on each of its tokens."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(S, B, H, generator=generator)
    weight = torch.randn(VOCAB, H, generator=generator)
    targets = torch.randint(0, VOCAB, (S, B), generator=generator)
    loss_mask = torch.rand(S, B, generator=generator) > 0.3
    loss_mask[0] = True
    current = torch.log_softmax(hidden.double() @ weight.double().T, -1).gather(2, targets[..., None]).squeeze(2)
    noise = 0.1 * torch.randn(S, B, generator=generator)
    noise -= (noise * loss_mask).sum(0) / loss_mask.sum(0)
    rollout = (current + noise + torch.where(torch.arange(B) % 2 == 0, 0.3, 0.0)).float()
    teacher = (current + torch.randn(S, B, generator=generator)).float()
    return {
        "hidden": hidden, "weight": weight, "targets": targets, "loss_mask": loss_mask, "rollout": rollout,
        "teacher": teacher,
    }  # fmt: skip


def by_definition(problem: Mapping[str, Tensor], loss: KLLossConfig | PolicyGradientConfig) -> dict[str, Tensor]:
    """In float64 under autograd, response by response and token by token."""
    hidden, weight = (problem[name].double().requires_grad_() for name in ("hidden", "weight"))
    correction, mask = loss.correction, problem["loss_mask"]
    assert correction is not None
    total, num_masked, rollout_kl = torch.zeros((), dtype=torch.float64), 0, 0.0
    for b in range(B):
        rows = [s for s in range(S) if mask[s, b]]
        log_p = [torch.log_softmax(weight @ hidden[s, b], 0)[problem["targets"][s, b]] for s in rows]
        ratios = [math.exp(p.item() - float(problem["rollout"][s, b])) for p, s in zip(log_p, rows, strict=True)]
        rollout_kl -= sum(map(math.log, ratios))
        if correction.sequence is not None:
            mean = math.exp(sum(math.log(ratio) for ratio in ratios) / len(ratios))
            if not correction.sequence.low <= mean <= correction.sequence.high:
                num_masked += 1
                continue
        for p, ratio, s in zip(log_p, ratios, rows, strict=True):
            delta = p - problem["teacher"][s, b].double()
            inside = correction.low <= ratio <= correction.high
            token = {"none": 1.0, "tis": min(ratio, correction.high), "icepop": ratio if inside else 0.0}
            share = 1 / (B * len(rows)) if loss.aggregation == "sequence_mean" else 1 / int(mask.sum())
            k3 = torch.exp(-delta) - 1 + delta
            value = {
                "k2": delta**2 / 2,
                "k3": k3,
                "k3_reverse": delta**2 / 2 + (k3 - delta**2 / 2).detach(),
                "policy_gradient": p * delta.detach() + (delta - p * delta).detach(),
            }[loss.type]
            total = total + share * token[correction.type] * value
    grads = torch.autograd.grad(total, (hidden, weight))
    numbers = {"masked": torch.tensor(num_masked), "rollout_kl": torch.tensor(rollout_kl)}
    return {"loss": total.detach(), "hidden": grads[0], "weight": grads[1], **numbers}


@pytest.mark.parametrize("budget_mib", [64, 1])
@pytest.mark.parametrize("kind", CORRECTIONS)
@pytest.mark.parametrize("name", ["k2", "k3", "k3_reverse", "policy_gradient"])
def test_equals_the_definition(
    layout: Layout, problem: dict[str, Tensor], name: str, kind: str, budget_mib: int
) -> None:
    loss = losses(CORRECTIONS[kind])[name]
    objective = Objective(loss, layout, true_vocab_size=VOCAB, lm_head_memory_budget_mib=budget_mib)
    hidden, weight = (problem[name].clone().requires_grad_() for name in ("hidden", "weight"))
    weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
    rows = LossRows(
        loss_mask=problem["loss_mask"].flatten(),
        loss_rows=choose_rows(problem["loss_mask"]),
        targets=problem["targets"].flatten(),
        samples=torch.arange(B).repeat(S),
        num_loss_tokens=problem["loss_mask"].sum(0),
        domains=torch.arange(B) % 3,
        sample_positions=torch.arange(B),
        fields={
            "teacher_ids": torch.arange(K).int().expand(S * B, K),
            "teacher_logprobs": torch.full((S * B, K), -2.0),
            "teacher_token_logprobs": problem["teacher"].flatten(),
            "rollout_logprobs": problem["rollout"].flatten(),
        },
    )
    assert "rollout_logprobs" in objective.field_names
    num_tokens = int(rows.loss_mask.sum())
    sums = objective.new_sums(num_domains=3, num_samples=B, num_loss_tokens=num_tokens, diagnostics=False)
    value = objective(LMHead(hidden, weight), rows=rows, sums=sums)  # type: ignore[arg-type]
    value.backward()
    assert objective._has_warned == (budget_mib == 1)
    expected = by_definition(problem, loss)
    torch.testing.assert_close(value.detach().double(), expected["loss"], rtol=1e-5, atol=1e-7)
    for got, wanted in ((hidden.grad, expected["hidden"]), (weight.main_grad, expected["weight"])):  # type: ignore[attr-defined]
        assert got is not None
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-6 * float(wanted.abs().max()))
    columns = dict(zip(sums.names, sums._totals.T, strict=True))
    assert columns["weighted_loss"].sum().item() == pytest.approx(value.item(), rel=1e-6)
    assert columns["rollout_kl"].sum().item() == pytest.approx(float(expected["rollout_kl"]), rel=1e-5)
    if loss.correction is not None and loss.correction.sequence is not None:
        assert columns["masked_sequences"].sum().item() == pytest.approx(float(expected["masked"])) == 3
    else:
        assert "masked_sequences" not in columns

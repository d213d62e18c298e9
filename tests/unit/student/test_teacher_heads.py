"""Losses over the whole vocabulary in the student's objective: several teachers of unequal sizes in one micro-batch,
with all logits at once or a few rows at a time, by their definition in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mopd.config.losses import FullLossConfig
from mopd.losses import choose_rows
from mopd.student.batch import LossRows
from mopd.student.model.gpt import LMHead
from mopd.student.objective import Objective
from mopd.student.parallel import Layout
from mopd.student.teacher_heads import TeacherHeads

S, B, H, VOCAB, PADDED = 5, 6, 8, 20_000, 20_003
SIZES = (4, 12)
"""Hidden sizes of the two teachers, of domains 1 and of domains 0 and 2."""
TEACHERS = (1, 0, 1)
LOSSES = {
    "forward": FullLossConfig(type="full_forward_kl", temperature=1.3),
    "reverse": FullLossConfig(type="full_reverse_kl", skew=0.1),
    "jsd": FullLossConfig(type="full_jsd", beta=0.2),
}


@pytest.fixture(scope="module")
def problem() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    padding = torch.full((PADDED - VOCAB, 1), 50.0)  # would win, if it counted
    return {
        "hidden": draw(S, B, H),
        "weight": torch.cat([draw(VOCAB, H), padding.expand(-1, H)]),
        "heads0": torch.cat([draw(VOCAB, SIZES[0]), padding.expand(-1, SIZES[0])]),
        "heads1": torch.cat([draw(VOCAB, SIZES[1]), padding.expand(-1, SIZES[1])]),
        "states": draw(S, B, SIZES[1]).bfloat16(),
        "mask": torch.rand(S, B, generator=generator) > 0.3,
        "targets": torch.randint(0, VOCAB, (S, B), generator=generator),
    }


def log_probs_of_teachers(problem: dict[str, Tensor], temperature: float) -> Tensor:
    """[S, B, V] in float64; sample b is of domain b % 3."""
    columns = []
    for b in range(B):
        teacher = TEACHERS[b % 3]
        states = problem["states"][:, b, : SIZES[teacher]].double()
        columns.append((states @ problem[f"heads{teacher}"][:VOCAB].double().T / temperature).log_softmax(-1))
    return torch.stack(columns, 1)


def loss_rows(problem: dict[str, Tensor], teacher_logprobs: Tensor) -> LossRows:
    chosen = choose_rows(problem["mask"])
    domains, samples = torch.arange(B) % 3, torch.arange(B).repeat(S)
    return LossRows(
        loss_mask=problem["mask"].flatten(),
        loss_rows=chosen,
        targets=problem["targets"].flatten(),
        samples=samples,
        num_loss_tokens=problem["mask"].sum(0),
        domains=domains,
        row_domains=domains[samples][chosen].numpy(),
        sample_positions=torch.arange(B),
        fields={"teacher_hidden": problem["states"].flatten(0, 1), "teacher_token_logprobs": teacher_logprobs},
    )


@pytest.mark.parametrize("budget_mib", [64, 1])
@pytest.mark.parametrize("name", LOSSES)
def test_equals_the_definition(layout: Layout, problem: dict[str, Tensor], name: str, budget_mib: int) -> None:
    loss, mask, targets = LOSSES[name], problem["mask"], problem["targets"]
    hidden, weight = (problem[part].double().requires_grad_() for part in ("hidden", "weight"))
    log_p = (hidden @ weight[:VOCAB].T / loss.temperature).log_softmax(-1)
    log_q = log_probs_of_teachers(problem, loss.temperature)
    p, q = log_p.exp(), log_q.exp()
    if name == "forward":
        wanted = q * (log_q - log_p)
    elif name == "reverse":
        wanted = p * (log_p - (loss.skew * p + (1 - loss.skew) * q).log())
    else:
        mixture = (loss.beta * q + (1 - loss.beta) * p).log()
        wanted = loss.beta * q * (log_q - mixture) + (1 - loss.beta) * p * (log_p - mixture)
    total = wanted.sum(-1)[mask].sum() / mask.sum()
    total.backward()

    own_hidden, own_weight = (problem[part].clone().requires_grad_() for part in ("hidden", "weight"))
    own_weight.main_grad = torch.zeros_like(own_weight)  # type: ignore[attr-defined]
    heads = TeacherHeads([problem["heads0"], problem["heads1"]], TEACHERS)
    sizes = {"true_vocab_size": VOCAB, "lm_head_memory_budget_mib": budget_mib}
    objective = Objective(loss, layout, has_support=False, heads=heads, **sizes)
    assert objective.field_names == ("tokens", "loss_mask", "teacher_token_logprobs", "teacher_hidden")
    said = log_q.gather(2, targets[..., None]).flatten().float()
    numbers = {"num_domains": 3, "num_samples": B, "num_loss_tokens": int(mask.sum())}
    sums = objective.new_sums(diagnostics=True, **numbers)
    value = objective(LMHead(own_hidden, own_weight), rows=loss_rows(problem, said), sums=sums)
    value.backward()
    assert objective._has_warned == (budget_mib == 1)
    torch.testing.assert_close(value.detach().double(), total.detach(), rtol=1e-6, atol=0)
    for got, other in ((own_hidden.grad, hidden.grad), (own_weight.main_grad, weight.grad)):  # type: ignore[attr-defined]
        assert got is not None and other is not None
        torch.testing.assert_close(got.double(), other, rtol=1e-4, atol=1e-6 * float(other.abs().max()))
    found = dict(zip(sums.names, sums._totals.T, strict=True))
    by_domain = torch.stack([wanted.sum(-1)[:, d::3][mask[:, d::3]].sum() for d in range(3)])
    torch.testing.assert_close(found["loss"], by_domain.detach(), rtol=1e-5, atol=0)
    assert float(found["hidden_error"].max()) < 1e-3 and "topk_overlap" not in found
    k1 = (log_p.gather(2, targets[..., None]).squeeze(2) - log_q.gather(2, targets[..., None]).squeeze(2))[mask].sum()
    assert float(found["k1"].sum()) == pytest.approx(k1.item(), rel=1e-4)

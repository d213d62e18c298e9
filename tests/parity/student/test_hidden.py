"""Losses over the whole vocabulary, from teachers' hidden states and output matrices, at every layout.

They equal the definition, evaluated in float64 on transformers' own models, and each other: at TP2, with sequence
parallelism, PP2, DP2, CP2 and two of them at a time, packed or right-padded, and whether the logits exist all at once
or a few rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from mopd.config.losses import FullLossConfig
from tests.parity.student import context_cases
from tests.parity.student.conftest import FOUR_RANK_LAYOUTS, ONE, TWO_RANK_LAYOUTS
from tests.parity.student.harness import run_ranks
from tests.parity.student.hidden_cases import LOSSES, make_hidden, make_models
from tests.parity.student.samples import DOMAINS, make_samples

pytestmark = [pytest.mark.multirank, pytest.mark.slow]
Results = dict[str, Any]
LAYOUTS = {
    2: {**TWO_RANK_LAYOUTS, "cp2": context_cases.CP2},
    4: {name: FOUR_RANK_LAYOUTS[name] for name in ("tp2_pp2", "tp2_sp_dp2")},
}
FORMS: dict[str, Results] = {
    "packed": {"head_mib": 1024},
    "padded": {"head_mib": 1024, "packing": False, "micro_batch_size": 4},
    "pieces": {"head_mib": 1, "max_tokens": 256},
}
CASES = [
    *((1, "one", form, loss) for form in FORMS for loss in LOSSES),
    *((2, layout, form, "full_jsd") for layout in LAYOUTS[2] for form in FORMS),
    *((2, layout, "packed", "full_reverse_skew") for layout in LAYOUTS[2]),
    *((2, layout, "packed", loss) for layout in ("tp2", "cp2") for loss in ("full_jsd_task", "full_reverse_half")),
    *((4, layout, "packed", "full_jsd") for layout in LAYOUTS[4]),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_models(tmp_path_factory.mktemp("hidden"))


@pytest.fixture(scope="module")
def results_of(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Results]:
    """Start so many ranks, once for all of their cases."""

    @cache
    def run(ranks: int) -> Results:
        layouts = LAYOUTS.get(ranks, {"one": ONE})
        cases = {
            f"{layout}/{form}/{loss}": {**layouts[layout], **FORMS[form], "loss": loss, "hidden": models, "steps": 1}
            for num, layout, form, loss in CASES
            if num == ranks
        }
        return run_ranks(ranks, {"model": models["student"], "cases": cases}, tmp_path_factory.mktemp(f"ranks{ranks}"))

    return run


def divergence(loss: FullLossConfig, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Of student p and teacher q [R, V], by the definition."""

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a.exp() * (a - b)).sum(-1)

    def mix(share: float) -> Tensor:
        return (share * log_q.exp() + (1 - share) * log_p.exp()).log()

    if loss.type == "full_jsd":
        return loss.beta * kl(log_q, mix(loss.beta)) + (1 - loss.beta) * kl(log_p, mix(loss.beta))
    if loss.type == "full_forward_kl":
        return kl(log_q, mix(loss.skew))
    return kl(log_p, mix(1 - loss.skew))


def counting(loss: FullLossConfig, log_p: Tensor, log_q: Tensor, mask: Tensor) -> Tensor:
    """Of a response's loss tokens [R] those that ``loss.tokens`` lets count."""
    if loss.tokens == "all":
        return mask
    score = -(log_p.exp() * log_p).sum(-1)
    if loss.tokens.largest == "divergence":
        score = (log_q.exp() * (log_q - log_p)).sum(-1)
    best = torch.where(mask, score, -torch.inf).topk(math.ceil(loss.tokens.share * int(mask.sum()))).indices
    return torch.zeros_like(mask).index_fill(0, best, True)


@pytest.fixture(scope="module")
def expected(models: dict[str, str]) -> Results:
    """Loss, mean loss of each domain's tokens, and gradient norm, by loss."""
    model = AutoModelForCausalLM.from_pretrained(models["student"], dtype=torch.float64)
    heads = {
        domain: AutoModelForCausalLM.from_pretrained(models[domain], dtype=torch.float64).lm_head.weight.detach()
        for domain in DOMAINS
    }
    metas, fields = make_samples(16, vocab_size=model.config.vocab_size, top_k=8, seed=1, first_id=100)
    states = make_hidden(metas, seed=1)
    found: Results = {}
    for name, loss in LOSSES.items():
        assert isinstance(loss, FullLossConfig)
        model.zero_grad()
        total, by_domain = torch.zeros((), dtype=torch.float64), dict.fromkeys(DOMAINS, 0.0)
        by_sequence = loss.aggregation == "sequence_mean"
        share = 1.0 if loss.tokens == "all" else loss.tokens.share
        numbers = [(m.domain, 1 if by_sequence else math.ceil(share * m.num_loss_tokens)) for m in metas]
        counts = {d: sum(number for domain, number in numbers if domain == d) for d in DOMAINS}
        columns = (fields[key] for key in ("tokens", "loss_mask", "task_advantage"))
        for meta, state, tokens, mask, advantage in zip(metas, states, *columns, strict=True):
            logits = model(tokens[None]).logits[0, meta.prompt_length - 1 : -1]
            log_p = (logits / loss.temperature).log_softmax(-1)
            log_q = (state.double() @ heads[meta.domain].T / loss.temperature).log_softmax(-1)
            own = log_p.gather(-1, tokens[meta.prompt_length :, None]).squeeze(-1)
            pull = -loss.task_reward_weight * advantage.double() * (1 + own - own.detach())
            rows = (divergence(loss, log_p, log_q) + pull)[counting(loss, log_p.detach(), log_q, mask)]
            by_domain[meta.domain] += rows.sum().item()
            one = rows.sum() / (meta.num_loss_tokens if by_sequence else 1)
            share = loss.domain_budget.get(meta.domain, counts[meta.domain] / sum(counts.values()))
            total = total + one * share / counts[meta.domain]
        total.backward()
        norm = math.sqrt(sum(float(parameter.grad.square().sum()) for parameter in model.parameters()))
        found[name] = {"loss": total.item(), "norm": norm, **by_domain}
    return found


@pytest.mark.parametrize(("ranks", "layout", "form", "loss"), CASES)
def test_equals_the_definition(
    results_of: Callable[[int], Results], expected: Results, ranks: int, layout: str, form: str, loss: str
) -> None:
    result, wanted = results_of(ranks)[f"{layout}/{form}/{loss}"], expected[loss]
    (step,) = result["steps"]
    assert result["head_in_chunks"] == (form == "pieces") and result["is_packed"] == [form != "padded"]
    found = sum(step[f"weighted_loss/{domain}"] for domain in DOMAINS)
    assert found == pytest.approx(wanted["loss"], rel=2e-6)
    assert step["exact_grad_norm"] == pytest.approx(wanted["norm"], rel=2e-6)
    for domain in DOMAINS:
        assert step[f"loss/{domain}"] == pytest.approx(wanted[domain], rel=2e-6)

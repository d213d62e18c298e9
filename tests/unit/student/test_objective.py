"""The student's objective: off-policy correction by its definition, with all logits at once or a few rows at a time;
the memory budget of the LM head; sums by domain."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from mopd.base.types import MicroBatchPlan, UserError
from mopd.config.losses import (
    KLLossConfig,
    LargestTokensConfig,
    Loss,
    MismatchCorrectionConfig,
    PolicyGradientConfig,
    SequenceMaskConfig,
    TopKLossConfig,
)
from mopd.losses import choose_rows
from mopd.orchestrator.support import NO_ID
from mopd.student.batch import LossRows
from mopd.student.model.gpt import LMHead
from mopd.student.objective import Objective, Sums
from mopd.student.parallel import Layout
from tests.fixtures.samples import meta_of

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
BASELINES: tuple[Literal["kl", "domain", "none"], ...] = ("kl", "domain", "none")
LISTED = -2.0
"""Log-prob of every id that the teacher lists."""


TOKENS: dict[str, Any] = {
    "all": "all",
    "entropy": LargestTokensConfig(largest="student_entropy", share=0.5),
    "divergence": LargestTokensConfig(largest="divergence", share=0.3),
}


def losses(correction: MismatchCorrectionConfig) -> dict[str, Loss]:
    return {
        "topk with a task": TopKLossConfig(top_k=K, task_reward_weight=0.5, correction=correction),
        **{name: KLLossConfig(type=name, correction=correction) for name in ("k2", "k3", "k3_reverse")},
        **{
            f"policy_gradient {baseline}": PolicyGradientConfig(
                type="policy_gradient", correction=correction, aggregation="sequence_mean", baseline=baseline
            )
            for baseline in BASELINES
        },
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
    advantage = torch.randn(B, generator=generator).expand(S, B)
    return {
        "hidden": hidden, "weight": weight, "targets": targets, "loss_mask": loss_mask, "rollout": rollout,
        "teacher": teacher, "advantage": advantage,
    }  # fmt: skip


def by_definition(problem: Mapping[str, Tensor], loss: Loss) -> dict[str, Tensor]:
    """In float64 under autograd, response by response and token by token."""
    hidden, weight = (problem[name].double().requires_grad_() for name in ("hidden", "weight"))
    correction, mask = loss.correction, problem["loss_mask"]
    assert correction is not None
    total, num_masked, rollout_kl, k1 = torch.zeros((), dtype=torch.float64), 0, 0.0, 0.0
    counts = [int(n) for n in mask.sum(0)]
    if loss.tokens != "all":
        counts = [math.ceil(loss.tokens.share * n) for n in counts]
    for b in range(B):
        rows = [s for s in range(S) if mask[s, b]]
        all_log_p = [torch.log_softmax(weight @ hidden[s, b], 0) for s in rows]
        log_p = [log_p[problem["targets"][s, b]] for log_p, s in zip(all_log_p, rows, strict=True)]
        ratios = [math.exp(p.item() - float(problem["rollout"][s, b])) for p, s in zip(log_p, rows, strict=True)]
        rollout_kl -= sum(map(math.log, ratios))
        k1 += sum(p.item() - float(problem["teacher"][s, b]) for p, s in zip(log_p, rows, strict=True))
        scores = [0.0] * len(rows)
        if loss.tokens != "all":
            by_entropy = loss.tokens.largest == "student_entropy"
            scores = [-float(x @ x.exp()) if by_entropy else float(lists_to(x.exp())) for x in all_log_p]
        chosen = sorted(range(len(rows)), key=lambda i: -scores[i])[: counts[b]]
        if correction.sequence is not None:
            mean = math.exp(sum(math.log(ratio) for ratio in ratios) / len(ratios))
            if not correction.sequence.low <= mean <= correction.sequence.high:
                num_masked += 1
                continue
        for i in chosen:
            p, every, ratio, s = log_p[i], all_log_p[i], ratios[i], rows[i]
            delta = p - problem["teacher"][s, b].double()
            if isinstance(loss, PolicyGradientConfig) and loss.baseline == "kl":
                delta = delta - kl_to_lists(every.detach().exp())
            if isinstance(loss, PolicyGradientConfig) and loss.baseline == "domain":
                delta = delta + 0.25 * b
            inside = correction.low <= ratio <= correction.high
            token = {"none": 1.0, "tis": min(ratio, correction.high), "icepop": ratio if inside else 0.0}
            share = 1 / (B * counts[b]) if loss.aggregation == "sequence_mean" else 1 / sum(counts)
            if isinstance(loss, TopKLossConfig):
                task = -0.5 * token[correction.type] * float(problem["advantage"][s, b])
                total = total + share * (lists_to(every.exp()) + task * (1 + p - p.detach()))
                continue
            k3 = torch.exp(-delta) - 1 + delta
            value = {
                "k2": delta**2 / 2,
                "k3": k3,
                "k3_reverse": delta**2 / 2 + (k3 - delta**2 / 2).detach(),
                "policy_gradient": p * delta.detach() + (delta - p * delta).detach(),
            }[loss.type]
            total = total + share * token[correction.type] * value
    grads = torch.autograd.grad(total, (hidden, weight))
    numbers = {"masked": torch.tensor(num_masked), "rollout_kl": torch.tensor(rollout_kl), "k1": torch.tensor(k1)}
    numbers["loss_tokens"] = torch.tensor(sum(counts))
    return {"loss": total.detach(), "hidden": grads[0], "weight": grads[1], **numbers}


def lists_to(p: Tensor) -> Tensor:
    """Return the KL from the lists of ``loss_rows`` and one bucket to p [V]."""
    rest = 1 - K * math.exp(LISTED)
    return math.exp(LISTED) * (LISTED - p[:K].log()).sum() + rest * (math.log(rest) - p[K:].sum().log())


def kl_to_lists(p: Tensor) -> float:
    """Return the KL from p [V] to the lists of ``loss_rows`` and one bucket."""
    q = K * math.exp(LISTED)
    inside = sum(float(p[k]) * (math.log(float(p[k])) - LISTED) for k in range(K))
    rest = float(p[K:].sum())
    return inside + rest * math.log(rest / (1 - q))


def loss_rows(
    loss_mask: Tensor, targets: Tensor, teacher: Tensor, rollout: Tensor, advantage: Tensor | None = None
) -> LossRows:
    """Rows of right-padded sequences, all [S, B], in three domains; the teacher lists the same ids everywhere."""
    num = loss_mask.shape[1]
    return LossRows(
        loss_mask=loss_mask.flatten(),
        loss_rows=choose_rows(loss_mask),
        targets=targets.flatten(),
        samples=torch.arange(num).repeat(len(loss_mask)),
        num_loss_tokens=loss_mask.sum(0),
        domains=torch.arange(num) % 3,
        sample_positions=torch.arange(num),
        fields={
            "teacher_ids": torch.arange(K).int().expand(loss_mask.numel(), K),
            "teacher_logprobs": torch.full((loss_mask.numel(), K), LISTED),
            "teacher_token_logprobs": teacher.flatten(),
            "rollout_logprobs": rollout.flatten(),
            "baseline": (0.25 * torch.arange(num)).repeat(len(loss_mask)),
            "task_advantage": (torch.zeros(loss_mask.shape) if advantage is None else advantage).flatten(),
        },
    )


def evaluate(objective: Objective, lm_head: LMHead, rows: LossRows) -> tuple[Sums, Tensor]:
    metas = [meta_of(i, response=n) for i, n in enumerate(rows.num_loss_tokens.tolist())]
    plan = MicroBatchPlan(
        micro_batches=((tuple(metas),),), num_loss_tokens=int(rows.loss_mask.sum()), num_samples=len(metas)
    )
    sizes = {"num_samples": len(rows.domains), "num_loss_tokens": objective.num_loss_tokens(plan)}
    sums = objective.new_sums(num_domains=3, diagnostics=False, **sizes)
    return sums, objective(lm_head, rows=rows, sums=sums)


LOOKS = [
    *((name, "all") for name in ("k2", "k3", "k3_reverse", *(f"policy_gradient {one}" for one in BASELINES))),
    *(("topk with a task", tokens) for tokens in TOKENS),
    *(("policy_gradient kl", tokens) for tokens in ("entropy", "divergence")),
]
"""Losses, and the tokens that they take."""


@pytest.mark.parametrize(
    ("name", "tokens", "kind", "budget_mib"),
    [
        *((*look, "tis", 64) for look in LOOKS),
        *((*look, "icepop", 1) for look in LOOKS),
        *(("k2", "all", kind, mib) for kind, mib in (("none", 1), ("without a sequence mask", 64))),
        ("topk with a task", "divergence", "without a sequence mask", 1),
    ],
)
def test_equals_the_definition(
    layout: Layout, problem: dict[str, Tensor], name: str, tokens: str, kind: str, budget_mib: int
) -> None:
    loss = replace(losses(CORRECTIONS[kind])[name], tokens=TOKENS[tokens])
    objective = Objective(loss, layout, true_vocab_size=VOCAB, lm_head_memory_budget_mib=budget_mib)
    hidden, weight = (problem[name].clone().requires_grad_() for name in ("hidden", "weight"))
    weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
    rows = loss_rows(*(problem[part] for part in ("loss_mask", "targets", "teacher", "rollout", "advantage")))
    assert "rollout_logprobs" in objective.field_names
    sums, value = evaluate(objective, LMHead(hidden, weight), rows)  # type: ignore[arg-type]
    value.backward()
    assert objective._has_warned == (budget_mib == 1)
    expected = by_definition(problem, loss)
    torch.testing.assert_close(value.detach().double(), expected["loss"], rtol=1e-5, atol=1e-7)
    for got, wanted in ((hidden.grad, expected["hidden"]), (weight.main_grad, expected["weight"])):  # type: ignore[attr-defined]
        assert got is not None
        least = 1e-5 if isinstance(loss, TopKLossConfig) else 1e-6  # sums over all columns, not the sampled token's
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=least * float(wanted.abs().max()))
    columns = dict(zip(sums.names, sums._totals.T, strict=True))
    assert columns["weighted_loss"].sum().item() == pytest.approx(value.item(), rel=1e-6)
    assert columns["rollout_kl"].sum().item() == pytest.approx(float(expected["rollout_kl"]), rel=1e-5)
    assert columns["k1"].sum().item() == pytest.approx(float(expected["k1"]), rel=1e-5)  # of all tokens
    if tokens != "all":
        assert columns["loss_tokens"].sum().item() == int(expected["loss_tokens"]) < columns["num_tokens"].sum().item()
        assert 0 < columns["chosen_score"].sum() < columns["score"].sum()
    if loss.correction is not None and loss.correction.sequence is not None:
        assert columns["masked_sequences"].sum().item() == pytest.approx(float(expected["masked"])) == 3
    else:
        assert "masked_sequences" not in columns


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_chunks_have_their_advantage_where_they_have_no_ids(
    layout: Layout, problem: dict[str, Tensor], weight: float
) -> None:
    """A row without ids is its advantage's policy gradient and nothing else, beside a task's; rows with ids are as they
    were."""
    has_ids = torch.rand(S, B, generator=torch.Generator().manual_seed(1)) > 0.4
    chunk = torch.where(has_ids, 0.0, problem["advantage"].flip(1) - 0.3)
    loss = TopKLossConfig(top_k=K, task_reward_weight=weight)
    objective = Objective(loss, layout, true_vocab_size=VOCAB, lm_head_memory_budget_mib=64, has_chunks=True)
    assert "chunk_advantage" in objective.field_names
    hidden, matrix = (problem[name].clone().requires_grad_() for name in ("hidden", "weight"))
    matrix.main_grad = torch.zeros_like(matrix)  # type: ignore[attr-defined]
    rows = loss_rows(*(problem[part] for part in ("loss_mask", "targets", "teacher", "rollout", "advantage")))
    fields = dict(rows.fields) | {"chunk_advantage": chunk.flatten()}
    fields["teacher_ids"] = torch.where(has_ids.flatten()[:, None], fields["teacher_ids"], NO_ID)
    fields["teacher_logprobs"] = torch.where(has_ids.flatten()[:, None], fields["teacher_logprobs"], -torch.inf)
    sums, value = evaluate(objective, LMHead(hidden, matrix), replace(rows, fields=fields))  # type: ignore[arg-type]
    value.backward()
    own = [problem[name].double().requires_grad_() for name in ("hidden", "weight")]
    every = torch.log_softmax(own[0] @ own[1].T, -1)
    log_p = every.gather(2, problem["targets"][..., None]).squeeze(2)
    advantage = chunk + weight * problem["advantage"]
    dense = torch.stack([torch.stack([lists_to(one.exp()) for one in row]) for row in every])
    wanted = torch.where(has_ids, dense, 0.0) - advantage * (1 + log_p - log_p.detach())
    expected = wanted[problem["loss_mask"]].mean()
    gradients = torch.autograd.grad(expected, own)
    torch.testing.assert_close(value.detach().double(), expected.detach(), rtol=1e-5, atol=1e-7)
    for got, needed in zip((hidden.grad, matrix.main_grad), gradients, strict=True):  # type: ignore[attr-defined]
        assert got is not None
        torch.testing.assert_close(got.double(), needed, rtol=1e-4, atol=1e-5 * float(needed.abs().max()))
    columns = dict(zip(sums.names, sums._totals.T, strict=True))
    total = float(torch.where(has_ids, dense, 0.0)[problem["loss_mask"]].sum())
    assert columns["divergence"].sum().item() == pytest.approx(total, rel=1e-5)


BUDGETED = {
    "token_mean": TopKLossConfig(top_k=K, domain_budget={"a": 0.7, "b": 0.2, "c": 0.1}),
    "sequence_mean": TopKLossConfig(top_k=K, aggregation="sequence_mean", domain_budget={"a": 0.1, "b": 0.6, "c": 0.3}),
    "domain_mean": TopKLossConfig(top_k=K, aggregation="domain_mean"),
    "policy_gradient": PolicyGradientConfig(
        type="policy_gradient", top_k=K, domain_budget={"a": 0.2, "b": 0.3, "c": 0.5}
    ),
}


@pytest.mark.parametrize("name", BUDGETED)
@pytest.mark.parametrize("absent", [(), (1,)])
def test_the_loss_is_the_domains_own_losses_by_budget(
    layout: Layout, problem: dict[str, Tensor], name: str, absent: tuple[int, ...]
) -> None:
    """Each domain's loss is that of a batch which holds its responses alone; the share of a domain that is absent goes
    to the others. The norm of each domain's gradient is that of its hidden states."""
    loss, mask = BUDGETED[name], problem["loss_mask"].clone()
    for domain in absent:
        mask[:, domain::3] = False
    budget = [(loss.domain_budget or dict.fromkeys("abc", 1 / 3))[d] * (i not in absent) for i, d in enumerate("abc")]  # type: ignore[attr-defined]

    def compute(columns: slice, loss: TopKLossConfig | PolicyGradientConfig) -> tuple[Sums, float, Tensor]:
        objective = Objective(loss, layout, true_vocab_size=VOCAB, lm_head_memory_budget_mib=64)
        hidden = problem["hidden"][:, columns].clone().requires_grad_()
        weight = problem["weight"].clone().requires_grad_()
        rows = loss_rows(*(x[:, columns] for x in (mask, problem["targets"], problem["teacher"], problem["rollout"])))
        num = [int(one) for one in rows.loss_mask.view(S, -1).sum(0)]
        metas = [meta_of(i, "abc"[i % 3], response=S, num_loss_tokens=n) for i, n in enumerate(num)]
        factors = objective.domain_factors(metas, "abc")
        sizes = {"num_domains": 3, "num_samples": len(num), "num_loss_tokens": sum(num)}
        sums = objective.new_sums(diagnostics=False, domain_factors=factors, **sizes)
        value = objective(LMHead(hidden, weight), rows=rows, sums=sums)
        value.backward()
        assert hidden.grad is not None
        return sums, value.item(), hidden.grad

    sums, value, gradient = compute(slice(None), loss)
    aggregation = loss.aggregation if loss.aggregation == "sequence_mean" else "token_mean"  # type: ignore[attr-defined]
    plain = replace(loss, domain_budget={}, aggregation=aggregation)
    own = {d: compute(slice(d, None, 3), plain)[1] for d in range(3) if d not in absent}
    assert value == pytest.approx(sum(budget[d] / sum(budget) * one for d, one in own.items()), rel=1e-5)
    weights = sums._totals[:, sums.names.index("weight")].tolist()
    assert weights == pytest.approx([share / sum(budget) for share in budget], rel=1e-6)
    norms = [float(gradient[:, d::3].double().square().sum()) for d in range(3)]
    assert sums._gradient.tolist() == pytest.approx(norms, rel=1e-5)


ROWS, BATCH = 6, 4


def head(vocab_size: int) -> LMHead:
    weight = torch.nn.Parameter(torch.randn(vocab_size, 2))
    weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
    return LMHead(torch.randn(ROWS, BATCH, 2, requires_grad=True), weight)


def loss_of(objective: Objective, lm_head: LMHead, loss_mask: Tensor) -> Tensor:
    targets, logprobs = torch.zeros(loss_mask.shape, dtype=torch.int64), torch.full(loss_mask.shape, -2.0)
    return evaluate(objective, lm_head, loss_rows(loss_mask, targets, logprobs, logprobs))[1]


def small(layout: Layout, vocab_size: int) -> Objective:
    return Objective(TopKLossConfig(top_k=K), layout, true_vocab_size=vocab_size, lm_head_memory_budget_mib=1)


def test_chunks_are_announced_once(layout: Layout, caplog: pytest.LogCaptureFixture) -> None:
    mask = torch.ones(ROWS, BATCH, dtype=torch.bool)
    with caplog.at_level(logging.INFO):
        loss_of(small(layout, 10_000), head(10_000), mask)
        assert not caplog.messages
        chunked = small(layout, 30_000)
        for _ in range(2):
            loss_of(chunked, head(30_000), mask)
    (message,) = caplog.messages
    assert message == (
        "LM head: the logits of 24 tokens would take 3 MiB, more than student.lm_head_memory_budget_mib 1: such "
        "micro-batches are computed 8 tokens at a time"
    )


def test_prompt_rows_do_not_count(layout: Layout, caplog: pytest.LogCaptureFixture) -> None:
    """Seven tokens of 24 have a loss: their logits fit, and the gradient is 0 on all others."""
    mask = torch.zeros(ROWS, BATCH, dtype=torch.bool)
    mask[:, 1], mask[2, 3] = True, True
    lm_head = head(30_000)
    loss_of(small(layout, 30_000), lm_head, mask).backward()
    assert not caplog.messages
    assert lm_head.hidden.grad is not None
    assert torch.equal(lm_head.hidden.grad.abs().sum(-1) > 0, mask)


def test_a_budget_below_one_row_is_refused(layout: Layout) -> None:
    said = (
        r"student.lm_head_memory_budget_mib 1 cannot be kept: memory_budget is 1048576 bytes, too little for 24 rows "
        r"of 300000 columns: set at least 1200\d+ .*; raise it, or lower student.max_tokens_per_micro_batch"
    )
    with pytest.raises(UserError, match=said):
        loss_of(small(layout, 300_000), head(300_000), torch.ones(ROWS, BATCH, dtype=torch.bool))


def test_a_bad_loss_marks_its_sample_and_no_other_domain() -> None:
    sums = Sums(("num_tokens", "loss"), num_domains=3, num_samples=5, num_loss_tokens=3, device=torch.device("cpu"))
    mask = torch.tensor([[True, True], [False, True]])
    rows = loss_rows(mask, mask.long(), mask.float(), mask.float())
    sums.add(rows, {"num_tokens": rows.loss_mask, "loss": torch.tensor([1.0, 4.0, float("nan"), float("inf")])})
    assert sums._is_bad.nonzero().flatten().tolist() == [1]
    assert sums._totals[0].tolist() == [1, 1] and sums._totals[2].tolist() == [0, 0]

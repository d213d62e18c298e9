"""Full-vocabulary divergences of two LM heads equal their definition, evaluated on all logits in float64.

Invariant: loss, both gradients and the metrics are those that autograd gives for sum_j a_j log(a_j / b_j) on
probability vectors, in pieces or at once, in float64 to 1e-9 and in float32 to 1e-6. Not exercised here: several ranks
(``test_full_ranks.py``), CUDA.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mopd.losses import parallel_full_distill
from tests.parity.losses.full_ranks import (
    BUDGETS,
    CASES,
    CORRECTION,
    FORMS,
    TASK_WEIGHT,
    TEMPERATURE,
    VOCAB,
    WITH_TASK,
    problem,
    run_case,
    task_options,
)
from tests.parity.losses.triton_layer import to_device


def kl(a: Tensor, b: Tensor) -> Tensor:
    """KL(a || b) of the rows of two probability vectors."""
    return (a * (a / b).log()).sum(-1)


def by_definition(form: str, p: Tensor, q: Tensor) -> Tensor:
    """The form's divergence of student p and teacher q, each ``[..., V]``."""
    if form == "jsd":
        mixture = 0.3 * q + 0.7 * p
        return 0.3 * kl(q, mixture) + 0.7 * kl(p, mixture)
    skew = 0.2 if form.startswith("skewed") else 0.0
    if form.endswith("forward_kl"):
        return kl(q, skew * q + (1 - skew) * p)
    return kl(p, skew * p + (1 - skew) * q)


def expected(form: str) -> dict[str, Tensor]:
    """What ``run_case`` returns, from the definition."""
    data = problem()
    hidden, weight = (data[name].clone().requires_grad_() for name in ("hidden", "weight"))
    p = ((hidden @ weight.t())[..., :VOCAB] / TEMPERATURE).softmax(-1)
    q = ((data["teacher_hidden"] @ data["teacher_weight"].t())[..., :VOCAB] / TEMPERATURE).softmax(-1)
    value, row_weight = by_definition(form.removesuffix("+task"), p, q), data["loss_weight"].double()
    own, theirs = (x.gather(-1, data["target"].unsqueeze(-1)).squeeze(-1).log() for x in (p, q))
    metrics = {"student_logprobs": own.detach(), "teacher_logprobs": theirs}
    if form in WITH_TASK:  # icepop: the ratio p / p_rollout inside its bounds, 0 outside
        ratio = (own.detach() - data["rollout_logprobs"]).exp()
        ratio[(ratio < CORRECTION[1]) | (ratio > CORRECTION[2])] = 0
        pull = -ratio * TASK_WEIGHT * data["task_advantage"]
        value = value + pull + pull * (own - own.detach())
        metrics |= {"task_loss": pull, "correction_weight": ratio}
    loss = (row_weight * value).sum()
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    metrics["unweighted_loss"] = value.detach()
    result = {f"metric/{name}": torch.where(row_weight == 0, 0, x) for name, x in metrics.items()}
    return result | {"loss": loss.detach(), "grad/hidden": hidden.grad, "grad/weight": weight.grad}


def assert_equal(actual: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    assert actual.keys() == wanted.keys()
    for name, value in wanted.items():
        scale = float(value.abs().max()) if name.startswith("grad/") else 1.0
        torch.testing.assert_close(
            actual[name].double(),
            value,
            rtol=tolerance,
            atol=tolerance * scale,
            msg=lambda m, name=name: f"{name}: {m}",
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("form", CASES)
def test_equals_the_definition(form: str, budget: str, dtype: torch.dtype) -> None:
    wanted = expected(form)
    actual = run_case(problem(dtype), form, BUDGETS[budget], None, sequence_parallel=False)
    assert_equal(actual, wanted, 1e-9 if dtype == torch.float64 else 1e-6)
    without = problem()["loss_weight"] == 0
    assert torch.count_nonzero(actual["grad/hidden"][without]) == 0
    assert torch.count_nonzero(actual["grad/weight"][VOCAB:]) == 0
    assert float(wanted["metric/unweighted_loss"].max()) > 0.1


@pytest.mark.parametrize("side", ["student", "teacher"])
@pytest.mark.parametrize("form", CASES)
def test_triton_layer(form: str, side: str) -> None:
    """As the chunked layer, with several tiles a row, padding, a row of weight 0 and one that is not finite."""
    generator = torch.Generator().manual_seed(8)
    own, theirs = (torch.randn(5, 2500, generator=generator) * 3 for _ in range(2))
    broken = own if side == "student" else theirs
    broken[2, 7], broken[4, 1], broken[:, 2400:] = torch.inf, torch.nan, torch.nan
    loss_weight = torch.tensor([1.0, 0.5, 1.0, 2.0, 0.0])
    shared = {"true_vocab_size": 2400, "temperature": 1.3, "loss_weight": loss_weight, **CASES[form]}
    if form in WITH_TASK:
        target, drawn = torch.tensor([5, 2399, 0, 1024, 7]), torch.tensor([-8.0, -8.5, -9.0, -7.5, -8.0])
        advantage = torch.tensor([1.0, -2.0, 0.5, 3.0, 1.0])
        shared |= {"target": target, **task_options({"task_advantage": advantage, "rollout_logprobs": drawn}, form)}
    found = []
    for backend in ("chunked", "triton"):
        leaf = to_device(own.clone()).requires_grad_()
        given = {name: to_device(x) if isinstance(x, Tensor) else x for name, x in shared.items()}
        loss, metrics = parallel_full_distill(leaf, to_device(theirs), backend=backend, **given)  # type: ignore[arg-type]
        (gradient,) = torch.autograd.grad(loss.sum(), leaf)
        found.append((loss.detach().cpu(), gradient.cpu(), metrics["unweighted_loss"].cpu()))
    rows = torch.tensor([0, 1, 3, 4])
    for name, wanted, actual in zip(("loss", "gradient", "metric"), *found, strict=True):
        torch.testing.assert_close(actual[rows], wanted[rows], rtol=2e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
        assert bool(actual[2].isnan().any())
    assert torch.count_nonzero(found[1][1][4]) == 0 and torch.count_nonzero(found[1][1][:, 2400:]) == 0


@pytest.mark.parametrize("form", CASES)
def test_triton_layer_behind_the_heads(form: str) -> None:
    actual = run_case(problem(torch.float32), form, BUDGETS["few"], None, sequence_parallel=False, backend="triton")
    assert_equal(actual, expected(form), 1e-5)


def logits(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    data = problem()
    own, theirs = data["hidden"] @ data["weight"].t(), data["teacher_hidden"] @ data["teacher_weight"].t()
    return own.to(dtype), theirs.to(dtype)


def rows_and_gradient(inp: Tensor, teacher: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    leaf = inp.clone().requires_grad_()
    loss, _ = parallel_full_distill(leaf, teacher, true_vocab_size=VOCAB, **options)
    loss.sum().backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


@pytest.mark.parametrize("form", CASES)
def test_reference_layer_agrees(form: str) -> None:
    options = CASES[form] | ({"target": problem()["target"]} if form in WITH_TASK else {})
    options |= task_options(problem(), form)
    wanted = rows_and_gradient(*logits(), backend="reference", **options)
    actual = rows_and_gradient(*logits(), **options)
    for a, b in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("form", FORMS)
def test_a_constant_added_to_either_side_changes_nothing(form: str) -> None:
    wanted = rows_and_gradient(*logits(), **FORMS[form])
    own, theirs = logits()
    actual = rows_and_gradient(own + 3000, theirs - 2000, **FORMS[form])
    for a, b in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_ends_of_the_jensen_shannon_divergence(beta: float) -> None:
    wanted = rows_and_gradient(*logits(), loss="reverse_kl" if beta else "forward_kl")
    actual = rows_and_gradient(*logits(), loss="jsd", beta=beta)
    assert all(torch.equal(a, b) for a, b in zip(actual, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_gradient_over_the_logits(form: str, dtype: torch.dtype) -> None:
    """The same bits as in a tensor of its own; the second backward raises."""
    own, theirs = logits(dtype)
    _, wanted = rows_and_gradient(own, theirs, **FORMS[form])
    leaf = own.clone().requires_grad_()
    loss, _ = parallel_full_distill(leaf * 1, theirs, true_vocab_size=VOCAB, overwrite_input=True, **FORMS[form])
    (actual,) = torch.autograd.grad(loss.sum(), leaf, retain_graph=True)
    assert torch.equal(actual, wanted)
    with pytest.raises(RuntimeError, match="overwrite_input=True"):
        torch.autograd.grad(loss.sum(), leaf)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("side", ["student", "teacher"])
def test_numbers_that_are_not_finite_stay_visible(side: str, value: float, form: str) -> None:
    """NaN in their own row, nothing in others; nothing where the row has no weight or the column is padding."""
    own, theirs = (x.flatten(0, 1) for x in logits(torch.float32))
    wanted, _ = rows_and_gradient(own, theirs, **FORMS[form])
    broken = own if side == "student" else theirs
    broken[2, 7], broken[4, 1], broken[:, VOCAB:] = value, value, torch.nan
    loss_weight = torch.ones(len(own))
    loss_weight[4] = 0
    loss, gradient = rows_and_gradient(own, theirs, loss_weight=loss_weight, **FORMS[form])
    assert bool(loss[2].isnan()) and float(loss[4]) == 0
    assert torch.count_nonzero(gradient[4]) == 0 and bool(gradient[2].isnan().any())
    others = torch.ones(len(own), dtype=torch.bool)
    others[[2, 4]] = False
    torch.testing.assert_close(loss[others], wanted[others])
    assert bool(gradient[others].isfinite().all())


def test_bfloat16_heads() -> None:
    """Hidden states and heads of both in bf16: the gradient is that of the rounded inputs within what bf16 logits of
    the student allow."""
    data = {name: x.bfloat16() if x.is_floating_point() else x for name, x in problem().items()}
    data["loss_weight"] = data["loss_weight"].float()
    exact = {name: x.double() if x.dtype == torch.bfloat16 else x for name, x in data.items()}
    for form in FORMS:
        wanted = run_case(exact, form, BUDGETS["few"], None, sequence_parallel=False)
        actual = run_case(data, form, BUDGETS["few"], None, sequence_parallel=False)
        torch.testing.assert_close(actual["loss"].double(), wanted["loss"], rtol=2e-2, atol=0)
        for name in ("grad/hidden", "grad/weight"):
            assert float((actual[name].double() - wanted[name]).norm() / wanted[name].norm()) < 2e-2

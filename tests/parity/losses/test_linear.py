"""LM head and loss in one equal the definition, evaluated on all logits in float64.

Invariant: ``linear_loss``, with however many rows at once, gives the loss and the gradients of hidden states and weight
that autograd gives for the definition on ``hidden @ weight.T``. Not exercised here: several ranks
(``test_linear_ranks.py``), memory (``tests/unit/losses/test_linear_memory.py``).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mopd.losses import parallel_topk_distill
from tests.parity.losses.definitions import teacher_topk, topk_loss
from tests.parity.losses.linear_topk import linear_topk, with_main_grad
from tests.parity.losses.triton_layer import to_device

T, H, V, PADDED, K = 19, 12, 89, 93, 5
AT_ONCE = (None, 4)
"""Rows whose logits exist at a time; None means all."""
TAILS = [("forward_kl", "bucket"), ("forward_kl", "none"), ("reverse_kl", "generalized"), ("jsd", "renormalize")]


def problem(dtype: torch.dtype = torch.float64, teachers: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(T, H, generator=generator, dtype=torch.float64)
    weight = torch.randn(PADDED, H, generator=generator, dtype=torch.float64)
    logits = (hidden @ weight.t())[:, None, :V] / 1.4 + torch.randn(T, teachers, V, generator=generator)
    ids, logq = teacher_topk(logits, K)
    loss_weight = torch.rand(T, generator=generator, dtype=torch.float64) + 0.1
    loss_weight[[2, 3, 17]] = 0
    return {
        "hidden": hidden.to(dtype),
        "weight": weight.to(dtype),
        "ids": ids,
        "logq": logq,
        "loss_weight": loss_weight,
        "teacher_weights": torch.rand(T, teachers, generator=generator),
        "target": torch.randint(0, V, (T,), generator=generator),
    }


def by_definition(data: dict[str, Tensor], **kind: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted loss and its two gradients."""
    hidden, weight = (data[name].clone().double().requires_grad_() for name in ("hidden", "weight"))
    logits = (hidden @ weight.t())[:, :V]
    rows = []
    for t in range(T):
        parts = [
            data["teacher_weights"][t, d].double()
            * topk_loss(logits[t], data["ids"][t, d].tolist(), data["logq"][t, d].double().tolist(), **kind)
            for d in range(data["ids"].size(1))
        ]
        rows.append(data["loss_weight"][t] * torch.stack(parts).sum())
    loss = torch.stack(rows).sum()
    loss.backward()
    return loss.detach(), hidden.grad, weight.grad  # type: ignore[return-value]


def run(data: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """On the CUDA device where there is one; the results are on the CPU."""
    own = {name: to_device(value.clone()) for name, value in data.items()}
    hidden, weight = (own.pop(name).requires_grad_() for name in ("hidden", "weight"))
    loss, metrics = linear_topk(hidden, weight, own.pop("ids"), own.pop("logq"), true_vocab_size=V, **own, **options)
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    return loss.detach().cpu(), hidden.grad.cpu(), weight.grad.cpu(), {k: x.cpu() for k, x in metrics.items()}


@pytest.mark.parametrize("teachers", [1, 3])
@pytest.mark.parametrize(("loss", "tail"), TAILS)
@pytest.mark.parametrize("at_once", AT_ONCE)
def test_equals_the_definition(at_once: int | None, loss: str, tail: str, teachers: int) -> None:
    data = problem(teachers=teachers)
    kind = {"loss": loss, "tail": tail, "temperature": 1.4}
    expected, grad_hidden, grad_weight = by_definition(data, **kind)
    total, *gradients, _ = run(data, rows_at_once=at_once, **kind)
    torch.testing.assert_close(total, expected, rtol=1e-7, atol=0)  # the teacher's log-probs are fp32
    torch.testing.assert_close(gradients[0], grad_hidden, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(gradients[1], grad_weight, rtol=1e-7, atol=1e-9)
    assert torch.count_nonzero(gradients[0][[2, 3, 17]]) == 0
    assert torch.count_nonzero(gradients[1][V:]) == 0


@pytest.mark.parametrize("at_once", [None, 9])
def test_triton_layer(at_once: int | None) -> None:
    data = problem(torch.float32, teachers=2)
    data["loss_weight"] = data["loss_weight"].float()
    kind = {"loss": "jsd", "tail": "bucket", "temperature": 1.4}
    loss, grad_hidden, grad_weight = by_definition(data, **kind)
    actual, *gradients, metrics = run(data, backend="triton", rows_at_once=at_once, with_entropy=True, **kind)
    _, _, _, expected = run(data, backend="chunked", rows_at_once=at_once, with_entropy=True, **kind)
    torch.testing.assert_close(actual.double(), loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients[0].double(), grad_hidden, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients[1].double(), grad_weight, rtol=1e-5, atol=1e-6)
    assert metrics.keys() == expected.keys() and "entropy" in metrics
    for name, value in expected.items():
        torch.testing.assert_close(metrics[name], value, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("offset", [-2000.0, 2000.0])
def test_a_constant_added_to_the_logits_changes_nothing(offset: float) -> None:
    """exp of such logits is 0 or infinite: no row may be measured against anything but its own peak."""
    data = problem()
    expected = run(data, rows_at_once=3)
    data["hidden"] = torch.cat([data["hidden"], torch.ones(T, 1, dtype=torch.float64)], 1)
    data["weight"] = torch.cat([data["weight"], torch.full((PADDED, 1), offset, dtype=torch.float64)], 1)
    actual = run(data, rows_at_once=3)
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-9, atol=0)
    torch.testing.assert_close(actual[1][:, :H], expected[1], rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(actual[2][:, :H], expected[2], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at_once", [1, 7])
def test_equals_the_loss_of_all_logits(at_once: int, dtype: torch.dtype) -> None:
    """Metrics too; hidden states as [S, B, H], where rows of weight 0 hold garbage."""
    data = {name: value[:18].unflatten(0, (6, 3)) for name, value in problem(dtype).items() if name != "weight"}
    hidden, weight = data["hidden"].clone().requires_grad_(), problem(dtype)["weight"].clone().requires_grad_()
    with torch.no_grad():
        hidden[0, 2] = torch.nan
    options: dict[str, Any] = {
        "loss_weight": data["loss_weight"].float(),
        "teacher_weights": data["teacher_weights"],
        "target": data["target"],
        "true_vocab_size": V,
        "with_entropy": True,
    }
    teacher = data["ids"], data["logq"]
    # As many rows at a time: a bf16 product of few may round a logit otherwise than that of all.
    logits = torch.cat([rows @ weight.t() for rows in hidden.flatten(0, 1).split(at_once)]).unflatten(0, (6, 3))
    expected, expected_metrics = parallel_topk_distill(logits, *teacher, reduce_loss=True, **options)
    expected_grads = torch.autograd.grad(expected, (hidden, weight))
    actual, metrics = linear_topk(hidden, weight, *teacher, rows_at_once=at_once, **options)
    grads = torch.autograd.grad(actual, (hidden, weight))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)
    assert metrics.keys() == expected_metrics.keys()
    for name, value in expected_metrics.items():
        torch.testing.assert_close(metrics[name], value, rtol=1e-5, atol=1e-5, msg=name)
    torch.testing.assert_close(grads[0], expected_grads[0], rtol=tolerance, atol=tolerance * 1e-2)
    # The product of all rows meets NaN * 0 in the weight gradient; rows that are left out do not.
    assert bool(torch.isfinite(grads[1]).all())


def test_bfloat16_gradients_add_up_in_fp32() -> None:
    """Three hundred chunks of a row are as exact as one product of all of them."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(300, 16, generator=generator).bfloat16()
    weight = torch.randn(40, 16, generator=generator).bfloat16()
    ids, logq = teacher_topk(torch.randn(300, 40, generator=generator), 4)
    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    loss, _ = parallel_topk_distill(exact[0] @ exact[1].t(), ids, logq, reduce_loss=True)
    expected = torch.autograd.grad(loss, exact)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    errors = []
    for at_once in (1, None):
        grads = torch.autograd.grad(linear_topk(*leaves, ids, logq, rows_at_once=at_once)[0], leaves)
        errors.append([float((g.double() - e).norm() / e.norm()) for g, e in zip(grads, expected, strict=True)])
    for own, plain in zip(*errors, strict=True):
        assert own < 1.1 * plain


@pytest.mark.parametrize("at_once", AT_ONCE)
def test_weight_gradient_into_main_grad(at_once: int | None) -> None:
    data = problem()
    _, grad_hidden, grad_weight = by_definition(data, loss="forward_kl", tail="bucket")
    hidden, weight = data.pop("hidden").clone().requires_grad_(), with_main_grad(data.pop("weight"), 1.0)
    loss, _ = linear_topk(
        hidden, weight, data.pop("ids"), data.pop("logq"), true_vocab_size=V, rows_at_once=at_once, **data
    )
    loss.backward()
    assert weight.grad is None and weight.grad_added_to_main_grad  # type: ignore[attr-defined]
    torch.testing.assert_close(weight.main_grad - 1, grad_weight, rtol=1e-7, atol=1e-9)  # type: ignore[attr-defined]
    torch.testing.assert_close(hidden.grad, grad_hidden, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("at_once", AT_ONCE)
@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_factor(at_once: int | None, frozen: str) -> None:
    data = problem()
    expected = dict(zip(("hidden", "weight"), by_definition(data, loss="forward_kl", tail="bucket")[1:], strict=True))
    leaves = {name: data.pop(name).clone().requires_grad_(name != frozen) for name in ("hidden", "weight")}
    teacher = data.pop("ids"), data.pop("logq")
    loss, _ = linear_topk(*leaves.values(), *teacher, true_vocab_size=V, rows_at_once=at_once, **data)
    loss.backward()
    for name, leaf in leaves.items():
        if name == frozen:
            assert leaf.grad is None
        else:
            torch.testing.assert_close(leaf.grad, expected[name], rtol=1e-7, atol=1e-9)

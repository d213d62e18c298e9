"""LM head and loss in one equal the definition, evaluated on all logits in float64.

Invariant: every strategy of ``linear_topk_distill``, whatever the sizes of its chunks and slices, gives the loss and
the gradients of hidden states and weight that autograd gives for the definition on ``hidden @ weight.T``. Not
exercised here: several ranks (``test_linear_ranks.py``), memory (``tests/unit/losses/test_linear_memory.py``).
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from mopd.losses import linear_topk_distill, parallel_topk_distill
from tests.parity.losses.definitions import teacher_topk, topk_loss
from tests.parity.losses.triton_layer import to_device

T, H, V, PADDED, K = 19, 12, 89, 93, 5
CHUNKED = ("token_chunks", "vocab_slices")
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


def by_definition(data: dict[str, Tensor], upstream: Tensor, **kind: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Row losses and the two gradients of sum(upstream x weighted loss)."""
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
    losses = torch.stack(rows)
    (losses * upstream).sum().backward()
    return losses.detach(), hidden.grad, weight.grad  # type: ignore[return-value]


def run(
    data: dict[str, Tensor], upstream: Tensor, reduce_loss: bool, **options: Any
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """On the CUDA device where there is one; the results are on the CPU."""
    hidden, weight = (to_device(data[name].clone()).requires_grad_() for name in ("hidden", "weight"))
    own = {name: to_device(value) for name, value in data.items()}
    loss, metrics = linear_topk_distill(
        hidden,
        weight,
        own["ids"],
        own["logq"],
        teacher_weights=own["teacher_weights"],
        loss_weight=own["loss_weight"],
        target=own["target"],
        true_vocab_size=V,
        reduce_loss=reduce_loss,
        **options,
    )
    (loss * to_device(upstream)).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    return loss.detach().cpu(), hidden.grad.cpu(), weight.grad.cpu(), {k: x.cpu() for k, x in metrics.items()}


def least_budget(strategy: str, *args: Tensor, **options: Any) -> int:
    """Bytes for one row or column at a time, as a budget of one byte is told."""
    with pytest.raises(ValueError, match="memory_budget is 1 bytes, too little") as refused:
        linear_topk_distill(*args, reduce_loss=True, memory_budget=1, strategy=strategy, **options)  # type: ignore[arg-type]
    least = re.search(rf"{strategy} (\d+)", str(refused.value))
    assert least is not None
    return int(least.group(1))


def budget(data: dict[str, Tensor], strategy: str, pieces: int, **options: Any) -> dict[str, Any]:
    """Strategy and budget for chunks of ``pieces`` rows or slices of ``pieces`` columns."""
    if strategy == "materialize":
        return {"strategy": strategy, "memory_budget": 1}
    hidden, weight = (data[name].clone().requires_grad_() for name in ("hidden", "weight"))
    weight.main_grad = weight.detach()  # type: ignore[attr-defined]
    weights = {name: data[name] for name in ("teacher_weights", "loss_weight")}
    least = least_budget(strategy, hidden, weight, data["ids"], data["logq"], **weights, **options)
    num_rows = int(torch.count_nonzero(data["loss_weight"]))
    piece = (PADDED if strategy == "token_chunks" else num_rows) * weight.element_size()
    return {"strategy": strategy, "memory_budget": least + (pieces - 1) * piece}


@pytest.mark.parametrize("teachers", [1, 3])
@pytest.mark.parametrize(("loss", "tail"), TAILS)
@pytest.mark.parametrize("strategy", ["materialize", *CHUNKED])
def test_equals_the_definition(strategy: str, loss: str, tail: str, teachers: int) -> None:
    data = problem(teachers=teachers)
    kind = {"loss": loss, "tail": tail, "temperature": 1.4}
    scale = torch.tensor(0.7, dtype=torch.float64)
    losses, grad_hidden, grad_weight = by_definition(data, scale, **kind)
    total, *gradients, _ = run(data, scale, True, **budget(data, strategy, 4), **kind)
    torch.testing.assert_close(total, losses.sum(), rtol=1e-7, atol=0)  # the teacher's log-probs are fp32
    torch.testing.assert_close(gradients[0], grad_hidden, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(gradients[1], grad_weight, rtol=1e-7, atol=1e-9)
    assert torch.count_nonzero(gradients[0][[2, 3, 17]]) == 0
    assert torch.count_nonzero(gradients[1][V:]) == 0


@pytest.mark.parametrize("strategy", ["materialize", "vocab_slices"])
def test_any_upstream_gradient_of_row_losses(strategy: str) -> None:
    data = problem(teachers=2)
    upstream = torch.linspace(-1, 2, T, dtype=torch.float64)
    losses, grad_hidden, grad_weight = by_definition(data, upstream, loss="jsd", tail="bucket")
    rows, *gradients, _ = run(data, upstream, False, **budget(data, strategy, 7), loss="jsd", tail="bucket")
    torch.testing.assert_close(rows, losses, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(gradients[0], grad_hidden, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(gradients[1], grad_weight, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("strategy", "reduce_loss"), [("materialize", True), ("token_chunks", True), ("vocab_slices", False)]
)
def test_triton_layer_serves_every_strategy(strategy: str, reduce_loss: bool) -> None:
    data = problem(torch.float32, teachers=2)
    data["loss_weight"] = data["loss_weight"].float()
    upstream = torch.tensor(0.6) if reduce_loss else torch.linspace(0.5, 1, T)
    kind = {"loss": "jsd", "tail": "bucket", "temperature": 1.4}
    losses, grad_hidden, grad_weight = by_definition(data, upstream.double(), **kind)
    options = {**budget(data, strategy, 35 if strategy == "vocab_slices" else 9), **kind, "with_entropy": True}
    actual, *gradients, metrics = run(data, upstream, reduce_loss, backend="triton", **options)
    _, _, _, expected = run(data, upstream, reduce_loss, backend="chunked", **options)
    torch.testing.assert_close(actual.double(), losses.sum() if reduce_loss else losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients[0].double(), grad_hidden, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients[1].double(), grad_weight, rtol=1e-5, atol=1e-6)
    assert metrics.keys() == expected.keys() and "entropy" in metrics
    for name, value in expected.items():
        torch.testing.assert_close(metrics[name], value, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("strategy", CHUNKED)
@pytest.mark.parametrize("offset", [-2000.0, 2000.0])
def test_a_constant_added_to_the_logits_changes_nothing(strategy: str, offset: float) -> None:
    """exp of such logits is 0 or infinite: no slice may be measured against anything but its own peak."""
    data = problem()
    one = torch.ones((), dtype=torch.float64)
    expected = run(data, one, True, **budget(data, strategy, 3))
    data["hidden"] = torch.cat([data["hidden"], torch.ones(T, 1, dtype=torch.float64)], 1)
    data["weight"] = torch.cat([data["weight"], torch.full((PADDED, 1), offset, dtype=torch.float64)], 1)
    actual = run(data, one, True, **budget(data, strategy, 3))
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-9, atol=0)
    torch.testing.assert_close(actual[1][:, :H], expected[1], rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(actual[2][:, :H], expected[2], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", CHUNKED)
@pytest.mark.parametrize("pieces", [1, 7, PADDED])
def test_equals_the_materialised_path(strategy: str, pieces: int, dtype: torch.dtype) -> None:
    """Metrics too; hidden states as [S, B, H], where rows of weight 0 hold garbage."""
    data = {name: value[:18].unflatten(0, (6, 3)) for name, value in problem(dtype).items() if name != "weight"}
    data["weight"] = problem(dtype)["weight"]
    hidden, weight = (data[name].clone().requires_grad_() for name in ("hidden", "weight"))
    with torch.no_grad():
        hidden[0, 2] = torch.nan
    options: dict[str, Any] = {
        "loss_weight": data["loss_weight"].float(),
        "teacher_weights": data["teacher_weights"],
        "target": data["target"],
        "true_vocab_size": V,
        "with_entropy": True,
        "reduce_loss": True,
    }
    expected, expected_metrics = parallel_topk_distill(hidden @ weight.t(), data["ids"], data["logq"], **options)
    expected_grads = torch.autograd.grad(expected, (hidden, weight))
    size = budget(data, strategy, pieces)
    actual, metrics = linear_topk_distill(hidden, weight, data["ids"], data["logq"], **size, **options)
    grads = torch.autograd.grad(actual, (hidden, weight))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)
    assert metrics.keys() == expected_metrics.keys()
    for name, value in expected_metrics.items():
        torch.testing.assert_close(metrics[name], value, rtol=1e-5, atol=1e-5, msg=name)
    torch.testing.assert_close(grads[0], expected_grads[0], rtol=tolerance, atol=tolerance * 1e-2)
    # The materialised product meets NaN * 0 in the weight gradient; rows that are left out do not.
    assert bool(torch.isfinite(grads[1]).all())


@pytest.mark.parametrize("strategy", CHUNKED)
def test_bfloat16_gradients_add_up_in_fp32(strategy: str) -> None:
    """Three hundred chunks of a row, or slices of a column, are as exact as one product of all of them."""
    generator = torch.Generator().manual_seed(1)
    rows, vocab = (300, 40) if strategy == "token_chunks" else (40, 300)
    hidden = torch.randn(rows, 16, generator=generator).bfloat16()
    weight = torch.randn(vocab, 16, generator=generator).bfloat16()
    ids, logq = teacher_topk(torch.randn(rows, vocab, generator=generator), 4)
    errors = {}
    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    loss, _ = parallel_topk_distill(exact[0] @ exact[1].t(), ids, logq, reduce_loss=True)
    expected = torch.autograd.grad(loss, exact)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    for name, size in (("materialize", 1), (strategy, least_budget(strategy, *leaves, ids, logq))):
        loss, _ = linear_topk_distill(*leaves, ids, logq, reduce_loss=True, memory_budget=size, strategy=name)
        grads = torch.autograd.grad(loss, leaves)
        errors[name] = [float((g.double() - e).norm() / e.norm()) for g, e in zip(grads, expected, strict=True)]
    for own, plain in zip(errors[strategy], errors["materialize"], strict=True):
        assert own < 1.1 * plain


@pytest.mark.parametrize("strategy", ["materialize", *CHUNKED])
@pytest.mark.parametrize("unit_upstream", [True, False])
def test_weight_gradient_into_main_grad(strategy: str, unit_upstream: bool) -> None:
    data = problem()
    upstream = torch.tensor(1.0 if unit_upstream else 0.3, dtype=torch.float64)
    _, grad_hidden, grad_weight = by_definition(data, upstream, loss="forward_kl", tail="bucket")
    hidden = data["hidden"].clone().requires_grad_()
    weight = torch.nn.Parameter(data["weight"].clone())
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones_like(weight), False  # type: ignore[attr-defined]
    loss, _ = linear_topk_distill(
        hidden,
        weight,
        data["ids"],
        data["logq"],
        teacher_weights=data["teacher_weights"],
        loss_weight=data["loss_weight"],
        true_vocab_size=V,
        reduce_loss=True,
        gradient_accumulation_fusion=True,
        unit_upstream=unit_upstream,
        **budget(data, strategy, 5, gradient_accumulation_fusion=True, unit_upstream=unit_upstream),
    )
    (loss if unit_upstream else loss * upstream).backward()
    assert weight.grad is None and weight.grad_added_to_main_grad  # type: ignore[attr-defined]
    torch.testing.assert_close(weight.main_grad - 1, grad_weight, rtol=1e-7, atol=1e-9)  # type: ignore[attr-defined]
    torch.testing.assert_close(hidden.grad, grad_hidden, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("strategy", ["materialize", *CHUNKED])
@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_factor(strategy: str, frozen: str) -> None:
    data = problem()
    one = torch.ones((), dtype=torch.float64)
    expected = dict(
        zip(("hidden", "weight"), by_definition(data, one, loss="forward_kl", tail="bucket")[1:], strict=True)
    )
    leaves = {name: data[name].clone().requires_grad_(name != frozen) for name in ("hidden", "weight")}
    loss, _ = linear_topk_distill(
        leaves["hidden"],
        leaves["weight"],
        data["ids"],
        data["logq"],
        teacher_weights=data["teacher_weights"],
        loss_weight=data["loss_weight"],
        true_vocab_size=V,
        reduce_loss=True,
        **budget(data, strategy, 5),
    )
    loss.backward()
    for name, leaf in leaves.items():
        if name == frozen:
            assert leaf.grad is None
        else:
            torch.testing.assert_close(leaf.grad, expected[name], rtol=1e-7, atol=1e-9)

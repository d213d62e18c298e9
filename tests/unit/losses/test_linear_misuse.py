"""What ``linear_topk_distill`` refuses, and in which words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mopd.losses import linear_topk_distill

T, H, V, K = 6, 4, 11, 3


def arguments() -> dict[str, Any]:
    return {
        "hidden": torch.randn(T, H, requires_grad=True),
        "weight": torch.nn.Parameter(torch.randn(V, H)),
        "teacher_ids": torch.arange(K).expand(T, K),
        "teacher_logprobs": torch.full((T, K), -2.0),
        "memory_budget": 10**6,
        "reduce_loss": True,
    }


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"hidden": torch.randn(T, H + 1)}, r"hidden is torch.float32 \[6, 5\] and weight torch.float32 \[11, 4\]"),
        ({"hidden": torch.randn(T, H).bfloat16()}, "hidden is torch.bfloat16.*one dtype"),
        ({"hidden": torch.randn(H)}, "hidden is"),
        ({"teacher_ids": torch.zeros(T, V + 1).long()}, "teacher_ids is"),
        ({"teacher_ids": torch.zeros(T - 1, K).long()}, r"teacher_ids is .*\[5\]: pass .*\[6\]"),
        ({"loss_weight": torch.ones(T - 1)}, r"loss_weight is .*\[5\]: pass .*\[6\]"),
        ({"target": torch.zeros(T)}, "target is torch.float32"),
        ({"row_index": torch.tensor([1.0])}, r"row_index is torch.float32 \[1\]"),
        ({"row_index": torch.zeros(0).long()}, r"row_index is torch.int64 \[0\]: .*at least one row"),
        ({"memory_budget": 10}, "memory_budget is 10 bytes, too little for 6 rows of 11 columns: set at least"),
        ({"strategy": "chunks"}, "strategy is 'chunks'"),
        ({"strategy": "token_chunks", "reduce_loss": False}, "reduce_loss=True"),
        ({"sequence_parallel": True}, "dist_process_group None"),
        ({"gradient_accumulation_fusion": True}, r"weight.main_grad \[11, 4\], which has none"),
        ({"loss": "kl"}, "loss is 'kl'"),
        ({"loss_max_clamp": -1.0, "strategy": "vocab_slices"}, "loss_max_clamp is -1.0"),
        ({"temperature": 0.0, "strategy": "vocab_slices"}, "temperature is 0.0"),
        ({"backend": "reference", "strategy": "vocab_slices"}, "top-k losses only|backend"),
    ],
)
def test_bad_arguments(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        linear_topk_distill(**{**arguments(), **changed})


def loss_of(**options: Any) -> tuple[Tensor, Tensor]:
    given = {**arguments(), "strategy": "token_chunks", **options}
    return linear_topk_distill(**given)[0], given["hidden"]


def test_gradients_formed_in_forward_are_handed_out_once() -> None:
    loss, hidden = loss_of()
    torch.autograd.grad(loss, hidden, retain_graph=True)
    with pytest.raises(RuntimeError, match="formed the gradients in forward"):
        torch.autograd.grad(loss, hidden)


def test_a_broken_promise_about_the_upstream_gradient() -> None:
    loss, hidden = loss_of(unit_upstream=True)
    with pytest.raises(RuntimeError, match="unit_upstream: the loss was scaled"):
        torch.autograd.grad(2 * loss, hidden)


@pytest.mark.parametrize("into_main_grad", [False, True])
def test_a_broken_promise_where_looking_would_wait(monkeypatch: pytest.MonkeyPatch, into_main_grad: bool) -> None:
    """No number is looked at, and none of the gradients can be taken for one: their norms are NaN."""
    monkeypatch.setattr("mopd.losses.rows.SYNCHRONOUS_DEVICES", ())
    for scale in (1, 2):
        given = arguments()
        weight = given["weight"].requires_grad_()
        weight.main_grad = torch.zeros(V, H)
        loss, hidden = loss_of(**given, unit_upstream=True, gradient_accumulation_fusion=into_main_grad)
        gradients = torch.autograd.grad(scale * loss, [hidden, weight], allow_unused=True)
        of_weight = weight.main_grad if into_main_grad else gradients[1]
        assert all(bool(x.norm().isfinite()) == (scale == 1) for x in (gradients[0], of_weight))


def test_value_checks_reach_the_chunks() -> None:
    logprobs = torch.full((T, K), -2.0)
    logprobs[4, 1] = torch.nan
    for strategy in ("materialize", "token_chunks", "vocab_slices"):
        with pytest.raises(ValueError, match="teacher_logprobs holds nan"):
            loss_of(teacher_logprobs=logprobs, strategy=strategy, check_values=True)


@pytest.mark.parametrize("strategy", ["materialize", "token_chunks", "vocab_slices"])
def test_no_row_with_weight(strategy: str) -> None:
    loss, hidden = loss_of(strategy=strategy, loss_weight=torch.zeros(T))
    (grad,) = torch.autograd.grad(loss, hidden)
    assert float(loss.detach()) == 0 and torch.count_nonzero(grad) == 0


@pytest.mark.parametrize("strategy", ["materialize", "token_chunks", "vocab_slices"])
def test_without_gradients_nothing_is_added(strategy: str) -> None:
    given = arguments()
    given["weight"].main_grad = torch.zeros(V, H)
    with torch.no_grad():
        loss, _ = linear_topk_distill(**given, strategy=strategy, gradient_accumulation_fusion=True, unit_upstream=True)
    assert not loss.requires_grad and torch.count_nonzero(given["weight"].main_grad) == 0
    assert float(loss) == pytest.approx(float(loss_of(**given)[0].detach()), rel=1e-5)


def test_dummy_gradient_for_megatron() -> None:
    given = arguments()
    given["weight"].main_grad = torch.zeros(V, H)
    loss, _ = linear_topk_distill(**given, gradient_accumulation_fusion=True, dummy_weight_grad=True)
    loss.backward()
    assert torch.equal(given["weight"].grad, torch.zeros(V, H))
    assert torch.count_nonzero(given["weight"].main_grad) > 0

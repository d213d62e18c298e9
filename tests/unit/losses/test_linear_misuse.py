"""What ``linear_loss`` and ``LinearHead`` refuse, and in which words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.losses.linear_topk import linear_topk, with_main_grad

T, H, V, K = 6, 4, 11, 3


def arguments() -> dict[str, Any]:
    return {
        "hidden": torch.randn(T, H, requires_grad=True),
        "weight": torch.nn.Parameter(torch.randn(V, H)),
        "ids": torch.arange(K).expand(T, K),
        "logq": torch.full((T, K), -2.0),
    }


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"hidden": torch.randn(T, H + 1)}, r"hidden is torch.float32 \[6, 5\] and weight torch.float32 \[11, 4\]"),
        ({"hidden": torch.randn(T, H).bfloat16()}, "hidden is torch.bfloat16.*one dtype"),
        ({"weight": torch.randn(V, H, 1)}, "hidden is"),
        ({"row_index": torch.tensor([1.0])}, r"row_index is torch.float32 \[1\]"),
        ({"row_index": torch.zeros(0).long()}, r"row_index is torch.int64 \[0\]: .*at least one row"),
        ({"memory_budget": 10}, "memory_budget is 10 bytes, too little for 6 rows of 11 columns: set at least"),
        ({"sequence_parallel": True}, "sequence_parallel is True but group None"),
    ],
)
def test_bad_arguments(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        linear_topk(**{**arguments(), **changed})


def loss_of(**options: Any) -> tuple[Tensor, Tensor]:
    given = {**arguments(), "rows_at_once": 4, **options}
    return linear_topk(**given)[0], given["hidden"]


def test_gradients_formed_in_forward_are_handed_out_once() -> None:
    loss, hidden = loss_of()
    torch.autograd.grad(loss, hidden, retain_graph=True)
    with pytest.raises(RuntimeError, match="formed the gradients in forward and has handed them out"):
        torch.autograd.grad(loss, hidden)


def test_a_scaled_loss() -> None:
    loss, hidden = loss_of()
    with pytest.raises(RuntimeError, match="formed the gradients in forward, and the loss was scaled"):
        torch.autograd.grad(2 * loss, hidden)


@pytest.mark.parametrize("into_main_grad", [False, True])
def test_a_scaled_loss_where_looking_would_wait(monkeypatch: pytest.MonkeyPatch, into_main_grad: bool) -> None:
    """No number is looked at, and none of the gradients can be taken for one: their norms are NaN."""
    monkeypatch.setattr("mopd.losses.chunked.blocks.SYNCHRONOUS_DEVICES", ())
    for scale in (1, 2):
        weight: Any = torch.nn.Parameter(torch.randn(V, H))
        weight = with_main_grad(weight) if into_main_grad else weight
        loss, hidden = loss_of(weight=weight)
        gradients = torch.autograd.grad(scale * loss, [hidden, weight], allow_unused=True)
        of_weight = weight.main_grad if into_main_grad else gradients[1]
        assert all(bool(x.norm().isfinite()) == (scale == 1) for x in (gradients[0], of_weight))


@pytest.mark.parametrize("at_once", [T, 4])
def test_value_checks_reach_the_chunks(at_once: int) -> None:
    logprobs = torch.full((T, K), -2.0)
    logprobs[4, 1] = torch.nan
    with pytest.raises(ValueError, match="teacher_logprobs holds nan"):
        loss_of(logq=logprobs, rows_at_once=at_once, check_values=True)


@pytest.mark.parametrize("at_once", [T, 1])
def test_no_row_with_weight(at_once: int) -> None:
    loss, hidden = loss_of(rows_at_once=at_once, loss_weight=torch.zeros(T))
    (grad,) = torch.autograd.grad(loss, hidden)
    assert float(loss.detach()) == 0 and torch.count_nonzero(grad) == 0


@pytest.mark.parametrize("at_once", [T, 4])
def test_without_gradients_nothing_is_added(at_once: int) -> None:
    given = arguments()
    given["weight"] = with_main_grad(given["weight"])
    with torch.no_grad():
        loss, _ = linear_topk(**given, rows_at_once=at_once)
    assert not loss.requires_grad and torch.count_nonzero(given["weight"].main_grad) == 0
    assert float(loss) == pytest.approx(float(loss_of(**given)[0].detach()), rel=1e-5)

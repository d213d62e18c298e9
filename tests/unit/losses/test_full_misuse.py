"""What the full-vocabulary losses refuse, in which words, and the memory that they keep to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mopd.bench.clock import peak_bytes
from mopd.losses import linear_full_distill, parallel_full_distill
from mopd.losses.chunked.blocks import BLOCK_ELEMENTS
from tests.parity.losses.linear_topk import with_main_grad

T, H, HT, V = 6, 4, 7, 11


def arguments() -> dict[str, Any]:
    return {
        "hidden": torch.randn(T, H, requires_grad=True),
        "weight": torch.nn.Parameter(torch.randn(V, H)),
        "teacher_hidden": torch.randn(T, HT),
        "teacher_weight": torch.randn(V, HT),
        "memory_budget": 10**6,
    }


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"teacher_hidden": torch.randn(T, H)}, r"hidden is torch.float32 \[6, 4\] and weight torch.float32 \[11, 7\]"),
        ({"teacher_weight": torch.randn(V, HT).bfloat16()}, "weight torch.bfloat16.*one dtype"),
        ({"teacher_weight": torch.randn(V + 1, HT)}, "teacher_weight has 12 rows and weight 11: .*padding included"),
        ({"teacher_hidden": torch.randn(T + 1, HT)}, r"teacher_hidden is \[7, 7\] and hidden has rows \[6\]"),
        ({"memory_budget": 10}, "memory_budget is 10 bytes, too little for 6 rows of 11 columns: set at least"),
        ({"loss": "tv"}, "loss is 'tv': choose one of"),
        ({"beta": 2.0}, "beta is 2.0: set it between 0 and 1"),
        ({"skew": 1.0}, "skew is 1.0: set at least 0 and less than 1"),
        ({"skew": 0.1, "loss": "jsd"}, "skew is 0.1 and loss 'jsd'"),
        ({"dist_process_group": None}, "dist_process_group is given: pass it as the group of head"),
        ({"target": torch.full((T,), V), "check_values": True}, "target holds 11"),
    ],
)
def test_bad_arguments(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        linear_full_distill(**{**arguments(), **changed})


def test_teacher_logits_of_another_shape() -> None:
    with pytest.raises(ValueError, match=r"teacher_logits is torch.float32 \[6, 12\]: pass float logits .* \[6, 11\]"):
        parallel_full_distill(torch.randn(T, V), torch.randn(T, V + 1))


def test_the_teacher_gets_no_gradient() -> None:
    given = arguments()
    given["teacher_hidden"].requires_grad_(), given["teacher_weight"].requires_grad_()
    linear_full_distill(**given)[0].backward()
    assert given["hidden"].grad is not None and given["weight"].grad is not None
    assert given["teacher_hidden"].grad is None and given["teacher_weight"].grad is None


@pytest.mark.parametrize("options", [{"loss": "reverse_kl"}, {"loss": "jsd"}, {"loss": "reverse_kl", "skew": 0.1}])
def test_budget_is_kept(options: dict[str, Any]) -> None:
    """The logits of both sides would take 73 MiB; the budget holds 16 rows of them."""
    rows, width, vocab = 320, 8, 30_000
    torch.manual_seed(0)
    hidden, teacher_hidden = torch.randn(rows, width, requires_grad=True), torch.randn(rows, width)
    weight, teacher_weight = with_main_grad(torch.randn(vocab, width)), torch.randn(vocab, width)
    budget = 16 * 2 * 4 * vocab

    def work() -> tuple[Tensor, ...]:
        own = (hidden, weight, teacher_hidden, teacher_weight)
        return torch.autograd.grad(linear_full_distill(*own, memory_budget=budget, **options)[0], hidden)

    scratch = 4 * BLOCK_ELEMENTS + 2**19  # and numbers of a few dozen bytes a row
    assert peak_bytes(work, torch.device("cpu")) < budget + hidden.nbytes + scratch

"""The fused LM head's products on CUDA, which adds half-precision products up in fp32 by a kernel of its own. A
stand-in sets that kernel's conditions (``_addmm_dtype_out_cuda``, torch 2.10 and later) and computes on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mopd.losses.linear import head
from tests.parity.losses.linear_topk import linear_topk, with_main_grad

CALLS: list[bool] = []
"""Whether a call added to what was there."""


def cuda_addmm(self: Tensor, a: Tensor, b: Tensor, *, out_dtype: torch.dtype, beta: int, out: Tensor) -> Tensor:
    assert a.dim() == b.dim() == 2 and a.size(1) == b.size(0) and out.shape == (a.size(0), b.size(1))
    assert a.dtype == b.dtype and (out_dtype == a.dtype or (out_dtype == torch.float32 and a.dtype in HALVES))
    assert out.dtype == out_dtype and self.dtype in (out_dtype, a.dtype)
    assert self is out, "another would be copied first"
    CALLS.append(bool(beta))
    product = a.to(out_dtype) @ b.to(out_dtype)
    return out.copy_(product + out if beta else product)


HALVES = (torch.float16, torch.bfloat16)


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    CALLS.clear()
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    monkeypatch.setattr(head.torch, "addmm", cuda_addmm)  # type: ignore[attr-defined]


@pytest.mark.parametrize("rows_at_once", [8, None])
def test_gradients_are_those_of_the_cpu(rows_at_once: int | None, request: pytest.FixtureRequest) -> None:
    """In chunks and whole, onto what ``main_grad`` holds."""
    torch.manual_seed(0)
    hidden, plain = torch.randn(48, 32).bfloat16(), torch.randn(301, 32).bfloat16()
    logq, ids = torch.log_softmax(torch.randn(48, 301), 1).topk(4, 1)

    def run() -> list[Tensor]:
        x, weight = hidden.clone().requires_grad_(), with_main_grad(plain, dtype=torch.float32)
        main: Any = weight
        main.main_grad.fill_(3.0)
        rows: dict[str, Any] = {"loss_weight": torch.full((48,), 1 / 48), "rows_at_once": rows_at_once}
        loss, _ = linear_topk(x, weight, ids, logq, backend="chunked", **rows)
        loss.backward()
        return [loss.detach(), x.grad, main.main_grad]  # type: ignore[list-item]

    expected = run()
    request.getfixturevalue("as_on_cuda")
    torch.testing.assert_close(run(), expected, rtol=1e-5, atol=1e-6)
    assert len(CALLS) == (1 if rows_at_once is None else 6) and all(CALLS)

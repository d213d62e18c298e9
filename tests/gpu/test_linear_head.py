"""The fused LM head on a CUDA device: what only CUDA's libraries do, and the memory that it is for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mopd.losses import chunked_topk_logprobs, parallel_topk_distill
from mopd.losses.linear.head import matmul_into
from tests.parity.losses.linear_topk import linear_topk, with_main_grad

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

T, H, V, K = 1024, 512, 32_001, 16
MIB = 2**20


@pytest.fixture(scope="module")
def data() -> dict[str, Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(T, H, device="cuda") / 8, torch.randn(V, H, device="cuda") / 4
    noise = torch.randn(T, V, device="cuda")
    logq, ids = torch.log_softmax(hidden @ weight.t() + noise, 1).topk(K, 1)
    loss_weight = torch.rand(T, device="cuda") / T
    return {"hidden": hidden, "weight": weight, "ids": ids, "logq": logq, "loss_weight": loss_weight}


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_half_precision_products_add_up_in_fp32(accumulate: bool, transposed: bool) -> None:
    torch.manual_seed(0)
    a = torch.randn(300, 70, device="cuda").bfloat16()
    a = a.t().contiguous().t() if transposed else a
    b = torch.randn(70, 50, device="cuda").bfloat16()
    out = torch.full((300, 50), 1000.0, device="cuda")
    matmul_into(out, a, b, accumulate=accumulate)
    expected = a.double() @ b.double() + (1000 if accumulate else 0)
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-4)


def run(data: dict[str, Tensor], dtype: torch.dtype, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    hidden = data["hidden"].clone().to(dtype).requires_grad_()
    weight = with_main_grad(data["weight"].to(dtype), dtype=torch.float32)
    loss, _ = linear_topk(hidden, weight, data["ids"], data["logq"], loss_weight=data["loss_weight"], **options)
    loss.backward()
    assert hidden.grad is not None
    return loss.detach(), hidden.grad, weight.main_grad  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", [12 * MIB, 1024 * MIB])
def test_equals_float64(data: dict[str, Tensor], budget: int, dtype: torch.dtype) -> None:
    exact = [data[name].clone().to(dtype).double().requires_grad_() for name in ("hidden", "weight")]
    rows = {"loss_weight": data["loss_weight"], "reduce_loss": True}
    loss, _ = parallel_topk_distill(exact[0] @ exact[1].t(), data["ids"], data["logq"], backend="reference", **rows)
    expected = (loss.detach(), *torch.autograd.grad(loss, exact))
    actual = run(data, dtype, memory_budget=budget)
    for name, value, wanted in zip(("loss", "hidden", "weight"), actual, expected, strict=True):
        error = float((value.double() - wanted).norm() / wanted.norm())
        assert error < (1e-5 if dtype == torch.float32 else 1e-2), (name, error)


def test_budget_is_kept(data: dict[str, Tensor]) -> None:
    """The logits take 63 MiB in bf16; the budget is 12. cuBLAS may keep a workspace of 32 MiB, made before."""
    run(data, torch.bfloat16, memory_budget=12 * MIB)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(data, torch.bfloat16, memory_budget=12 * MIB)
    inputs = (T * H + V * H) * 2 + V * H * 4
    used = torch.cuda.max_memory_allocated() - before - inputs
    assert used < (12 + 4) * MIB


def test_no_wait_for_the_device(data: dict[str, Tensor]) -> None:
    index = torch.arange(0, T, 2, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for budget in (12 * MIB, 1024 * MIB):
            run(data, torch.bfloat16, memory_budget=budget, row_index=index)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_teacher_topk(data: dict[str, Tensor]) -> None:
    hidden, weight = data["hidden"].bfloat16(), data["weight"].bfloat16()
    scored = chunked_topk_logprobs(hidden, weight, K, max_rows=100, target=data["ids"][:, 0])
    expected = torch.log_softmax((hidden @ weight.t()).double(), 1)
    torch.testing.assert_close(scored.logprobs.double(), expected.topk(K, 1).values, rtol=0, atol=1e-2)
    torch.testing.assert_close(scored.mass, scored.logprobs.exp().sum(1))

"""What ``linear_loss`` and ``chunked_topk_logprobs`` allocate stays within what they are allowed.

Measured: the highest sum of live bytes that torch's CPU allocator reports during forward and backward.
"""

from __future__ import annotations

import pytest
import torch

from mopd.bench.clock import peak_bytes
from mopd.losses import chunked_topk_logprobs
from mopd.losses.chunked.blocks import BLOCK_ELEMENTS
from tests.parity.losses.linear_topk import linear_topk, with_main_grad

T, H, V, K = 400, 32, 30_000, 8
MIB, CPU = 2**20, torch.device("cpu")
SCRATCH = 2 * 4 * BLOCK_ELEMENTS + 2 * MIB
"""The two blocks of the logits passes, and numbers of a few hundred bytes a row."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_budget_is_kept(dtype: torch.dtype) -> None:
    """The materialised logits take 46 MiB (fp32); the budget is a tenth."""
    torch.manual_seed(0)
    hidden = torch.randn(T, H).to(dtype).requires_grad_()
    weight = with_main_grad(torch.randn(V, H).to(dtype), dtype=torch.float32)
    ids, logq = torch.randint(0, V, (T, K)), torch.full((T, K), -4.0)
    logits_bytes = T * V * weight.element_size()

    def work(memory_budget: int) -> tuple[torch.Tensor, ...]:
        loss, _ = linear_topk(hidden, weight, ids, logq, memory_budget=memory_budget)
        return torch.autograd.grad(loss, (hidden, weight), allow_unused=True)

    budget = logits_bytes // 10
    frugal = peak_bytes(lambda: work(budget), CPU)
    plain = peak_bytes(lambda: work(10**9), CPU)
    results = hidden.nbytes
    assert plain > logits_bytes
    assert frugal < budget + results + SCRATCH
    assert frugal < plain / 2


def test_teacher_holds_one_chunk_of_logits() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(T, H), torch.randn(V, H)
    chunk = 20 * V * 4
    used = peak_bytes(lambda: chunked_topk_logprobs(hidden, weight, K, max_rows=20), CPU)
    assert used < 1.3 * chunk + MIB
    assert used < T * V * 4 / 10

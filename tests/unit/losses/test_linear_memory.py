"""What ``linear_loss`` and ``chunked_topk_logprobs`` allocate stays within what they are allowed.

Measured: the highest sum of live bytes that torch's CPU allocator reports during forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from mopd.losses import chunked_topk_logprobs
from mopd.losses.chunked.blocks import BLOCK_ELEMENTS
from tests.parity.losses.linear_topk import linear_topk, with_main_grad

T, H, V, K = 400, 32, 30_000, 8
MIB = 2**20
SCRATCH = 2 * 4 * BLOCK_ELEMENTS + 2 * MIB
"""The two blocks of the logits passes, and numbers of a few hundred bytes a row."""


def peak_bytes(work: Callable[[], Any]) -> int:
    """Highest sum of allocated minus freed bytes on the CPU while ``work`` runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        kept = work()
    peak = live = 0
    for event in recorded.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    del kept
    return peak


def test_the_measure_sees_what_is_allocated_and_freed() -> None:
    def work() -> torch.Tensor:
        first = torch.ones(MIB)
        second = first * 2
        del first
        return second + 1

    assert 8 * MIB <= peak_bytes(work) < 9 * MIB


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
    frugal = peak_bytes(lambda: work(budget))
    plain = peak_bytes(lambda: work(10**9))
    results = hidden.nbytes
    assert plain > logits_bytes
    assert frugal < budget + results + SCRATCH
    assert frugal < plain / 2


def test_teacher_holds_one_chunk_of_logits() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(T, H), torch.randn(V, H)
    chunk = 20 * V * 4
    used = peak_bytes(lambda: chunked_topk_logprobs(hidden, weight, K, max_rows=20))
    assert used < 1.3 * chunk + MIB
    assert used < T * V * 4 / 10

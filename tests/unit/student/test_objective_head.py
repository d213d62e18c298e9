"""The memory budget of the LM head: what the student says when it chunks, and when it cannot."""

from __future__ import annotations

import logging

import pytest
import torch

from mopd.base.types import UserError
from mopd.config.losses import TopKLossConfig
from mopd.losses import choose_rows
from mopd.student.batch import LossRows
from mopd.student.model.gpt import LMHead
from mopd.student.objective import Objective
from mopd.student.parallel import Layout

S, B, H, K = 6, 4, 2, 3


def head(vocab_size: int) -> LMHead:
    weight = torch.nn.Parameter(torch.randn(vocab_size, H))
    weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
    return LMHead(torch.randn(S, B, H, requires_grad=True), weight)


def loss_of(objective: Objective, lm_head: LMHead, loss_mask: torch.Tensor) -> torch.Tensor:
    rows = LossRows(
        loss_mask=loss_mask.flatten(),
        loss_rows=choose_rows(loss_mask),
        targets=torch.zeros(S * B, dtype=torch.int64),
        samples=torch.arange(B).repeat(S),
        num_loss_tokens=loss_mask.sum(0),
        domains=torch.zeros(B, dtype=torch.int64),
        sample_positions=torch.arange(B),
        fields={
            "teacher_ids": torch.arange(K).int().expand(S * B, K),
            "teacher_logprobs": torch.full((S * B, K), -2.0),
            "teacher_token_logprobs": torch.full((S * B,), -2.0),
        },
    )
    num_tokens = int(loss_mask.sum())
    sums = objective.new_sums(num_domains=1, num_samples=B, num_loss_tokens=num_tokens, diagnostics=False)
    return objective(lm_head, rows=rows, sums=sums)


def objective(layout: Layout, vocab_size: int) -> Objective:
    return Objective(TopKLossConfig(top_k=K), layout, true_vocab_size=vocab_size, lm_head_memory_budget_mib=1)


def test_chunks_are_announced_once(layout: Layout, caplog: pytest.LogCaptureFixture) -> None:
    mask = torch.ones(S, B, dtype=torch.bool)
    with caplog.at_level(logging.INFO):
        loss_of(objective(layout, 10_000), head(10_000), mask)
        assert not caplog.messages
        chunked = objective(layout, 30_000)
        for _ in range(2):
            loss_of(chunked, head(30_000), mask)
    (message,) = caplog.messages
    assert message == (
        "LM head: the logits of 24 tokens would take 3 MiB, more than student.lm_head_memory_budget_mib 1: such "
        "micro-batches are computed 8 tokens at a time"
    )


def test_prompt_rows_do_not_count(layout: Layout, caplog: pytest.LogCaptureFixture) -> None:
    """Seven tokens of 24 have a loss: their logits fit, and the gradient is 0 on all others."""
    mask = torch.zeros(S, B, dtype=torch.bool)
    mask[:, 1], mask[2, 3] = True, True
    lm_head = head(30_000)
    loss_of(objective(layout, 30_000), lm_head, mask).backward()
    assert not caplog.messages
    assert lm_head.hidden.grad is not None
    assert torch.equal(lm_head.hidden.grad.abs().sum(-1) > 0, mask)


def test_a_budget_below_one_row_is_refused(layout: Layout) -> None:
    said = (
        r"student.lm_head_memory_budget_mib 1 cannot be kept: memory_budget is 1048576 bytes, too little for 24 rows "
        r"of 300000 columns: set at least 1200\d+ .*; raise it, or lower student.max_tokens_per_micro_batch"
    )
    with pytest.raises(UserError, match=said):
        loss_of(objective(layout, 300_000), head(300_000), torch.ones(S, B, dtype=torch.bool))

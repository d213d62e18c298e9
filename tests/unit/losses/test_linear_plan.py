"""How many rows of an LM head a memory budget lets exist at once, and what is said when not even one fits."""

from __future__ import annotations

import pytest
import torch

from mopd.losses import LinearHead
from tests.parity.losses.linear_topk import with_main_grad

ROWS, HIDDEN, VOCAB = 10_000, 4, 2_000
ROW = 4 * VOCAB
BESIDE = 2 * 4 * HIDDEN * ROWS // 2
"""Half of the rows, gathered, and their gradient."""
HEAD = LinearHead(row_index=torch.arange(0, ROWS, 2))


def rows_within(budget: int, head: LinearHead = HEAD) -> int:
    hidden = torch.zeros(ROWS, HIDDEN, requires_grad=True)
    return head.rows_within(budget, hidden, with_main_grad(torch.zeros(VOCAB, HIDDEN)))


def test_logits_that_fit_exist_at_once() -> None:
    assert rows_within(5_000 * ROW) == 5_000
    assert rows_within(5_000 * ROW - 1) == 5_000 - 1 - BESIDE // ROW


@pytest.mark.parametrize("budget", [400_000, 4_111_111, 39_000_000])
def test_chunks_fill_the_budget_and_no_more(budget: int) -> None:
    rows = rows_within(budget)
    assert 1 < rows < 5_000 and budget - ROW < BESIDE + rows * ROW <= budget


def test_gradients_that_are_results_cost_nothing() -> None:
    assert rows_within(10 * ROW, LinearHead()) == 10


def test_a_weight_gradient_without_a_buffer_counts() -> None:
    hidden, weight = torch.zeros(ROWS, HIDDEN), torch.zeros(VOCAB, HIDDEN, requires_grad=True)
    assert LinearHead().rows_within(4 * VOCAB * HIDDEN + 10 * ROW, hidden, weight) == 10
    with torch.no_grad():
        assert LinearHead().rows_within(10 * ROW, hidden, weight) == 10


def test_what_cannot_be_kept_is_refused() -> None:
    said = (
        rf"memory_budget is 1000 bytes, too little for 5000 rows of 2000 columns: set at least {BESIDE + ROW} "
        rf"\(bytes needed: all rows at once {5_000 * ROW}, one at a time {BESIDE + ROW}\) or pass fewer rows"
    )
    with pytest.raises(ValueError, match=said):
        rows_within(1_000)

"""Which strategy a budget selects, and what is said when none can keep it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mopd.losses.linear_plan import FEWEST_ROWS, Plan, Sizes, make_plan

SIZES = Sizes(rows=10_000, columns=2_000, row=4_000, column=20_000, beside_chunks=1_000_000, beside_slices=3_000_000)
"""Logits of 40 MB."""


def plan(budget: int, strategy: str = "auto", *, scalar: bool = True, sliceable: bool = True) -> Plan:
    return make_plan(SIZES, budget, strategy, scalar=scalar, sliceable=sliceable)


def test_logits_that_fit_are_materialised() -> None:
    assert plan(40_000_000).strategy == "materialize"
    assert plan(39_999_999).strategy == "token_chunks"


@pytest.mark.parametrize("strategy", ["token_chunks", "vocab_slices"])
@pytest.mark.parametrize("budget", [4_000_000, 11_111_111, 39_000_000])
def test_pieces_fill_the_budget_and_no_more(strategy: str, budget: int) -> None:
    chosen = plan(budget, strategy)
    piece = SIZES.row if strategy == "token_chunks" else SIZES.column
    assert chosen.strategy == strategy
    assert budget - piece < chosen.bytes <= budget
    size = chosen.rows if strategy == "token_chunks" else chosen.columns
    assert size > 1


def test_pieces_are_never_more_than_there_are() -> None:
    assert plan(10**9, "token_chunks").rows == SIZES.rows
    assert plan(10**9, "vocab_slices").columns == SIZES.columns


def test_short_chunks_give_way_to_slices_where_the_loss_allows() -> None:
    few = SIZES.beside_chunks + (FEWEST_ROWS - 1) * SIZES.row
    assert plan(few + SIZES.row).strategy == "token_chunks"
    assert plan(few).strategy == "vocab_slices" or few < SIZES.beside_slices + SIZES.column
    enough_for_slices = Sizes(10_000, 2_000, 4_000, 20_000, 8_000_000, 3_000_000)
    assert make_plan(enough_for_slices, 9_000_000, "auto", scalar=True, sliceable=True).strategy == "vocab_slices"
    assert make_plan(enough_for_slices, 9_000_000, "auto", scalar=True, sliceable=False).strategy == "token_chunks"
    assert plan(1_100_000).strategy == "token_chunks"  # slices do not fit at all


def test_row_losses_cannot_form_gradients_in_forward() -> None:
    assert plan(39_000_000, scalar=False).strategy == "vocab_slices"
    with pytest.raises(ValueError, match=r"token_chunks.*reduce_loss=True"):
        plan(39_000_000, "token_chunks", scalar=False)


@pytest.mark.parametrize(
    ("budget", "options", "said"),
    [
        (1_000, {}, "memory_budget is 1000 bytes.*set at least 1004000 .*token_chunks 1004000.*vocab_slices 3020000"),
        (1_000, {"sliceable": False}, r"set at least 1004000 \(bytes needed: materialize 40000000, token_chunks 1004"),
        (1_000, {"scalar": False}, "set at least 3020000"),
        (1_000, {"strategy": "vocab_slices", "sliceable": False}, "vocab_slices.*top-k losses only"),
        (1_000, {"strategy": "fastest"}, "strategy is 'fastest': choose one of auto, materialize"),
    ],
)
def test_what_cannot_be_kept_is_refused(budget: int, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as refused:
        plan(budget, **options)
    assert re.search(said, str(refused.value)), refused.value

"""Ranks that share the tokens of each sequence change nothing.

Invariant: loss, gradient norm, metrics and log-probs of context-parallel ranks are those of one rank (1e-5 relative,
fp32), packed and right-padded, for losses of whole responses, an ensemble, and latent attention with experts and their
balancing losses; beside tensor, pipeline, data and expert parallelism, and with recompute. Images and checkpoints have
files of their own. Not exercised: CUDA, TransformerEngine.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.student import context_cases
from tests.parity.student.test_layouts import assert_same_step

pytestmark = [pytest.mark.multirank, pytest.mark.slow]

Results = dict[str, Any]
OF_ONE_RANK = context_cases.on_one_rank("", {})


def assert_same(result: Results, expected: Results) -> None:
    (step,), (wanted,) = result["steps"], expected["steps"]
    assert_same_step(step, wanted)
    for name in ("logprobs", "one_logprob"):
        if name in expected:
            for row, wanted_row in zip(result[name], expected[name], strict=True):
                assert row == pytest.approx(wanted_row, abs=1e-5)


@pytest.mark.parametrize("name", [name.removeprefix("context/one/") for name in OF_ONE_RANK])
def test_two_ranks_equal_one(two_ranks: Results, one_rank: Results, name: str) -> None:
    assert_same(two_ranks[f"context/cp2/{name}"], one_rank[f"context/one/{name}"])


@pytest.mark.parametrize("name", context_cases.on_four_ranks(""))
def test_four_ranks_equal_one(four_ranks: Results, one_rank: Results, name: str) -> None:
    _, _, case = name.split("/", 2)
    assert_same(four_ranks[name], one_rank[f"context/one/{case}"])


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_changes_nothing(two_ranks: Results, recompute: str) -> None:
    """The keys of other ranks are gathered again."""
    name = "context/cp2/masked_sequences"
    assert_same(two_ranks[f"{name}/{recompute}"], two_ranks[f"{name}/packed"])

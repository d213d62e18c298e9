"""Which loss tokens count: by response, whatever the order of the rows; how many, from lengths alone."""

from __future__ import annotations

import math

import pytest
import torch

from mopd.losses import largest_rows, num_chosen, total_chosen

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("share", "counts"),
    [(0.5, [0, 1, 1, 2, 5, 500_001]), (0.1, [0, 1, 1, 1, 1, 100_001]), (0.7, [0, 1, 2, 3, 7, 700_001]),
     (1.0, [0, 1, 2, 3, 10, 1_000_001]), (1e-30, [0, 1, 1, 1, 1, 1])],
)  # fmt: skip
def test_counts_are_the_share_rounded_up_and_at_least_one(share: float, counts: list[int]) -> None:
    """0.1 x 10 and 0.7 x 10 are whole numbers but for rounding."""
    lengths = torch.tensor([0, 1, 2, 3, 10, 1_000_001])
    assert num_chosen(lengths, share).tolist() == counts
    assert [total_chosen([n], share) for n in lengths.tolist()] == counts


@pytest.mark.parametrize(
    ("scores", "mask", "count", "chosen"),
    [
        ([0.1, 0.9, 0.5, 0.7], "1111", 2, [1, 3]),
        ([0.5, 0.5, 0.5, 0.5], "1111", 2, [0, 1]),  # the first of equal ones
        ([9.0, 0.1, 9.0, 0.2], "0101", 1, [3]),
        ([0.3, NAN, 0.5, INF], "1111", 2, [1, 3]),
        ([NAN, 0.3, 0.5, 0.1], "0111", 3, [1, 2, 3]),
        ([0.3, 0.2, 0.1, 0.0], "0000", 0, []),
    ],
)
def test_the_largest_of_each_sample(scores: list[float], mask: str, count: int, chosen: list[int]) -> None:
    """Beside a sample with other scores, its rows between this one's: of [S, B] and of a pack."""
    other = [5.0, 7.0, 6.0, 8.0]
    both = torch.tensor([scores, other])
    is_loss = torch.tensor([[letter == "1" for letter in mask], [True] * 4])
    samples = torch.tensor([[0] * 4, [1] * 4])
    for arrange in (lambda x: x.flatten(), lambda x: x.T.flatten()):
        got = largest_rows(arrange(both), arrange(is_loss), arrange(samples), torch.tensor([count, 1]))
        at = arrange(torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]]))
        assert sorted(at[got].tolist()) == [*chosen, 7]

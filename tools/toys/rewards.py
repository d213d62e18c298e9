"""Reward of the toys whose answers are chains of words."""

from __future__ import annotations

import itertools


def prefix_share(response: str, ground_truth: str, **_: object) -> float:
    """Return the share of the right answer's words that come before the response's first mistake."""
    said, right = response.split(), ground_truth.split()
    pairs = zip(said, right, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)) / len(right)

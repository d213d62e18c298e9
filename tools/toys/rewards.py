"""Rewards of the toys: of answers that are chains of words, and of answers without a call."""

from __future__ import annotations

import itertools

CALL = "<call>"
"""Token of the toy ``decision`` that ends an answer."""


def prefix_share(response: str, ground_truth: str, **_: object) -> float:
    """Return the share of the right answer's words that come before the response's first mistake."""
    said, right = response.split(), ground_truth.split()
    pairs = zip(said, right, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)) / len(right)


def no_call(response: str, **_: object) -> float:
    """Return 1 for a response without the call that no teacher makes, else 0."""
    return float(CALL not in response.split())

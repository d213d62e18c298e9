"""What a reward is: a number for each finished response, and what of the response it judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardItem:
    """One finished response and what its row says about it."""

    prompt: str
    """Rendered prompt."""
    response: str
    """Decoded response without special tokens."""
    ground_truth: Any
    extra_info: Any
    domain: str
    place: str
    """File and row number, for messages."""


@dataclass(frozen=True, slots=True)
class Graded:
    """A reward, and how it came about."""

    value: float
    """Finite."""
    extracted: str | None
    """What of the response was judged, cut where it is long; ``None``: nothing was found to judge."""
    problem: str = ""
    """Why the value is no higher, in a few words, where the reward can tell."""


class Reward(Protocol):
    """Rewards a batch of responses."""

    def check(self, item: RewardItem) -> None:
        """``UserError`` for a row whose ground truth is of no use, whatever the response."""
        ...

    async def __call__(self, items: Sequence[RewardItem]) -> list[Graded]:
        """One outcome per item; ``UserError`` when that is impossible."""
        ...

    def close(self) -> None:
        """Give up processes and files; the reward is not called again."""
        ...

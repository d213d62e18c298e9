"""What a reward is: a number for each finished response."""

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


class Reward(Protocol):
    """Rewards a batch of responses."""

    needs_ground_truth: bool

    async def __call__(self, items: Sequence[RewardItem]) -> list[float]:
        """One finite number per item; ``UserError`` when that is impossible."""
        ...

    def close(self) -> None:
        """Give up processes and files; the reward is not called again."""
        ...

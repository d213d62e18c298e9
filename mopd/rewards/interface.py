"""What a reward is: a number for each finished response; the plainest one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mopd.types import UserError


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


class ExactMatchReward:
    """1 for the right answer, 0 for any other: compares both as text after stripping surrounding white space."""

    needs_ground_truth = True

    async def __call__(self, items: Sequence[RewardItem]) -> list[float]:
        """1.0 or 0.0 per item; ``UserError`` for a ground truth that is neither text nor a number."""
        return [float(item.response.strip() == _text(item)) for item in items]

    def close(self) -> None:
        """Nothing is held."""


def _text(item: RewardItem) -> str:
    if not isinstance(item.ground_truth, (str, int, float)):
        raise UserError(
            f"{item.place}: the ground truth is {type(item.ground_truth).__name__}, exact_match compares text: point "
            "data.ground_truth_key to text or choose a custom reward"
        )
    return str(item.ground_truth).strip()

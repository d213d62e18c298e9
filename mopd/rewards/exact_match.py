"""1 for the right answer, 0 for any other."""

from __future__ import annotations

from collections.abc import Sequence

from mopd.rewards.interface import RewardItem
from mopd.types import UserError


class ExactMatchReward:
    """Compares response and ground truth as text after stripping surrounding white space."""

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

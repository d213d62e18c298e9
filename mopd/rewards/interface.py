"""The interface of a reward: a number for each finished response, and the part of the response that it judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardItem:
    """One finished response and its row's data."""

    prompt: str
    """Rendered prompt."""
    response: str
    """Decoded response without special tokens; of several turns the last."""
    ground_truth: Any
    extra_info: Any
    domain: str
    place: str
    """File and row number, for messages."""
    environment_reward: float | None = None
    """Sum of the rewards of ``rollout.environment``; ``None`` without one."""


@dataclass(frozen=True, slots=True)
class Graded:
    """A reward and its explanation."""

    value: float
    """The reward; finite."""
    extracted: str | None
    """The judged part of the response, cut if it is long; ``None``: there was nothing to judge."""
    problem: str = ""
    """Why the value is no higher, in a few words, if the reward can tell."""


class Reward(Protocol):
    """A function that grades a batch of responses."""

    def check(self, item: RewardItem) -> None:
        """Raise ``UserError`` for a row whose ground truth is unusable, whatever the response."""
        ...

    async def __call__(self, items: Sequence[RewardItem]) -> list[Graded]:
        """Return one outcome per item; ``UserError`` if that is impossible."""
        ...

    def close(self) -> None:
        """End processes and close files; the reward is not called again."""
        ...

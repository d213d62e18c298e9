"""Responses with their rows, and a reward over several of them."""

from __future__ import annotations

import asyncio
from typing import Any

from mopd.config.rewards import RewardConfig
from mopd.rewards.domains import build_rewards
from mopd.rewards.interface import Graded, RewardItem


def item(response: str, ground_truth: Any = None, **extra_info: Any) -> RewardItem:
    return RewardItem(
        prompt="p",
        response=response,
        ground_truth=ground_truth,
        extra_info=extra_info or None,
        domain="math",
        place="f: row 3",
    )


def judged(cfg: RewardConfig, *items: RewardItem) -> list[Graded]:
    """All items in one batch, by processes that are gone afterwards."""
    rewards = build_rewards({"math": cfg})
    try:
        return asyncio.run(rewards.score(items))
    finally:
        rewards.close()


def values(cfg: RewardConfig, *items: RewardItem) -> list[float]:
    return [graded.value for graded in judged(cfg, *items)]

"""The reward of each domain, as a recipe's ``validation`` section names them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from mopd.config.data import ExactMatchConfig, ValidationConfig
from mopd.config.data import Reward as RewardConfig
from mopd.rewards.custom import CustomReward
from mopd.rewards.interface import ExactMatchReward, Reward, RewardItem


class DomainRewards:
    """Sends each item to its domain's reward. Rewards with equal settings are one object."""

    def __init__(self, default: Reward, by_domain: Mapping[str, Reward]) -> None:
        self._default = default
        self._by_domain = dict(by_domain)

    def of(self, domain: str) -> Reward:
        """The reward in force for ``domain``."""
        return self._by_domain.get(domain, self._default)

    @property
    def needs_ground_truth(self) -> bool:
        """Whether any reward reads the ground truth."""
        return any(reward.needs_ground_truth for reward in self._all())

    async def score(self, items: Sequence[RewardItem]) -> list[float]:
        """One finite number per item, in their order."""
        groups: dict[int, tuple[Reward, list[int]]] = {}
        for i, item in enumerate(items):
            reward = self.of(item.domain)
            groups.setdefault(id(reward), (reward, []))[1].append(i)
        answers = await asyncio.gather(*(reward([items[i] for i in places]) for reward, places in groups.values()))
        result = [0.0] * len(items)
        for (_, places), values in zip(groups.values(), answers, strict=True):
            for i, value in zip(places, values, strict=True):
                result[i] = value
        return result

    def close(self) -> None:
        """Close every reward."""
        for reward in self._all():
            reward.close()

    def _all(self) -> list[Reward]:
        return list({id(reward): reward for reward in (self._default, *self._by_domain.values())}.values())


def build_rewards(cfg: ValidationConfig) -> DomainRewards:
    """Rewards of a ``validation`` section; ``UserError`` when the file of a custom reward does not exist."""
    built: list[tuple[RewardConfig, Reward]] = []

    def build(reward: RewardConfig) -> Reward:
        for known, existing in built:
            if known == reward:
                return existing
        built.append((reward, ExactMatchReward() if isinstance(reward, ExactMatchConfig) else CustomReward(reward)))
        return built[-1][1]

    return DomainRewards(build(cfg.reward), {domain: build(reward) for domain, reward in cfg.domain_rewards.items()})

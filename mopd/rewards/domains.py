"""The reward of each domain, as a recipe's ``rewards`` section names them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

from mopd.base.types import UserError
from mopd.config.reading.tree import shown_key
from mopd.config.rewards import DEFAULT, CustomRewardConfig, ExactMatchConfig, MultipleChoiceConfig, RewardConfig
from mopd.rewards.custom import CustomReward
from mopd.rewards.interface import Graded, Reward, RewardItem
from mopd.rewards.judged import JudgedReward
from mopd.rewards.texts import ExactMatchReward, MultipleChoiceReward


class DomainRewards:
    """The rewards of a run by domain. Rewards with equal settings are one object."""

    def __init__(self, configs: Mapping[str, RewardConfig], rewards: Mapping[str, Reward]) -> None:
        """Keep configurations and rewards by the names of the recipe, domains and ``default``."""
        self._configs = dict(configs)
        self._rewards = dict(rewards)
        self.around_calls: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        """Entered around each ``score``, whose deadline grows with the number of responses."""

    def name(self, domain: str) -> str:
        """Return key and type of a domain's reward, for messages; ``UserError`` with the key to add if it has none."""
        return f"{_key(self._known(domain))} ({self._configs[self._known(domain)].type})"

    def of(self, domain: str) -> Reward:
        """Return the reward in force for ``domain``; ``UserError`` if it has none."""
        return self._rewards[self._known(domain)]

    def unused(self, domains: Sequence[str]) -> list[str]:
        """Return the names that are none of ``domains``, probably misspelt."""
        return sorted(self._rewards.keys() - {*domains, DEFAULT})

    async def score(self, items: Sequence[RewardItem]) -> list[Graded]:
        """Return one outcome per item, in their order, each from its domain's reward."""
        groups: dict[int, tuple[Reward, list[int]]] = {}
        for i, item in enumerate(items):
            reward = self.of(item.domain)
            groups.setdefault(id(reward), (reward, []))[1].append(i)
        with self.around_calls():
            answers = await asyncio.gather(*(reward([items[i] for i in places]) for reward, places in groups.values()))
        result = [Graded(0.0, None)] * len(items)
        for (_, places), outcomes in zip(groups.values(), answers, strict=True):
            for i, outcome in zip(places, outcomes, strict=True):
                result[i] = outcome
        return result

    def close(self) -> None:
        """Close every reward, side by side: the end of a run has time for one."""
        rewards = {id(reward): reward for reward in self._rewards.values()}
        with ThreadPoolExecutor(max(1, len(rewards))) as pool:
            list(pool.map(lambda reward: reward.close(), rewards.values()))

    def _known(self, domain: str) -> str:
        if domain not in self._rewards and DEFAULT not in self._rewards:
            raise UserError(
                f"rewards has none for domain {domain!r} of the data: add {_key(domain)}, or {_key(DEFAULT)} for every "
                "domain that it does not name"
            )
        return domain if domain in self._rewards else DEFAULT


def build_rewards(configs: Mapping[str, RewardConfig]) -> DomainRewards:
    """Build the rewards of a ``rewards`` section; ``UserError`` for a file that it names and that cannot be used."""
    built: list[tuple[RewardConfig, Reward]] = []

    def build(name: str, cfg: RewardConfig) -> Reward:
        for known, existing in built:
            if known == cfg:
                return existing
        built.append((cfg, _build(cfg, _key(name))))
        return built[-1][1]

    return DomainRewards(configs, {name: build(name, cfg) for name, cfg in configs.items()})


def _build(cfg: RewardConfig, key: str) -> Reward:
    if isinstance(cfg, ExactMatchConfig):
        return ExactMatchReward()
    if isinstance(cfg, MultipleChoiceConfig):
        return MultipleChoiceReward()
    return CustomReward(cfg) if isinstance(cfg, CustomRewardConfig) else JudgedReward(cfg, key)


def _key(name: str) -> str:
    return shown_key(("rewards", name))

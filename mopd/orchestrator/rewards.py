"""The reward worker: reads sampled responses, has them judged, and writes what a policy gradient needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mopd.base.types import Prompt, SampleMeta
from mopd.data.prompts import PromptDataset
from mopd.data.tokenizer import read_texts
from mopd.data_plane.interface import Storage
from mopd.orchestrator.rollout import reward_item
from mopd.orchestrator.trajectories import last_turns
from mopd.rewards.domains import DomainRewards


@dataclass(frozen=True)
class RewardWorker:
    """Adds ``task_advantage`` to samples that have ``tokens``, for losses with ``task_reward_weight``."""

    dataset: PromptDataset
    tokenizer: PreTrainedTokenizerBase
    rewards: DomainRewards
    plane: Storage
    form: Literal["mean", "leave_one_out", "grpo"] = "mean"
    """``loss.task_advantage``."""
    cut_texts: tuple[str, ...] = ()
    """``RolloutConfig.cut_texts``."""
    has_environment: bool = False
    """Samples have ``environment_reward``."""
    _groups: Counter[str] = field(default_factory=Counter)
    """Prompts judged since the last ``take_numbers``, by domain."""
    _even: Counter[str] = field(default_factory=Counter)
    """Those of them whose responses all have one reward, and so no task advantage."""

    async def judge(self, prompts: Sequence[Prompt], samples: Sequence[SampleMeta]) -> None:
        """Write ``task_advantage`` [R] fp32 of each response, made from the rewards of its prompt's responses.

        ``samples`` holds equally many of each prompt, prompt after prompt.
        """
        await self.write(prompts, samples, await self.values(prompts, samples))

    async def values(self, prompts: Sequence[Prompt], samples: Sequence[SampleMeta]) -> Tensor:
        """Return the rewards [prompts, responses] float64 of the samples, as ``judge`` takes them."""
        names = ["tokens", "loss_mask", *(["environment_reward"] if self.has_environment else [])]
        fields = await self.plane.get([sample.sample_id for sample in samples], names)
        responses = [own[s.prompt_length :] for own, s in zip(fields["tokens"], samples, strict=True)]
        if self.has_environment:
            texts = last_turns(self.tokenizer, responses, fields["loss_mask"], self.cut_texts)
        else:
            texts = read_texts([own.tolist() for own in responses], self.tokenizer, self.cut_texts)
        given = [own.item() for own in fields["environment_reward"]] if self.has_environment else [None] * len(texts)
        per_prompt = len(samples) // len(prompts)
        values = await self.graded([prompt for prompt in prompts for _ in range(per_prompt)], texts, given)
        return torch.tensor(values, dtype=torch.float64).view(len(prompts), per_prompt)

    async def graded(
        self, prompts: Sequence[Prompt], texts: Sequence[str], given: Sequence[float | None]
    ) -> list[float]:
        """Return the reward of one response to each prompt, to which its environment has ``given`` one, if any."""
        items = [
            reward_item(self.dataset, prompt.row, text, reward)
            for prompt, text, reward in zip(prompts, texts, given, strict=True)
        ]
        return [graded.value for graded in await self.rewards.score(items)]

    async def write(self, prompts: Sequence[Prompt], samples: Sequence[SampleMeta], rewards: Tensor) -> None:
        """Write the advantages that follow from ``rewards``, as ``values`` returns them."""
        advantages = task_advantages(rewards, self.form).flatten().tolist()
        for prompt, own in zip(prompts, rewards, strict=True):
            self._groups[prompt.domain] += 1
            self._even[prompt.domain] += bool((own == own[0]).all())
        columns = [
            torch.full((sample.response_length,), advantage)
            for sample, advantage in zip(samples, advantages, strict=True)
        ]
        await self.plane.update([sample.sample_id for sample in samples], {"task_advantage": columns})

    def take_numbers(self) -> dict[str, float]:
        """Return, by domain, the share of prompts since the last call whose responses all have one reward."""
        shares = {
            f"even_rewards_share/{name}": self._even[name] / count for name, count in sorted(self._groups.items())
        }
        self._groups.clear()
        self._even.clear()
        return shares


def task_advantages(rewards: Tensor, form: Literal["mean", "leave_one_out", "grpo"]) -> Tensor:
    """Return the advantage of each response from the rewards [prompts, responses] float64; 0 where all of a prompt's
    are equal.

    Sources: RLOO, Ahmadian et al. 2024 (arXiv 2402.14740), eq. 9, for ``leave_one_out``; GRPO, Shao et al. 2024 (arXiv
    2402.03300), section 4.1.2, for ``grpo``, whose division makes easy and hard prompts weigh as much as the others.
    """
    num, centred = rewards.size(-1), rewards - rewards.mean(-1, keepdim=True)
    if form == "leave_one_out":
        return centred * (num / (num - 1))
    if form == "mean":
        return centred
    spread = rewards.std(-1, keepdim=True)
    return torch.where(spread > 0, centred / spread.clamp_min(torch.finfo(spread.dtype).tiny), 0)

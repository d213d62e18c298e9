"""The reward worker: reads sampled responses, has them judged, and writes what a policy gradient needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from mopd.base.types import Prompt, SampleMeta
from mopd.data.prompts import PromptDataset
from mopd.data_plane.interface import Storage
from mopd.orchestrator.rollout import reward_item
from mopd.rewards.domains import DomainRewards


@dataclass(frozen=True)
class RewardWorker:
    """Adds ``task_advantage`` to samples that have ``tokens``, for losses with ``task_reward_weight``."""

    dataset: PromptDataset
    tokenizer: PreTrainedTokenizerBase
    rewards: DomainRewards
    plane: Storage

    async def judge(self, prompts: Sequence[Prompt], samples: Sequence[SampleMeta]) -> None:
        """Write ``task_advantage`` [R] fp32: the reward of each response less the mean over its prompt's responses.

        ``samples`` holds equally many of each prompt, prompt after prompt.
        """
        per_prompt = len(samples) // len(prompts)
        ids = [sample.sample_id for sample in samples]
        tokens = (await self.plane.get(ids, ["tokens"]))["tokens"]
        responses = [own[sample.prompt_length :].tolist() for own, sample in zip(tokens, samples, strict=True)]
        texts = self.tokenizer.batch_decode(responses, skip_special_tokens=True)
        items = [
            reward_item(self.dataset, prompt.row, text)
            for prompt, text in zip((p for p in prompts for _ in range(per_prompt)), texts, strict=True)
        ]
        values = [graded.value for graded in await self.rewards.score(items)]
        rewards = torch.tensor(values, dtype=torch.float64).view(len(prompts), per_prompt)
        advantages = (rewards - rewards.mean(-1, keepdim=True)).flatten().tolist()
        fields = [
            torch.full((sample.response_length,), advantage)
            for sample, advantage in zip(samples, advantages, strict=True)
        ]
        await self.plane.update(ids, {"task_advantage": fields})

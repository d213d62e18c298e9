"""The rollout worker: prompts in, sampled responses into the data plane, their lengths back to the controller."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mopd.data.prompts import PromptDataset
from mopd.data_plane.local import LocalDataPlane
from mopd.engines.interface import Generation, Generator, SamplingParams
from mopd.replicas.interface import SampleFailed
from mopd.rewards.domains import DomainRewards
from mopd.rewards.interface import RewardItem
from mopd.text import one_line
from mopd.types import Prompt, SampleMeta, UserError

MAX_NAMED_SAMPLES = 8
Purpose = Literal["rollout", "validation", "generate"]


@dataclass(frozen=True)
class TaskAdvantage:
    """Reward of each response minus the mean over its prompt's responses, for losses with ``task_reward_weight``."""

    dataset: PromptDataset
    tokenizer: PreTrainedTokenizerBase
    rewards: DomainRewards

    async def __call__(self, prompts: Sequence[Prompt], responses: Sequence[Tensor]) -> list[float]:
        """``responses`` holds the same number of token sequences for each prompt, prompt after prompt."""
        per_prompt = len(responses) // len(prompts)
        texts = self.tokenizer.batch_decode([r.tolist() for r in responses], skip_special_tokens=True)
        items = [
            reward_item(self.dataset, prompt.row, text)
            for prompt, text in zip((p for p in prompts for _ in range(per_prompt)), texts, strict=True)
        ]
        values = [graded.value for graded in await self.rewards.score(items)]
        rewards = torch.tensor(values, dtype=torch.float64).view(len(prompts), per_prompt)
        return (rewards - rewards.mean(-1, keepdim=True)).flatten().tolist()


@dataclass(frozen=True)
class RolloutWorker:
    """Draws ``samples_per_prompt`` responses per prompt with the generator's weights of the moment."""

    generator: Generator
    plane: LocalDataPlane
    _: KW_ONLY
    sampling: SamplingParams
    seed: int
    samples_per_prompt: int = 1
    task_advantage: TaskAdvantage | None = None

    async def generate(self, prompts: Sequence[Prompt]) -> list[SampleMeta]:
        """Sample, put ``ROLLOUT_FIELDS`` (and ``task_advantage`` [R] fp32 where asked for), return the samples.

        Response j of a prompt has sample id ``prompt.sample_id * samples_per_prompt + j`` and a seed derived from it.
        ``UserError`` with samples, domains and the last error when no replica gives a response.
        """
        num = self.samples_per_prompt
        repeated = [prompt for prompt in prompts for _ in range(num)]
        sample_ids = [prompt.sample_id * num + j for prompt in prompts for j in range(num)]
        version = self.generator.weight_version
        seeds = [derive_seed(self.seed, sample_id) for sample_id in sample_ids]
        try:
            generations = await self.generator.generate([prompt.tokens for prompt in repeated], self.sampling, seeds)
        except SampleFailed as error:
            raise UserError(_describe(error, sample_ids, repeated)) from error
        if self.generator.weight_version != version:
            raise RuntimeError(
                f"weights changed from version {version} to {self.generator.weight_version} in a rollout"
            )
        metas = [
            _meta(sample_id, prompt, generation, version)
            for sample_id, prompt, generation in zip(sample_ids, repeated, generations, strict=True)
        ]
        await self.plane.put(metas, await self._fields(prompts, repeated, generations))
        return metas

    async def _fields(
        self, prompts: Sequence[Prompt], repeated: Sequence[Prompt], generations: Sequence[Generation]
    ) -> dict[str, list[Tensor]]:
        fields = {
            "tokens": [
                torch.cat([torch.tensor(prompt.tokens, dtype=torch.int64), generation.tokens])
                for prompt, generation in zip(repeated, generations, strict=True)
            ],
            "loss_mask": [torch.ones(len(generation.tokens), dtype=torch.bool) for generation in generations],
            "rollout_logprobs": [generation.logprobs for generation in generations],
        }
        if self.task_advantage is not None:
            advantages = await self.task_advantage(prompts, [generation.tokens for generation in generations])
            fields["task_advantage"] = [
                torch.full((len(generation.tokens),), advantage)
                for generation, advantage in zip(generations, advantages, strict=True)
            ]
        return fields


def derive_seed(seed: int, sample_id: int, purpose: Purpose = "rollout") -> int:
    """63-bit seed of one sample. Training, validation and ``mopd generate`` draw from separate families."""
    digest = hashlib.sha256(f"{purpose}:{seed}:{sample_id}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def reward_item(dataset: PromptDataset, row: int, response: str) -> RewardItem:
    """A decoded response beside what its row says."""
    found = dataset.row(row)
    return RewardItem(
        prompt=found.text,
        response=response,
        ground_truth=found.ground_truth,
        extra_info=found.extra_info,
        domain=found.domain,
        place=found.place,
    )


def _describe(error: SampleFailed, sample_ids: Sequence[int], prompts: Sequence[Prompt]) -> str:
    ids = ", ".join(str(sample_ids[i]) for i in error.positions[:MAX_NAMED_SAMPLES])
    more = f" and {len(error.positions) - MAX_NAMED_SAMPLES} more" if len(error.positions) > MAX_NAMED_SAMPLES else ""
    domains = ", ".join(repr(domain) for domain in sorted({prompts[i].domain for i in error.positions}))
    reason = one_line(error)
    return f"rollout gave no response for samples {ids}{more} of domain {domains}: {reason}: see the replicas' logs"


def _meta(sample_id: int, prompt: Prompt, generation: Generation, weight_version: int) -> SampleMeta:
    return SampleMeta(
        sample_id=sample_id,
        domain=prompt.domain,
        weight_version=weight_version,
        prompt_length=len(prompt.tokens),
        response_length=len(generation.tokens),
        num_loss_tokens=len(generation.tokens),
        truncated=generation.finish_reason == "length",
    )

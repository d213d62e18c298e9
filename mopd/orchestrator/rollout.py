"""The rollout worker: prompts in, sampled responses into the data plane, their lengths back to the controller."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from mopd.base.text import encodable, named_samples, one_line
from mopd.base.types import ROUTES_FIELD, Prompt, SampleMeta
from mopd.data.image_refs import image_refs_to_tensor
from mopd.data.prompts import PromptDataset, PromptRow
from mopd.data_plane.interface import Storage
from mopd.engines.concurrency import all_or_none
from mopd.engines.interface import Generation, Generator, Images, SamplingParams, ToDraw
from mopd.engines.replicas.interface import SampleFailed
from mopd.orchestrator.prefixes import Prefixes, behind
from mopd.orchestrator.trajectories import Player, Segmented, Trajectory, draw_turns, join_parts
from mopd.rewards.interface import RewardItem

HASH_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5], np.uint64)
"""Odd 64-bit numbers, as of xxHash."""


@dataclass(frozen=True)
class RolloutWorker:
    """Draws ``samples_per_prompt`` responses per prompt with the generator's current weights."""

    generator: Generator
    plane: Storage
    dataset: PromptDataset
    _: KW_ONLY
    sampling: SamplingParams
    seed: int
    samples_per_prompt: int = 1
    masked_tail: int = 0
    """Last tokens of a truncated response that carry no loss."""
    limit: Callable[[int], int] | None = None
    """Most tokens of a response by its prompt's number (``Recipe.response_limit``); ``None``: those of ``sampling``."""
    player: Player | None = None
    """Player of responses of several turns, where the recipe has an environment."""
    prefixes: Prefixes | None = None
    """First parts of responses that are given, where the recipe has them."""

    async def generate(
        self, prompts: Sequence[Prompt], *, ended: Callable[[Prompt, int], None] | None = None
    ) -> list[SampleMeta]:
        """Draw responses, put ``ROLLOUT_FIELDS`` and ``token_versions`` [R] int32, and return the samples, prompt after
        prompt. Where ``sampling`` asks for most probable ids also put ``student_ids`` [R, ``num_top_ids``] int32, where
        it asks for them ``routes``, for a student that sees images ``images`` (``image_refs_to_tensor``), with an
        environment ``environment_reward`` [1] fp32.

        Response j of a prompt has sample id ``prompt.sample_id * samples_per_prompt + j`` and a seed derived from it.
        ``ended(prompt, weight_version)`` is called once for each response, with the weights of its newest token: as
        soon as it is complete if the engine tells that, else with the others.
        ``UserError`` with samples, domains and the last error if no replica gives a response.
        """
        num = self.samples_per_prompt
        repeated = [prompt for prompt in prompts for _ in range(num)]
        sample_ids = [prompt.sample_id * num + j for prompt in prompts for j in range(num)]
        try:
            given = None if self.prefixes is None else await self.prefixes.of(prompts)
            responses = await self._responses(repeated, sample_ids, given or [()] * len(repeated), ended)
        except SampleFailed as error:
            named = named_samples(
                [sample_ids[i] for i in error.positions], {repeated[i].domain for i in error.positions}
            )
            raise error.ends(
                f"rollout gave no response for samples {named}: {one_line(error)}: see the replicas' logs"
            ) from error
        return await put_samples(
            self.plane,
            self.dataset,
            repeated,
            sample_ids,
            responses,
            masked_tail=self.masked_tail,
            has_horizon=self._has_horizon,
        )

    async def _responses(
        self,
        prompts: Sequence[Prompt],
        sample_ids: Sequence[int],
        given: Sequence[Sequence[int]],
        ended: Callable[[Prompt, int], None] | None,
    ) -> list[Generation]:
        """Return one complete response per sample, each behind what is ``given`` of it."""
        waiting = set(range(len(prompts)))
        segments: Counter[int] = Counter()

        def note_end(index: int, part: Generation) -> None:
            if ended is not None and index in waiting and part.finish_reason != "handed_back":
                waiting.remove(index)
                ended(prompts[index], int(part.token_versions.max()))

        def next_seed(index: int) -> int:
            segments[index] += 1
            return self._seed(prompts[index], sample_ids[index], segments[index] - 1)

        async def draw(
            numbers: Sequence[int],
            starts: Sequence[tuple[int, ...]],
            limits: Sequence[int],
            on_end: Callable[[int, Generation], None] = lambda number, part: None,
        ) -> list[Generation]:
            seeds = [next_seed(i) for i in numbers]
            images = self.dataset.images_of([prompts[i].row for i in numbers])
            parts = await draw_turns(self.generator, starts, self.sampling, limits, seeds, images, numbers, on_end)

            async def complete(place: int) -> Generation:
                index = numbers[place]
                response = await self._finished(
                    starts[place], limits[place], parts[place], prompts[index].row, partial(next_seed, index)
                )
                on_end(index, response)
                return response

            return await all_or_none(complete(place) for place in range(len(numbers)))

        limits = [self._sampling(prompt).max_new_tokens - len(own) for prompt, own in zip(prompts, given, strict=True)]
        if self.player is None:
            starts = [(*self._tokens(prompt), *own) for prompt, own in zip(prompts, given, strict=True)]
            drawn = await draw(range(len(prompts)), starts, limits, note_end)
            return [behind(own, response) for own, response in zip(given, drawn, strict=True)]
        rows = [self.dataset.row(prompt.row) for prompt in prompts]
        seeds = [self._seed(prompt, number, 0) for prompt, number in zip(prompts, sample_ids, strict=True)]
        return [*await self.player.play(rows, seeds, limits, draw, ended=note_end)]

    async def _finished(
        self, start: tuple[int, ...], limit: int, part: Generation, row: int, next_seed: Callable[[], int]
    ) -> Generation:
        """Return the whole turn that begins with ``part``, behind ``start``. A turn handed back because new weights
        arrived continues with what stands there as the next prompt, on any replica with room; each segment has a seed
        of its own."""
        parts = [part]
        while parts[-1].finish_reason == "handed_back":
            # a continued turn may be handed back again
            prefix = torch.cat([own.tokens for own in parts]).tolist()
            sampling = replace(self.sampling, max_new_tokens=limit - len(prefix), num_begun=len(prefix))
            images = self.dataset.images_of([row])
            asked = ToDraw([(*start, *prefix)], sampling, [next_seed()], images=images)
            parts += await self.generator.generate(asked)
        return part if len(parts) == 1 else join_parts(parts, parts[-1].finish_reason)

    def take_numbers(self) -> dict[str, float]:
        """Return the numbers of player and prefixes since the last call."""
        sources = [source for source in (self.player, self.prefixes) if source is not None]
        return {name: value for source in sources for name, value in source.take_numbers().items()}

    def _sampling(self, prompt: Prompt) -> SamplingParams:
        if self.limit is None:
            return self.sampling
        return replace(self.sampling, max_new_tokens=self.limit(prompt.sample_id))

    def _has_horizon(self, prompt: Prompt) -> bool:
        return self._sampling(prompt).max_new_tokens < self.sampling.max_new_tokens

    def _tokens(self, prompt: Prompt) -> tuple[int, ...]:
        return self.dataset.row(prompt.row).tokens

    def _seed(self, prompt: Prompt, sample_id: int, segment: int) -> int:
        """Return the seed of one segment of one draw: equal runs draw equal responses."""
        if prompt.attempt == segment == 0:
            return derive_seed(self.seed, sample_id)
        return derive_seed(self.seed, sample_id, purpose=f"rollout {prompt.attempt} {segment}")


async def put_samples(
    plane: Storage,
    dataset: PromptDataset,
    prompts: Sequence[Prompt],
    sample_ids: Sequence[int],
    responses: Sequence[Generation],
    *,
    masked_tail: int = 0,
    has_horizon: Callable[[Prompt], bool] = lambda _: False,
) -> list[SampleMeta]:
    """Put the fields of new samples, one prompt and response each, and return them. ``masked_tail``: last tokens of a
    truncated response without loss. ``has_horizon``: a prompt's responses stop before they are as long as they may be,
    and that is no truncation."""
    rows = [dataset.row(prompt.row) for prompt in prompts]
    starts = [
        response.prompt if isinstance(response, Trajectory) else row.tokens
        for row, response in zip(rows, responses, strict=True)
    ]
    horizons = [has_horizon(prompt) for prompt in prompts]
    masks = [
        _loss_mask(response, 0 if stops_early else masked_tail)
        for response, stops_early in zip(responses, horizons, strict=True)
    ]
    metas = [
        _meta(sample_id, prompt, len(start), response, int(mask.sum()), has_horizon=stops_early)
        for sample_id, prompt, start, response, mask, stops_early in zip(
            sample_ids, prompts, starts, responses, masks, horizons, strict=True
        )
    ]
    fields = {
        "tokens": [
            torch.cat([torch.tensor(start, dtype=torch.int64), response.tokens])
            for start, response in zip(starts, responses, strict=True)
        ],
        "loss_mask": masks,
        "rollout_logprobs": [response.logprobs for response in responses],
        "token_versions": [response.token_versions for response in responses],
    }
    routes = [response.routes for response in responses if response.routes is not None]
    if routes:
        fields[ROUTES_FIELD] = routes
    tops = [response.top_ids for response in responses if response.top_ids is not None]
    if tops:
        fields["student_ids"] = tops
    played = [response for response in responses if isinstance(response, Trajectory)]
    if played:
        fields["environment_reward"] = [torch.tensor([response.reward]) for response in played]
    if dataset.images is not None:
        fields["images"] = [image_refs_to_tensor(row.images) for row in rows]
    await plane.put(metas, fields)
    return metas


async def play_turns(
    player: Player,
    generator: Generator,
    rows: Sequence[PromptRow],
    sampling: SamplingParams,
    seeds: Sequence[int],
    images: Images,
) -> list[Trajectory]:
    """Return a trajectory for each row, of at most ``sampling.max_new_tokens`` tokens; what it draws follows from its
    seed."""
    turns: Counter[int] = Counter()

    async def draw(
        numbers: Sequence[int], starts: Sequence[tuple[int, ...]], limits: Sequence[int]
    ) -> list[Generation]:
        own = [derive_seed(seeds[i], turns[i], "turn") if turns[i] else seeds[i] for i in numbers]
        turns.update(numbers)
        seen = None if images is None else [images[i] for i in numbers]
        return await draw_turns(generator, starts, sampling, limits, own, seen, numbers)

    return await player.play(rows, seeds, [sampling.max_new_tokens] * len(rows), draw)


def derive_seed(seed: int, sample_id: int, purpose: str = "rollout") -> int:
    """Return the 63-bit seed of one sample. Training, ``validation`` and ``generate`` draw from separate families."""
    digest = hashlib.sha256(f"{purpose}:{seed}:{sample_id}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def reward_item(dataset: PromptDataset, row: int, response: str, environment_reward: float | None = None) -> RewardItem:
    """Return a decoded response together with its row's data."""
    found = dataset.row(row)
    return RewardItem(
        prompt=found.text,
        response=encodable(response),
        ground_truth=found.ground_truth,
        extra_info=found.extra_info,
        domain=found.domain,
        place=found.place,
        environment_reward=environment_reward,
    )


def repeated_share(tokens: Tensor) -> float:
    """Return the share of the 4-grams of ``tokens`` [R] that stand earlier in them: what a loop drives to 1. It is 0
    for fewer than 4 tokens.

    Source: ``seq-rep-4`` of Welleck et al. 2019 (arXiv 1908.04319), section 6.
    """
    grams = tokens.unfold(0, 4, 1).numpy() if len(tokens) >= 4 else tokens.new_zeros(1, 4).numpy()
    # 64 bits of a hash tell them apart, and sort faster than rows
    hashes = (grams.astype(np.uint64) * HASH_FACTORS).sum(1, dtype=np.uint64)
    return 1 - len(np.unique(hashes)) / len(hashes)


def _loss_mask(response: Generation, masked_tail: int) -> Tensor:
    """Return [R] bool: all tokens of a response but those that were given, and of one that was cut its last
    ``masked_tail``."""
    own = response.loss_mask if isinstance(response, Segmented) else torch.ones(len(response.tokens)).bool()
    is_kept = torch.arange(len(own)) < len(own) - masked_tail
    return own & is_kept if response.finish_reason == "length" else own


def _meta(
    sample_id: int,
    prompt: Prompt,
    prompt_length: int,
    response: Generation,
    num_loss_tokens: int,
    *,
    has_horizon: bool,
) -> SampleMeta:
    versions = set(response.token_versions.tolist())
    is_cut = response.finish_reason == "length"
    return SampleMeta(
        sample_id=sample_id,
        domain=prompt.domain,
        weight_version=min(versions),
        prompt_length=prompt_length,
        response_length=len(response.tokens),
        num_loss_tokens=num_loss_tokens,
        truncated=is_cut and not has_horizon,
        at_horizon=is_cut and has_horizon,
        repeated_share=repeated_share(response.tokens),
        num_versions=len(versions),
        version_span=max(versions) - min(versions),
    )

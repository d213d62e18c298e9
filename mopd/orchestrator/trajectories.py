"""Responses of several turns: the student draws one, the environment answers, and the student goes on behind it.

A trajectory is the prompt and then segments, drawn or given. Its ids only grow: each turn's prompt is all that stands
there, and what was drawn is never encoded again (``data/turns.py``). Every trajectory of a call is asked for its next
turn together with the others, so that a call's batches, and with them torch's last bits, do not depend on who is quick.
Shapes: R response tokens of one trajectory, given ones included.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mopd.base.metrics import is_counted
from mopd.base.text import encodable, one_line
from mopd.data.prompts import PromptRow
from mopd.data.tokenizer import read_texts
from mopd.data.turns import TurnFrame
from mopd.engines.concurrency import all_or_none
from mopd.engines.interface import FinishReason, Generation, Generator, Images, SamplingParams, ToDraw
from mopd.environments.process import EnvironmentFailed, Environments, Episode

logger = logging.getLogger(__name__)
Draw = Callable[[Sequence[int], Sequence[tuple[int, ...]], Sequence[int]], Awaitable[list[Generation]]]
"""``draw(numbers, starts, limits)``: the next turn of some trajectories, each with its number, all ids before the turn,
and the most tokens of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segmented(Generation):
    """A response of drawn and given tokens. Given ones have log-prob 0 and the version of a drawn one beside them."""

    loss_mask: Tensor
    """[R] bool: the student drew the token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory(Segmented):
    """A response of several turns."""

    prompt: tuple[int, ...]
    """Ids of the prompt: the row's, or of the messages that the environment began with."""
    reward: float
    """Sum of the environment's rewards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A part of a trajectory, as people read it."""

    text: str
    """With special tokens."""
    is_given: bool
    """Template and environment wrote it; otherwise the student drew it."""


@dataclass
class _Playing:
    """A trajectory under way."""

    episode: Episode
    prompt: tuple[int, ...]
    limit: int
    """Most tokens of the response."""
    parts: list[Generation] = field(default_factory=list)
    """Segments in order, given ones as generations with log-prob 0."""
    drawn: list[bool] = field(default_factory=list)
    """Whether each of them was drawn."""
    reward: float = 0.0
    num_bad_calls: int = 0
    """Turns that were answered with a line of an error."""
    reason: FinishReason = "length"

    @property
    def length(self) -> int:
        return sum(len(part.tokens) for part in self.parts)

    @property
    def start(self) -> tuple[int, ...]:
        return (*self.prompt, *(token for part in self.parts for token in part.tokens.tolist()))

    def give(self, ids: Sequence[int]) -> None:
        """Append tokens that the student did not draw."""
        self.parts.append(given_part(ids, self.parts[-1], -1))
        self.drawn.append(False)

    def whole(self) -> Trajectory:
        """Return the trajectory as it is."""
        joined = join_parts(self.parts, self.reason)
        masks = [torch.full((len(p.tokens),), own) for p, own in zip(self.parts, self.drawn, strict=True)]
        return Trajectory(
            **{name: getattr(joined, name) for name in Generation.__dataclass_fields__},
            prompt=self.prompt,
            loss_mask=torch.cat(masks),
            reward=self.reward,
        )


def given_part(ids: Sequence[int], neighbour: Generation, place: int) -> Generation:
    """Return tokens that the student did not draw, beside token ``place`` of what it drew."""
    tops = neighbour.top_ids
    return Generation(
        tokens=torch.tensor(ids, dtype=torch.int64),
        logprobs=torch.zeros(len(ids)),
        finish_reason="stop",
        token_versions=neighbour.token_versions[place].expand(len(ids)),
        top_ids=None if tops is None else tops.new_zeros(len(ids), tops.shape[1]),
    )


def join_parts(parts: Sequence[Generation], reason: FinishReason) -> Generation:
    """Return the segments of one response as one, which ended for ``reason``."""
    tops = [own.top_ids for own in parts if own.top_ids is not None]
    # Each drawn part tells of all that stands before it: what it was drawn behind has gone its own ways already.
    routes: Tensor | None = None
    for own in parts:
        if own.routes is not None:
            routes = own.routes if routes is None else torch.cat([routes, own.routes[len(routes) :]])
    return Generation(
        routes=routes,
        tokens=torch.cat([own.tokens for own in parts]),
        top_ids=torch.cat(tops) if tops else None,
        logprobs=torch.cat([own.logprobs for own in parts]),
        token_versions=torch.cat([own.token_versions for own in parts]),
        finish_reason=reason,
    )


async def draw_turns(
    generator: Generator,
    starts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    limits: Sequence[int],
    seeds: Sequence[int],
    images: Images,
    numbers: Sequence[int],
    on_response: Callable[[int, Generation], None] = lambda number, part: None,
) -> list[Generation]:
    """Return what the generator draws behind ``starts``, each at most as long as its limit; those of equal limits are
    one request. ``on_response`` is called with the numbers that the sequences have among ``numbers``."""
    drawn: dict[int, Generation] = {}

    async def draw(limit: int) -> None:
        own = [place for place, one in enumerate(limits) if one == limit]
        asked = ToDraw(starts, replace(sampling, max_new_tokens=limit), seeds, images=images).at(own)
        parts = await generator.generate(asked, on_response=lambda i, part: on_response(numbers[own[i]], part))
        drawn.update(zip(own, parts, strict=True))

    await all_or_none(draw(limit) for limit in dict.fromkeys(limits))
    return [drawn[place] for place in range(len(starts))]


class Player:
    """Plays trajectories in the recipe's environment."""

    def __init__(self, environments: Environments, frame: TurnFrame, *, max_prompt_length: int) -> None:
        """``max_prompt_length``: limit of a prompt that the environment makes of its own."""
        self.environments, self._frame, self._cfg = environments, frame, environments.cfg
        self._max_prompt_length = max_prompt_length
        self._numbers: dict[str, Counter[str]] = {
            name: Counter() for name in ("responses", "turns", "tokens", "given", "bad_calls")
        }
        self._rewards: defaultdict[str, float] = defaultdict(float)
        self._errors: Counter[str] = Counter()

    async def play(
        self,
        rows: Sequence[PromptRow],
        seeds: Sequence[int],
        limits: Sequence[int],
        draw: Draw,
        *,
        ended: Callable[[int, Trajectory], None] = lambda number, trajectory: None,
    ) -> list[Trajectory]:
        """Return one trajectory for each row, with a seed for its environment and at most ``limits`` tokens.
        ``ended`` is called for each as soon as it is complete.

        Raises:
            UserError: the environment fails, and ``on_error`` is ``stop``; or an episode does not begin.
        """
        playing = await all_or_none(
            self._begun(row, seed, limit) for row, seed, limit in zip(rows, seeds, limits, strict=True)
        )
        live = list(range(len(playing)))
        for turn in range(1, self._cfg.max_turns + 1):
            most = [self._room(playing[i]) for i in live]
            parts = await draw(live, [playing[i].start for i in live], most)
            goes_on = await all_or_none(
                self._after(playing[i], part, turn, rows[i]) for i, part in zip(live, parts, strict=True)
            )
            for i, more in zip(live, goes_on, strict=True):
                if not more:
                    if is_counted():
                        self._count(rows[i].domain, playing[i])
                    ended(i, playing[i].whole())
            live = [i for i, more in zip(live, goes_on, strict=True) if more]
            if not live:
                break
        return [one.whole() for one in playing]

    def take_numbers(self) -> dict[str, float]:
        """Return metrics by domain of what counts to a step, since the last call: turns of a response, tokens and
        reward of a turn, the share of a response's tokens that were given, the share of turns that were answered with
        an error, and responses whose environment failed."""
        values: dict[str, float] = {}
        counts = self._numbers
        for domain, number in sorted(counts["responses"].items()):
            turns, given = counts["turns"][domain], counts["given"][domain]
            values[f"turns/{domain}"] = turns / number
            values[f"turn_length/{domain}"] = (counts["tokens"][domain] - given) / turns
            values[f"turn_reward/{domain}"] = self._rewards[domain] / turns
            values[f"tool_errors/{domain}"] = counts["bad_calls"][domain] / turns
            values[f"given_share/{domain}"] = given / counts["tokens"][domain]
            values[f"environment_errors/{domain}"] = float(self._errors[domain])
        for counter in (*counts.values(), self._errors):
            counter.clear()
        self._rewards.clear()
        return values

    async def _begun(self, row: PromptRow, seed: int, limit: int) -> _Playing:
        told = {
            "prompt": row.text, "domain": row.domain, "ground_truth": row.ground_truth, "extra_info": row.extra_info,
        }  # fmt: skip
        episode = await self.environments.reset(told, seed)
        if episode.messages is None:
            return _Playing(episode, row.tokens, limit)
        prompt = await asyncio.to_thread(self._frame.prompt, episode.messages, f"{row.place}: messages of reset")
        problem = f"began with a prompt of {len(prompt)} tokens, data.max_prompt_length is {self._max_prompt_length}"
        if row.images or row.views:
            problem = "began with messages of its own, but the row has images, or a view for a teacher"
        elif len(prompt) <= self._max_prompt_length:
            return _Playing(episode, prompt, limit)
        raise self.environments.error(EnvironmentFailed(f"{problem}, for {row.place}"))

    def _room(self, one: _Playing) -> int:
        left = one.limit - one.length
        return left if self._cfg.max_tokens_per_turn is None else min(left, self._cfg.max_tokens_per_turn)

    async def _after(self, one: _Playing, part: Generation, turn: int, row: PromptRow) -> bool:
        """Add a turn, and what the environment answers; return whether another turn follows. A turn that was cut is
        half a sentence, which nobody answers; an observation behind which nothing is drawn is left out."""
        one.parts.append(part)
        one.drawn.append(True)
        try:
            if part.finish_reason == "stop":
                ids = part.tokens.tolist()
                observation, reward = await one.episode.step(self._frame.said(ids))
                one.reward += reward
                one.num_bad_calls += any(line.startswith("error: ") for line in (observation or "").splitlines())
                if observation is None:
                    one.reason = "stop"
                elif turn < self._cfg.max_turns:
                    given = self._frame.given(observation, ids[-1])
                    if one.length + len(given) < one.limit:
                        one.give(given)
                        return True
            await one.episode.close()
        except EnvironmentFailed as failed:
            if not self.environments.goes_on:
                raise self.environments.error(failed) from failed
            self._errors[row.domain] += int(is_counted())
            logger.warning("%s: the environment %s", row.place, one_line(failed))
            with contextlib.suppress(EnvironmentFailed):  # counted above
                await one.episode.close()
        return False

    def _count(self, domain: str, one: _Playing) -> None:
        self._rewards[domain] += one.reward
        for name, number in (
            ("responses", 1), ("turns", sum(one.drawn)), ("tokens", one.length), ("bad_calls", one.num_bad_calls),
            ("given", sum(len(p.tokens) for p, own in zip(one.parts, one.drawn, strict=True) if not own)),
        ):  # fmt: skip
            self._numbers[name][domain] += number


def segments_of(tokenizer: PreTrainedTokenizerBase, response: Generation) -> list[Segment]:
    """Return the parts of a trajectory in order; none of another response."""
    if not isinstance(response, Trajectory):
        return []
    pairs = zip(response.loss_mask.tolist(), response.tokens.tolist(), strict=True)
    return [
        Segment(text=encodable(str(tokenizer.decode([token for _, token in own]))), is_given=not is_drawn)
        for is_drawn, own in itertools.groupby(pairs, itemgetter(0))
    ]


def last_turns(
    tokenizer: PreTrainedTokenizerBase,
    responses: Sequence[Tensor],
    masks: Sequence[Tensor],
    cut_texts: Sequence[str] = (),
) -> list[str]:
    """Return the text of each response's last turn, which rewards judge, up to the first of ``cut_texts``: [R] ids, and
    the student's among them."""
    own = []
    for tokens, mask in zip(responses, masks, strict=True):
        end = int(mask.nonzero()[-1]) if mask.any() else 0
        given = (~mask[:end]).nonzero()
        own.append(tokens[int(given[-1]) + 1 if len(given) else 0 :].tolist())
    return read_texts(own, tokenizer, cut_texts)

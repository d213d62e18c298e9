"""First parts of training responses that are given: of a teacher's answer, or of the row's reference.

A response is then given tokens and the drawn ones behind them, in one sequence of ids: teachers score it as a whole,
losses see the drawn ones alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedTokenizerBase

from mopd.base.types import Prompt, UserError
from mopd.config.rollout import PrefixConfig
from mopd.config.schema import Recipe
from mopd.data.prompts import PromptDataset, PromptRow
from mopd.data.turns import PlainText
from mopd.engines.interface import Generation
from mopd.orchestrator.trajectories import Segmented, given_part, join_parts

AnswersOf = Callable[[Sequence[Prompt]], Awaitable[list[Generation]]]
"""``AnswerWorker.draw``: ``samples_per_prompt`` answers to each prompt."""
KEY = "rollout.prefix.source 'data'"


@dataclass(frozen=True, kw_only=True)
class Prefixes:
    """What is given of each response."""

    cfg: PrefixConfig
    dataset: PromptDataset
    prompts_per_step: int
    samples_per_prompt: int
    longest: int
    """Most tokens of a response, of which the student draws at least the last."""
    answers: AnswersOf | None
    """Source of the teachers' answers, ``source: teacher``."""
    plain: PlainText | None
    """Encodes references, ``source: data``."""
    _given: Counter[str] = field(default_factory=Counter)
    """Given tokens since the last ``take_numbers``, by domain."""
    _prompts: Counter[str] = field(default_factory=Counter)
    """Prompts likewise."""

    async def of(self, prompts: Sequence[Prompt]) -> list[Sequence[int]]:
        """Return the ids that each response begins with, ``samples_per_prompt`` of each prompt, prompt after prompt.
        None is asked for in steps whose share is 0. Raises as ``AnswerWorker.draw``."""
        shares = [self.cfg.at(prompt.sample_id // self.prompts_per_step) for prompt in prompts]
        asked = [prompt for prompt, share in zip(prompts, shares, strict=True) if share]
        whole = iter(await self._whole(asked))
        given: list[Sequence[int]] = []
        for prompt, share in zip(prompts, shares, strict=True):
            own = [next(whole) if share else () for _ in range(self.samples_per_prompt)]
            given += [ids[: min(int(share * len(ids)), self.longest - 1)] for ids in own]
            self._prompts[prompt.domain] += 1
            self._given[prompt.domain] += sum(map(len, given[-self.samples_per_prompt :]))
        return given

    def take_numbers(self) -> dict[str, float]:
        """Return the mean number of given tokens of a response since the last call, by domain."""
        values = {
            f"prefix_length/{domain}": self._given[domain] / (number * self.samples_per_prompt)
            for domain, number in sorted(self._prompts.items())
        }
        self._given.clear()
        self._prompts.clear()
        return values

    async def _whole(self, prompts: Sequence[Prompt]) -> list[Sequence[int]]:
        """Return what prefixes are cut from; of a teacher's answer all but the token that ends it."""
        if self.answers is not None:
            drawn = await self.answers(prompts)
            return [own.tokens.tolist()[: len(own.tokens) - (own.finish_reason == "stop")] for own in drawn]
        assert self.plain is not None, "the reference of a row is read by an encoder"
        own = [self.plain.encode(reference(self.cfg, self.dataset.row(prompt.row))) for prompt in prompts]
        return [ids for ids in own for _ in range(self.samples_per_prompt)]


def build_prefixes(
    recipe: Recipe, dataset: PromptDataset, tokenizer: PreTrainedTokenizerBase, answers: AnswersOf | None
) -> Prefixes | None:
    """Return the prefixes of a recipe's training responses; ``None`` where the student draws all of them."""
    cfg = recipe.rollout.prefix
    if cfg is None:
        return None
    return Prefixes(
        cfg=cfg,
        dataset=dataset,
        prompts_per_step=recipe.schedule.prompts_per_step,
        samples_per_prompt=recipe.rollout.samples_per_prompt,
        longest=recipe.rollout.max_response_length,
        answers=answers if cfg.source == "teacher" else None,
        plain=PlainText(tokenizer, KEY) if cfg.source == "data" else None,
    )


def check_references(cfg: PrefixConfig, dataset: PromptDataset, tokenizer: PreTrainedTokenizerBase) -> None:
    """``UserError`` with the place of the first row that lacks the text which a prefix is cut from, or for a tokenizer
    that cannot encode it."""
    if cfg.source == "data":
        PlainText(tokenizer, KEY)
        for row in dataset.rows:
            reference(cfg, row)


def reference(cfg: PrefixConfig, row: PromptRow) -> str:
    """Return the text that a row's prefix is cut from. ``UserError`` with the row's place where there is none."""
    name, found = cfg.reference, row.ground_truth
    if name is not None:
        found = row.extra_info.get(name) if isinstance(row.extra_info, dict) else None
    if isinstance(found, str) and found:
        return found
    what = "ground_truth" if name is None else f"extra_info.{name}"
    raise UserError(
        f"{row.place}: {what} is {found!r:.60}, and {KEY} begins responses with its text: store "
        "a text there, or set rollout.prefix.reference"
    )


def behind(given: Sequence[int], drawn: Generation) -> Generation:
    """Return a response as it is trained on: what was given, and what was drawn behind it."""
    if not given:
        return drawn
    joined = join_parts([given_part(given, drawn, 0), drawn], drawn.finish_reason)
    return Segmented(
        **{name: getattr(joined, name) for name in Generation.__dataclass_fields__},
        loss_mask=torch.arange(len(joined.tokens)) >= len(given),
    )

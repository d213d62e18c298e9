"""Reward per domain on held-out prompts, while training and apart from it, and its file.

Uses no training randomness: seeds derive from row numbers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from mopd.base.files.json_text import MAX_DEPTH, MAX_VALUES, parse_json
from mopd.base.metrics import MAX_LINE_BYTES, JsonlWriter, apart
from mopd.base.text import encodable, one_line
from mopd.base.types import UserError
from mopd.config.schema import Recipe
from mopd.data.image_files import read_rgb
from mopd.data.prompts import PromptDataset, PromptView
from mopd.data.tokenizer import load_tokenizer, stops_of
from mopd.engines.interface import Generation, Generator, SamplingParams, ToDraw
from mopd.orchestrator.rollout import derive_seed, play_turns, reward_item
from mopd.orchestrator.trajectories import Player, Segment, Trajectory, last_turns, segments_of
from mopd.report.thumbnails import MAX_THUMBNAILS, thumbnail
from mopd.rewards.domains import DomainRewards
from mopd.rewards.interface import Graded, RewardItem

logger = logging.getLogger(__name__)
NUM_EXAMPLES = 4
"""Generations per domain that are kept for the report: what one screen of it shows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationResult:
    """Results by domain, domains in alphabetical order."""

    rewards: dict[str, float]
    """Mean reward over all responses."""
    num_samples: dict[str, int]
    """Number of responses."""
    truncated_share: dict[str, float]
    """Share of responses that ended at the length limit."""
    extracted_share: dict[str, float]
    """Share of responses in which the reward found something to judge."""
    examples: dict[str, list[dict[str, Any]]]
    """Examples of the first rows: ``{prompt, response, ground_truth, reward, extracted, problem}``. ``extracted`` is
    what the reward judged (``None``: nothing), ``problem`` why its value is no higher. Rows with images also have
    ``images`` (``thumbnail``), those of a teacher with a view of its own ``view``, the text that it read."""
    scores: dict[str, list[float]] = field(default_factory=dict)
    """Mean reward of each prompt's responses, prompt after prompt."""
    pass_at_k: dict[str, float] = field(default_factory=dict)
    """Mean over prompts of the best of their responses; empty with one response a prompt."""
    prompts: dict[str, str] = field(default_factory=dict)
    """Digest of the prompts: equal ones were asked in the same order."""


class Validator:
    """Validates a generator."""

    def __init__(
        self,
        recipe: Recipe,
        dataset: PromptDataset,
        tokenizer: PreTrainedTokenizerBase,
        rewards: DomainRewards,
        player: Player | None = None,
    ) -> None:
        assert recipe.validation is not None, "there are no validation prompts without the section"
        self._recipe, self._cfg = recipe, recipe.validation
        self._dataset, self._tokenizer, self._rewards, self._player = dataset, tokenizer, rewards, player

    @property
    def domains(self) -> tuple[str, ...]:
        """Domains of the validation prompts that are taught, not only watched."""
        return tuple(domain for domain in self._dataset.rows_by_domain if domain not in self._cfg.watch)

    async def run(
        self, generator: Generator, *, domains: Collection[str] | None = None, teacher: str | None = None
    ) -> ValidationResult:
        """Draw ``samples_per_prompt`` responses of ``generator`` per row of ``domains`` (all when ``None``) and reward
        them. ``teacher``: whose view of the prompts it reads; the student's where ``None``. Consumes no training
        randomness. ``UserError`` for a domain without rows."""
        all_rows = self._dataset.rows_by_domain
        chosen = sorted(all_rows if domains is None else set(domains))
        absent = [domain for domain in chosen if domain not in all_rows]
        if absent:
            raise UserError(f"data.validation has no row of domain {', '.join(map(repr, absent))}: add some")
        num = self._cfg.samples_per_prompt
        rows = {domain: all_rows[domain][: self._cfg.max_samples_per_domain] for domain in chosen}
        order = [row for domain in chosen for row in rows[domain] for _ in range(num)]
        prompts = [self._dataset.row(row).tokens_of(teacher) for row in order]
        seeds = [
            derive_seed(self._recipe.seed, row, f"validation {i % num}" if i % num else "validation")
            for i, row in enumerate(order)
        ]
        is_other = teacher in self._recipe.own_tokenizers
        stops = stops_of(self._recipe.rollout, self._tokenizer)
        sampling = SamplingParams(
            max_new_tokens=self._recipe.longest_response(teacher),
            temperature=self._cfg.temperature,
            **(stops | {"stop_token_ids": ()} if is_other else stops),  # ids of the student are no ids there
        )
        tokenizer = load_tokenizer(self._recipe.teachers[teacher].model) if teacher and is_other else self._tokenizer
        with apart():
            generations = await self._generations(generator, order, prompts, sampling, seeds)
        items = self._items(order, generations, tokenizer)
        finished = list(zip(items, await self._rewards.score(items), generations, order, strict=True))
        by_domain = {domain: [entry for entry in finished if entry[0].domain == domain] for domain in chosen}

        def means(value: Callable[[Graded, Generation], float]) -> dict[str, float]:
            return {d: sum(value(g, made) for _, g, made, _ in own) / len(own) for d, own in by_domain.items()}

        by_prompt = {
            domain: [[graded.value for _, graded, *_ in own[i : i + num]] for i in range(0, len(own), num)]
            for domain, own in by_domain.items()
        }
        return ValidationResult(
            rewards=means(lambda graded, _: graded.value),
            num_samples={domain: len(own) for domain, own in by_domain.items()},
            truncated_share=means(lambda _, made: made.finish_reason == "length"),
            extracted_share=means(lambda graded, _: graded.extracted is not None),
            examples={
                domain: [
                    _example(
                        replace(item, response=_whole(tokenizer, made)),
                        graded,
                        self._thumbnails(row),
                        self._dataset.row(row).views.get(teacher or ""),
                        segments_of(tokenizer, made),
                    )
                    for item, graded, made, row in own[: NUM_EXAMPLES * num : num]
                ]
                for domain, own in by_domain.items()
            },
            scores={d: [round(sum(values) / num, 6) for values in own] for d, own in by_prompt.items()},
            pass_at_k={d: sum(map(max, own)) / len(own) for d, own in by_prompt.items()} if num > 1 else {},
            prompts={d: _digest([self._dataset.row(row).tokens for row in own]) for d, own in rows.items()},
        )

    def _items(
        self, order: Sequence[int], generations: Sequence[Generation], tokenizer: PreTrainedTokenizerBase
    ) -> list[RewardItem]:
        """Return what rewards judge of the responses to rows ``order``: the text of the last turn."""
        responses = [made.tokens for made in generations]
        played = [made if isinstance(made, Trajectory) else None for made in generations]
        masks = [
            torch.ones_like(own).bool() if one is None else one.loss_mask
            for own, one in zip(responses, played, strict=True)
        ]
        texts = last_turns(tokenizer, responses, masks, self._recipe.rollout.cut_texts)
        return [
            reward_item(self._dataset, row, text, None if one is None else one.reward)
            for row, text, one in zip(order, texts, played, strict=True)
        ]

    async def _generations(
        self,
        generator: Generator,
        order: Sequence[int],
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        seeds: Sequence[int],
    ) -> Sequence[Generation]:
        """Return the response to each prompt, those of rows ``order``, played in the environment if there is one."""
        if self._player is None:
            asked = ToDraw(prompts, sampling, seeds, images=self._dataset.images_of(order))
            return await generator.generate(asked)
        rows = [replace(self._dataset.row(row), tokens=tuple(own)) for row, own in zip(order, prompts, strict=True)]
        return await play_turns(self._player, generator, rows, sampling, seeds, self._dataset.images_of(order))

    def _thumbnails(self, row: int) -> list[str]:
        images, refs = self._dataset.images, self._dataset.row(row).images[:MAX_THUMBNAILS]
        return [] if images is None else [thumbnail(read_rgb(images.read(ref), images.place(ref))) for ref in refs]

    async def record(self, generator: Generator, step: int) -> dict[str, Any]:
        """Validate, and return the result as a line of ``validation.jsonl``."""
        start = time.perf_counter()
        result = await self.run(generator)
        return record_of(step, result, wall_s=time.perf_counter() - start, watch=self._cfg.watch)


def _whole(tokenizer: PreTrainedTokenizerBase, response: Generation) -> str:
    """Return the text of a response, of all its turns."""
    return encodable(str(tokenizer.decode(response.tokens.tolist(), skip_special_tokens=True)))


def is_due(recipe: Recipe, step: int) -> bool:
    """Return whether it is time to validate after ``step`` optimizer steps."""
    cfg = recipe.validation
    return cfg is not None and (step % cfg.every_steps == 0 or step == recipe.schedule.steps)


def _digest(prompts: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(json.dumps([list(tokens) for tokens in prompts]).encode()).hexdigest()[:16]


def record_of(step: int, result: ValidationResult, *, wall_s: float, watch: Collection[str] = ()) -> dict[str, Any]:
    """Return a line of ``validation.jsonl``, plain JSON, in which the rewards of the domains of ``watch`` stand apart.
    Only that of step 0 holds images: all have its rows."""
    examples = result.examples
    if step > 0:
        examples = {
            domain: [{key: value for key, value in row.items() if key != "images"} for row in rows]
            for domain, rows in examples.items()
        }
    return {
        "step": step,
        "rewards": {domain: reward for domain, reward in result.rewards.items() if domain not in watch},
        "watched": {domain: result.rewards[domain] for domain in watch},
        "scores": result.scores,
        "pass_at_k": result.pass_at_k,
        "prompts": result.prompts,
        "truncated_share": result.truncated_share,
        "examples": plain_examples(examples, "validation.jsonl", MAX_LINE_BYTES),
        "wall_s": wall_s,
    }


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Append one line to ``validation.jsonl``."""
    with closing(JsonlWriter(path)) as writer:
        writer.write(record)


def _example(
    item: RewardItem,
    graded: Graded,
    thumbnails: list[str],
    view: PromptView | None,
    segments: Sequence[Segment],
) -> dict[str, Any]:
    return {
        **({"segments": list(map(asdict, segments))} if segments else {}),
        **({"images": thumbnails} if thumbnails else {}),
        **({"view": view.text} if view is not None else {}),
        "prompt": item.prompt,
        "response": item.response,
        "ground_truth": item.ground_truth,
        "reward": graded.value,
        "extracted": graded.extracted,
        "problem": graded.problem,
    }


def plain_examples(
    examples: Mapping[str, list[dict[str, Any]]], name: str, max_bytes: int
) -> dict[str, list[dict[str, Any]]]:
    """Return the examples as JSON for the file ``name`` of at most ``max_bytes``. Ground truths of parquet files may be
    decimals, times or bytes, which become text as for rewards. What the reader of that file would refuse is left out
    with a warning: no response or ground truth ends a run by being shown."""
    try:
        text = json.dumps(examples, ensure_ascii=False, default=str)
        if len(text.encode()) > max_bytes // 2:
            raise ValueError(f"they have {len(text)} characters")
        # the file holds them two levels deeper, and beside other values
        plain: dict[str, list[dict[str, Any]]] = parse_json(text, max_depth=MAX_DEPTH - 2, max_values=MAX_VALUES // 2)
    except (ValueError, TypeError, RecursionError) as error:
        logger.warning("%s: the examples are left out (%s)", name, one_line(error))
        return {}
    return plain

"""Reward per domain on held-out prompts. Uses no training randomness: seeds derive from row numbers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from mopd.data.prompts import PromptDataset
from mopd.engines.interface import Generator, SamplingParams
from mopd.rewards.domains import DomainRewards
from mopd.rollout.worker import derive_seed, reward_item
from mopd.types import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationResult:
    """Per domain, domains in alphabetical order."""

    rewards: dict[str, float]
    """Mean reward."""
    num_samples: dict[str, int]
    truncated_share: dict[str, float]
    """Share of responses that ended at the length limit."""
    examples: dict[str, list[dict[str, Any]]]
    """The first rows' ``{prompt, response, ground_truth, reward}``."""


async def validate(
    generator: Generator,
    dataset: PromptDataset,
    tokenizer: PreTrainedTokenizerBase,
    rewards: DomainRewards,
    *,
    sampling: SamplingParams,
    seed: int,
    max_samples_per_domain: int | None = None,
    num_examples: int = 0,
    domains: Collection[str] | None = None,
) -> ValidationResult:
    """One response per row of ``domains`` (all when ``None``), rewarded; ``UserError`` for a domain without rows."""
    rows_by_domain = dataset.rows_by_domain
    chosen = sorted(rows_by_domain if domains is None else set(domains))
    absent = [domain for domain in chosen if domain not in rows_by_domain]
    if absent:
        raise UserError(f"data.validation has no row of domain {', '.join(map(repr, absent))}: add some")
    rows = {domain: rows_by_domain[domain][:max_samples_per_domain] for domain in chosen}
    order = [row for domain in chosen for row in rows[domain]]
    generations = await generator.generate(
        [dataset.row(row).tokens for row in order], sampling, [derive_seed(seed, row, "validation") for row in order]
    )
    texts = tokenizer.batch_decode([g.tokens.tolist() for g in generations], skip_special_tokens=True)
    items = [reward_item(dataset, row, text) for row, text in zip(order, texts, strict=True)]
    values = await rewards.score(items)
    finished = list(zip(items, values, generations, strict=True))
    by_domain = {domain: [entry for entry in finished if entry[0].domain == domain] for domain in chosen}
    return ValidationResult(
        rewards={d: sum(value for _, value, _ in entries) / len(entries) for d, entries in by_domain.items()},
        num_samples={d: len(entries) for d, entries in by_domain.items()},
        truncated_share={
            d: sum(g.finish_reason == "length" for _, _, g in entries) / len(entries)
            for d, entries in by_domain.items()
        },
        examples={
            d: [
                {"prompt": i.prompt, "response": i.response, "ground_truth": i.ground_truth, "reward": value}
                for i, value, _ in entries[:num_examples]
            ]
            for d, entries in by_domain.items()
        },
    )

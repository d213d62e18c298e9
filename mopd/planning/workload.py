"""Size of a step's samples: how many, how long, and which teacher gets which share of them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mopd.base.types import UserError
from mopd.config.losses import has_domain_baseline
from mopd.config.schema import Recipe
from mopd.conversion.models.dims import ModelDims

ID_BYTES, LOGPROB_BYTES, HIDDEN_BYTES, TOKEN_BYTES = 4, 4, 2, 8
"""int32 ids, fp32 log-probs and bf16 hidden states on the wire and in the data plane; int64 tokens in the data
plane."""
ASSUMED_SHARE = 0.5
"""Mean length of prompts and responses over the longest that the recipe lets through, where none is given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One optimizer step's samples."""

    samples: int
    prompt_tokens: float
    """Mean prompt tokens of a sample."""
    response_tokens: float
    """Mean response tokens of a sample."""
    longest_response: int
    max_tokens: int
    """Tokens of the longest sample that the recipe lets through."""
    teacher_shares: Mapping[str, float]
    """Teacher -> its share of the samples; they add up to more than 1 where ensembles score."""
    max_teachers: int
    """D: most teachers of one domain."""
    source: str
    image_tokens: float
    """Mean image tokens of a sample, part of its prompt's."""
    hidden_sizes: Mapping[str, int] = field(default_factory=dict)
    """Teacher -> size of the hidden states that it sends; empty where none does."""

    @property
    def hidden_bytes(self) -> float:
        """Mean bytes of hidden states with each response token."""
        return HIDDEN_BYTES * sum(self.teacher_shares[name] * size for name, size in self.hidden_sizes.items())

    @property
    def tokens(self) -> float:
        """Tokens of a step, prompts and responses."""
        return self.samples * (self.prompt_tokens + self.response_tokens)

    @property
    def rows(self) -> float:
        """Response tokens of a step."""
        return self.samples * self.response_tokens

    def response_lengths(self) -> list[int]:
        """Return the response lengths of a step's samples, ascending: evenly spaced quantiles of a distribution with
        this mean and longest (exponential, cut off at the longest; uniform where the mean is half of it or more)."""
        mean, longest = self.response_tokens, float(self.longest_response)
        marks = [(i + 0.5) / self.samples for i in range(self.samples)]
        if mean >= longest / 2:
            low = 2 * mean - longest
            return [max(1, round(low + mark * (longest - low))) for mark in marks]
        rate = _rate(mean, longest)
        whole = -math.expm1(-rate * longest)
        return [max(1, min(round(-math.log1p(-mark * whole) / rate), int(longest))) for mark in marks]

    @property
    def length(self) -> float:
        """Mean tokens of a sample."""
        return self.prompt_tokens + self.response_tokens


def _rate(mean: float, longest: float) -> float:
    """Return the rate of the exponential distribution on [0, longest] with this mean, which is below the middle."""
    low, high = 1e-9 / longest, 50 / mean
    for _ in range(60):
        rate = (low + high) / 2
        found = 1 / rate - longest / math.expm1(min(700.0, rate * longest))
        low, high = (rate, high) if found > mean else (low, rate)
    return (low + high) / 2


def expected(
    recipe: Recipe,
    *,
    prompt_tokens: float | None = None,
    response_tokens: float | None = None,
    image_tokens: float = 0.0,
) -> Workload:
    """Return the samples that the recipe lets expect, with mean lengths that are given or assumed. Domains share the
    stream by ``data.domain_weights``, else equally.

    Raises:
        UserError: a mean above the longest.
    """
    longest = {"prompt": recipe.data.max_prompt_length, "response": recipe.rollout.max_response_length}
    keys = {"prompt": "data.max_prompt_length", "response": "rollout.max_response_length"}
    means = {"prompt": prompt_tokens, "response": response_tokens}
    for what, mean in means.items():
        if mean is not None and not 1 <= mean <= longest[what]:
            raise UserError(f"--{what}-length is {mean:g}: set 1 to {keys[what]} {longest[what]}")
    half = [keys[what] for what, mean in means.items() if mean is None]
    texts = [f"mean {what} length as given" for what, mean in means.items() if mean is not None]
    texts += [f"mean length assumed half of {' and '.join(half)}"] if half else []
    return _workload(
        recipe,
        domain_shares(recipe),
        prompt_tokens=prompt_tokens or max(1.0, ASSUMED_SHARE * longest["prompt"]),
        response_tokens=response_tokens or max(1.0, ASSUMED_SHARE * longest["response"]),
        image_tokens=image_tokens,
        source="; ".join(texts),
    )


def measured(recipe: Recipe, steps: Sequence[Mapping[str, Any]], *, image_tokens: float = 0.0) -> Workload:
    """Return the samples that the records of a run's steps describe, except ``image_tokens``, which records lack.

    Raises:
        UserError: no record has lengths.
    """
    samples: dict[str, float] = defaultdict(float)
    responses = tokens = 0.0
    for record in steps:
        for name, value in record.items():
            metric, _, domain = name.partition("/")
            if metric == "num_samples" and value:
                samples[domain] += value
                responses += value * (record.get(f"response_length/{domain}") or 0.0)
        tokens += record.get("tokens") or 0.0
    total = sum(samples.values())
    if not total or not responses or tokens <= responses:
        raise UserError("--measured: the run's metrics.jsonl tells no lengths yet: wait for its first steps")
    return _workload(
        recipe,
        {domain: count / total for domain, count in samples.items()},
        prompt_tokens=(tokens - responses) / total,
        response_tokens=responses / total,
        image_tokens=image_tokens,
        source="lengths and domains of the measured run",
    )


def share_of_group(recipe: Recipe, work: Workload, teacher: str) -> float:
    """Return the share of all samples that come to the replicas of a teacher, for all teachers that these answer
    for."""
    return sum(work.teacher_shares[name] for name in recipe.on_group_of(teacher))


def _workload(recipe: Recipe, domains: Mapping[str, float], **lengths: Any) -> Workload:
    """Return the workload of samples that ``domains`` share so; an ensemble's teachers each score all of a domain's."""
    shares = dict.fromkeys(recipe.teachers, 0.0)
    for domain, share in domains.items():
        for name in recipe.assignment.teachers_of(domain):
            shares[name] += share
    return Workload(
        samples=recipe.samples_per_step,
        longest_response=recipe.rollout.max_response_length,
        max_tokens=recipe.data.max_prompt_length + recipe.rollout.max_response_length,
        teacher_shares=shares,
        max_teachers=recipe.teachers_per_row,
        **lengths,
    )


def route_bytes(recipe: Recipe, dims: ModelDims, work: Workload) -> int:
    """Return the bytes of one sample's routes; 0 where none are replayed."""
    if dims.moe is None or not recipe.rollout.replay_routes:
        return 0
    return round(dims.moe.route_shape.token_bytes * work.length)


def sample_bytes(recipe: Recipe, work: Workload) -> int:
    """Return the bytes of one sample's tensors in the data plane, all of its fields but ``route_bytes``."""
    teacher: float = work.max_teachers * recipe.support_width * (ID_BYTES + LOGPROB_BYTES) + LOGPROB_BYTES
    teacher += student_ids(recipe) * ID_BYTES + work.hidden_bytes
    advantages = recipe.needs_task_advantage + has_domain_baseline(recipe.loss)
    row = 1 + LOGPROB_BYTES + ID_BYTES + teacher + LOGPROB_BYTES * advantages
    return round(TOKEN_BYTES * work.length + row * work.response_tokens)


def student_ids(recipe: Recipe) -> int:
    """Return how many of the student's most probable ids travel with each token, from the rollout on."""
    return max(asked.student for asked in recipe.asked.values())


def domain_shares(recipe: Recipe) -> dict[str, float]:
    """Return each domain's share of the stream; the domains of a default teacher that names none count as one."""
    weights = dict(recipe.data.fixed_weights)
    if not weights:
        weights = dict.fromkeys(recipe.assignment.by_domain, 1.0)
        if recipe.assignment.default is not None and not recipe.teachers[recipe.assignment.default].domains:
            weights["others"] = 1.0
    return {domain: weight / sum(weights.values()) for domain, weight in weights.items()}

"""Busy and waiting times of a run's pipeline stages, and ages of its samples, from the records of steps.

Every stage of a step's seconds T is busy, starved (nothing to work on) or blocked (its results, or the next work, not
let through), and the three add up to T::

    rollout         busy: a request under way on any replica        blocked: the window admits nothing
    answers         busy: a teacher draws an answer                 blocked: the window admits nothing
    teachers/NAME   busy: likewise                                  blocked: never, scores are always taken
    rewards         busy: a prompt's responses are being judged     blocked: never
    trainer         busy: what is left                              blocked: until the weights are taken
    weight_sync     busy: weights are handed over or sent, while the trainer waits

starved is what is left, for the trainer its wait for a batch. ``docs/metrics.md`` has the names of records.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mopd.report.groups import ALL, group_values, label

STEP_MARKS = ("timing/window_closed_s", "timing/stage_weights_s", "staleness_share/0")
"""Metrics of runs that record when a stage was blocked; older runs have none of them."""
AGE_SHARE = "staleness_share"
WAITS_LITTLE = 0.05
"""Share of the steps' time below which the trainer's waits are negligible: the trainer then bounds them."""
MOST_DIGITS = 4
"""Largest number of digits of an age; no run allows older samples."""
Seconds = tuple[float, float, float]
"""Busy, starved, blocked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageResult:
    """One stage over all steps; the shares add up to 1."""

    busy: float
    starved: float
    blocked: float
    replicas: int | None
    """Number of replicas of a group of engines; other stages have none."""
    balanced_replicas: int | None
    """Number of replicas that would keep up with the trainer: the replicas' busy seconds over the trainer's, rounded
    up. ``None`` where the trainer did nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineResult:
    """All stages, in the order of a sample's life."""

    bound_by: str
    """Name of the bounding stage: the trainer, if it hardly waits, else the stage that is busy longest."""
    stages: Mapping[str, StageResult]


@dataclass(frozen=True, kw_only=True, slots=True)
class AgeResult:
    """Ages of the weights that drew the samples, and numbers of samples that were not trained on."""

    shares: Mapping[str, float]
    """Optimizer steps behind -> share of the samples; empty in a run without staleness."""
    response_versions_mean: float | None
    """Mean number of versions of the weights that a response's tokens come from."""
    response_versions_max: int | None
    refused_samples: Mapping[str, int]
    """Domain -> samples that became too old, and whose prompts were drawn again."""
    refused_tokens: Mapping[str, int]
    """Domain -> response tokens of these."""
    replaced_samples: Mapping[str, int]
    """Domain -> samples that no teacher could score."""
    drawn_length: Mapping[str, float]
    """Domain -> mean tokens of the responses that were drawn. Where it is not that of the trained ones, a response's
    length decided whether it was trained on."""
    trained_length: Mapping[str, float]
    """Domain -> mean tokens of the responses that were trained on; like ``drawn_length`` of runs with staleness."""


def summarise_pipeline(steps: Sequence[Mapping[str, Any]]) -> PipelineResult | None:
    """Summarise the stages; ``None`` for runs that do not record when a stage was blocked, and before the first
    step."""
    if not any(mark in record for record in steps for mark in STEP_MARKS):
        return None
    totals: dict[str, list[float]] = {}
    replica_s: dict[str, float] = {}
    replicas: dict[str, int] = {}
    for record in steps:
        for stage, seconds in stage_seconds(record).items():
            totals[stage] = [a + b for a, b in zip(totals.get(stage, (0.0, 0.0, 0.0)), seconds, strict=True)]
        for stage, group in _groups(record).items():
            own = _number(group, "replica_busy_s") or _number(group, "busy_s")
            replica_s[stage] = replica_s.get(stage, 0.0) + own
            replicas[stage] = int(_number(group, "replicas"))
    if not totals:
        return None
    trainer_s, *waits = totals["trainer"]
    stages = {}
    for stage in sorted(totals, key=_place):
        busy, starved, blocked = (seconds / sum(totals[stage]) for seconds in totals[stage])
        needed = replica_s[stage] / trainer_s if stage in replicas and trainer_s > 0 else math.inf
        stages[stage] = StageResult(
            busy=busy,
            starved=starved,
            blocked=blocked,
            replicas=replicas.get(stage),
            balanced_replicas=max(1, math.ceil(round(needed, 6))) if math.isfinite(needed) else None,
        )
    longest = max(stages, key=lambda stage: stages[stage].busy)
    hardly_waits = sum(waits) < WAITS_LITTLE * sum(totals["trainer"])
    return PipelineResult(bound_by="trainer" if hardly_waits else longest, stages=stages)


def stage_seconds(record: Mapping[str, Any]) -> dict[str, Seconds]:
    """Return one step's seconds by stage; empty without a step's length."""
    whole = _number(record, "timing/step_s")
    if whole <= 0:
        return {}
    starved = min(whole, _number(record, "timing/wait_batch_s"))
    blocked = min(whole - starved, _number(record, "timing/weight_sync_s"))
    sync = _number(record, "timing/stage_weights_s") + _number(record, "timing/weight_sync_s")
    found = {"trainer": (whole - starved - blocked, starved, blocked), "weight_sync": _split(sync, 0.0, whole)}
    groups = {stage: _number(group, "busy_s") for stage, group in _groups(record).items()}
    drawing = {name: _number(record, key) for name in ("rollout", "answers") if (key := f"timing/{name}_s") in record}
    for stage, busy in (drawing | groups).items():
        is_drawing = stage in ("rollout", "answers")
        found[stage] = _split(busy, _number(record, "timing/window_closed_s") if is_drawing else 0.0, whole)
    if "timing/rewards_s" in record:
        found["rewards"] = _split(_number(record, "timing/rewards_s"), 0.0, whole)
    return found


def summarise_ages(steps: Sequence[Mapping[str, Any]]) -> AgeResult | None:
    """Summarise ages and lost samples; ``None`` for runs that record none of this."""
    shares: dict[int, float] = {}
    counts: dict[str, dict[str, int]] = {"refused_samples": {}, "refused_tokens": {}, "replaced_samples": {}}
    for record in steps:
        for name, value in record.items():
            metric, _, part = name.partition("/")
            if metric == AGE_SHARE and part.isdecimal() and len(part) <= MOST_DIGITS:
                shares[int(part)] = shares.get(int(part), 0.0) + max(0.0, value or 0.0)
            elif metric in counts and part:
                counts[metric][part] = counts[metric].get(part, 0) + int(value or 0)
    versions = mean_of(steps, "response_versions/mean")
    if not (shares or versions is not None or any(counts.values())):
        return None
    whole = sum(shares.values())
    return AgeResult(
        shares={str(age): shares[age] / whole for age in sorted(shares)} if whole > 0 else {},
        response_versions_mean=versions,
        response_versions_max=int(max(_number(record, "response_versions/max") for record in steps)) or None,
        **counts,
        drawn_length=_mean_lengths(steps, "drawn_tokens", "drawn_samples"),
        trained_length=_mean_lengths(steps, "num_tokens", "num_samples"),
    )


def _mean_lengths(steps: Sequence[Mapping[str, Any]], tokens: str, samples: str) -> dict[str, float]:
    """Return, by domain, the sum of ``tokens/DOMAIN`` over that of ``samples/DOMAIN``; empty if draws are not
    counted."""
    drawn = "drawn_samples/"
    domains = sorted({name.removeprefix(drawn) for record in steps for name in record if name.startswith(drawn)})
    totals = {
        domain: [math.fsum(_number(record, f"{name}/{domain}") for record in steps) for name in (tokens, samples)]
        for domain in domains
    }
    return {domain: num_tokens / num_samples for domain, (num_tokens, num_samples) in totals.items() if num_samples}


def stage_label(stage: str) -> str:
    """Name a stage: ``rollout``, ``teacher math``, ``weight sync``."""
    room, _, name = stage.partition("/")
    return label(room, name) if name else stage.replace("_", " ")


def pipeline_line(pipeline: PipelineResult) -> str:
    """Write all stages in one line, shares in whole percent."""
    stages = "  ".join(
        f"{stage_label(name)} {'/'.join(f'{100 * share:.0f}' for share in (one.busy, one.starved, one.blocked))}"
        for name, one in pipeline.stages.items()
    )
    changes = [
        f"{stage_label(name)} {one.replicas} → {one.balanced_replicas}"
        for name, one in pipeline.stages.items()
        if one.balanced_replicas not in (None, one.replicas)
    ]
    balanced = f"; balanced with replicas: {', '.join(changes)}" if changes else ""
    return f"busy/starved/blocked %  {stages}  bound by {stage_label(pipeline.bound_by)}{balanced}"


def ages_line(ages: AgeResult) -> str:
    """Write the ages of the samples, and how many were not trained on; empty if none is recorded."""
    texts = [f"{age} steps behind {100 * share:.0f} %" for age, share in ages.shares.items() if share]
    if ages.response_versions_mean is not None:
        texts.append(f"{ages.response_versions_mean:.2f} versions a response")
    for what, counts in (("refused", ages.refused_samples), ("replaced", ages.replaced_samples)):
        texts += [f"{sum(counts.values())} {what}"] if any(counts.values()) else []
    return f"samples  {', '.join(texts)}" if texts else ""


def lengths_line(ages: AgeResult) -> str:
    """Write the mean lengths of drawn, trained and refused responses by domain; empty for runs that do not count
    draws."""
    texts = []
    for domain, drawn in ages.drawn_length.items():
        if domain in ages.trained_length:
            num_refused = ages.refused_samples.get(domain, 0)
            refused = f", {ages.refused_tokens.get(domain, 0) / num_refused:.0f}" if num_refused else ""
            texts.append(f"{domain} {drawn:.0f} tokens, {ages.trained_length[domain]:.0f}{refused}")
    named = "drawn, trained, refused" if any(ages.refused_samples.values()) else "drawn, trained"
    return f"mean length {named}  {'; '.join(texts)}" if texts else ""


def _groups(record: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the numbers of each group by its stage, without replicas."""
    return {
        room if name == ALL else f"{room}/{name}": values
        for room, names in group_values(record).items()
        for name, values in names.items()
        if "replicas" in values
    }


def _split(busy: float, blocked: float, whole: float) -> Seconds:
    """Split a step into busy, starved and blocked seconds. A measured time may exceed the step (a validation
    between)."""
    busy = min(busy, whole)
    blocked = min(blocked, whole - busy)
    return busy, whole - busy - blocked, blocked


def _place(stage: str) -> tuple[int, str]:
    return ("rollout", "answers", "teachers", "rewards", "trainer", "weight_sync").index(stage.partition("/")[0]), stage


def _number(values: Mapping[str, Any], name: str) -> float:
    """Return a metric, at least 0; 0 if it was not measured."""
    return max(0.0, values.get(name) or 0.0)


def mean_of(records: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Return a metric's mean over the records that have it; ``None`` where none has."""
    values = [record[name] for record in records if record.get(name) is not None]
    return sum(values) / len(values) if values else None

"""``report.json`` and ``report.html`` of a run folder, finished or not.

Head-room recovery of a domain = (after - before) / (teacher - before): the share of its teacher's lead that the student
gained. ``before`` is the validation reward at step 0, ``after`` that of the best validation (highest mean over domains,
the earliest of equals: the checkpoint that is exported), ``teacher`` the domain's own teacher on the same prompts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from mopd.base.files.writing import write_text
from mopd.base.text import visible
from mopd.report.charts import cell
from mopd.report.curves import Phase, percents, phase_name, phases
from mopd.report.groups import LATENCY_HEADING, GroupResult, label, latencies, summarise_groups
from mopd.report.intervals import Interval, Scores, difference_interval, mean_interval, recovery_interval, show_interval
from mopd.report.page import render_page
from mopd.report.pipeline import (
    AgeResult,
    PipelineResult,
    ages_line,
    lengths_line,
    mean_of,
    stage_label,
    summarise_ages,
    summarise_pipeline,
)
from mopd.report.run_files import RunFiles, best_of
from mopd.report.terminal import Terminal, make_table

OBJECTIVES = {
    "on_policy": "on-policy",
    "sft_on_teacher": "SFT on the teachers' answers",
    "off_policy_scores": "the teachers' answers, with their scores",
}
"""``objective`` -> its name in reports."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DomainResult:
    """Mean validation rewards of one domain; ``None`` where not measured (yet)."""

    before: float | None
    after: float | None
    teacher: float | None
    headroom_recovery: float | None
    """Recovered share of the teacher's lead; ``None`` also where the teacher does not beat ``before``."""
    num_prompts: int | None
    after_interval: Interval | None
    """95 % interval of ``after`` over the prompts (``intervals.py``), as those below."""
    recovery_interval: Interval | None
    change_interval: Interval | None
    """Interval of ``after`` - ``before``, which tells whether a domain was forgotten or only measured."""
    pass_at_k: float | None
    """Mean of each prompt's best response, at ``after``; ``None`` with one response a prompt."""
    is_watched: bool
    """No teacher teaches the domain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Content of ``report.json``, with ``domains`` by name."""

    domains: Mapping[str, DomainResult]
    mean_headroom_recovery: float | None
    mean_recovery_interval: Interval | None
    best_step: int | None
    """Step of ``after``."""
    steps: int
    """Number of optimizer steps done."""
    planned_steps: int
    wall_s: float
    """Seconds of all steps (``timing/step_s``) and validations; not start, checkpoints or export."""
    train_tokens_per_s: float | None
    """Prompt and response tokens trained on, per second of the steps (rollout and scoring included)."""
    phases: Mapping[str, Phase]
    """Consecutive phases of the trainer by name; ``other`` is the rest. Empty before the first step."""
    vision_tower_share: float | None
    """Vision tower's share of the first pipeline stage's passes, mean over steps; ``None`` for a student without
    vision."""
    pipeline_bubble_share: float | None
    """Share of a step's passes in which ranks do not compute, mean over steps; ``None`` without vision."""
    pipeline: PipelineResult | None
    """Busy and waiting times of the stages."""
    samples: AgeResult | None
    """Ages of the samples, and numbers of samples that were not trained on."""
    groups: Mapping[str, Mapping[str, GroupResult]]
    """``teachers`` and ``rollout`` -> group or replica -> its work; a group of one replica stands for it. The rollout's
    are ``all`` and the numbers of its replicas."""
    objective: str = OBJECTIVES["on_policy"]
    """What the run trains on, in words."""
    warm_up: str | None = None
    """Where its warm-up ended, in words; ``None`` for a run without."""


def build_report(run_dir: str | Path) -> Report:
    """Write ``report.json`` and ``report.html`` into the run folder and return the former's content.

    Raises:
        UserError: the folder holds no run, a file of it is damaged, or a write is refused.
    """
    files = RunFiles(Path(run_dir))
    files.require_run()
    steps, validations = files.steps(), files.validations()
    recipe = files.recipe_tree()
    report = summarise_run(files, steps, validations, recipe)
    page = render_page(asdict(report), files, recipe, steps, validations, evidence_lines(report))
    write_text(files.report_json, json.dumps(asdict(report), indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    write_text(files.report_html, visible(page, keep="\n\t"))
    return report


def summarise_run(
    files: RunFiles,
    steps: Sequence[Mapping[str, Any]],
    validations: Sequence[Mapping[str, Any]],
    recipe: Mapping[str, Any],
) -> Report:
    """Make the report of a run from the records that were read from its ``files``, and its recipe."""
    report = summarise(
        steps,
        validations,
        files.teacher_rewards(),
        teacher_scores=files.teacher_scores(),
        planned_steps=recipe["schedule"]["steps"],
    )
    return replace(report, objective=objective_of(recipe), warm_up=warm_up_end(recipe, validations))


def summarise(
    steps: Sequence[Mapping[str, Any]],
    validations: Sequence[Mapping[str, Any]],
    teachers: Mapping[str, float],
    *,
    teacher_scores: Mapping[str, Scores],
    planned_steps: int,
) -> Report:
    """Make the report from the records of ``metrics.jsonl`` and ``validation.jsonl``, the teachers' mean rewards by
    domain, and their scores prompt by prompt where these were kept."""
    best = best_of(validations)
    before = record_at(validations, 0)
    after = record_at(validations, None if best is None else best.step)
    domains = _domains(before, after, teachers, teacher_scores)
    triples = [
        _scores_of(name, before, after, teacher_scores)
        for name, result in domains.items()
        if result.headroom_recovery is not None
    ]
    recoveries = [result.headroom_recovery for result in domains.values() if result.headroom_recovery is not None]
    step_s = sum(record.get("timing/step_s", 0.0) for record in steps)
    tokens = sum(record.get("tokens", 0.0) for record in steps)
    return Report(
        domains=domains,
        mean_headroom_recovery=sum(recoveries) / len(recoveries) if recoveries else None,
        mean_recovery_interval=recovery_interval(triples),
        best_step=None if best is None else best.step,
        steps=steps[-1]["step"] if steps else 0,
        planned_steps=planned_steps,
        wall_s=step_s + sum(record.get("wall_s", 0.0) for record in validations),
        train_tokens_per_s=tokens / step_s if step_s else None,
        phases=phases(steps),
        vision_tower_share=mean_of(steps, "rate/vision_tower_share"),
        pipeline_bubble_share=mean_of(steps, "rate/pipeline_bubble_share"),
        pipeline=summarise_pipeline(steps),
        samples=summarise_ages(steps),
        groups=summarise_groups(steps),
    )


def objective_of(recipe: Mapping[str, Any]) -> str:
    """Say what a run trains on, from the values of its resolved recipe; those before this key were on-policy."""
    name = OBJECTIVES.get(str(recipe.get("objective", "on_policy")), "unknown")
    warm_up = recipe["schedule"].get("warm_up")
    if not isinstance(warm_up, Mapping):
        return name
    return f"{name} after {warm_up.get('steps')} steps of {OBJECTIVES.get(str(warm_up.get('objective')), 'unknown')}"


def warm_up_end(recipe: Mapping[str, Any], validations: Sequence[Mapping[str, Any]]) -> str | None:
    """Say where a warm-up ended, and with which rewards where the last validation within it has some; ``None`` for a
    run without."""
    warm_up = recipe["schedule"].get("warm_up")
    if not isinstance(warm_up, Mapping) or type(steps := warm_up.get("steps")) is not int:
        return None
    line = f"warm-up: {OBJECTIVES.get(str(warm_up.get('objective')), 'unknown')} up to step {steps}"
    within = [record for record in validations if 0 < record["step"] <= steps]
    if not within:
        return line
    rewards = ", ".join(f"{domain} {reward:.3f}" for domain, reward in sorted(within[-1]["rewards"].items()))
    return f"{line}; rewards at step {within[-1]['step']}: {rewards}"


def record_at(validations: Sequence[Mapping[str, Any]], step: int | None) -> Mapping[str, Any]:
    """Return the validation after ``step`` steps; empty if there is none."""
    return next((record for record in validations if record["step"] == step), {})


def _domains(
    before: Mapping[str, Any], after: Mapping[str, Any], teachers: Mapping[str, float], scores: Mapping[str, Scores]
) -> dict[str, DomainResult]:
    """Return the result of every domain that the records of both validations or the teachers name."""
    rewards = [{**record.get("rewards", {}), **record.get("watched", {})} for record in (before, after)]
    watched = {*before.get("watched", ()), *after.get("watched", ())}
    found = {}
    for name in sorted({*rewards[0], *rewards[1], *teachers}):
        first, last, teacher = rewards[0].get(name), rewards[1].get(name), teachers.get(name)
        own = _scores_of(name, before, after, scores)
        found[name] = DomainResult(
            before=first,
            after=last,
            teacher=teacher,
            headroom_recovery=(recovery := headroom_recovery(first, last, teacher)),
            num_prompts=len(own[0]) or None,
            after_interval=mean_interval(own[1]),
            recovery_interval=None if recovery is None else recovery_interval([own]),
            change_interval=difference_interval([(own[1], own[0])], is_paired=True) if own[0] else None,
            pass_at_k=after.get("pass_at_k", {}).get(name),
            is_watched=name in watched,
        )
    return found


def _scores_of(
    name: str, before: Mapping[str, Any], after: Mapping[str, Any], teachers: Mapping[str, Scores]
) -> tuple[Scores, Scores, Scores]:
    """Return a domain's scores before, after and of its teacher; empty ones where they were not kept."""
    return *(record.get("scores", {}).get(name, []) for record in (before, after)), teachers.get(name, [])


def headroom_recovery(before: float | None, after: float | None, teacher: float | None) -> float | None:
    """Return ``(after - before) / (teacher - before)``; ``None`` unless all are known and the teacher beats
    ``before``."""
    if before is None or after is None or teacher is None or teacher <= before:
        return None
    return (after - before) / (teacher - before)


def print_summary(report: Report, console: Terminal | None = None) -> None:
    """Print the report as tables on the terminal."""
    table = Table(title=f"step {report.steps} of {report.planned_steps}", title_justify="left")
    table.add_column("domain")
    after = "after" if report.best_step is None else f"after (step {report.best_step})"
    for heading in ("before", after, "teacher", "head-room recovered"):
        table.add_column(heading, justify="right")
    for domain, result in report.domains.items():
        before, last, teacher = (cell(v, "{:.3f}") for v in (result.before, result.after, result.teacher))
        recovery = f"{cell(result.headroom_recovery, '{:.0%}')} {show_interval(result.recovery_interval, '{:.0%}')}"
        table.add_row(domain, before, f"{last} {show_interval(result.after_interval)}", teacher, recovery)
    if len(report.domains) > 1:
        table.add_section()
        interval = show_interval(report.mean_recovery_interval, "{:.0%}")
        table.add_row("mean", "", "", "", f"{cell(report.mean_headroom_recovery, '{:.0%}')} {interval}")
    rate = cell(report.train_tokens_per_s, "{:,.0f} tokens/s")
    console = console or Terminal()
    console.print(table)
    for line in evidence_lines(report):
        console.print(line)
    if report.objective != OBJECTIVES["on_policy"]:
        console.print(f"trained on: {report.objective}")
    if report.warm_up is not None:
        console.print(report.warm_up)
    if report.groups:
        console.print(_group_table(report.groups))
    if report.phases:
        shown = percents([phase.share for phase in report.phases.values()])
        parts = (f"{phase_name(name).lower()} {text}" for name, text in zip(report.phases, shown, strict=True))
        console.print(f"time of the steps: {', '.join(parts)}")
    if report.vision_tower_share is not None:
        bubble = cell(report.pipeline_bubble_share, "{:.1%}")
        line = f"vision tower: {report.vision_tower_share:.1%} of the first pipeline stage's passes; bubble {bubble}"
        console.print(line)
    if report.pipeline is not None:
        console.print(_stage_table(report.pipeline))
    if report.samples is not None:
        for line in filter(None, (ages_line(report.samples), lengths_line(report.samples))):
            console.print(line)
    console.print(f"{report.wall_s:,.0f} s in steps and validations, {rate} trained")


def evidence_lines(report: Report) -> list[str]:
    """Say how many prompts stand behind the rewards, what the best of several responses reached, and which watched
    domain was forgotten."""
    counted = {name: one for name, one in report.domains.items() if one.num_prompts}
    if not counted:
        return []
    numbers = [one.num_prompts or 0 for one in counted.values()]
    shown = " to ".join(f"{number:,}" for number in sorted({min(numbers), max(numbers)}))
    lines = [f"[…]: 95 % intervals over {shown} prompts a domain"]
    best = ", ".join(f"{name} {one.pass_at_k:.3f}" for name, one in counted.items() if one.pass_at_k is not None)
    lines += [f"pass@k, the best of each prompt's responses: {best}"] if best else []
    for name, one in counted.items():
        if one.is_watched and one.before is not None and one.after is not None and one.change_interval is not None:
            low, high = one.change_interval
            told = "forgotten" if high < 0 else "improved" if low > 0 else "no change beyond noise"
            interval = show_interval(one.change_interval, "{:+.3f}")
            lines.append(f"watched, taught by nobody: {name} {one.after - one.before:+.3f} {interval}: {told}")
    return lines


def _stage_table(pipeline: PipelineResult) -> Table:
    title = f"bound by {stage_label(pipeline.bound_by)}"
    headings = ("stage", "busy", "starved", "blocked", "replicas", "balanced")
    table = make_table(*headings, title=title, title_justify="left", padding=0, collapse_padding=True)
    for name, stage in pipeline.stages.items():
        shares = percents([stage.busy, stage.starved, stage.blocked])
        counts = (cell(number, "{:d}") for number in (stage.replicas, stage.balanced_replicas))
        table.add_row(stage_label(name), *shares, *counts)
    return table


def _group_table(groups: Mapping[str, Mapping[str, GroupResult]]) -> Table:
    headings = ("group", "samples", "tokens/s", LATENCY_HEADING, "MiB", "retries", "failures")
    table = make_table(*headings, padding=0, collapse_padding=True)
    for room, names in groups.items():
        table.add_section()
        for name, result in names.items():
            table.add_row(
                label(room, name),
                f"{result.samples:,}",
                cell(result.tokens_per_s, "{:,.0f}"),
                latencies(result.latency_p50_s, result.latency_p95_s, result.latency_p99_s) or "–",
                cell(None if result.payload_bytes is None else result.payload_bytes / 2**20, "{:.1f}"),
                cell(result.retries, "{:d}"),
                cell(result.failures, "{:d}"),
            )
    return table

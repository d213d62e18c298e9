"""``report.json`` and ``report.html`` of a run folder, finished or not.

Head-room recovery of a domain = (after - before) / (teacher - before): the share of its teacher's lead that the student
gained. ``before`` is the validation reward at step 0, ``after`` that of the best validation (highest mean over domains,
the earliest of equals: the checkpoint that is exported), ``teacher`` the domain's own teacher on the same prompts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from mopd.base.files.writing import write_text
from mopd.base.text import visible
from mopd.report.charts import cell
from mopd.report.curves import Phase, percents, phase_name, phases
from mopd.report.groups import LATENCY_HEADING, GroupResult, label, latencies, summarise_groups
from mopd.report.page import render_page
from mopd.report.pipeline import (
    AgeResult,
    PipelineResult,
    ages_line,
    lengths_line,
    stage_label,
    summarise_ages,
    summarise_pipeline,
)
from mopd.report.run_files import RunFiles, best_of
from mopd.report.terminal import Terminal, make_table


@dataclass(frozen=True, kw_only=True, slots=True)
class DomainResult:
    """Mean validation rewards of one domain; ``None`` where not measured (yet)."""

    before: float | None
    after: float | None
    teacher: float | None
    headroom_recovery: float | None
    """Recovered share of the teacher's lead; ``None`` also where the teacher does not beat ``before``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Content of ``report.json``, with ``domains`` by name."""

    domains: Mapping[str, DomainResult]
    mean_headroom_recovery: float | None
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


def build_report(run_dir: str | Path) -> Report:
    """Write ``report.json`` and ``report.html`` into the run folder and return the former's content.

    Raises:
        UserError: the folder holds no run, a file of it is damaged, or a write is refused.
    """
    files = RunFiles(Path(run_dir))
    files.require_run()
    steps, validations = files.steps(), files.validations()
    recipe = files.recipe_tree()
    report = summarise(steps, validations, files.teacher_rewards(), planned_steps=recipe["schedule"]["steps"])
    page = render_page(asdict(report), files, recipe, steps, validations)
    write_text(files.report_json, json.dumps(asdict(report), indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    write_text(files.report_html, visible(page, keep="\n\t"))
    return report


def summarise(
    steps: Sequence[Mapping[str, Any]],
    validations: Sequence[Mapping[str, Any]],
    teachers: Mapping[str, float],
    *,
    planned_steps: int,
) -> Report:
    """Make the report from the records of ``metrics.jsonl`` and ``validation.jsonl`` and the teachers' rewards by
    domain."""
    before: Mapping[str, float] = next((record["rewards"] for record in validations if record["step"] == 0), {})
    best = best_of(validations)
    after: Mapping[str, float] = next((r["rewards"] for r in validations if best and r["step"] == best.step), {})
    domains = {
        domain: DomainResult(
            before=before.get(domain),
            after=after.get(domain),
            teacher=teachers.get(domain),
            headroom_recovery=headroom_recovery(before.get(domain), after.get(domain), teachers.get(domain)),
        )
        for domain in sorted({*before, *after, *teachers})
    }
    recoveries = [result.headroom_recovery for result in domains.values() if result.headroom_recovery is not None]
    step_s = sum(record.get("timing/step_s", 0.0) for record in steps)
    tokens = sum(record.get("tokens", 0.0) for record in steps)
    return Report(
        domains=domains,
        mean_headroom_recovery=sum(recoveries) / len(recoveries) if recoveries else None,
        best_step=None if best is None else best.step,
        steps=steps[-1]["step"] if steps else 0,
        planned_steps=planned_steps,
        wall_s=step_s + sum(record.get("wall_s", 0.0) for record in validations),
        train_tokens_per_s=tokens / step_s if step_s else None,
        phases=phases(steps),
        vision_tower_share=_mean(steps, "rate/vision_tower_share"),
        pipeline_bubble_share=_mean(steps, "rate/pipeline_bubble_share"),
        pipeline=summarise_pipeline(steps),
        samples=summarise_ages(steps),
        groups=summarise_groups(steps),
    )


def _mean(steps: Sequence[Mapping[str, Any]], metric: str) -> float | None:
    """Return a metric's mean over the steps that have it."""
    values = [record[metric] for record in steps if record.get(metric) is not None]
    return sum(values) / len(values) if values else None


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
        rewards = (cell(value, "{:.3f}") for value in (result.before, result.after, result.teacher))
        table.add_row(domain, *rewards, cell(result.headroom_recovery, "{:.0%}"))
    if len(report.domains) > 1:
        table.add_section()
        table.add_row("mean", "", "", "", cell(report.mean_headroom_recovery, "{:.0%}"))
    rate = cell(report.train_tokens_per_s, "{:,.0f} tokens/s")
    console = console or Terminal()
    console.print(table)
    if report.groups:
        console.print(_group_table(report.groups))
    if report.phases:
        shown = percents([phase.share for phase in report.phases.values()])
        parts = (f"{phase_name(name).lower()} {text}" for name, text in zip(report.phases, shown, strict=True))
        console.print(f"time of the steps: {', '.join(parts)}", highlight=False)
    if report.vision_tower_share is not None:
        bubble = cell(report.pipeline_bubble_share, "{:.1%}")
        line = f"vision tower: {report.vision_tower_share:.1%} of the first pipeline stage's passes; bubble {bubble}"
        console.print(line, highlight=False)
    if report.pipeline is not None:
        console.print(_stage_table(report.pipeline))
    if report.samples is not None:
        for line in filter(None, (ages_line(report.samples), lengths_line(report.samples))):
            console.print(line, highlight=False)
    console.print(f"{report.wall_s:,.0f} s in steps and validations, {rate} trained", highlight=False)


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

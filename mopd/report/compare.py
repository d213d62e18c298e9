"""Runs side by side: their last numbers, what differs in their recipes, and their curves over one another."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from mopd.base.text import visible
from mopd.base.types import UserError
from mopd.config.load import differences, flatten
from mopd.report.build import Report, record_at, summarise, summarise_run
from mopd.report.charts import Series, cell, named_series, short
from mopd.report.curves import Curves, curves_by_metric, is_zero, panel_of
from mopd.report.intervals import Interval, difference_interval, show_interval
from mopd.report.page import chart, duration, render
from mopd.report.pipeline import mean_of
from mopd.report.recovery import equal_budgets, headline, read_rewards, within_noise
from mopd.report.run_files import RunFiles
from mopd.report.terminal import Terminal

MAX_RUNS = 16
LAST = 20
"""Number of last steps over which loss and KL are averaged; single steps are noisy."""
RUNS_IN_A_TABLE = 3
"""Number of runs that fit a terminal of 80 columns."""
METRICS = (
    "kl_k1", "loss", "topk_overlap", "entropy", "response_length", "truncated_share", "grad_norm", "lr",
    "timing/step_s", "rate/train_tokens_per_s", "memory/student_peak_gib",
)  # fmt: skip
"""Metrics that are drawn, by domain if they have domains."""
NAME_OF_RUN = "run_dir"
"""Recipe key that always differs."""
Section = tuple[str, list[tuple[str, list[str]]]]
"""Heading, and rows of a name and a text for each run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRun:
    """Content of one run's files."""

    name: str
    """Name of the run's folder, or the path as given if two folders have one name."""
    report: Report
    steps: Sequence[Mapping[str, Any]]
    curves: Curves
    rewards: Mapping[str, list[tuple[float, float]]]
    """Domain -> (step, reward) of every validation."""
    recipe: Mapping[str, Any]
    validations: Sequence[Mapping[str, Any]]
    """Records of all validations."""
    after: Mapping[str, Any]
    """Record of the best one; empty before the first."""

    def mean_of_last(self, name: str) -> float | None:
        """Return the mean over the last ``LAST`` steps; ``None`` for a metric that was not measured."""
        return mean_of(self.steps[-LAST:], name)


def read_runs(paths: Sequence[Path]) -> list[ComparedRun]:
    """Read every run folder, finished or not, in the order given. A file is what ``mopd eval --json`` printed of a
    model that no run trained; its head-room is the first run's.

    Raises:
        UserError: fewer than two, too many, the same one twice, no run among them, or a folder that holds no run or a
            damaged one.
    """
    if not 2 <= len(paths) <= MAX_RUNS:
        raise UserError(f"compare: {len(paths)} runs: name 2 to {MAX_RUNS}")
    resolved = [path.resolve() for path in paths]
    for i, path in enumerate(resolved):
        if path in resolved[:i]:
            raise UserError(f"compare: {str(paths[i])!r} is named twice: name different runs")
    names = [path.stem if path.is_file() else path.name for path in resolved]
    is_clear = len(set(names)) == len(names)
    called = {path: name if is_clear else str(path) for path, name in zip(paths, names, strict=True)}
    runs = {path: _read(RunFiles(path), name) for path, name in called.items() if not path.is_file()}
    if not runs:
        raise UserError("compare: no run, files of `mopd eval --json` alone: name a run too")
    first = next(iter(runs.values()))
    return [runs[path] if path in runs else _untrained(path, name, first) for path, name in called.items()]


def _read(files: RunFiles, name: str) -> ComparedRun:
    files.require_run()
    steps, validations, recipe = files.steps(), files.validations(), files.recipe_tree()
    rewards: dict[str, list[tuple[float, float]]] = {}
    for validation in validations:
        for domain, reward in {**validation["rewards"], **validation.get("watched", {})}.items():
            rewards.setdefault(domain, []).append((validation["step"], reward))
    return ComparedRun(
        name=name,
        report=(report := summarise_run(files, steps, validations, recipe)),
        validations=validations,
        after=record_at(validations, report.best_step),
        steps=steps,
        curves=curves_by_metric(steps),
        rewards=rewards,
        recipe=recipe,
    )


def _untrained(path: Path, name: str, run: ComparedRun) -> ComparedRun:
    """Read the rewards of a model that no run trained, to be set against the head-room of ``run``."""
    rewards = read_rewards(path)
    domains = run.report.domains
    before, teachers = (
        {domain: value for domain, one in domains.items() if (value := getattr(one, key)) is not None}
        for key in ("before", "teacher")
    )
    validations = [{"step": step, "rewards": own} for step, own in ((0, before), (1, rewards))]
    report = summarise([], validations, teachers, teacher_scores={}, planned_steps=0)
    points = {domain: [(1.0, reward)] for domain, reward in rewards.items()}
    report = replace(report, best_step=None, objective="untrained")
    return replace(run, name=name, report=report, validations=[], after={}, steps=[], curves={}, rewards=points)


def comparison(runs: Sequence[ComparedRun]) -> dict[str, Any]:
    """Return what ``--json`` prints: the numbers of each run by its name, and the values of every key that differs."""
    return {
        "headline": headline(runs),
        "runs": {run.name: _numbers(run) for run in runs},
        "behind_best": {
            "mean": _gaps_by_run(runs),
            "domains": {domain: _gaps_by_run(runs, domain) for domain in _domains(runs)},
        },
        "recovery_at_equal": {
            budget.name: {
                "amount": budget.amount,
                "mean": dict(zip((run.name for run in runs), budget.means, strict=True)),
                "domains": {run.name: own for run, own in zip(runs, budget.recoveries, strict=True)},
                "within_noise": [runs[i].name for i in within_noise(runs, budget)],
            }
            for budget in equal_budgets(runs)
        },
        "recipe_differences": {
            key: {run.name: value for run, value in zip(runs, values, strict=True)}
            for key, values in recipe_differences(runs).items()
        },
    }


def recipe_differences(runs: Sequence[ComparedRun]) -> dict[str, list[Any]]:
    """Return each run's value (``None`` where absent) of every key that differs, by dotted path. A section that not
    all runs have shows by those of its keys that are set."""
    first, *others = runs
    keys = dict.fromkeys(key for other in others for key in differences(first.recipe, other.recipe))
    flat = [flatten(run.recipe) for run in runs]
    found = {key: [values.get(key) for values in flat] for key in keys if key != NAME_OF_RUN}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}


def _numbers(run: ComparedRun) -> dict[str, Any]:
    told = asdict(run.report)
    for key in ("groups", "pipeline", "samples"):
        del told[key]
    for domain in _domains([run]):
        entry = told["domains"].setdefault(domain, dict.fromkeys(("before", "after", "teacher", "headroom_recovery")))
        rewards = run.rewards.get(domain)
        entry |= {"last": rewards[-1][1] if rewards else None, "kl": run.mean_of_last(f"kl_k1/{domain}")}
    return told | {"loss": run.mean_of_last("loss"), "step_s": run.mean_of_last("timing/step_s")}


def _domains(runs: Sequence[ComparedRun]) -> list[str]:
    found = {domain for run in runs for curves in run.curves.values() for domain in curves}
    return sorted((found | {domain for run in runs for domain in run.report.domains}) - {""})


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """How far a run's reward at its best validation is from the best of all runs."""

    value: float
    """Difference, 0 or negative."""
    interval: Interval | None
    """95 % interval over the prompts; ``None`` for the best run and where scores were not kept."""


def behind_best(runs: Sequence[ComparedRun], domain: str = "") -> list[Gap | None]:
    """Compare each run's reward in a domain (``""``: mean over the taught ones) with the best run's; ``None`` without
    a reward. Runs that answered the same prompts are compared prompt by prompt."""
    rewards = [_rewards_after(run, domain) for run in runs]
    means = [sum(own.values()) / len(own) if own else -math.inf for own in rewards]
    best = means.index(max(means))

    def of_best(key: str, name: str) -> Any:
        return runs[best].after.get(key, {}).get(name)

    gaps: list[Gap | None] = []
    for i, run in enumerate(runs):
        scores, prompts = run.after.get("scores", {}), run.after.get("prompts", {})
        pairs = [(scores.get(name, []), of_best("scores", name) or []) for name in rewards[i]]
        is_paired = all(name in prompts and prompts[name] == of_best("prompts", name) for name in rewards[i])
        interval = None if i == best else difference_interval(pairs, is_paired=is_paired)
        gaps.append(Gap(value=means[i] - means[best], interval=interval) if rewards[i] else None)
    return gaps


def _rewards_after(run: ComparedRun, domain: str) -> Mapping[str, float]:
    """Return the rewards at the best validation of the taught domains, or of ``domain`` alone, by domain."""
    taught = run.after.get("rewards", {})
    known = {**taught, **run.after.get("watched", {})}
    return taught if not domain else {domain: known[domain]} if domain in known else {}


def _gaps_by_run(runs: Sequence[ComparedRun], domain: str = "") -> dict[str, Any]:
    return {run.name: gap and asdict(gap) for run, gap in zip(runs, behind_best(runs, domain), strict=True)}


def _gap_text(gap: Gap | None) -> str:
    if gap is None:
        return "–"
    if gap.interval is None:
        return f"{gap.value:+.3f}" if gap.value else "best"
    is_noise = gap.interval[0] <= 0 <= gap.interval[1]
    return f"{gap.value:+.3f} {show_interval(gap.interval, '{:+.2f}')}{' within noise' if is_noise else ''}"


def sections(runs: Sequence[ComparedRun]) -> list[Section]:
    """Make the tables of terminal and page, as texts."""
    numbers = [_numbers(run) for run in runs]

    def row(what: str, texts: Iterator[str]) -> tuple[str, list[str]]:
        return what, list(texts)

    whole = [
        row("trained on", (run.report.objective for run in runs)),
        row("steps", (f"{n['steps']:,} of {n['planned_steps']:,}" for n in numbers)),
        row("best validation at step", (cell(n["best_step"], "{:,}") for n in numbers)),
        row("mean head-room recovered", (cell(n["mean_headroom_recovery"], "{:.0%}") for n in numbers)),
        row("domain with the least recovered", map(_weakest, runs)),
        row("mean reward, behind the best run", map(_gap_text, behind_best(runs))),
        row(f"loss, last {LAST} steps", (cell(n["loss"], short) for n in numbers)),
        row("steps and validations", (duration(n["wall_s"]) for n in numbers)),
        row(f"seconds per step, last {LAST}", (cell(n["step_s"], short) for n in numbers)),
        row("trained tokens/s", (cell(n["train_tokens_per_s"], "{:,.0f}") for n in numbers)),
    ]
    stored = [run.mean_of_last("stored_answers_share") for run in runs]
    if any(share is not None for share in stored):
        whole.append(row(f"answers that were stored, last {LAST} steps", (cell(share, "{:.0%}") for share in stored)))
    differing = recipe_differences(runs).items()
    recipe = [row(key, (json.dumps(value, ensure_ascii=False) for value in values)) for key, values in differing]
    made: list[Section] = [("", whole), ("Recipe, where it differs", recipe or [row("no key", ("" for _ in runs))])]
    for budget in equal_budgets(runs):
        rows = [row(d, (cell(own.get(d), "{:.0%}") for own in budget.recoveries)) for d in _domains(runs)]
        made.append((budget.heading, [row("mean", (cell(value, "{:.0%}") for value in budget.means)), *rows]))
    headings = {
        "before": "reward before",
        "after": "reward at the best validation",
        "last": "reward at the last validation",
        "teacher": "reward of the teacher",
    }
    for domain in _domains(runs):
        of_domain = [n["domains"].get(domain, {}) for n in numbers]
        rows = [row(what, (cell(n.get(key), "{:.3f}") for n in of_domain)) for key, what in headings.items()]
        rows.append(row("head-room recovered", (cell(n.get("headroom_recovery"), "{:.0%}") for n in of_domain)))
        rows.append(row("reward, behind the best run", map(_gap_text, behind_best(runs, domain))))
        rows.append(row(f"KL from the teacher, last {LAST} steps", (cell(n.get("kl"), short) for n in of_domain)))
        made.append((domain, rows))
    return made


def _weakest(run: ComparedRun) -> str:
    """Write the domain of which the run recovered least; a mean may hide that one starves."""
    known = {d: one.headroom_recovery for d, one in run.report.domains.items() if one.headroom_recovery is not None}
    domain = min(known, key=lambda name: known[name], default=None)
    return "–" if domain is None else f"{known[domain]:.0%} {domain}"


def print_comparison(runs: Sequence[ComparedRun], console: Terminal | None = None) -> None:
    """Print tables on the terminal, with as many runs in each as fit."""
    console = console or Terminal()
    made, best = sections(runs), headline(runs)
    if best is not None:
        console.print(best)
    for start in range(0, len(runs), RUNS_IN_A_TABLE):
        chosen = slice(start, start + RUNS_IN_A_TABLE)
        table = Table()
        table.add_column("", ratio=2)
        for run in runs[chosen]:
            table.add_column(run.name, justify="right", ratio=2)
        for heading, rows in made:
            table.add_section()
            if heading:
                table.add_row(heading, style="bold")
            for what, texts in rows:
                table.add_row(what, *texts[chosen])
        console.print(table)


def comparison_page(runs: Sequence[ComparedRun]) -> str:
    """Return one HTML page without outside references: the tables, and curves with a colour for each run."""
    charts = [*_reward_charts(runs), *_metric_charts(runs)]
    text = render(
        "compare.html.j2",
        runs=[run.name for run in runs],
        headline=headline(runs),
        sections=sections(runs),
        charts=[one for one in charts if not one["is_zero"]],
        zero_charts=[one for one in charts if one["is_zero"]],
    )
    return visible(text, keep="\n\t")


def _reward_charts(runs: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    charts = []
    for domain in sorted({domain for run in runs for domain in run.rewards}):
        series = []
        for index, run in enumerate(runs):
            result = run.report.domains.get(domain)
            goal = None if result is None else result.teacher
            points = run.rewards.get(domain, [])
            series.append(Series(name=run.name, index=index, points=points, goal=goal, has_marks=True))
        text = "Mean on held-out prompts; dotted: the teacher."
        made = chart(f"Validation reward, {domain}", text, series, from_zero=False)
        charts.append({**made, "is_zero": False})
    return charts


def _metric_charts(runs: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    charts = []
    for metric in METRICS:
        panel = panel_of(metric)
        for domain in sorted({domain for run in runs for domain in run.curves.get(metric, ())}):
            points = {run.name: run.curves.get(metric, {}).get(domain, []) for run in runs}
            series = named_series(points, is_noisy=panel.is_noisy)
            title = f"{panel.title}, {domain}" if domain else panel.title
            made = chart(title, panel.text, series, metric=metric, from_zero=panel.from_zero)
            charts.append({**made, "is_zero": is_zero(points)})
    return charts

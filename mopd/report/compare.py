"""Runs side by side: their last numbers, what differs in their recipes, their curves over one another, and what each
recovered of its teachers' head-room at equal prompts and at equal seconds."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich.table import Table

from mopd.base.files.json_text import read_json_object
from mopd.base.files.reading import shown_path
from mopd.base.text import visible
from mopd.base.types import UserError
from mopd.config.load import differences, flatten
from mopd.report.build import DomainResult, Report, headroom_recovery, record_at, summarise, summarise_run
from mopd.report.charts import Series, cell, named_series, short
from mopd.report.curves import Curves, curves_by_metric, is_zero, panel_of
from mopd.report.intervals import Interval, difference_interval, show_interval
from mopd.report.page import chart, duration, render
from mopd.report.pipeline import mean_of
from mopd.report.run_files import RunFiles, is_number, mean
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


def read_rewards(path: Path) -> dict[str, float]:
    """Read the rewards by domain that ``mopd eval --json`` has printed into a file. ``UserError`` for another file."""
    cure = "write it with `mopd eval RECIPE --model FOLDER --json > FILE`"
    rewards = read_json_object(path, cure=cure).get("rewards")
    if not isinstance(rewards, dict) or not rewards or not all(map(is_number, rewards.values())):
        raise UserError(f"{shown_path(path)}: holds no rewards by domain: {cure}")
    return rewards


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """A quantity that training spends, and the share of the head-room that each run had recovered for so much of it."""

    name: str
    """``prompts`` or ``seconds``."""
    amount: float
    """What the run that spent least had spent by its last validation."""
    validations: Sequence[Mapping[str, Any]]
    """Record of each run's best validation within the amount; empty without one, or of a model that nobody trained."""
    recoveries: Sequence[Mapping[str, float | None]]
    """Recovery by domain of each run, at that validation."""
    costs: Sequence[float]
    """What each run had spent of the other quantity, seconds or prompts, when it had spent the amount."""

    @property
    def heading(self) -> str:
        """Heading of its table."""
        unit = "seconds of steps" if self.name == "seconds" else self.name
        return f"Head-room recovered after {self.amount:,.0f} {unit}"

    @property
    def means(self) -> list[float | None]:
        """Mean recovery over the domains of each run."""
        known = [[value for value in own.values() if value is not None] for own in self.recoveries]
        return [sum(own) / len(own) if own else None for own in known]

    @property
    def best(self) -> int | None:
        """Number of the run that recovered most; ``None`` unless two are known."""
        ranked = [(value, -i) for i, value in enumerate(self.means) if value is not None]
        return -max(ranked)[1] if len(ranked) > 1 else None

    @property
    def other(self) -> str:
        """Name of the quantity of ``costs``."""
        return "seconds" if self.name == "prompts" else "prompts"


def equal_budgets(runs: Sequence[ComparedRun]) -> list[Budget]:
    """Compare the runs at the largest number of prompts, and of seconds, that all of them had spent by a validation; a
    model that nobody trained counts at any amount. Empty where no two can be compared."""
    found = []
    for name, spent, other in (("prompts", _prompts, _seconds), ("seconds", _seconds, _prompts)):
        ends = [spent(run)(max(steps)) for run in runs if run.steps and (steps := _validated(run))]
        if len(runs) < 2 or not ends:
            continue
        amount = min(ends)
        best = [_best_within(run, spent(run), amount) for run in runs]
        last = [_last_within(run, spent(run), amount) for run in runs]
        budget = Budget(
            name=name,
            amount=amount,
            validations=[record_at(run.validations, step) for run, step in zip(runs, best, strict=True)],
            recoveries=[_recovered(run, step) for run, step in zip(runs, best, strict=True)],
            costs=[other(run)(step) for run, step in zip(runs, last, strict=True)],
        )
        found += [budget] if budget.best is not None else []
    return found


def within_noise(runs: Sequence[ComparedRun], budget: Budget) -> list[int]:
    """Return the numbers of the runs whose recovery differs from the best one's by no more than other prompts might
    have made of it; a run without scores, or with head-room in other domains, is not among them."""
    best = budget.best
    known = [{domain for domain, value in own.items() if value is not None} for own in budget.recoveries]
    found = []
    for i in range(len(runs)):
        if best is None or i == best or not known[i] or known[i] != known[best]:
            continue
        pairs = [(_scaled(runs, budget, best, domain), _scaled(runs, budget, i, domain)) for domain in sorted(known[i])]
        asked = [budget.validations[one].get("prompts", {}) for one in (best, i)]
        is_paired = all(domain in asked[0] and asked[0][domain] == asked[1].get(domain) for domain in known[i])
        interval = difference_interval(pairs, is_paired=is_paired)
        found += [i] if interval is not None and interval[0] <= 0 <= interval[1] else []
    return found


def _scaled(runs: Sequence[ComparedRun], budget: Budget, i: int, domain: str) -> list[float]:
    """Return a run's score of each prompt as a share of the head-room: its mean is the recovery."""
    result = runs[i].report.domains[domain]
    assert result.before is not None and result.teacher is not None
    scores = budget.validations[i].get("scores", {}).get(domain, [])
    return [(score - result.before) / (result.teacher - result.before) for score in scores]


def headline(runs: Sequence[ComparedRun]) -> str | None:
    """Say in one sentence which run recovered most, by either budget, or which ones are within noise."""
    line = "; ".join(_sentence(runs, budget) for budget in equal_budgets(runs))
    return f"{line[0].upper()}{line[1:]}" if line else None


def _sentence(runs: Sequence[ComparedRun], budget: Budget) -> str:
    best, means = budget.best, budget.means
    assert best is not None
    level = [best, *within_noise(runs, budget)]
    if len(level) == 1:
        others = max(value for i, value in enumerate(means) if value is not None and i != best)
        name, reached = f"{runs[best].name} ({runs[best].report.objective})", cell(means[best], "{:.0%}")
        return f"at equal {budget.name} {name} recovered most: {reached}, the next {others:.0%}"
    names = [f"{runs[i].name} ({runs[i].report.objective}, {cell(means[i], '{:.0%}')})" for i in level]
    said = f"at equal {budget.name} {', '.join(names[:-1])} and {names[-1]} are within noise"
    by_cost = sorted(level, key=lambda i: budget.costs[i])
    first, second = (f"{budget.costs[i]:,.0f}" for i in by_cost[:2])
    cheaper = f", and {runs[by_cost[0]].name} is cheaper in {budget.other}: {first}, the next {second}"
    return said + (cheaper if first != second else "")


def _prompts(run: ComparedRun) -> Callable[[int], float]:
    per_step = run.recipe["schedule"]["prompts_per_step"]
    return lambda step: step * per_step


def _seconds(run: ComparedRun) -> Callable[[int], float]:
    """Return the seconds of all steps up to one of them; validations do not count, as a run may have more of them."""
    steps = [record["step"] for record in run.steps]
    until = [0.0, *accumulate(record.get("timing/step_s") or 0.0 for record in run.steps)]
    return lambda step: until[bisect_right(steps, step)]


def _validated(run: ComparedRun) -> list[int]:
    return sorted({int(step) for points in run.rewards.values() for step, _ in points if step > 0})


def _fits(spent: float, amount: float) -> bool:
    return spent <= amount * (1 + 1e-9)


def _rewards_at(run: ComparedRun, step: int) -> dict[str, float]:
    """Return the rewards of the domains that have a teacher, as far as they were measured at the step."""
    found = {domain: dict(run.rewards.get(domain, ())).get(step) for domain in _taught(run)}
    return {domain: reward for domain, reward in found.items() if reward is not None}


def _taught(run: ComparedRun) -> dict[str, DomainResult]:
    return {domain: result for domain, result in run.report.domains.items() if result.teacher is not None}


def _best_within(run: ComparedRun, spent: Callable[[int], float], amount: float) -> int | None:
    """Return the step of the run's best validation within the amount, the earliest of equals."""
    within = [step for step in _validated(run) if not run.steps or _fits(spent(step), amount)]
    rewards = {step: own for step in within if (own := _rewards_at(run, step))}
    return max(rewards, key=lambda step: (mean(rewards[step]), -step), default=None)


def _last_within(run: ComparedRun, spent: Callable[[int], float], amount: float) -> int:
    return max((record["step"] for record in run.steps if _fits(spent(record["step"]), amount)), default=0)


def _recovered(run: ComparedRun, step: int | None) -> dict[str, float | None]:
    after = {} if step is None else _rewards_at(run, step)
    return {
        domain: headroom_recovery(result.before, after.get(domain), result.teacher)
        for domain, result in _taught(run).items()
    }

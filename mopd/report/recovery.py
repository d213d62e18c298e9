"""Runs beside one another: what each recovered of its teachers' head-room at equal prompts and at equal seconds. Models
that nobody trained here (a teacher, a merge) may stand beside them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mopd.base.files.json_text import read_json_object
from mopd.base.files.reading import shown_path
from mopd.base.types import UserError
from mopd.report.build import DomainResult, headroom_recovery, record_at
from mopd.report.charts import cell
from mopd.report.intervals import difference_interval
from mopd.report.run_files import is_number, mean

if TYPE_CHECKING:
    from mopd.report.compare import ComparedRun


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

"""Runs beside one another: what each recovered of its teachers' head-room at equal prompts and at equal seconds. Models
that nobody trained here (a teacher, a merge) may stand beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from mopd.base.files.json_text import read_json_object
from mopd.base.files.reading import shown_path
from mopd.base.types import UserError
from mopd.report.build import headroom_recovery
from mopd.report.charts import cell
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
    recoveries: Sequence[Mapping[str, float | None]]
    """Recovery by domain of each run, at its best validation within the amount."""

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


def equal_budgets(runs: Sequence[ComparedRun]) -> list[Budget]:
    """Compare the runs at the largest number of prompts, and of seconds, that all of them had spent by a validation; a
    model that nobody trained counts at any amount. Empty where no two can be compared."""
    found = []
    for name, spent in (("prompts", _prompts), ("seconds", _seconds)):
        ends = [spent(run)(max(steps)) for run in runs if run.steps and (steps := _validated(run))]
        if len(runs) > 1 and ends:
            amount = min(ends)
            found.append(Budget(name=name, amount=amount, recoveries=[_recovered(run, spent, amount) for run in runs]))
    return [budget for budget in found if budget.best is not None]


def headline(runs: Sequence[ComparedRun]) -> str | None:
    """Say in one sentence which run recovered most, by either budget."""
    parts = []
    for budget in equal_budgets(runs):
        if (best := budget.best) is not None:
            others = [value for i, value in enumerate(budget.means) if value is not None and i != best]
            parts.append(
                f"at equal {budget.name} {runs[best].name} ({runs[best].report.objective}) recovered most: "
                f"{cell(budget.means[best], '{:.0%}')}, the next {max(others):.0%}"
            )
    line = "; ".join(parts)
    return f"{line[0].upper()}{line[1:]}" if line else None


def _prompts(run: ComparedRun) -> Callable[[int], float]:
    per_step = run.recipe["schedule"]["prompts_per_step"]
    return lambda step: step * per_step


def _seconds(run: ComparedRun) -> Callable[[int], float]:
    """Return the seconds of all steps up to one of them; validations do not count, as a run may have more of them."""
    each = (record.get("timing/step_s") or 0.0 for record in run.steps)
    until = dict(zip((record["step"] for record in run.steps), accumulate(each), strict=True))
    return lambda step: max((seconds for done, seconds in until.items() if done <= step), default=0.0)


def _validated(run: ComparedRun) -> list[int]:
    return sorted({int(step) for points in run.rewards.values() for step, _ in points if step > 0})


def _recovered(
    run: ComparedRun, spent: Callable[[ComparedRun], Callable[[int], float]], amount: float
) -> dict[str, float | None]:
    of_step = spent(run)
    within = [step for step in _validated(run) if not run.steps or of_step(step) <= amount * (1 + 1e-9)]
    at = {step: {d: dict(points).get(step) for d, points in run.rewards.items()} for step in within}
    taught = {domain: result for domain, result in run.report.domains.items() if result.teacher is not None}
    whole = {step: {d: r for d, r in own.items() if d in taught and r is not None} for step, own in at.items()}
    best = max((step for step in within if whole[step]), key=lambda step: (mean(whole[step]), -step), default=None)
    after = {} if best is None else whole[best]
    return {
        domain: headroom_recovery(result.before, after.get(domain), result.teacher) for domain, result in taught.items()
    }

"""Comparison of a plan with what a run measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mopd.planning.balance import TRAINER, WEIGHTS
from mopd.planning.plan import RunPlan
from mopd.report.pipeline import mean_of, stage_seconds

SETTLING_STEPS = 2
"""Number of a run's first steps that are left out: they also allocate and compile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedAndMeasured:
    """One number of the plan, and the mean of the run's steps."""

    what: str
    unit: str
    planned: float
    measured: float

    @property
    def ratio(self) -> float | None:
        """Planned over measured."""
        return self.planned / self.measured if self.measured else None


def compare(plan: RunPlan, steps: Sequence[Mapping[str, Any]]) -> list[PlannedAndMeasured]:
    """Return the seconds of the stages and the bytes of the engines that both plan and run have."""
    records = steps[SETTLING_STEPS:] or steps
    rows = []
    if plan.times is not None:
        busy = stage_means(records)
        planned = plan.times.seconds
        rows = [
            PlannedAndMeasured(what=name, unit="s", planned=planned[name], measured=busy[name])
            for name in sorted(planned.keys() & busy.keys(), key=_place)
        ]
        whole = mean_of(records, "timing/step_s")
        if whole:
            rows.append(PlannedAndMeasured(what="step", unit="s", planned=plan.times.step_s, measured=whole))
    for link in plan.links:
        key, _, _ = link.name.partition(": ")
        room, _, name = key.partition(".")
        measured = mean_of(records, f"{room}/payload_bytes" + (f"/{name}" if name else ""))
        if measured:
            rows.append(PlannedAndMeasured(what=link.name, unit="bytes", planned=link.num_bytes, measured=measured))
    return rows


def slowest(steps: Sequence[Mapping[str, Any]]) -> str:
    """Return the stage that was busy longest."""
    busy = stage_means(steps[SETTLING_STEPS:] or steps)
    return max(busy, key=busy.__getitem__)


def stage_means(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean busy seconds of a step by stage, without rewards, which no plan has."""
    found: dict[str, list[float]] = defaultdict(list)
    for record in steps:
        for name, (seconds, _, _) in stage_seconds(record).items():
            found[name].append(seconds)
    return {name: sum(values) / len(values) for name, values in found.items() if name != "rewards"}


def _place(stage: str) -> tuple[int, str]:
    return {TRAINER: 2, WEIGHTS: 3}.get(stage, int(stage.startswith("teachers"))), stage

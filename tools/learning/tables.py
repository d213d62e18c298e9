"""The tables of ``docs/learning.md`` and ``docs/losses.md``, from the results that are there."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mopd.report.build import headroom_recovery
from tools.learning.contenders import BASELINES, CONFLICT, CONTENDERS, FIRST, REFERENCE, TOYS, Contender

BEGIN, END = "<!-- tables of tools/measure_learning.py: begin -->", "<!-- end -->"
Result = Mapping[str, Any]
ABSENT = "–"
BY_REWARD = ("half", "self")
"""Toys whose teacher is no measure of the student: rewards stand in place of recovery."""
DISTANCES = ("reverse_kl", "forward_kl", "never_drawn")


def fill(page: str, results: Sequence[Result], questions: Sequence[str]) -> str:
    """Return the page with the tables of these questions between its marks. ``ValueError`` for a page without
    marks."""
    before, found, rest = page.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise ValueError(f"the page lacks the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{tables(results, questions)}\n{END}{after}"


def tables(results: Sequence[Result], questions: Sequence[str]) -> str:
    """Return a table for each question, a line for each contender that was measured, a column for each toy."""
    parts = []
    for question in questions:
        first = FIRST.get(question, (REFERENCE,))
        own = [one for one in CONTENDERS if one.question == question or one.name in first]
        toys = [toy for toy in TOYS if any(toy in one.toys for one in own if one.question == question)]
        rows = [[one.name, *(_cell(_of(results, one.name, toy), toy) for toy in toys)] for one in own]
        asked = [row for one, row in zip(own, rows, strict=True) if one.question == question]
        if any(set(row[1:]) != {ABSENT} for row in asked):
            measured = [row for row in rows if set(row[1:]) != {ABSENT}]
            parts += [f"### {question}", "", *_table(["", *toys], measured), ""]
        if question == BASELINES and (table := _at_equal_seconds(results, own)):
            parts += [f"### {question}, at equal processor seconds", "", *table, ""]
        if question == CONFLICT and (table := _by_seed(results, "quickstart", [one.name for one in own])):
            parts += ["### The quickstart, by domain and seed", "", *table, ""]
    return "\n".join(parts)


def _of(results: Iterable[Result], name: str, toy: str) -> list[Result]:
    return [one for one in results if (one["contender"], one["toy"]) == (name, toy)]


def _cell(runs: Sequence[Result], toy: str) -> str:
    """Write what the seeds of a contender reached: recovery, mean of the domains and of the worst one; or both KLs."""
    failed = [one for one in runs if "failed" in one]
    done = [one for one in runs if "failed" not in one]
    if not done:
        return f"failed: {failed[0]['failed'][:60]}" if failed else ABSENT
    if toy == "stochastic":
        text = " / ".join(_spread([_mean_distance(one, key) for one in done]) for key in DISTANCES)
    elif toy in BY_REWARD:
        before, after = ([_mean_reward(one, when) for one in done] for when in ("before", "after"))
        text = f"{statistics.mean(before):.3f} → {_spread(after)}"
    else:
        worst = statistics.mean(min(one["recovery"].values()) for one in done)
        text = f"{_spread([statistics.mean(one['recovery'].values()) for one in done])}, worst {worst:.2f}"
    seconds = statistics.mean(one["wall_s"] for one in done)
    missing = f", {len(failed)} of {len(runs)} failed" if failed else ""
    return f"{text} ({len(done)} × {seconds:.0f} s{missing})"


def _mean_distance(result: Result, key: str) -> float | None:
    """Return the mean over the domains; ``None`` for a result of before it was measured."""
    values = [by_domain.get(key) for by_domain in result["distance"].values()]
    return None if None in values else statistics.mean(values)


def _mean_reward(result: Result, when: str) -> float:
    return float(statistics.mean(one[when] for one in result["domains"].values()))


def _spread(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ABSENT
    spread = f" ± {statistics.stdev(known):.3f}" if len(known) > 1 else ""
    return f"{statistics.mean(known):.3f}{spread}"


def _by_seed(results: Sequence[Result], toy: str, names: Sequence[str]) -> list[str]:
    """Return the table of a toy's recovery in each domain, seed after seed; empty without results."""
    runs = {name: [one["recovery"] for one in _of(results, name, toy) if "failed" not in one] for name in names}
    domains = sorted({domain for own in runs.values() for one in own for domain in one})
    rows = [
        [name, *(", ".join(f"{one[domain]:.3f}" for one in own) for domain in domains)]
        for name, own in runs.items()
        if own
    ]
    return _table(["", *domains], rows) if rows else []


def _at_equal_seconds(results: Sequence[Result], contenders: Sequence[Contender]) -> list[str]:
    """Return the table of the recovery that each contender had reached when the fastest run of any had ended, by the
    processor seconds of its steps; empty without results that know them."""
    columns = {}
    for toy in TOYS:
        runs = [_of(results, one.name, toy) for one in contenders]
        curves = [[curve for one in own if (curve := _recovery_curve(one))] for own in runs]
        if ends := [curve[-1][0] for own in curves for curve in own if curve[-1][0] > 0]:
            columns[f"{toy}, {min(ends):.0f} s"] = [_cell_within(own, min(ends)) for own in curves]
    rows = [[one.name, *(cells[i] for cells in columns.values())] for i, one in enumerate(contenders)]
    return _table(["", *columns], rows) if columns else []


def _recovery_curve(result: Result) -> list[tuple[float, float, float]]:
    """Return of each validation: processor seconds of the steps before it, mean reward, mean recovery. A model that no
    run trained is one point at 0 s; a result without validations or processor seconds has none.

    A run's processor seconds are spread evenly over its wall seconds, of which those of its start, its validations and
    its export are left out."""
    if "curve" not in result:
        return [(0.0, 0.0, statistics.mean(result["recovery"].values()))] if "recovery" in result else []
    if "cpu_s" not in result:
        return []
    load, points = result["cpu_s"] / result["process_s"], []
    for (_, rewards), steps_s in zip(result["curve"], result["steps_s"], strict=True):
        taught = {domain: one for domain, one in result["domains"].items() if one["teacher"] is not None}
        found = [headroom_recovery(one["before"], rewards[domain], one["teacher"]) for domain, one in taught.items()]
        known = [recovery for recovery in found if recovery is not None]
        points.append((load * steps_s, statistics.mean(rewards.values()), statistics.mean(known)))
    return points


def _cell_within(curves: Sequence[Sequence[tuple[float, float, float]]], seconds: float) -> str:
    """Write the recovery at the best validation within so many processor seconds, and the seconds of the whole run."""
    if not curves:
        return ABSENT
    within = [[point for point in curve if point[0] <= seconds] for curve in curves]
    best = [max(points, key=lambda point: point[1])[2] for points in within]
    return f"{_spread(best)} ({len(curves)} × {statistics.mean(curve[-1][0] for curve in curves):.0f} s)"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [headings, ["---"] * len(headings), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]

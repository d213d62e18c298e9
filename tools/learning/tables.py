"""The tables of ``docs/learning.md``, from the results that are there."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tools.learning.contenders import CONTENDERS, REFERENCE, TOYS

BEGIN, END = "<!-- tables of tools/measure_learning.py: begin -->", "<!-- end -->"
Result = Mapping[str, Any]
ABSENT = "–"


def fill(page: str, results: Sequence[Result]) -> str:
    """Return the page with the tables between its marks. ``ValueError`` for a page without marks."""
    before, found, rest = page.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise ValueError(f"the page lacks the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{tables(results)}\n{END}{after}"


def tables(results: Sequence[Result]) -> str:
    """Return a table for each question, a line for each contender, a column for each toy."""
    parts = []
    for question in dict.fromkeys(contender.question for contender in CONTENDERS):
        own = [one for one in CONTENDERS if one.question == question or one.name == REFERENCE]
        toys = [toy for toy in TOYS if any(toy in one.toys for one in own if one.name != REFERENCE)]
        rows = [[one.name, *(_cell(_of(results, one.name, toy), toy) for toy in toys)] for one in own]
        asked = [row for one, row in zip(own, rows, strict=True) if one.question == question]
        if any(set(row[1:]) != {ABSENT} for row in asked):
            parts += [f"### {question}", "", *_table(["", *toys], rows), ""]
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
        text = " / ".join(
            _spread(done, lambda one, key=key: _mean_kl(one, key)) for key in ("reverse_kl", "forward_kl")
        )
    else:
        worst = statistics.mean(min(one["recovery"].values()) for one in done)
        text = f"{_spread(done, lambda one: statistics.mean(one['recovery'].values()))}, worst {worst:.2f}"
    seconds = statistics.mean(one["wall_s"] for one in done)
    missing = f", {len(failed)} of {len(runs)} failed" if failed else ""
    return f"{text} ({len(done)} × {seconds:.0f} s{missing})"


def _mean_kl(result: Result, key: str) -> float:
    return statistics.mean(by_domain[key] for by_domain in result["distance"].values())


def _spread(runs: Sequence[Result], of: Callable[[Result], float]) -> str:
    values = [of(one) for one in runs]
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [headings, ["---"] * len(headings), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]

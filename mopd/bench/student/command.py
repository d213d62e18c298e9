"""``mopd bench student``: a student step beside plain PyTorch, packed sequences beside padded ones, ranks beside each
other."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from mopd.bench.clock import Others
from mopd.bench.student.measure import NUM_RANKS, Contest, imbalance, measure_mixed, measure_toy
from mopd.report.terminal import Terminal
from mopd.types import UserError

MOST_OF_PLAIN = 1.3
"""Times plain PyTorch's step that the student's may take."""
LEAST_SPEED_UP = 1.8
"""Times the padded samples' tokens a second that packed ones must train."""
MOST_IMBALANCE, LEAST_DEALT = 1.05, 1.3
"""The busiest rank's cost over the mean; and what it must at least be when nobody balances, for a telling case."""
STUDENT, PLAIN, PACKED, AS_DRAWN = "student", "plain PyTorch", "packed", "padded, as drawn"
MIXED_ROUNDS = 3
MIXED_SAMPLES, QUICK_SAMPLES, DEALT_SAMPLES = 24, 8, 48


def run(args: argparse.Namespace) -> int:
    """Measure, print, and return 0 if every goal is met, else 1.

    Raises:
        UserError: an impossible option.
    """
    if args.rounds < 1:
        raise UserError(f"--rounds is {args.rounds}: set 1 or more")
    if args.size is not None:
        return _full_size(args)
    others = Others()
    print("student: a step beside plain PyTorch", file=sys.stderr, flush=True)
    toy = measure_toy(args.rounds)
    print("student: packed and padded sequences", file=sys.stderr, flush=True)
    mixed = measure_mixed(1 if args.quick else MIXED_ROUNDS, num_samples=QUICK_SAMPLES if args.quick else MIXED_SAMPLES)
    found = report(toy, mixed, imbalance(DEALT_SAMPLES), others.cores())
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        show(toy, mixed, found)
    return 0 if all(goal["is_met"] for goal in found["goals"].values()) else 1


def _full_size(args: argparse.Namespace) -> int:
    """``--size``: on a GPU, beside transformers' own model."""
    from mopd.bench.student.full_size import LEAST_SHARE, LEAST_SPEED_UP, measure_full_size

    found = measure_full_size(args.size)
    if args.json:
        print(json.dumps(found.tree(), indent=2))
        return 0 if found.is_met else 1
    table = Table(
        f"{found.size} on {found.device}: {found.num_tokens:,} tokens a step", "tokens/s", "of the peak", "GiB"
    )
    for name, trained in found.trained.items():
        share = "" if trained.share_of_peak is None else f"{trained.share_of_peak:.1%}"
        peak = "" if trained.peak_gib is None else f"{trained.peak_gib:.1f}"
        table.add_row(name, f"{trained.tokens_per_s:,.0f}", share, peak)
    terminal = Terminal()
    terminal.print(table)
    terminal.print(f"Speed-up {found.speed_up:.2f}; goals: {LEAST_SPEED_UP} and {LEAST_SHARE:.0%} of the peak.")
    return 0 if found.is_met else 1


def report(toy: Contest, mixed: Contest, ranks: Mapping[str, float], cores: float | None) -> dict[str, Any]:
    """What ``--json`` prints."""
    own, speed_up = toy.ratio(STUDENT, PLAIN), mixed.ratio(AS_DRAWN, PACKED)
    return {
        "goals": {
            "student_over_plain": _goal(own, own <= MOST_OF_PLAIN, at_most=MOST_OF_PLAIN),
            "packed_over_padded": _goal(speed_up, speed_up >= LEAST_SPEED_UP, at_least=LEAST_SPEED_UP),
            "imbalance": _goal(
                ranks["packed"],
                ranks["packed"] <= MOST_IMBALANCE and ranks["dealt in turn"] > LEAST_DEALT,
                at_most=MOST_IMBALANCE,
            ),
        },
        "contests": [
            {
                "name": contest.name,
                "num_tokens": contest.num_tokens,
                "median_s": {name: contest.median_s(name) for name in contest.seconds},
                "tokens_per_s": {name: contest.tokens_per_s(name) for name in contest.seconds},
                "seconds": contest.seconds,
            }
            for contest in (toy, mixed)
        ],
        "imbalance": {"data_parallel_ranks": NUM_RANKS, **ranks},
        "others_cores": cores,
    }


def _goal(value: float, is_met: bool, **bound: float) -> dict[str, Any]:
    return {"value": value, **bound, "is_met": is_met}


def show(toy: Contest, mixed: Contest, found: Mapping[str, Any]) -> None:
    """The same as tables."""
    terminal = Terminal()
    for contest, base in ((toy, PLAIN), (mixed, PACKED)):
        table = Table(f"{contest.name}: {contest.num_tokens:,} tokens a step", "ms", "tokens/s", f"time, x {base}")
        for name in contest.seconds:
            table.add_row(
                name,
                f"{1000 * contest.median_s(name):,.1f}",
                f"{contest.tokens_per_s(name):,.0f}",
                f"{contest.ratio(name, base):.2f}",
            )
        terminal.print(table)
    ranks, goals = found["imbalance"], found["goals"]
    terminal.print(
        f"Busiest of {NUM_RANKS} data-parallel ranks, cost over the mean: {ranks['packed']:.3f}; lengths dealt in "
        f"turn: {ranks['dealt in turn']:.3f}."
    )
    for name, goal in goals.items():
        bound = f"<= {goal['at_most']}" if "at_most" in goal else f">= {goal['at_least']}"
        terminal.print(f"{name}: {goal['value']:.3f}, goal {bound}: {'met' if goal['is_met'] else 'missed'}")
    if found["others_cores"] is not None and found["others_cores"] > 0.1:
        terminal.print(f"Other processes kept {found['others_cores']:.1f} cores busy meanwhile: noisier.")

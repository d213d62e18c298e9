"""``mopd bench weights``: what an update of the rollout's weights takes, beside what the machine allows."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from dataclasses import asdict
from typing import Any

from rich.table import Table

from mopd.bench.weights.measure import BARE, HTTP, MIB, WeightContest, measure
from mopd.config.weights import MAX_BUCKET_MIB
from mopd.report.terminal import Terminal
from mopd.types import UserError

LEAST_OF_BARE = 0.7
"""Of the bare broadcast's rate."""
LEAST_OVER_HTTP = 3.0
MOST_BUCKETS = 2.0
"""Of memory beyond the models', on either side."""
MOST_CLAIM_S = 0.05
"""Longest wait of the student for the data plane while its weights travel by HTTP."""
MAX_MB, MAX_REPLICAS, MAX_STAGES, MAX_ROUNDS = 100_000, 64, 8, 1000


def run(args: argparse.Namespace) -> int:
    """Measure, print, and return 0 if every goal is met, else 1.

    Raises:
        UserError: an impossible option, or a server did not start.
    """
    check(args)

    def progress(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    contests = [
        asyncio.run(
            measure(
                mb * 10**6,
                replicas,
                way=args.way,
                num_stages=args.stages,
                bucket_mib=args.bucket_mib,
                num_rounds=args.rounds,
                progress=progress,
            )
        )
        for mb in args.mb
        for replicas in args.replicas
    ]
    if args.json:
        print(json.dumps([report(contest) for contest in contests], indent=2))
    else:
        show(contests)
    return 0 if all(goal["is_met"] for contest in contests for goal in goals(contest).values()) else 1


def check(args: argparse.Namespace) -> None:
    """``UserError`` for numbers out of range."""
    bounds = {
        "mb": MAX_MB,
        "replicas": MAX_REPLICAS,
        "stages": MAX_STAGES,
        "bucket_mib": MAX_BUCKET_MIB,
        "rounds": MAX_ROUNDS,
    }
    for name, most in bounds.items():
        given = getattr(args, name)
        for value in given if isinstance(given, list) else [given]:
            if not 1 <= value <= most:
                raise UserError(f"--{name.replace('_', '-')} is {value}: set 1 to {most}")


def goals(contest: WeightContest) -> dict[str, dict[str, Any]]:
    """Values beside their bounds."""
    of_bare, over_http = contest.ratio(BARE, contest.way), contest.ratio(HTTP, contest.way)
    buckets, claim_s = contest.extra_buckets(contest.way), statistics.median(contest.claim_s)
    return {
        "of_bare_broadcast": {
            "value": of_bare, "at_least": LEAST_OF_BARE, "is_met": of_bare >= LEAST_OF_BARE
        },
        "over_http": {"value": over_http, "at_least": LEAST_OVER_HTTP, "is_met": over_http >= LEAST_OVER_HTTP},
        "extra_buckets": {"value": buckets, "at_most": MOST_BUCKETS, "is_met": buckets <= MOST_BUCKETS},
        "claim_s": {"value": claim_s, "at_most": MOST_CLAIM_S, "is_met": claim_s <= MOST_CLAIM_S},
    }  # fmt: skip


def report(contest: WeightContest) -> dict[str, Any]:
    """What ``--json`` prints of one."""
    return {
        **asdict(contest),
        "median_s": {way: contest.median_s(way) for way in contest.seconds},
        "goals": goals(contest),
    }


def show(contests: list[WeightContest]) -> None:
    """The same as tables."""
    terminal = Terminal()
    for contest in contests:
        title = f"{contest.num_bytes / 1e9:.2f} GB to {contest.num_replicas}"
        sides = list(contest.extra_bytes[contest.way])
        table = Table(title, "s", "GB/s", "x bare", *(f"{side} MiB" for side in sides))
        for way in (BARE, contest.way, HTTP):
            extra = contest.extra_bytes.get(way)
            table.add_row(
                way,
                f"{contest.median_s(way):.2f}",
                f"{contest.num_bytes / 1e9 / contest.median_s(way):.2f}",
                f"{contest.ratio(BARE, way):.2f}",
                *("" if extra is None else f"{extra[side] / MIB:,.0f}" for side in sides),
            )
        terminal.print(table)
        terminal.print(", ".join(f"{key.removeprefix('timing/')} {value:.2f}" for key, value in contest.phases.items()))
        for name, goal in goals(contest).items():
            bound = f"<= {goal['at_most']}" if "at_most" in goal else f">= {goal['at_least']}"
            terminal.print(f"{name}: {goal['value']:.2f}, goal {bound}: {'met' if goal['is_met'] else 'missed'}")
        if contest.others_cores is not None and contest.others_cores > 0.1:
            terminal.print(f"Other processes kept {contest.others_cores:.1f} cores busy meanwhile: noisier.")

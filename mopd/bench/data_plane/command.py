"""``mopd bench data_plane``: what a rank receives beside what it needs, and who carries a step how fast."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.table import Table

from mopd.bench.data_plane.ranks import GOAL, RankBytes, measure_ranks
from mopd.bench.data_plane.steps import make_step
from mopd.bench.data_plane.transport import SizeResult, measure_transport
from mopd.report.terminal import Terminal
from mopd.types import UserError

MIB = 2**20
SIZES = (64 * MIB, 1024 * MIB)
QUICK_SIZES = (8 * MIB, 32 * MIB)
RANK_BYTES = 64 * MIB
TOP_K = 64


def run(args: argparse.Namespace) -> int:
    """Measure, print, and return 0 if no rank receives more than ``GOAL`` of its needs and TransferQueue is no slower
    than the two ways that it replaces, else 1.

    Raises:
        UserError: an impossible option, or a package is missing.
    """
    if args.rounds < 1:
        raise UserError(f"--rounds is {args.rounds}: set 1 or more")

    def progress(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    sizes = QUICK_SIZES if args.quick else SIZES
    progress("data_plane: 8 ranks, TP2 x PP2 x DP2")
    ranks = measure_ranks(partial(make_step, min(RANK_BYTES, sizes[-1]), top_k=TOP_K))
    transport = measure_transport(sizes, top_k=TOP_K, num_rounds=args.rounds, progress=progress)
    if args.json:
        print(json.dumps(report(ranks, transport), indent=2))
    else:
        show(ranks, transport)
    return 0 if worst_ratio(ranks["local"]) <= GOAL and all(map(is_met, transport)) else 1


def worst_ratio(rows: list[RankBytes]) -> float:
    """The largest share of what a rank needs; infinite where one that needs nothing receives something."""
    return max(row.ratio if row.ratio is not None else (float("inf") if row.received else 0.0) for row in rows)


def is_met(result: SizeResult) -> bool:
    """TransferQueue is no slower than Ray's object store through the driver, nor than pickled lists."""
    queue = result.carriers["transfer_queue"]
    return max(queue.ratio_to(result.carriers[name]) for name in ("ray_object_store", "pickled_lists")) <= 1.0


def report(ranks: dict[str, list[RankBytes]], transport: list[SizeResult]) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {
        "ranks": {way: [{**asdict(row), "ratio": row.ratio} for row in rows] for way, rows in ranks.items()},
        "worst_ratio": worst_ratio(ranks["local"]),
        "goal": GOAL,
        "transport": [
            {
                **asdict(result),
                "ratios": {
                    one: {other: result.carriers[one].ratio_to(carrier) for other, carrier in result.carriers.items()}
                    for one in result.carriers
                },
                "is_met": is_met(result),
            }
            for result in transport
        ],
    }


def show(ranks: dict[str, list[RankBytes]], transport: list[SizeResult]) -> None:
    """The same as tables."""
    terminal = Terminal()
    table = Table("rank", "TP", "PP", "DP", "needs MiB", "receives MiB", "ratio", "broadcast MiB")
    for own, old in zip(ranks["local"], ranks["broadcast"], strict=True):
        table.add_row(
            *map(str, (own.rank, own.tp_rank, own.pp_rank, own.dp_rank)),
            f"{own.needed / MIB:.2f}",
            f"{own.received / MIB:.2f}",
            "-" if own.ratio is None else f"{own.ratio:.4f}",
            f"{old.received / MIB:.2f}",
        )
    terminal.print(table)
    slowest = {way: max(row.seconds for row in rows) for way, rows in ranks.items()}
    terminal.print(
        f"The slowest rank had its samples after {slowest['local']:.2f} s, by broadcast after "
        f"{slowest['broadcast']:.2f} s. Goal: ratio <= {GOAL}."
    )
    for result in transport:
        table = Table(f"{result.num_bytes / MIB:,.0f} MiB a step", "put + get s", "get s", "MiB/s", "transfer_queue is")
        for name, carrier in result.carriers.items():
            ratio = result.carriers["transfer_queue"].ratio_to(carrier)
            table.add_row(
                name,
                f"{carrier.median_s:.3f}",
                f"{sorted(carrier.get_s)[len(carrier.get_s) // 2]:.3f}",
                f"{result.num_bytes / MIB / carrier.median_s:,.0f}",
                "" if name == "transfer_queue" else f"{ratio:.2f} x as long",
            )
        terminal.print(table)

"""What is measured: its JSON, and a table a case and a figure a run (with rich and matplotlib, where installed)."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from mopd.bench.losses.plan import Case
from mopd.types import UserError

SCHEMA = 1
DISTURBED = 0.1
"""Share of the machine's cores; more than that in the hands of others is marked."""
HEAD = ("contender", "loss", "forward ms", "fwd+bwd ms", "of floor", "speed", "extra MiB", "x [T,V] fp32", "error")
Status = Literal["measured", "out of memory", "not available", "failed", "not reached"]


@dataclass(kw_only=True)
class Row:
    """One contender of one case. Times are medians over rounds."""

    name: str
    group: str
    loss: str
    status: Status
    reason: str | None = None
    """Why there are no numbers, or a remark."""
    forward_ms: float | None = None
    total_ms: float | None = None
    """Forward and backward."""
    total_ms_range: tuple[float, float] | None = None
    """Fastest and slowest round."""
    rounds: int = 0
    floor_share: float | None = None
    """Floor of the case / ``total_ms``."""
    speedup: float | None = None
    """``total_ms`` of the case's baseline / that of this row."""
    extra_bytes: int | None = None
    """Peak memory of forward and backward above inputs and gradients."""
    extra_over_logits: float | None = None
    """``extra_bytes`` relative to the logits in fp32, [T, V] x 4 bytes."""
    errors: dict[str, float] = field(default_factory=dict)
    """Of the gradients, against float64: see ``mopd.bench.losses.exact`` and ``mopd.bench.losses.heads``."""


@dataclass(kw_only=True)
class CaseResult:
    """All rows of one case."""

    case: Case
    baseline: str
    floor: str
    """What the floor is."""
    floor_ms: float | None = None
    copy_gb_per_s: float | None = None
    """Bytes read plus bytes written of a plain copy, per second, in the same rounds."""
    others_cores: float | None = None
    """Cores that other processes kept busy during the rounds; None where the system does not say."""
    rows: list[Row] = field(default_factory=list)

    @property
    def is_disturbed(self) -> bool:
        """Others took so much of the machine that times on a CPU say little."""
        return self.others_cores is not None and self.others_cores > DISTURBED * (os.cpu_count() or 1)

    def finish(self) -> None:
        """Fill in what compares rows with one another."""
        logits_bytes = 4 * self.case.rows * self.case.columns
        base = [row.total_ms for row in self.rows if row.name == self.baseline and row.total_ms is not None]
        for row in self.rows:
            if row.extra_bytes is not None:
                row.extra_over_logits = row.extra_bytes / logits_bytes
            if row.total_ms is not None:
                row.floor_share = None if self.floor_ms is None else self.floor_ms / row.total_ms
                row.speedup = base[0] / row.total_ms if base else None


@dataclass(kw_only=True)
class BenchReport:
    """A run of the benchmark."""

    machine: dict[str, Any]
    date: str
    command: str
    repeats: int
    complete: bool = False
    """False while shapes are outstanding."""
    not_reached: list[str] = field(default_factory=list)
    """Cases that a time limit left out."""
    cases: list[CaseResult] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        """Rows of ours that raised an error."""
        rows = ((result.case.title, row) for result in self.cases for row in result.rows)
        return [f"{title}: {row.name} ({row.loss}): {row.reason}" for title, row in rows if row.status == "failed"]

    def to_json(self) -> str:
        """Strict JSON: what is not a number is null."""
        tree = {"schema": SCHEMA, **asdict(self)}
        for source, target in zip(self.cases, tree["cases"], strict=True):
            target["case"]["columns"] = source.case.columns
            target["disturbed"] = source.is_disturbed
        finite = json.loads(json.dumps(tree), parse_constant=lambda name: None)
        return json.dumps(finite, indent=1, allow_nan=False) + "\n"


def table(result: CaseResult) -> None:
    """Print one case, the fastest row first within each loss."""
    rows = sorted(result.rows, key=_order)
    (_plain if find_spec("rich") is None else _rich)(result.case.title, rows)
    for row in rows:
        if row.reason is not None:
            print(f"  {row.name} ({row.loss}): {row.status + ': ' if row.total_ms is None else ''}{row.reason}")
    for line in _legend(result):
        print(textwrap.fill(line, 78, initial_indent="  ", subsequent_indent="    "))
    print()


def _order(row: Row) -> tuple[str, float]:
    return row.loss, row.total_ms if row.total_ms is not None else float("inf")


def _cells(row: Row) -> tuple[str, ...]:
    if row.total_ms is None:
        return (row.name, row.loss, row.status, "", "", "", "", "", "")
    return (
        row.name,
        row.loss,
        _number(row.forward_ms),
        _number(row.total_ms),
        "" if row.floor_share is None else f"{100 * row.floor_share:.0f} %",
        "" if row.speedup is None else f"{row.speedup:.2f}x",
        "" if row.extra_bytes is None else _number(row.extra_bytes / 2**20),
        "" if row.extra_over_logits is None else f"{row.extra_over_logits:.3f}",
        " ".join(f"{value:.1e}" for key, value in row.errors.items() if key != "scaled"),
    )


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _legend(result: CaseResult) -> list[str]:
    floor = "not known" if result.floor_ms is None else f"{result.floor_ms:.3g} ms"
    rate = "" if result.copy_gb_per_s is None else f" at the measured copy rate of {result.copy_gb_per_s:.1f} GB/s"
    error = "dlogits" if result.case.hidden is None else "dhidden dweight"
    lines = [
        f"floor: {result.floor}{rate}: {floor}; speed: relative to {result.baseline!r}",
        f"extra: peak memory above inputs and gradients; error of {error} relative to float64",
    ]
    if result.is_disturbed:
        lines.append(f"disturbed: other processes kept {result.others_cores:.1f} cores busy meanwhile: measure again")
    return lines


def _plain(title: str, rows: Sequence[Row]) -> None:
    lines = [HEAD, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(title)
    for line in lines:
        padded = [f"{text:{'<' if i < 2 else '>'}{widths[i]}}" for i, text in enumerate(line)]
        print("  " + "  ".join(padded).rstrip())


def _rich(title: str, rows: Sequence[Row]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    lines = [_cells(row) for row in rows]
    for i, (name, column) in enumerate(zip(HEAD, zip(HEAD, *lines, strict=True), strict=True)):
        longest = max(len(word) for text in column for word in text.split() or [""])
        made.add_column(name, justify="left" if i < 2 else "right", width=longest if i else None, overflow="fold")
    for row, line in zip(rows, lines, strict=True):
        made.add_row(*line, style="bold" if row.group == "ours" else None)
    Console().print(made)


def plot(report: BenchReport, path: Path) -> None:
    """One panel a case: time of every row, the floor as a line.

    Raises:
        UserError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise UserError("--plot needs matplotlib: install it, or leave --plot out")
    from matplotlib.figure import Figure

    cases = [result for result in report.cases if any(row.total_ms is not None for row in result.rows)]
    heights = [max(1, sum(row.total_ms is not None for row in result.rows)) + 2 for result in cases]
    figure = Figure(figsize=(10, max(3.0, 0.28 * sum(heights))), layout="constrained")
    panels: Any = figure.subplots(len(cases), 1, squeeze=False, height_ratios=heights) if cases else []
    colours = {"ours": "tab:blue", "plain": "0.45", "style": "tab:orange", "released": "tab:green", "floor": "black"}
    for (axes,), result in zip(panels, cases, strict=True):
        rows = sorted((row for row in result.rows if row.total_ms is not None), key=_order, reverse=True)
        labels = [f"{row.name} · {row.loss}" for row in rows]
        bars = axes.barh(labels, [row.total_ms for row in rows], color=[colours[row.group] for row in rows])
        axes.bar_label(bars, labels=[_number(row.total_ms) for row in rows], padding=3, fontsize=7)
        if result.floor_ms is not None:
            axes.axvline(result.floor_ms, color="black", linestyle=":", linewidth=1)
        axes.margins(x=0.08)
        axes.set_xlabel("forward + backward, ms (dotted: floor)")
        axes.set_title(result.case.title, fontsize=9)
        axes.tick_params(labelsize=7)
    machine = f"{report.machine.get('name', '')} · torch {report.machine.get('torch', '')}"
    figure.suptitle(f"mopd bench losses · {machine} · {report.date[:10]}", fontsize=9)
    figure.savefig(path, dpi=120)

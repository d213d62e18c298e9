"""Results for people: a table a case, a figure a run. rich and matplotlib are used where they are installed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mopd.bench.losses.results import BenchReport, CaseResult, Row
from mopd.types import UserError

HEAD = ("contender", "loss", "forward ms", "fwd+bwd ms", "of floor", "speed", "extra MiB", "x [T,V] fp32", "error")


def table(result: CaseResult) -> None:
    """Print one case, the fastest row first within each loss."""
    rows = sorted(result.rows, key=_order)
    cells = [_cells(row) for row in rows]
    notes = [f"{row.name} ({row.loss}): {_note(row)}" for row in rows if row.reason is not None]
    if find_spec("rich") is None:
        _plain(result, cells)
    else:
        _rich(result, cells)
    for line in (*notes, *_legend(result)):
        print(f"  {line}")
    print()


def _order(row: Row) -> tuple[str, float]:
    return row.loss, row.total_ms if row.total_ms is not None else float("inf")


def _cells(row: Row) -> list[str]:
    if row.total_ms is None:
        return [row.name, row.loss, row.status, "", "", "", "", "", ""]
    return [
        row.name,
        row.loss,
        _number(row.forward_ms),
        _number(row.total_ms),
        "" if row.floor_share is None else f"{100 * row.floor_share:.0f} %",
        "" if row.speedup is None else f"{row.speedup:.2f}x",
        "" if row.extra_bytes is None else _number(row.extra_bytes / 2**20),
        "" if row.extra_over_logits is None else f"{row.extra_over_logits:.3f}",
        " ".join(f"{value:.1e}" for key, value in row.errors.items() if key != "scaled"),
    ]


def _note(row: Row) -> str:
    return str(row.reason) if row.total_ms is not None else f"{row.status}: {row.reason}"


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


def _plain(result: CaseResult, cells: Sequence[Sequence[str]]) -> None:
    widths = [max(len(line[i]) for line in (HEAD, *cells)) for i in range(len(HEAD))]
    print(result.case.title)
    for line in (HEAD, *cells):
        names = [text.ljust(width) for text, width in zip(line[:2], widths[:2], strict=True)]
        numbers = [text.rjust(width) for text, width in zip(line[2:], widths[2:], strict=True)]
        print("  " + "  ".join([*names, *numbers]).rstrip())


def _rich(result: CaseResult, cells: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    made = Table(title=result.case.title, title_justify="left", box=box.SIMPLE_HEAD)
    for i, name in enumerate(HEAD):
        made.add_column(name, justify="left" if i < 2 else "right", no_wrap=i != 0)
    for line, row in zip(cells, sorted(result.rows, key=_order), strict=True):
        made.add_row(*line, style="bold" if row.group == "ours" else None)
    console = Console()
    console = console if console.is_terminal else Console(width=160)
    console.print(made)


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

"""What is measured, and its JSON."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from mopd.bench.losses.plan import Case
from mopd.files.writing import write_text

SCHEMA = 1
DISTURBED = 0.1
"""Share of the machine's cores; more than that in the hands of others is marked."""
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

    def row(self, name: str, loss: str) -> Row:
        """The row of one contender."""
        return next(row for row in self.rows if row.name == name and row.loss == loss)


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
        return json.dumps(_finite(tree), indent=1, allow_nan=False) + "\n"

    def write(self, path: Path) -> None:
        """Replace the file at once: a reader never sees half of it. ``UserError`` if the system refuses."""
        write_text(path, self.to_json())


def median_ms(seconds: Sequence[float]) -> float:
    """Median, in milliseconds."""
    return 1000 * statistics.median(seconds)


def _finite(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {str(key): _finite(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_finite(value) for value in tree]
    if isinstance(tree, float) and (tree != tree or tree in (float("inf"), float("-inf"))):
        return None
    return tree

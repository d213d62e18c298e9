"""The run on the terminal: a live table with a bar, or plain lines where output is no terminal (a log, a pipe)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from mopd.metrics import StepMetrics

LINE_EVERY_S = 10.0
"""Plain lines are at least this far apart, however fast the steps are."""
COLUMNS = {"kl_k1": "KL", "loss": "loss", "topk_overlap": "overlap", "response_length": "length"}
"""Metric -> heading of the live table. Overlap comes on diagnostic steps only and stays until the next."""


def make_progress(
    console: Console, steps: int, start_step: int, rewards: Mapping[str, float]
) -> LiveProgress | PlainProgress:
    """The form that suits ``console``. ``rewards`` are those of the last validation (empty before the first)."""
    if console.is_terminal:
        return LiveProgress(console, steps, start_step, rewards)
    return PlainProgress(console, steps, start_step)


class LiveProgress:
    """One row per domain, and a bar with the time left."""

    def __init__(self, console: Console, steps: int, start_step: int, rewards: Mapping[str, float]) -> None:
        self._rows: dict[str, dict[str, float]] = {}
        self._rewards = dict(rewards)
        self._validated = ""
        bar = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None), TextColumn("{task.description}"))
        self._bar = Progress(*bar, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), expand=True)
        self._task = self._bar.add_task("", total=steps, completed=start_step)
        self._live = Live(console=console, get_renderable=self._draw, refresh_per_second=2)
        self._live.start()

    def log(self, metrics: StepMetrics) -> None:
        for metric in COLUMNS:
            for domain, value in metrics.by_domain(metric).items():
                self._rows.setdefault(domain, {})[metric] = value
        self._bar.update(self._task, completed=metrics.step, description=_speed(metrics))

    def log_validation(self, step: int, rewards: Mapping[str, float]) -> None:
        self._rewards = dict(rewards)
        self._validated = f" at {step}"

    def close(self) -> None:
        self._live.stop()

    def _draw(self) -> Group:
        table = Table(box=None, pad_edge=False)
        table.add_column("domain")
        for heading in (*COLUMNS.values(), f"reward{self._validated}"):
            table.add_column(heading, justify="right")
        for domain in sorted({*self._rows, *self._rewards}):
            row = self._rows.get(domain, {})
            cells = [_number(row.get(metric)) for metric in COLUMNS]
            table.add_row(domain, *cells, _number(self._rewards.get(domain)))
        return Group(table, self._bar)


class PlainProgress:
    """A line for the first step, the last, and now and then between; one for each validation."""

    def __init__(
        self, console: Console, steps: int, start_step: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._steps = steps
        self._start_step = start_step
        self._clock = clock
        self._started = clock()
        self._last_line = -math.inf

    def log(self, metrics: StepMetrics) -> None:
        now = self._clock()
        if metrics.step < self._steps and now - self._last_line < LINE_EVERY_S:
            return
        self._last_line = now
        left = (now - self._started) / (metrics.step - self._start_step) * (self._steps - metrics.step)
        by_domain = "  ".join(f"{domain} {_number(value)}" for domain, value in metrics.by_domain("kl_k1").items())
        self._line(
            f"step {metrics.step}/{self._steps}  loss {_number(metrics.values['loss'])}  KL {by_domain}  "
            f"{_speed(metrics)}  {_duration(left)} left"
        )

    def log_validation(self, step: int, rewards: Mapping[str, float]) -> None:
        by_domain = "  ".join(f"{domain} {_number(reward)}" for domain, reward in rewards.items())
        self._line(f"step {step}/{self._steps}  reward {by_domain}")

    def close(self) -> None:
        """Nothing to do."""

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _speed(metrics: StepMetrics) -> str:
    seconds = metrics.values.get("timing/step_s")
    rate = metrics.values.get("rate/train_tokens_per_s")
    parts = [] if seconds is None else [f"{seconds:.2f} s/step"]
    return "  ".join(parts if rate is None else [*parts, f"{rate:,.0f} tokens/s"])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}" if abs(value) >= 100 else f"{value:.3f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

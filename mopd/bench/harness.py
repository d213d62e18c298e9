"""One harness for all benchmarks: contenders take turns, ratios are medians over rounds, goals decide the exit code,
and every result has one form as a table and one as JSON.

::

    BenchReport ─┬─ parts (Comparison): a table each, a row for each contender
                 └─ goals: value, bound, met or missed

It needs torch alone, as ``mopd bench losses`` does on a bare GPU machine.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import shlex
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import torch

from mopd import __version__
from mopd.base.files.writing import write_text

T = TypeVar("T")

WIDTH = 80
"""Width of every table, in columns of a terminal."""
STATISTICS = Path("/proc/stat")
"""File in which Linux counts what its cores did: user, nice, system, idle, iowait, irq, softirq, steal, in ticks."""
CPUS = Path("/proc/cpuinfo")
DISTURBED = 0.1
"""Share of the machine's cores that other processes may use before times on a CPU become unreliable."""


def rounds(contenders: Collection[T], count: int) -> Iterator[list[T]]:
    """Yield each round's order: every contender once, each round begun by another one."""
    order = list(contenders)
    for number in range(count):
        first = number % max(1, len(order))
        yield order[first:] + order[:first]


def timed(contenders: Mapping[str, Callable[[], object]], count: int) -> dict[str, list[float]]:
    """Return the seconds of each contender's ``count`` runs, taken in turns by wall clock."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for order in rounds(contenders, count):
        for name in order:
            began = time.perf_counter()
            contenders[name]()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def ratio(seconds: Mapping[str, Sequence[float]], name: str, other: str) -> float:
    """Return the median over rounds of ``name``'s time relative to ``other``'s in the same round."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[other], strict=True))


def rows(
    seconds: Mapping[str, Sequence[float]], base: str, figures: Callable[[str, float], Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Make a row for each contender: all times, their median and spread, the ratio to ``base``, and what ``figures``
    makes of the name and the median."""
    found = []
    for name, times in seconds.items():
        median = statistics.median(times)
        own = {"median_s": median, "range_s": (min(times), max(times)), "ratio": ratio(seconds, name, base)}
        found.append({"name": name, **own, "seconds": list(times), **figures(name, median)})
    return found


@dataclass(kw_only=True)
class Comparison:
    """Table of contenders that were measured against each other."""

    title: str
    columns: Mapping[str, str]
    """Heading in the table -> name and format of a row's figure, as ``"total_ms:.2f"``. JSON has all figures."""
    rows: Sequence[dict[str, Any]]
    """Figures of each contender, its ``name`` among them."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Figures that hold for all rows."""
    remarks: Sequence[str] = ()
    """Lines below the table."""

    def show(self) -> None:
        """Print the table. Words are never cut: cells go on in their next line where 80 columns are too few."""
        lines = [[self.title, *self.columns]]
        lines += [[str(row["name"]), *(_cell(row, form) for form in self.columns.values())] for row in self.rows]
        widths = [
            max(len(word) for text in column for word in text.split() or [""]) for column in zip(*lines, strict=True)
        ]
        longest = max(len(line[0]) for line in lines)
        widths[0] = max(widths[0], min(longest, WIDTH - sum(widths[1:]) - 2 * len(widths[1:])))
        for line in lines:
            cells = [textwrap.wrap(text, width) for text, width in zip(line, widths, strict=True)]
            for parts in itertools.zip_longest(*cells, fillvalue=""):
                first, *others = zip(parts, widths, strict=True)
                padded = [f"{first[0]:{first[1]}}", *(f"{text:>{width}}" for text, width in others)]
                print("  ".join(padded).rstrip())
        for remark in self.remarks:
            print(textwrap.fill(remark, WIDTH, initial_indent="  ", subsequent_indent="    "))
        print()


def _cell(row: Mapping[str, Any], form: str) -> str:
    name, _, spec = form.partition(":")
    value = row.get(name)
    return "" if value is None else f"{value:{spec}}"


Goals = Mapping[str, Mapping[str, Any]]
"""Goals by name: the figure's ``value``, ``at_most`` or ``at_least``, and whether it ``is_met``."""


def at_most(value: float, bound: float) -> dict[str, Any]:
    """Make the goal that a figure does not exceed ``bound``; a NaN misses it."""
    return {"value": value, "at_most": bound, "is_met": value <= bound}


def at_least(value: float, bound: float) -> dict[str, Any]:
    """Make the goal that a figure reaches ``bound``; a NaN misses it."""
    return {"value": value, "at_least": bound, "is_met": value >= bound}


@dataclass(kw_only=True)
class BenchReport:
    """A benchmark's result. Parts are printed as they come, or all of it as JSON in the end."""

    benchmark: str
    arguments: Sequence[str]
    as_json: bool
    device: torch.device
    output: Path | None = None
    """File to which the JSON is written after every part."""
    parts: list[Comparison] = field(default_factory=list)
    goals: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    """Contenders of ours that raised an error."""
    not_reached: list[str] = field(default_factory=list)
    """Titles of the cases that a time limit left out."""
    others_cores: float | None = None
    """Cores that other processes kept busy while times were taken; None where the system does not say."""

    def add(self, part: Comparison, goals: Goals | None = None) -> None:
        """Keep a part with its goals, and print it."""
        self.parts.append(part)
        self.goals |= goals or {}
        if self.output is not None:  # what is known so far
            write_text(self.output, self.to_json())
        if not self.as_json:
            part.show()

    def finish(self) -> int:
        """Print goals and failures, or the JSON. Return 0 if every goal is met and nothing failed, else 1."""
        text = self.to_json()
        if self.output is not None:
            write_text(self.output, text)
        if self.as_json:
            sys.stdout.write(text)
        else:
            for name, goal in self.goals.items():
                bound = f"<= {goal['at_most']}" if "at_most" in goal else f">= {goal['at_least']}"
                print(f"{name}: {goal['value']:.4g}, goal {bound}: {'met' if goal['is_met'] else 'missed'}")
            if is_disturbed(self.others_cores):
                print(f"disturbed: other processes kept {self.others_cores:.1f} cores busy meanwhile: measure again")
        for line in (*(f"not measured, time limit: {title}" for title in self.not_reached), *self.failures):
            say(line)
        return 0 if self.is_met else 1

    @property
    def is_met(self) -> bool:
        """Whether every goal is met and nothing failed."""
        return not self.failures and all(goal["is_met"] for goal in self.goals.values())

    def to_json(self) -> str:
        """Return the report as strict JSON, in which NaN and infinity are null."""
        tree = {
            "schema": 2,
            "benchmark": self.benchmark,
            "command": shlex.join(self.arguments),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": machine(self.device),
            "is_met": self.is_met,
            "goals": self.goals,
            "parts": [{"title": part.title, **part.facts, "rows": list(part.rows)} for part in self.parts],
            "failures": self.failures,
            "not_reached": self.not_reached,
            "others_cores": self.others_cores,
        }
        finite = json.loads(json.dumps(tree), parse_constant=lambda name: None)
        return json.dumps(finite, indent=1, allow_nan=False) + "\n"


def say(line: str) -> None:
    """Print progress on standard error, where it does not mix with results."""
    print(line, file=sys.stderr, flush=True)


def machine(device: torch.device) -> dict[str, Any]:
    """Describe the machine that the numbers depend on."""
    cpus = CPUS.read_text().split("model name", 1)[1:] if CPUS.is_file() else []  # not on every architecture
    cpu = cpus[0].split("\n", 1)[0].strip("\t: ") if cpus else platform.processor()
    return {
        "device": device.type,
        "name": cpu if device.type == "cpu" else torch.cuda.get_device_name(device),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": None if device.type == "cpu" else torch.cuda.mem_get_info(device)[1] / 2**30,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "mopd": __version__,
    }


def own_busy_s() -> float:
    """Return the busy seconds of this process and its ended children."""
    return sum(os.times()[:4])


def is_disturbed(others_cores: float | None) -> bool:
    """Return whether other processes took so much of the machine that times on a CPU say little."""
    return others_cores is not None and others_cores > DISTURBED * (os.cpu_count() or 1)


class Others:
    """Meter of the processor time that other processes use; ``own_s`` returns this benchmark's own."""

    def __init__(self, own_s: Callable[[], float] = own_busy_s) -> None:
        self._own_s = own_s
        self._start = self._now()

    def cores(self) -> float | None:
        """Return the cores that other processes kept busy on average; None where the system does not say."""
        if self._start is None:
            return None
        busy, own, wall = (b - a for a, b in zip(self._start, self._now() or self._start, strict=True))
        most = os.cpu_count() or 1  # the system counts in ticks, so that a short time may seem to hold more
        return min(max(0.0, busy - own) / wall, most) if wall > 0 else 0.0

    def _now(self) -> tuple[float, float, float] | None:
        """Return seconds: all cores' busy time, our own processes' busy time, wall clock."""
        if not STATISTICS.is_file():
            return None
        ticks = [int(number) for number in STATISTICS.read_text().split("\n", 1)[0].split()[1:9]]
        wall = time.monotonic()  # at once: to look at all processes takes a while
        busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
        return busy, self._own_s(), wall

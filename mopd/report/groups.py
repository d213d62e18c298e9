"""What teachers and rollout replicas did, from the records of steps: names like ``teachers/latency_p95_s/math.1``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mopd.base.metrics import GROUP_ROOMS

BREAKER_STATES = ("ok", "trial", "broken", "stale", "restarting", "gone")
"""Meanings of the values of ``breaker``, in order."""
ALL = "all"
"""Name of the rollout group; its replicas have numbers."""
Room = dict[str, dict[str, float]]
"""Group or replica -> metric -> value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupResult:
    """Work of a group, or of one replica of a group, over all steps; ``None`` where it was never measured."""

    samples: int
    """Number of samples that it answered for."""
    tokens: int
    """Number of tokens of their prompts and responses."""
    tokens_per_s: float | None
    """Rate while it had work."""
    latency_p50_s: float | None
    """Median over steps of a request's latency, from sending to the answer."""
    latency_p95_s: float | None
    latency_p99_s: float | None
    queue_depth: int | None
    """Largest number of requests that waited at the router; groups only."""
    in_flight_tokens: int
    """Largest number of tokens under way on one replica."""
    payload_bytes: int | None
    """Bytes sent and received; ``None`` for engines of the trainer's process."""
    retries: int | None
    """Number of requests sent again; groups only."""
    failures: int | None
    """Number of attempts that failed; replicas only."""


def group_values(record: Mapping[str, Any]) -> dict[str, Room]:
    """Return one step's numbers by room (``teachers``, ``rollout``), in order of names."""
    rooms: dict[str, Room] = {}
    for room, name, metric, value in _parts(record):
        rooms.setdefault(room, {}).setdefault(name, {})[metric] = value
    return {room: dict(sorted(names.items())) for room, names in rooms.items()}


def is_group_metric(name: str) -> bool:
    """Return whether the metric belongs to a group or replica."""
    return "/" in name and name.split("/", 1)[0] in GROUP_ROOMS


def label(room: str, name: str) -> str:
    """Name a group or replica: ``teacher math.1``, ``rollout``, ``rollout.1``."""
    if room == "teachers":
        return f"teacher {name}"
    return room if name == ALL else f"{room}.{name}"


def summarise_groups(steps: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, GroupResult]]:
    """Summarise all steps' numbers by room and by name of group or replica."""
    series: dict[str, dict[str, dict[str, list[float]]]] = {}
    for record in steps:
        for room, name, metric, value in _parts(record):
            series.setdefault(room, {}).setdefault(name, {}).setdefault(metric, []).append(value)
    return {
        room: {name: _summary(metrics) for name, metrics in sorted(names.items())}
        for room, names in sorted(series.items(), reverse=True)
    }


def trouble(record: Mapping[str, Any]) -> list[str]:
    """List one step's replicas that do not work (``teacher math.1 broken``) and requests that had to be repeated."""
    texts = []
    for room, names in group_values(record).items():
        for name, values in names.items():
            state = BREAKER_STATES[int(values.get("breaker", 0))]
            if state != "ok":
                texts.append(f"{label(room, name)} {state}")
            if values.get("retries", 0) > 0:
                texts.append(f"{label(room, name)}: {values['retries']:.0f} retries")
    return texts


def latencies(p50_s: float | None, p95_s: float | None, p99_s: float | None) -> str:
    """Write latencies as ``21/46/72``, whole milliseconds, in one cell: three would not fit. Empty if not measured."""
    known = [seconds for seconds in (p50_s, p95_s, p99_s) if seconds is not None]
    return "/".join(f"{1000 * seconds:.0f}" for seconds in known)


LATENCY_HEADING = "p50/95/99 ms"


def _summary(series: Mapping[str, Sequence[float]]) -> GroupResult:
    tokens, busy_s = int(sum(series.get("tokens", ()))), sum(series.get("busy_s", ()))
    return GroupResult(
        samples=int(sum(series.get("samples", ()))),
        tokens=tokens,
        tokens_per_s=tokens / busy_s if busy_s else None,
        latency_p50_s=_over(statistics.median, series.get("latency_p50_s")),
        latency_p95_s=_over(statistics.median, series.get("latency_p95_s")),
        latency_p99_s=_over(statistics.median, series.get("latency_p99_s")),
        queue_depth=_whole(_over(max, series.get("queue_depth"))),
        in_flight_tokens=int(max(series.get("in_flight_tokens", (0,)))),
        payload_bytes=_whole(_over(sum, series.get("payload_bytes"))),
        retries=_whole(_over(sum, series.get("retries"))),
        failures=_whole(_over(sum, series.get("failures"))),
    )


def _over(function: Callable[[Sequence[float]], float], values: Sequence[float] | None) -> float | None:
    return function(values) if values else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _parts(record: Mapping[str, Any]) -> Iterator[tuple[str, str, str, float]]:
    """Yield ``(room, name, metric, value)`` for each number of a group."""
    for key, value in record.items():
        if is_group_metric(key) and value is not None:
            room, metric, *name = key.split("/", 2)
            if name or room != "teachers":
                yield room, name[0] if name else ALL, metric, value

"""What teachers and rollout replicas did, from the records of steps: names like ``teachers/latency_p95_s/math.1``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mopd.base.metrics import GROUP_ROOMS

BREAKER_STATES = ("ok", "trial", "broken", "stale", "restarting", "gone")
"""What the values of ``breaker`` mean, in order."""
ALL = "all"
"""What the rollout group is called beside its replicas, which have numbers."""
Room = dict[str, dict[str, float]]
"""Group or replica -> metric -> value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupResult:
    """A group, or one replica of a group, over all steps; ``None`` where it was never measured."""

    samples: int
    """Samples that it answered for."""
    tokens: int
    """Tokens of their prompts and responses."""
    tokens_per_s: float | None
    """While it had work."""
    latency_p50_s: float | None
    """Of a request, from sending to the answer: the median over steps."""
    latency_p95_s: float | None
    latency_p99_s: float | None
    queue_depth: int | None
    """Largest number of requests that waited at the router; groups only."""
    in_flight_tokens: int
    """Largest number of tokens under way on one replica."""
    payload_bytes: int | None
    """Sent and received; ``None`` for engines of the trainer's process."""
    retries: int | None
    """Requests sent again; groups only."""
    failures: int | None
    """Attempts that failed; replicas only."""


def group_values(record: Mapping[str, Any]) -> dict[str, Room]:
    """One step's numbers by room (``teachers``, ``rollout``), in order of names."""
    rooms: dict[str, Room] = {}
    for room, name, metric, value in _parts(record):
        rooms.setdefault(room, {}).setdefault(name, {})[metric] = value
    return {room: dict(sorted(names.items())) for room, names in rooms.items()}


def is_group_metric(name: str) -> bool:
    """``name`` is a number of a group or replica."""
    return "/" in name and name.split("/", 1)[0] in GROUP_ROOMS


def label(room: str, name: str) -> str:
    """``teacher math.1``, ``rollout``, ``rollout.1``."""
    if room == "teachers":
        return f"teacher {name}"
    return room if name == ALL else f"{room}.{name}"


def summarise_groups(steps: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, GroupResult]]:
    """All steps' numbers by room and by name of group or replica."""
    series: dict[str, dict[str, dict[str, list[float]]]] = {}
    for record in steps:
        for room, name, metric, value in _parts(record):
            series.setdefault(room, {}).setdefault(name, {}).setdefault(metric, []).append(value)
    return {
        room: {name: _summary(metrics) for name, metrics in sorted(names.items())}
        for room, names in sorted(series.items(), reverse=True)
    }


def trouble(record: Mapping[str, Any]) -> list[str]:
    """One step's replicas that do not work (``teacher math.1 broken``) and requests that had to be repeated."""
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
    """``21/46/72``: whole milliseconds, empty where nothing was measured. One cell: three would not fit a terminal."""
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
    """``(room, name, metric, value)`` of each number of a group."""
    for key, value in record.items():
        if is_group_metric(key) and value is not None:
            room, metric, *name = key.split("/", 2)
            if name or room != "teachers":
                yield room, name[0] if name else ALL, metric, value

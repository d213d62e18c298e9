"""A router's counters between two readings (bounded memory, however many requests), and their names in
``metrics.jsonl`` (``docs/metrics.md``).

A teacher's are ``teachers/latency_p95_s/math``, the rollout's ``rollout/latency_p95_s``. A group of several replicas
also has the main numbers of each: ``teachers/latency_p95_s/math.1``, ``rollout/latency_p95_s/1``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mopd.engines.replicas.interface import Kind

MAX_LATENCIES = 2048
"""Latencies kept per replica between two readings: the latest."""
STATES = {"closed": 0.0, "half_open": 1.0, "open": 2.0, "stale": 3.0, "restarting": 4.0, "gone": 5.0}
"""Value of a replica's ``breaker``: 0 works, all others do not."""
PERCENTILES = (50, 95, 99)


@dataclass(kw_only=True, slots=True)
class ReplicaNumbers:
    """Numbers of one replica since the last reading."""

    name: str
    state: str = "closed"
    """``closed``, ``half_open`` or ``open`` (its breaker), ``restarting``, ``stale`` (weights) or ``gone``."""
    num_samples: int = 0
    num_tokens: int = 0
    """Tokens of prompts and responses of the answered samples."""
    busy_s: float = 0.0
    """Seconds with at least one request in progress."""
    in_flight_tokens: int = 0
    """Largest number of tokens in progress."""
    failures: int = 0
    """Attempts that failed through the replica's fault: unavailable, late, corrupt."""
    busy_answers: int = 0
    """Requests that its full queue turned away."""
    stale_answers: int = 0
    """Requests that it refused for the version of its weights."""
    latencies_s: tuple[float, ...] = ()
    """Seconds from sending to answer, of requests or (told one by one) of responses; at most ``MAX_LATENCIES``."""
    payload_bytes: int | None = None
    """Bytes sent and received; ``None`` for an engine of this process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupNumbers:
    """Numbers of one group since the last reading."""

    kind: Kind
    name: str
    replicas: tuple[ReplicaNumbers, ...]
    queue_depth: int
    """Largest number of parts of callers' requests that waited for a replica."""
    queued_tokens: int
    """Largest number of tokens that waited."""
    busy_s: float
    """Seconds with at least one request in progress on any replica."""
    retries: int
    """Parts of requests that were sent again: after a failure, full queue, stale weights or refused joint request."""


class BusyTime:
    """Stopwatch of the time during which at least one of several overlapping spans is open."""

    def __init__(self) -> None:
        self._open = 0
        self._since = 0.0
        self._total_s = 0.0

    def begin(self, now: float) -> None:
        if self._open == 0:
            self._since = now
        self._open += 1

    def end(self, now: float) -> None:
        self._open -= 1
        if self._open == 0:
            self._total_s += now - self._since

    def take(self, now: float) -> float:
        """Return the seconds since the last ``take``, an open span counted up to ``now``."""
        total = self._total_s
        if self._open:
            total += now - self._since
            self._since = now
        self._total_s = 0.0
        return total


class ReplicaCounters:
    """Counters of one replica; they outlive its restarts."""

    def __init__(self, name: str) -> None:
        self.numbers = ReplicaNumbers(name=name)
        """Numbers since the last ``take``. Failures of all kinds are counted where they are met."""
        self._latencies = deque[float](maxlen=MAX_LATENCIES)
        self._busy = BusyTime()
        self._in_flight = 0
        self._payload_seen: int | None = None

    def sent(self, tokens: int, now: float) -> None:
        """Count samples of so many tokens that go out."""
        self._busy.begin(now)
        self._in_flight += tokens
        self.numbers.in_flight_tokens = max(self.numbers.in_flight_tokens, self._in_flight)

    def freed(self, tokens: int) -> None:
        """Count tokens that are no longer in progress."""
        self._in_flight -= tokens

    def came_back(self, now: float) -> None:
        """End the span of one ``sent``, answered or not; all its tokens are freed."""
        self._busy.end(now)

    def answered(self, *, num_samples: int, num_tokens: int, latency_s: float) -> None:
        """Count answers that are used and came together."""
        self.numbers.num_samples += num_samples
        self.numbers.num_tokens += num_tokens
        self._latencies.append(latency_s)

    def payload_starts(self, engine: object) -> None:
        """Take the totals of a new ``engine`` as the start: bytes that it moved before are not the group's."""
        self._payload_seen = _payload_total(engine)

    def note_payload(self, engine: object) -> None:
        """Add what the engine's running totals have grown by."""
        total = _payload_total(engine)
        if total is not None and self._payload_seen is not None:
            self.numbers.payload_bytes = (self.numbers.payload_bytes or 0) + total - self._payload_seen
        self._payload_seen = total

    def take(self, state: str, now: float) -> ReplicaNumbers:
        """Return the numbers since the last ``take`` and reset them."""
        taken = self.numbers
        taken.state, taken.busy_s, taken.latencies_s = state, self._busy.take(now), tuple(self._latencies)
        self._latencies.clear()
        self.numbers = ReplicaNumbers(name=taken.name, in_flight_tokens=self._in_flight)
        return taken


def _payload_total(engine: object) -> int | None:
    if not hasattr(engine, "bytes_sent"):
        return None
    return int(engine.bytes_sent) + int(engine.bytes_received)  # type: ignore[attr-defined]


def group_metrics(numbers: GroupNumbers) -> dict[str, float]:
    """Return one group's metrics by their final names."""
    replicas = numbers.replicas
    values = {
        **_work(replicas, numbers.busy_s),
        "queue_depth": numbers.queue_depth,
        "queued_tokens": numbers.queued_tokens,
        "retries": numbers.retries,
        "replica_busy_s": sum(replica.busy_s for replica in replicas),
        "replicas_up": sum(replica.state == "closed" for replica in replicas),
        "replicas": len(replicas),
    }
    by_name = {"" if numbers.kind == "rollout" else f"/{numbers.name}": values}
    if len(replicas) > 1:
        for replica in replicas:
            name = replica.name.rpartition(".")[2] if numbers.kind == "rollout" else replica.name
            by_name[f"/{name}"] = {
                **_work([replica], replica.busy_s),
                "failures": replica.failures,
                "busy_answers": replica.busy_answers,
                "stale_answers": replica.stale_answers,
                "breaker": STATES[replica.state],
            }
    room = "rollout" if numbers.kind == "rollout" else "teachers"
    return {f"{room}/{metric}{name}": float(value) for name, own in by_name.items() for metric, value in own.items()}


def _work(replicas: Sequence[ReplicaNumbers], busy_s: float) -> dict[str, float]:
    """Return the metrics of a group or a replica: rates and latencies if it had work, bytes if they are counted."""
    tokens = sum(replica.num_tokens for replica in replicas)
    latencies_s = [value for replica in replicas for value in replica.latencies_s]
    ranks = np.percentile(latencies_s, PERCENTILES, method="inverted_cdf") if latencies_s else ()
    payloads = [replica.payload_bytes for replica in replicas if replica.payload_bytes is not None]
    return {
        "samples": sum(replica.num_samples for replica in replicas),
        "tokens": tokens,
        "busy_s": busy_s,
        "in_flight_tokens": max((replica.in_flight_tokens for replica in replicas), default=0),
        **{f"latency_p{percent}_s": value for percent, value in zip(PERCENTILES, ranks, strict=False)},
        **({"tokens_per_s": tokens / busy_s} if busy_s > 0 else {}),
        **({"payload_bytes": sum(payloads)} if payloads else {}),
    }

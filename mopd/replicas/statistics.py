"""What a router counts between two looks: bounded memory however many requests there are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

RESERVOIR_SIZE = 2048
"""Latencies kept per replica between two looks; beyond it each one is kept with equal chance (Vitter's algorithm R)."""


class Reservoir:
    """A bounded uniform sample of a stream of numbers."""

    def __init__(self, size: int = RESERVOIR_SIZE) -> None:
        self._size = size
        self._random = random.Random(0)
        self._values: list[float] = []
        self._count = 0

    def add(self, value: float) -> None:
        self._count += 1
        if len(self._values) < self._size:
            self._values.append(value)
            return
        place = self._random.randrange(self._count)
        if place < self._size:
            self._values[place] = value

    def take(self) -> tuple[float, ...]:
        """The sample, ascending; starts anew."""
        values = tuple(sorted(self._values))
        self._values, self._count = [], 0
        return values


def percentile(ascending: Sequence[float], share: float) -> float:
    """Nearest-rank percentile of a non-empty sequence: the smallest value that at least ``share`` of it do not exceed.

    Example: ``percentile([1, 2, 3, 4], 0.5)`` is 2.
    """
    rank = -(-len(ascending) * round(share * 1000) // 1000)
    return ascending[max(int(rank), 1) - 1]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaNumbers:
    """One replica since the last look."""

    name: str
    state: str
    """``closed``, ``half_open`` or ``open`` (its breaker), ``restarting``, ``stale`` (weights) or ``gone``."""
    num_requests: int
    """Answered requests."""
    num_samples: int
    num_tokens: int
    """Tokens of prompts and responses of the answered samples."""
    busy_s: float
    """Time with at least one request under way."""
    in_flight_tokens: int
    """Largest number of tokens under way."""
    failures: int
    """Attempts that failed through the replica's fault: unavailable, late, corrupt."""
    busy_answers: int
    """Requests that its full queue sent away."""
    stale_answers: int
    """Requests that it refused for its weights' version."""
    latencies_s: tuple[float, ...]
    """Of answered requests, from sending to the answer; ascending, a bounded sample."""
    payload_bytes: int | None
    """Sent and received; ``None`` for an engine of this process."""

    @property
    def tokens_per_s(self) -> float | None:
        """While it was busy; ``None`` if it was not."""
        return self.num_tokens / self.busy_s if self.busy_s > 0 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupNumbers:
    """One group since the last look."""

    name: str
    replicas: tuple[ReplicaNumbers, ...]
    queue_depth: int
    """Largest number of requests that waited for a replica."""
    queued_tokens: int
    """Largest number of tokens that waited."""
    busy_s: float
    """Time with at least one request under way on any replica."""
    retries: int
    """Requests sent again after a failure, a full queue or stale weights."""
    hedges: int
    """Requests sent to a second replica as well."""
    hedges_won: int
    """Of those, answered by the second one first."""

    @property
    def latencies_s(self) -> tuple[float, ...]:
        """All replicas' latencies, ascending."""
        return tuple(sorted(value for replica in self.replicas for value in replica.latencies_s))

    @property
    def payload_bytes(self) -> int | None:
        """``None`` where no replica counts bytes."""
        counted = [replica.payload_bytes for replica in self.replicas if replica.payload_bytes is not None]
        return sum(counted) if counted else None


class BusyTime:
    """Time during which at least one of several overlapping spans is open."""

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
        """Seconds since the last ``take``, an open span counted up to ``now``."""
        total = self._total_s
        if self._open:
            total += now - self._since
            self._since = now
        self._total_s = 0.0
        return total


class ReplicaCounters:
    """Counts of one replica; they outlive its restarts."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.failures = self.busy_answers = self.stale_answers = 0
        self._num_requests = self._num_samples = self._num_tokens = 0
        self._latencies = Reservoir()
        self._busy = BusyTime()
        self._in_flight = self._most_in_flight = 0
        self._payload_seen: int | None = None
        self._payload_waiting: int | None = None

    def sent(self, tokens: int, now: float) -> None:
        """A request of so many tokens goes out."""
        self._busy.begin(now)
        self._in_flight += tokens
        self._most_in_flight = max(self._most_in_flight, self._in_flight)

    def came_back(self, tokens: int, now: float) -> None:
        """It is under way no more, answered or not."""
        self._busy.end(now)
        self._in_flight -= tokens

    def answered(self, *, num_samples: int, num_tokens: int, latency_s: float) -> None:
        """An answer that is used."""
        self._num_requests += 1
        self._num_samples += num_samples
        self._num_tokens += num_tokens
        self._latencies.add(latency_s)

    def payload_starts(self, engine: object) -> None:
        """``engine`` takes over: what it has counted before is not the group's."""
        self._payload_seen = _payload_total(engine)

    def note_payload(self, engine: object) -> None:
        """Read the engine's running totals."""
        total = _payload_total(engine)
        if total is not None and self._payload_seen is not None:
            self._payload_waiting = (self._payload_waiting or 0) + total - self._payload_seen
        self._payload_seen = total

    def take(self, state: str, now: float) -> ReplicaNumbers:
        """The numbers since the last ``take``; starts anew."""
        numbers = ReplicaNumbers(
            name=self.name,
            state=state,
            num_requests=self._num_requests,
            num_samples=self._num_samples,
            num_tokens=self._num_tokens,
            busy_s=self._busy.take(now),
            in_flight_tokens=self._most_in_flight,
            failures=self.failures,
            busy_answers=self.busy_answers,
            stale_answers=self.stale_answers,
            latencies_s=self._latencies.take(),
            payload_bytes=self._payload_waiting,
        )
        self._num_requests = self._num_samples = self._num_tokens = 0
        self.failures = self.busy_answers = self.stale_answers = 0
        self._most_in_flight, self._payload_waiting = self._in_flight, None
        return numbers


def _payload_total(engine: object) -> int | None:
    if not hasattr(engine, "bytes_sent"):
        return None
    return int(engine.bytes_sent) + int(engine.bytes_received)  # type: ignore[attr-defined]

"""One replica in a pool: the work that it has, whether it may be given more, and what a request needs of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

from mopd.base.metrics import is_counted
from mopd.base.text import one_line
from mopd.config.groups import RoutingConfig
from mopd.config.values import shown_url
from mopd.engines.replicas.interface import Replica, RouterLimits
from mopd.engines.replicas.statistics import ReplicaCounters

logger = logging.getLogger(__name__)

SPARE_SHARE = 8
"""Divisor of the sequences that wait at a replica: one that runs N at a time is given up to N / SPARE_SHARE more, so
that those that end are followed at once, and requests carry N / SPARE_SHARE sequences rather than one."""


BreakerState = Literal["closed", "half_open", "open"]
"""``closed``: the replica takes work. ``half_open``: one trial request is in progress. ``open``: it takes no work until
its pause is over."""


class Breaker:
    """Circuit breaker of one replica. Times are seconds of any one clock.

    ::

        closed ── `failures` failures in a row ──> open ── `reset_s` later, at the next request ──> half_open
          ▲                                         ▲──────────── the trial fails ───────────────────┤
          └──────────────────────────────────────────────────────── the trial succeeds ──────────────┘
    """

    def __init__(self, *, failures: int, reset_s: float) -> None:
        self._max_failures, self._reset_s = failures, reset_s
        self._failures_in_a_row = 0
        self._opens_again_at = -math.inf
        self.state: BreakerState = "closed"

    def takes_work(self, now: float) -> bool:
        """Return whether a request may be sent now."""
        return self.state == "closed" or (self.state == "open" and now >= self._opens_again_at)

    @property
    def next_trial_at(self) -> float | None:
        """Time when an open breaker allows its trial; ``None`` in the other states."""
        return self._opens_again_at if self.state == "open" else None

    def sent(self) -> None:
        """Record that a request goes out (after ``takes_work``): on an open breaker it is the trial."""
        if self.state == "open":
            self.state = "half_open"

    def succeeded(self) -> None:
        """Close the breaker: an answer came, whatever it says, so the replica lives."""
        self.state, self._failures_in_a_row = "closed", 0

    def failed(self, now: float) -> None:
        """Record a request that failed through the replica's fault."""
        self._failures_in_a_row += 1
        if self.state == "half_open" or self._failures_in_a_row >= self._max_failures:
            self.state, self._opens_again_at = "open", now + self._reset_s

    def abandoned(self, now: float) -> None:
        """Record a request that its sender cancelled, which proves nothing: a trial may be repeated at once."""
        if self.state == "half_open":
            self.state, self._opens_again_at = "open", now


@dataclass(frozen=True, slots=True)
class Room:
    """Capacity of a replica that samples take while it works on them."""

    tokens: int
    """Tokens that are sent."""
    sequences: int
    """Responses to draw; 0 for scoring."""
    load: int
    """Upper bound of their final tokens, drawn ones included; replicas are compared by it."""

    def __add__(self, other: Room) -> Room:
        return Room(self.tokens + other.tokens, self.sequences + other.sequences, self.load + other.load)

    def __sub__(self, other: Room) -> Room:
        return Room(self.tokens - other.tokens, self.sequences - other.sequences, self.load - other.load)


NO_ROOM = Room(0, 0, 0)


@dataclass(kw_only=True, eq=False)
class WorkRequest:
    """Requirements of one caller's samples on a replica."""

    order: tuple[int, ...]
    """Priority: smaller ones are served first; a retry keeps its own."""
    room: Room
    """Room that they take."""
    version: int | None = None
    """Oldest weight version that may answer; ``None`` for fixed weights."""
    failed_on: list[str] = field(default_factory=list)
    """Replicas that failed at it, in order: used again only when no other is up."""
    key: Hashable = None
    """Wants of different callers with equal keys may travel in one request; ``None``: this one travels alone."""
    caller: object = None
    """Wants of one caller never travel together: how its samples are cut into requests is decided before."""
    is_counted: bool = field(default_factory=is_counted)
    """Whether it counts in the numbers of a step (``mopd.base.metrics.apart``)."""
    lent: Room = NO_ROOM
    """Room that it occupies at a replica now."""


class Member:
    """One life of a replica. A restart makes a new one, so late failures of the old life do not count against it."""

    def __init__(
        self, replica: Replica, routing: RoutingConfig, limits: RouterLimits, counters: ReplicaCounters
    ) -> None:
        self.name, self.engine, self.tells = replica.name, replica.engine, replica.tells
        url = getattr(replica.engine, "url", None)
        self.label = self.name if url is None else f"{self.name} ({shown_url(url)})"
        """Name and URL, for users."""
        self.counters = counters
        self.breaker = Breaker(failures=limits.breaker_failures, reset_s=limits.breaker_reset_s)
        self.in_flight = NO_ROOM
        self.busy_until = 0.0
        self.suspended: str | None = None
        self.suspended_until = 0.0
        self.refused_version: int | None = None
        """Weight version that it could not serve when asked."""
        own = replica.limits
        self.max_tokens_per_request = min(
            routing.max_tokens_per_request, own.max_tokens_per_request or routing.max_tokens_per_request
        )
        """Token limit of requests that several callers share."""
        self._max_tokens = self._max_prompt_tokens = routing.max_inflight_tokens
        if own.max_running_tokens is not None:
            self._max_prompt_tokens = min(own.max_running_tokens, own.max_queued_tokens or own.max_running_tokens)
        self._max_sequences = math.inf if own.max_sequences is None else own.max_sequences
        self.spare_sequences = None if own.max_sequences is None else max(1, own.max_sequences // SPARE_SHARE)
        """Sequences that it is given beyond those that it runs; ``None`` if it does not tell how many it runs."""
        counters.payload_starts(replica.engine)

    def serves(self, version: int | None) -> bool:
        """Return whether it has the weights of ``version`` or newer ones (``None``: any weights will do)."""
        if version is None:
            return True
        if self.refused_version is not None and version >= self.refused_version:
            return False
        return bool(getattr(self.engine, "weight_version", version) >= version)

    def is_up(self, now: float, version: int | None) -> bool:
        """Return whether it may be given work now, apart from room."""
        return (
            self.suspended is None and self.breaker.takes_work(now) and now >= self.busy_until and self.serves(version)
        )

    @property
    def is_short_of_work(self) -> bool:
        """Whether its own queue of sequences is empty, so that it is filled up again."""
        return self.in_flight.sequences <= self._max_sequences

    def has_room(self, room: Room) -> bool:
        """Return whether ``room`` fits beside the work in progress. Larger work goes to an idle replica."""
        if self.in_flight.tokens == 0:
            return True
        most = self._max_prompt_tokens if room.sequences else self._max_tokens
        most_sequences = self._max_sequences + (self.spare_sequences or 0)
        after = self.in_flight + room
        return after.tokens <= most and after.sequences <= most_sequences

    def failed(self, now: float, error: Exception) -> None:
        """Record a request that failed through its fault."""
        was_closed = self.breaker.state == "closed"
        self.breaker.failed(now)
        self.counters.numbers.failures += 1
        if was_closed and self.breaker.state == "open":
            logger.warning("%s is left alone and asked again from time to time: %s", self.label, one_line(error))

    def answered(self) -> None:
        """Record that it answered, whatever it said."""
        if self.breaker.state != "closed":
            logger.warning("%s answers again", self.label)
        self.breaker.succeeded()

    def state(self, version: int | None) -> str:
        """Return its state as in ``ReplicaNumbers.state``."""
        if self.suspended is not None:
            return "restarting"
        if self.breaker.state != "closed":
            return self.breaker.state
        return "closed" if self.serves(version) else "stale"

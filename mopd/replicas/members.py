"""One replica as a pool sees it: what it has under way, whether it may be asked, and what a request wants of it."""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Hashable
from dataclasses import dataclass, field

from mopd.config.groups import RoutingConfig
from mopd.config.values import shown_url
from mopd.metrics import is_counted
from mopd.replicas.interface import Replica, RouterLimits
from mopd.replicas.statistics import ReplicaCounters
from mopd.text import one_line

logger = logging.getLogger(__name__)

SPARE_SHARE = 8
"""A replica that works on N sequences at a time is given up to N / 8 more, which wait at it: those that end are
followed at once, and what waits at the router travels N / 8 sequences at a time rather than one by one."""


class BreakerState(enum.Enum):
    """Values are what ``metrics.jsonl`` shows."""

    CLOSED = 0
    """Takes work."""
    HALF_OPEN = 1
    """One trial request is under way."""
    OPEN = 2
    """Takes no work until its time is up."""


class Breaker:
    """Circuit breaker of one replica. Times are seconds of any one clock.

    ::

        CLOSED ── `failures` failures in a row ──> OPEN ── `reset_s` later, at the next request ──> HALF_OPEN
          ▲                                         ▲──────────── the trial fails ───────────────────┤
          └──────────────────────────────────────────────────────── the trial succeeds ──────────────┘
    """

    def __init__(self, *, failures: int, reset_s: float) -> None:
        self._max_failures, self._reset_s = failures, reset_s
        self._failures_in_a_row = 0
        self._opens_again_at = -math.inf
        self.state = BreakerState.CLOSED

    def takes_work(self, now: float) -> bool:
        """A request may be sent now."""
        return self.state is BreakerState.CLOSED or (self.state is BreakerState.OPEN and now >= self._opens_again_at)

    @property
    def next_trial_at(self) -> float | None:
        """When an open breaker allows its trial; ``None`` in the other states."""
        return self._opens_again_at if self.state is BreakerState.OPEN else None

    def sent(self) -> None:
        """A request goes out (``takes_work`` said so)."""
        if self.state is BreakerState.OPEN:
            self.state = BreakerState.HALF_OPEN

    def succeeded(self) -> None:
        """An answer came, whatever it says: the replica lives."""
        self.state, self._failures_in_a_row = BreakerState.CLOSED, 0

    def failed(self, now: float) -> None:
        """A request failed through the replica's fault."""
        self._failures_in_a_row += 1
        if self.state is BreakerState.HALF_OPEN or self._failures_in_a_row >= self._max_failures:
            self.state, self._opens_again_at = BreakerState.OPEN, now + self._reset_s

    def abandoned(self, now: float) -> None:
        """A request was cancelled by its sender: it proves nothing. A trial may be repeated at once."""
        if self.state is BreakerState.HALF_OPEN:
            self.state, self._opens_again_at = BreakerState.OPEN, now


@dataclass(frozen=True, slots=True)
class Room:
    """What samples take of a replica while they are under way."""

    tokens: int
    """Those that are sent."""
    sequences: int
    """Responses that are to be drawn; 0 where given ones are scored."""
    load: int
    """Most tokens that there may be in the end, drawn ones included: what replicas are compared by."""

    def __add__(self, other: Room) -> Room:
        return Room(self.tokens + other.tokens, self.sequences + other.sequences, self.load + other.load)

    def __sub__(self, other: Room) -> Room:
        return Room(self.tokens - other.tokens, self.sequences - other.sequences, self.load - other.load)


NO_ROOM = Room(0, 0, 0)


@dataclass(kw_only=True, eq=False)
class Want:
    """What some samples of one caller need of a replica."""

    order: tuple[int, ...]
    """Smaller ones come first; a retry keeps its own."""
    room: Room
    """What they take."""
    version: int | None = None
    """Oldest weight version that may answer; ``None`` where weights are fixed."""
    failed_on: list[str] = field(default_factory=list)
    """Replicas that failed at it, in order: taken only when no other is up."""
    key: Hashable = None
    """Wants of different callers with one key may travel in one request; ``None``: this one travels alone."""
    caller: object = None
    """Those of one caller never travel together: how its samples are cut into requests is decided before."""
    is_counted: bool = field(default_factory=is_counted)
    """It stands in the numbers of a step: see ``mopd.metrics.apart``."""
    lent: Room = NO_ROOM
    """What a replica has of it under way."""


class Member:
    """One life of a replica: a restart makes a new one, so late failures of the old life do not count against it."""

    def __init__(
        self, replica: Replica, routing: RoutingConfig, limits: RouterLimits, counters: ReplicaCounters
    ) -> None:
        self.name, self.engine, self.tells = replica.name, replica.engine, replica.tells
        url = getattr(replica.engine, "url", None)
        self.label = self.name if url is None else f"{self.name} ({shown_url(url)})"
        """Name and place, for users."""
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
        """Of requests that several callers share."""
        self._max_tokens = self._max_prompt_tokens = routing.max_inflight_tokens
        if own.max_running_tokens is not None:
            self._max_prompt_tokens = min(own.max_running_tokens, own.max_queued_tokens or own.max_running_tokens)
        self._max_sequences = math.inf if own.max_sequences is None else own.max_sequences
        self.spare_sequences = None if own.max_sequences is None else max(1, own.max_sequences // SPARE_SHARE)
        """Sequences that it is given beyond those that it works on."""
        counters.payload_starts(replica.engine)

    def serves(self, version: int | None) -> bool:
        """It has the weights of ``version`` or newer ones (``None``: weights do not matter)."""
        if version is None:
            return True
        if self.refused_version is not None and version >= self.refused_version:
            return False
        return bool(getattr(self.engine, "weight_version", version) >= version)

    def is_up(self, now: float, version: int | None) -> bool:
        """It may be asked now, room or not."""
        return (
            self.suspended is None and self.breaker.takes_work(now) and now >= self.busy_until and self.serves(version)
        )

    @property
    def is_short_of_work(self) -> bool:
        """Its own queue of sequences is empty: it is filled up again."""
        return self.in_flight.sequences <= self._max_sequences

    def has_room(self, room: Room) -> bool:
        """Besides what is under way; whatever is larger than the replica goes when nothing else does."""
        if self.in_flight.tokens == 0:
            return True
        most = self._max_prompt_tokens if room.sequences else self._max_tokens
        most_sequences = self._max_sequences + (self.spare_sequences or 0)
        after = self.in_flight + room
        return after.tokens <= most and after.sequences <= most_sequences

    def failed(self, now: float, error: Exception) -> None:
        """A request failed through its fault."""
        was_closed = self.breaker.state is BreakerState.CLOSED
        self.breaker.failed(now)
        self.counters.numbers.failures += 1
        if was_closed and self.breaker.state is BreakerState.OPEN:
            logger.warning("%s is left alone and asked again from time to time: %s", self.label, one_line(error))

    def answered(self) -> None:
        """It answered, whatever it said."""
        if self.breaker.state is not BreakerState.CLOSED:
            logger.warning("%s answers again", self.label)
        self.breaker.succeeded()

    def state(self, version: int | None) -> str:
        """See ``ReplicaNumbers.state``."""
        if self.suspended is not None:
            return "restarting"
        if self.breaker.state is not BreakerState.CLOSED:
            return self.breaker.state.name.lower()
        return "closed" if self.serves(version) else "stale"

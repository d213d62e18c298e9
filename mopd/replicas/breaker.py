"""A replica that fails again and again gets no work for a while, then one trial request."""

from __future__ import annotations

import enum
import math


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

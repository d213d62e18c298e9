"""Admission of requests: bounded by tokens and sequences. None enters while weights wait for running requests, while
the engine sleeps, or while the server ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mopd.serving.errors import Refusal, busy, too_large

RETRY_AFTER_S = (0.05, 30.0)
"""Shortest and longest pause, in seconds, that a refused client is told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerLimits:
    """Limits of one server."""

    max_tokens_per_request: int
    """Tokens of one request (for generation: of its prompts); more is answered with 413."""
    max_queued_tokens: int
    """Tokens that wait, run, or whose answers are not sent yet; more is answered with 429."""
    max_logprobs: int = 1024
    """Most probable tokens that a request may ask for per scored token: they decide how long an answer is."""
    max_body_bytes: int = 64 * 2**20
    """Bytes of one request for scores or responses; more is answered with 413."""
    max_connections: int = 2048
    """Open connections; beyond them the one that has waited longest for a request is closed."""
    request_timeout_s: float = 600.0
    """Longest life of a request, whatever its deadline header says."""
    head_timeout_s: float = 10.0
    """Longest time for the head of a request to arrive; for a new connection's first one from its beginning."""
    body_timeout_s: float = 60.0
    """Longest time for one body to arrive."""
    stall_timeout_s: float = 20.0
    """Longest silence within a body, and longest time that a client does not read its answer."""
    update_timeout_s: float = 600.0
    """Longest time between two messages of a weight update; then it is forgotten and the old weights serve again."""
    drain_timeout_s: float = 60.0
    """Longest time that running requests may take to end after SIGTERM."""

    def __post_init__(self) -> None:
        if self.max_queued_tokens < self.max_tokens_per_request:
            raise ValueError(
                f"max_queued_tokens {self.max_queued_tokens} is below max_tokens_per_request "
                f"{self.max_tokens_per_request}: such a request could never enter"
            )


class Admission:
    """Accounts of admitted tokens and running work. Not thread-safe: use from one event loop."""

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        self.max_queued_sequences: int | None = None
        """Responses that may wait or run at a time; more are answered with 429, but a request that comes alone is
        admitted whatever its number. ``None``: tokens alone decide."""
        self.queued_tokens = self.queued_sequences = 0
        """Tokens, and sequences to generate, that are admitted and not yet released."""
        self.num_running = 0
        """Requests whose engine work has not ended."""
        self._closed_because: Refusal | None = None
        self._is_paused = False
        self.takes_weights = False
        """Whether an engine that sleeps has the memory for new weights already."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._done_tokens = 0
        self._busy_s = 0.0
        self._busy_since = 0.0

    def admit(self, num_tokens: int, *, num_sequences: int = 0) -> Reservation:
        """Reserve room for a request of ``num_tokens``, and of ``num_sequences`` to generate, whose responses' lengths
        are unknown. The caller must release it.

        Raises:
            Refusal: 413 if it can never enter, 429 if the queue is full or new weights wait for running requests, 503
                while asleep and at the end.
        """
        self.require_open()
        limit = self.limits.max_tokens_per_request
        if num_tokens > limit:
            raise too_large(f"a request of {num_tokens} tokens: this server takes {limit} at a time")
        excess = self.queued_tokens + num_tokens - self.limits.max_queued_tokens
        if excess > 0:
            raise busy(
                f"{self.queued_tokens} of {self.limits.max_queued_tokens} tokens are queued: no room for {num_tokens}",
                retry_after_s=self._time_for(excess),
            )
        most = self.max_queued_sequences
        if most is not None and self.queued_sequences and self.queued_sequences + num_sequences > most:
            raise busy(
                f"{self.queued_sequences} of {most} sequences are queued: no room for {num_sequences}",
                retry_after_s=self._time_for(num_tokens),
            )
        if self.queued_tokens == 0:
            self._busy_since = time.monotonic()
        self.queued_tokens += num_tokens
        self.queued_sequences += num_sequences
        return Reservation(self, num_tokens, num_sequences)

    def require_open(self) -> None:
        """Raise the ``Refusal`` with the reason if nothing is admitted now."""
        if self._closed_because is not None:
            raise self._closed_because

    def require_open_to_weights(self) -> None:
        """Do as ``require_open``, except that a sleeping engine which ``takes_weights`` is open."""
        if not (self._is_paused and self.takes_weights):
            self.require_open()

    def pause(self, reason: Refusal) -> None:
        """Admit nothing until ``resume``: weights change, or the engine sleeps. ``Refusal`` if it is paused or ends."""
        self.require_open()
        self._closed_because, self._is_paused = reason, True

    def resume(self) -> None:
        """Admit work again, unless the server ends."""
        if self._is_paused:
            self._closed_because, self._is_paused, self.takes_weights = None, False, False

    def close(self, kind: str, message: str) -> None:
        """Admit nothing from now on."""
        self._closed_because, self._is_paused = Refusal(503, kind, message), False

    @property
    def closed_kind(self) -> str | None:
        """``draining`` or ``dead`` if the server ends, otherwise ``None``."""
        return None if self._closed_because is None or self._is_paused else self._closed_because.kind

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count an admitted request as running inside the context."""
        self.num_running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_running -= 1
            if self.num_running == 0:
                self._idle.set()

    async def wait_idle(self, timeout_s: float) -> None:
        """Return when no engine work runs; ``Refusal`` 504 after ``timeout_s``."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except asyncio.TimeoutError as error:
            raise Refusal(504, "deadline", f"{self.num_running} requests did not end in {timeout_s:g} s") from error

    def _time_for(self, num_tokens: int) -> float:
        """Return the seconds in which this server works through ``num_tokens``, by its record so far."""
        low, high = RETRY_AFTER_S
        busy_s = self._busy_s + time.monotonic() - self._busy_since
        if self._done_tokens == 0 or busy_s <= 0:
            return 1.0
        return min(max(num_tokens * busy_s / self._done_tokens, low), high)

    def _release(self, num_tokens: int, num_sequences: int) -> None:
        self.queued_tokens -= num_tokens
        self.queued_sequences -= num_sequences
        self._done_tokens += num_tokens
        if num_tokens and self.queued_tokens == 0:
            self._busy_s += time.monotonic() - self._busy_since


class Reservation:
    """Room of one request, held until its answer has left."""

    def __init__(self, admission: Admission, num_tokens: int, num_sequences: int) -> None:
        self._admission = admission
        self._num_tokens, self._num_sequences = num_tokens, num_sequences

    def release(self, *, num_tokens: int | None = None, num_sequences: int | None = None) -> None:
        """Release a part of it, or all that is left. The latter may be repeated."""
        tokens = self._num_tokens if num_tokens is None else num_tokens
        sequences = self._num_sequences if num_sequences is None else num_sequences
        self._num_tokens -= tokens
        self._num_sequences -= sequences
        self._admission._release(tokens, sequences)

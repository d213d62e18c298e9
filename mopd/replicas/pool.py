"""Which replica may take which request now: room, load, breakers, restarts, weight versions. No request is sent here.

Requests wait in order of their numbers. A request that finds its replicas full keeps their room for itself: later ones
pass it only on replicas that it cannot use, so a long request is never starved by short ones.
"""

from __future__ import annotations

import asyncio
import enum
import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from mopd.config.groups import RoutingConfig
from mopd.metrics import is_counted
from mopd.replicas.interface import Kind, NoReplica, Replica, RouterLimits
from mopd.replicas.statistics import BusyTime, GroupNumbers, ReplicaCounters


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


class Member:
    """One life of a replica: a restart makes a new one, so late failures of the old life do not count against it."""

    def __init__(self, replica: Replica, limits: RouterLimits, counters: ReplicaCounters) -> None:
        self.name, self.engine = replica.name, replica.engine
        self.counters = counters
        self.breaker = Breaker(failures=limits.breaker_failures, reset_s=limits.breaker_reset_s)
        self.in_flight_tokens = 0
        self.busy_until = 0.0
        self.suspended: str | None = None
        self.suspended_until = 0.0
        self.refused_version: int | None = None
        """Weight version that it could not serve when asked."""
        counters.payload_starts(replica.engine)

    def serves(self, version: int | None) -> bool:
        """It has the weights of ``version`` (``None``: weights do not matter)."""
        if version is None:
            return True
        return self.refused_version != version and getattr(self.engine, "weight_version", version) == version

    def is_up(self, now: float, version: int | None) -> bool:
        """It may be asked now, room or not."""
        return (
            self.suspended is None and self.breaker.takes_work(now) and now >= self.busy_until and self.serves(version)
        )

    def state(self, version: int | None) -> str:
        """See ``ReplicaNumbers.state``."""
        if self.suspended is not None:
            return "restarting"
        if self.breaker.state is not BreakerState.CLOSED:
            return self.breaker.state.name.lower()
        return "closed" if self.serves(version) else "stale"


@dataclass(kw_only=True, eq=False)
class Want:
    """What a request needs of a replica."""

    order: int
    """Smaller numbers come first; a retry keeps its number."""
    tokens: int
    """Room that it takes on a replica."""
    version: int | None = None
    """Weight version that must answer; ``None`` where weights are fixed."""
    failed_on: list[str] = field(default_factory=list)
    """Replicas that failed at it, in order: taken only when no other is up."""
    is_counted: bool = field(default_factory=is_counted)
    """It stands in the numbers of a step: see ``mopd.metrics.apart``."""


class _Waiter:
    def __init__(self, want: Want, granted: asyncio.Future[Member]) -> None:
        self.want, self.granted = want, granted


class Pool:
    """The replicas of one group and the requests that wait for them. Used on one event loop; times are the loop's."""

    def __init__(self, routing: RoutingConfig, limits: RouterLimits, replicas: Sequence[Replica]) -> None:
        self._routing, self._limits = routing, limits
        self._counters: dict[str, ReplicaCounters] = {}
        self._members: dict[str, Member] = {}
        self._waiters: list[_Waiter] = []
        self._timer: asyncio.TimerHandle | None = None
        self._moved_at = -math.inf
        self._last_loss = ""
        self._busy = BusyTime()
        self._num_waiting = self._waiting_tokens = self._most_waiting = self._most_waiting_tokens = 0
        for replica in replicas:
            self.add(replica)

    @property
    def members(self) -> tuple[Member, ...]:
        """All replicas that are not gone."""
        return tuple(self._members.values())

    def member(self, name: str) -> Member:
        """``KeyError`` for a replica that does not exist or is gone."""
        return self._members[name]

    def add(self, replica: Replica) -> None:
        """A new replica, or the next life of one."""
        counters = self._counters.setdefault(replica.name, ReplicaCounters(replica.name))
        if replica.name in self._members:
            counters.note_payload(self._members[replica.name].engine)
        self._members[replica.name] = Member(replica, self._limits, counters)
        self.look_again()

    def remove(self, name: str, reason: str) -> None:
        """Gone for good; with the last one every waiting request fails."""
        self._counters[name].note_payload(self._members.pop(name).engine)
        self._last_loss = f"{name} is gone: {reason}"
        if not self._members:
            for waiter in self._waiters:
                if not waiter.granted.done():
                    waiter.granted.set_exception(NoReplica(self.describe(waiter.want.version)))

    async def acquire(self, want: Want) -> Member:
        """Wait for a replica with room, which is the request's until ``ended``.

        ``NoReplica`` when none is left, or when nothing has moved in the whole group (nothing sent, nothing come back)
        for as long as one attempt or a declared restart may take.
        """
        if not self._members:
            raise NoReplica(self.describe(want.version))
        waiter = _Waiter(want, asyncio.get_running_loop().create_future())
        insort(self._waiters, waiter, key=lambda w: w.want.order)
        self._count_waiting(want, 1)
        self.look_again()
        self._most_waiting = max(self._most_waiting, self._num_waiting)
        self._most_waiting_tokens = max(self._most_waiting_tokens, self._waiting_tokens)
        try:
            came_at = self.now()
            while not waiter.granted.done():
                left_s = self._gives_up_at(came_at) - self.now()
                if left_s <= 0:
                    raise NoReplica(self.describe(want.version))
                await asyncio.wait({waiter.granted}, timeout=left_s)
            return waiter.granted.result()
        except asyncio.CancelledError:
            if waiter.granted.done() and waiter.granted.exception() is None:
                member = waiter.granted.result()
                member.breaker.abandoned(self.now())
                self.ended(member, want)
            raise
        finally:
            if waiter in self._waiters:
                self._forget(waiter)

    def look_again(self) -> None:
        """Give room to whoever waits for it; called after every change."""
        if not self._waiters:
            return
        now = self.now()
        up = {m.name for m in self._members.values() if m.is_up(now, None)}
        kept: set[str] = set()
        for waiter in list(self._waiters):
            if up <= kept:
                break
            if waiter.granted.done():
                continue
            choice = self._choose(waiter.want, now, kept)
            if choice is not None:
                self._forget(waiter)
                self._lend(choice, waiter.want, now)
                waiter.granted.set_result(choice)
        self._set_timer(now)

    def ended(self, member: Member, want: Want) -> None:
        """The request is under way no more; its outcome has been told to breaker and counters."""
        now = self.now()
        member.in_flight_tokens -= want.tokens
        if want.is_counted:
            member.counters.came_back(want.tokens, now)
            self._busy.end(now)
        self._moved_at = now
        self.look_again()

    def take(self, version: int | None, *, kind: Kind, name: str, retries: int) -> GroupNumbers:
        """The numbers since the last ``take``; starts anew."""
        now = self.now()
        for member in self._members.values():
            member.counters.note_payload(member.engine)
        replicas = tuple(
            counters.take(self._members[n].state(version) if n in self._members else "gone", now)
            for n, counters in self._counters.items()
        )
        numbers = GroupNumbers(
            kind=kind,
            name=name,
            replicas=replicas,
            queue_depth=self._most_waiting,
            queued_tokens=self._most_waiting_tokens,
            busy_s=self._busy.take(now),
            retries=retries,
        )
        self._most_waiting, self._most_waiting_tokens = self._num_waiting, self._waiting_tokens
        return numbers

    def describe(self, version: int | None) -> str:
        """Why nobody takes work, replica by replica."""
        if not self._members:
            return f"no replica is left ({self._last_loss})" if self._last_loss else "no replica is left"
        states = ", ".join(
            f"{m.name} {m.suspended or m.state(version).replace('_', '-')}" for m in self._members.values()
        )
        return f"no replica took or finished work in time ({states})"

    def now(self) -> float:
        """Seconds of the running loop's clock."""
        return asyncio.get_running_loop().time()

    def _choose(self, want: Want, now: float, kept: set[str]) -> Member | None:
        """The least loaded replica with room. When there is none, those that ``want`` could use join ``kept``."""
        up = [m for m in self._members.values() if m.is_up(now, want.version)]
        up = [m for m in up if m.name not in want.failed_on] or up
        most = self._routing.max_inflight_tokens
        free = [
            m
            for m in up
            if m.name not in kept and (m.in_flight_tokens == 0 or m.in_flight_tokens + want.tokens <= most)
        ]
        if free:
            return min(free, key=lambda m: m.in_flight_tokens)
        kept.update(m.name for m in up)
        return None

    def _forget(self, waiter: _Waiter) -> None:
        self._waiters.remove(waiter)
        self._count_waiting(waiter.want, -1)

    def _count_waiting(self, want: Want, change: int) -> None:
        if want.is_counted:
            self._num_waiting += change
            self._waiting_tokens += change * want.tokens

    def _lend(self, member: Member, want: Want, now: float) -> None:
        member.in_flight_tokens += want.tokens
        member.breaker.sent()
        if want.is_counted:
            member.counters.sent(want.tokens, now)
            self._busy.begin(now)
        self._moved_at = now

    def _set_timer(self, now: float) -> None:
        """Look again when the next breaker or full queue may be tried; everything else that changes calls us."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        times = [m.busy_until for m in self._members.values()]
        times += [m.breaker.next_trial_at for m in self._members.values() if m.breaker.next_trial_at is not None]
        due = min((t for t in times if t > now), default=None)
        if self._waiters and due is not None:
            self._timer = asyncio.get_running_loop().call_at(due, self.look_again)

    def _gives_up_at(self, came_at: float) -> float:
        """When a request that came at ``came_at`` has waited long enough, if nothing moves from now on."""
        timeout_s = self._routing.request_timeout_s
        times = [max(came_at, self._moved_at) + timeout_s]
        for member in self._members.values():
            if member.in_flight_tokens:  # it has a deadline of its own and will move
                times.append(self.now() + timeout_s)
            if member.suspended is not None:
                times.append(member.suspended_until)
            if member.breaker.next_trial_at is not None:
                times.append(member.breaker.next_trial_at + timeout_s)
        return max(times)

    def close(self) -> None:
        """Drop all replicas; whoever waits gets ``NoReplica``."""
        if self._timer is not None:
            self._timer.cancel()
        for name in list(self._members):
            self.remove(name, "the group is closed")

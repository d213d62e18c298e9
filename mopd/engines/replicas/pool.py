"""Assignment of waiting work to replicas, by room, load, breakers, restarts and weight versions. Sends no request
itself.

Wants wait in their order. One that finds its replicas full reserves their room: later ones pass it only on replicas
that it cannot use, so long ones are never starved by short ones. Wants that get room at one replica at the same moment
are joined into requests.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from mopd.base.types import UserError
from mopd.config.groups import RoutingConfig
from mopd.engines.replicas.interface import Kind, NoReplica, Replica, RouterLimits
from mopd.engines.replicas.members import NO_ROOM, Member, Room, WorkRequest
from mopd.engines.replicas.statistics import BusyTime, GroupNumbers, ReplicaCounters

WorkRequestT = TypeVar("WorkRequestT", bound=WorkRequest)
Demand = tuple[int | None, frozenset[str]]
"""Weight version and replicas to avoid. Wants of one demand have the same choice of replicas."""


class _Waiter(Generic[WorkRequestT]):
    def __init__(self, want: WorkRequestT, sent: asyncio.Future[None]) -> None:
        self.want, self.sent = want, sent
        self.demand: Demand = (want.version, frozenset(want.failed_on))


class Pool(Generic[WorkRequestT]):
    """The replicas of one group and the wants that wait for them. Not thread-safe: use from one event loop, whose clock
    gives all times."""

    def __init__(
        self,
        routing: RoutingConfig,
        limits: RouterLimits,
        replicas: Sequence[Replica],
        send: Callable[[Member, Sequence[WorkRequestT]], None],
    ) -> None:
        """Start with ``replicas``. ``send`` is called with wants that travel to a replica as one request; each holds
        its room there until ``ended``."""
        self._routing, self._limits, self._send = routing, limits, send
        self._counters: dict[str, ReplicaCounters] = {}
        self._members: dict[str, Member] = {}
        self._waiters: list[_Waiter[WorkRequestT]] = []
        self._demands: Counter[Demand] = Counter()
        self._look: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._moved_at = -math.inf
        self._last_loss = ""
        self._failure: UserError | None = None
        self._busy = BusyTime()
        self._num_waiting = self._waiting_tokens = self._most_waiting = self._most_waiting_tokens = 0
        for replica in replicas:
            self.add(replica)

    @property
    def members(self) -> tuple[Member, ...]:
        """All replicas that are not gone."""
        return tuple(self._members.values())

    @property
    def max_sequences(self) -> int | None:
        """Most responses in one request of a caller, so that it can follow at once what ends at a replica; ``None`` if
        no replica tells how many sequences it runs."""
        return min((m.spare_sequences for m in self.members if m.spare_sequences is not None), default=None)

    def member(self, name: str) -> Member:
        """Return the replica; ``KeyError`` if it does not exist or is gone."""
        return self._members[name]

    def add(self, replica: Replica) -> None:
        """Add a new replica, or the next life of one."""
        counters = self._counters.setdefault(replica.name, ReplicaCounters(replica.name))
        if replica.name in self._members:
            counters.note_payload(self._members[replica.name].engine)
        self._members[replica.name] = Member(replica, self._routing, self._limits, counters)
        self.look_again()

    def remove(self, name: str, reason: str) -> None:
        """Remove a replica for good; after the last one every waiting want fails."""
        self._counters[name].note_payload(self._members.pop(name).engine)
        self._last_loss = f"{name} is gone: {reason}"
        if not self._members:
            self._end_waits(lambda waiter: NoReplica(self.describe(waiter.want.version)))

    def fail(self, error: UserError) -> None:
        """Fail every waiting and later want with ``error``."""
        self._failure = error
        self._end_waits(lambda waiter: error)

    def _end_waits(self, error_of: Callable[[_Waiter[WorkRequestT]], Exception]) -> None:
        for waiter in self._waiters:
            if not waiter.sent.done():
                waiter.sent.set_exception(error_of(waiter))

    async def acquire(self, want: WorkRequestT) -> None:
        """Wait until ``want`` has been sent to a replica with room.

        ``NoReplica`` when none is left, or when nothing has moved in the whole group (nothing sent, nothing come back)
        for as long as one attempt or a declared restart may take. Raises also the error of ``fail``.
        """
        if self._failure is not None:
            raise self._failure
        if not self._members:
            raise NoReplica(self.describe(want.version))
        waiter = _Waiter(want, asyncio.get_running_loop().create_future())
        self._waiters.insert(self._place(want), waiter)
        self._count_waiting(waiter, 1)
        self.look_again()
        try:
            came_at = self.now()
            while not waiter.sent.done():
                # computed anew after each wait: whatever moves in the group puts the deadline off
                left_s = self._gives_up_at(came_at) - self.now()
                if left_s <= 0:
                    raise NoReplica(self.describe(want.version))
                await asyncio.wait({waiter.sent}, timeout=left_s)
            waiter.sent.result()
        finally:
            place = self._place(want)
            # a want that was sent has left the list; its place may be another's
            if place < len(self._waiters) and self._waiters[place] is waiter:
                self._forget(place)

    def look_again(self) -> None:
        """Schedule one pass over the waiting wants; call after every change. Changes of one moment share a pass, so
        that their wants travel together."""
        if self._waiters and self._look is None:
            self._look = asyncio.get_running_loop().call_soon(self._give_room)

    def freed(self, member: Member, want: WorkRequestT, room: Room) -> None:
        """Release part of the room that ``want`` holds at a replica."""
        self._give_back(member, want, room)
        self._moved_at = self.now()
        self.look_again()

    def ended(self, member: Member, want: WorkRequestT) -> None:
        """Release all room of ``want``. Its outcome has been reported to breaker and counters already."""
        now = self.now()
        self._give_back(member, want, want.lent)
        if want.is_counted:
            member.counters.came_back(now)
            self._busy.end(now)
        self._moved_at = now
        self.look_again()

    def take(self, version: int | None, *, kind: Kind, name: str, retries: int) -> GroupNumbers:
        """Return the numbers since the last ``take`` and reset them."""
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
        """Return why no replica takes work, replica by replica."""
        if not self._members:
            return f"no replica is left ({self._last_loss})" if self._last_loss else "no replica is left"
        states = ", ".join(
            f"{m.label} {m.suspended or m.state(version).replace('_', '-')}" for m in self._members.values()
        )
        return f"no replica took or finished work in time ({states})"

    def now(self) -> float:
        """Return the running loop's time in seconds."""
        return asyncio.get_running_loop().time()

    def _give_room(self) -> None:
        """Give room to waiting wants, in order. Costs as much as it gives away, not as much as waits: it ends when no
        replica is left that the rest could use."""
        self._look = None
        now = self.now()
        choices, names = self._choices(now)
        # `kept`: replicas that take no more in this pass: busy enough, or reserved by a want that did not fit
        kept = {member.name for member in self._members.values() if not member.is_short_of_work}
        joint = _JointRequests[WorkRequestT]()
        place = 0
        while place < len(self._waiters) and not names <= kept:
            waiter = self._waiters[place]
            member = None if waiter.sent.done() else _choose(choices[waiter.demand], waiter.want.room, kept)
            if member is None:
                place += 1
                continue
            self._forget(place)
            # an open breaker admits one trial: after it this replica is no choice for the others
            on_trial = member.breaker.state != "closed"
            self._lend(member, waiter.want, now)
            joint.add(member, waiter.want)
            waiter.sent.set_result(None)
            if on_trial:
                choices, names = self._choices(now)
        self._most_waiting = max(self._most_waiting, self._num_waiting)
        self._most_waiting_tokens = max(self._most_waiting_tokens, self._waiting_tokens)
        for request in joint.requests:
            self._send(request.member, [*request.by_caller.values()])
        self._set_timer(now)

    def _choices(self, now: float) -> tuple[dict[Demand, list[Member]], set[str]]:
        """Return, for each waiting demand, the replicas that may serve it, room or not; and the names of them all."""
        choices = {}
        for version, avoided in self._demands:
            up = [member for member in self._members.values() if member.is_up(now, version)]
            choices[version, avoided] = [member for member in up if member.name not in avoided] or up
        return choices, {member.name for members in choices.values() for member in members}

    def _place(self, want: WorkRequestT) -> int:
        return bisect_left(self._waiters, want.order, key=lambda waiter: waiter.want.order)

    def _forget(self, place: int) -> None:
        self._count_waiting(self._waiters.pop(place), -1)

    def _count_waiting(self, waiter: _Waiter[WorkRequestT], change: int) -> None:
        self._demands[waiter.demand] += change
        if not self._demands[waiter.demand]:
            del self._demands[waiter.demand]
        if waiter.want.is_counted:
            self._num_waiting += change
            self._waiting_tokens += change * waiter.want.room.load

    def _lend(self, member: Member, want: WorkRequestT, now: float) -> None:
        want.lent = want.room
        member.in_flight += want.room
        member.breaker.sent()
        if want.is_counted:
            member.counters.sent(want.room.load, now)
            self._busy.begin(now)
        self._moved_at = now

    def _give_back(self, member: Member, want: WorkRequestT, room: Room) -> None:
        want.lent -= room
        member.in_flight -= room
        if want.is_counted:
            member.counters.freed(room.load)

    def _set_timer(self, now: float) -> None:
        """Schedule a pass for when the next breaker or full queue may be tried; other changes call it themselves."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        times = [m.busy_until for m in self._members.values()]
        times += [m.breaker.next_trial_at for m in self._members.values() if m.breaker.next_trial_at is not None]
        due = min((t for t in times if t > now), default=None)
        if self._waiters and due is not None:
            self._timer = asyncio.get_running_loop().call_at(due, self.look_again)

    def _gives_up_at(self, came_at: float) -> float:
        """Return when a want that came at ``came_at`` gives up, if nothing moves from now on."""
        timeout_s = self._routing.request_timeout_s
        times = [max(came_at, self._moved_at) + timeout_s]
        for member in self._members.values():
            if member.in_flight != NO_ROOM:  # its requests have deadlines of their own: it will move
                times.append(self.now() + timeout_s)
            if member.suspended is not None:
                times.append(member.suspended_until)
            if member.breaker.next_trial_at is not None:
                times.append(member.breaker.next_trial_at + timeout_s)
        return max(times)

    def close(self) -> None:
        """Drop all replicas; waiting wants get ``NoReplica``."""
        for handle in (self._timer, self._look):
            if handle is not None:
                handle.cancel()
        for name in list(self._members):
            self.remove(name, "the group is closed")


def _choose(members: Sequence[Member], room: Room, kept: set[str]) -> Member | None:
    """Return the least loaded replica with room; if there is none, add them all to ``kept``."""
    free = [member for member in members if member.name not in kept and member.has_room(room)]
    if free:
        return min(free, key=lambda member: member.in_flight.load)
    kept.update(member.name for member in members)
    return None


@dataclass
class _JointRequest(Generic[WorkRequestT]):
    """Wants that travel to one replica together."""

    member: Member
    by_caller: dict[int, WorkRequestT] = field(default_factory=dict)
    tokens: int = 0


class _JointRequests(Generic[WorkRequestT]):
    """Requests made of wants in the order in which they got room. Each want joins the first request to its replica that
    has room and none of the same caller. A request that was too full for one is full for all."""

    def __init__(self) -> None:
        self.requests: list[_JointRequest[WorkRequestT]] = []
        self._open: dict[Hashable, list[_JointRequest[WorkRequestT]]] = defaultdict(list)
        """Requests of one key to one replica that are not full."""

    def add(self, member: Member, want: WorkRequestT) -> None:
        """Add one want to a request to ``member``, or start a new request."""
        caller = id(want.caller)
        key = id(want) if want.key is None else (member.name, want.key, want.is_counted)
        for request in [*self._open[key]]:
            if request.tokens + want.room.tokens > member.max_tokens_per_request:
                self._open[key].remove(request)
            elif caller not in request.by_caller:
                break
        else:
            request = _JointRequest(member)
            self.requests.append(request)
            self._open[key].append(request)
        request.by_caller[caller] = want
        request.tokens += want.room.tokens

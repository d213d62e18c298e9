"""Accounts of every prompt, by ids and lengths and by queue: none is lost and none is trained on twice.

A slot is a place in the stream of prompts, open from when its prompt is admitted until its samples are trained on::

    stream ──admit──> open ──complete──> ready ──take──> taken ──trained──> gone
     at most           │ ▲                 │
     published + n + 1 │ ├── again: its samples are older than max_staleness (n) allows; the same prompt is drawn anew
     steps' worth      │ │                 │
                       └─┴── replace: its samples cannot be scored; another prompt of its queue takes its place

A batch takes ready slots, those of the oldest weights first, as many of each queue as the same stretch of the stream
has: in whatever order responses end, every batch has the stream's mix. A queue (``Prompt.queue``) is a domain; stored
prompts (``data.scored``) of a domain are one of their own, so that every batch has their share.

A slot of weights v has to be trained on by step v + n + 1 at the latest. With ``on_expiry: hold`` a batch waits rather
than take a slot of newer weights and leave more old ones than the steps up to their last one have room for. So none is
ever refused, and the length of a response does not change its chance to be trained on. Admission guarantees that such
an order exists: of weights v or older at most (v + n + 1) steps' worth are ever admitted. With ``redraw`` the batch
goes ahead, and what became too old is drawn again: faster, and biased against long responses.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from heapq import heappop, heappush
from typing import Any, Literal

from mopd.base.types import Prompt, SampleMeta, UserError
from mopd.orchestrator.pace import Pace

ENDS = ("trained", "refused", "replaced")
"""Possible ends of an admitted prompt."""


@dataclass(kw_only=True, eq=False, slots=True)
class Slot:
    """One open place in the stream."""

    number: int
    """Place in the order of admission, from 0."""
    prompt: Prompt
    """Prompt that fills it now."""
    weight_version: int
    """Weights that its age counts from (``Ledger.version_of``). Until its samples are drawn, the oldest that it may
    turn out to be."""
    opened_at: float
    """Time when its prompt was admitted, by the ledger's clock."""
    ready_at: float = 0.0
    """Time when its samples were complete."""
    is_drawn: bool = False
    """Whether one of its samples is drawn, so that new weights do not make the slot younger any more."""
    samples: tuple[SampleMeta, ...] = ()
    """Finished samples, once it is ready."""


class Ledger:
    """Tracks every admitted prompt until it is trained on. Not thread-safe: use from one event loop. Each change wakes
    all coroutines that wait here."""

    def __init__(
        self,
        *,
        prompts_per_step: int,
        max_staleness: int,
        step: int,
        last_step: int | None = None,
        warm_up: int = 0,
        on_expiry: Literal["hold", "redraw"] = "hold",
        on_new_weights: Literal["finish", "continue"] = "finish",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin after ``step`` optimizer steps, whose weights are published.

        Args:
            last_step: no prompt is admitted for a step after it.
            warm_up: no prompt of a later step is admitted before this step's weights are published, so that no batch
                mixes the samples of two objectives.
            on_expiry: ``schedule.on_expiry``.
            on_new_weights: ``rollout.on_new_weights``.
        """
        self.prompts_per_step, self.max_staleness = prompts_per_step, max_staleness
        self.step = self.published = step
        self._holds, self._continues = on_expiry == "hold", on_new_weights == "continue"
        self._last_step, self._warm_up = last_step, warm_up
        self._clock = clock
        self._pace = Pace(max_staleness)
        self._next_step = step
        """Number of steps whose batches are taken: one more than ``step`` while one is trained on."""
        self._num_admitted = step * prompts_per_step
        self._order: deque[str] = deque()
        """Queues of the stream, in its order, from the first prompt on that belongs to no completed step."""
        self._mixes: deque[Counter[str]] = deque()
        """Prompts of each queue by step of ``_order``, from the next one on; the last step may be incomplete."""
        self._open: dict[int, Slot] = {}
        self._versions: defaultdict[str, Counter[int]] = defaultdict(Counter)
        """Queue -> ``weight_version`` -> open slots."""
        self._ready: defaultdict[str, dict[int, list[int]]] = defaultdict(dict)
        """Queue -> ``weight_version`` -> heap of the numbers of its ready slots; no heap is empty."""
        self._admitted: Counter[str] = Counter()
        self._ended: dict[str, Counter[str]] = {end: Counter() for end in ENDS}
        self._num_contained = 0
        """Waits in progress that ``take`` contains."""
        self._change: asyncio.Future[None] | None = None
        """Future of the next change, if a coroutine waits for it."""

    async def room(self, num_prompts: int) -> None:
        """Wait until ``num_prompts`` more may be admitted: the newest could then still be trained on in time, and the
        trainer will need them soon (``Pace``).

        This wait has no deadline of its own: it ends when newer weights are published or a batch is taken, which have
        one, or when the trainer stops and cancels it.
        """
        while True:
            wait_s: float | None = None  # until newer weights are published
            if self.has_room(num_prompts):
                # the step of the last of these prompts, counted from the next one
                ahead = (self._num_admitted + num_prompts - 1) // self.prompts_per_step - self._next_step
                now = self._clock()
                wait_s = self._pace.due(ahead, now) - now if self.max_staleness else 0.0
                if wait_s <= 0:
                    return
            await asyncio.wait({self._next_change()}, timeout=wait_s)

    def has_room(self, num_prompts: int = 1) -> bool:
        """Return whether the bound on staleness lets ``num_prompts`` more in."""
        newest = self.published + self.max_staleness + 1
        if self.published < self._warm_up:
            newest = min(newest, self._warm_up)
        if self._last_step is not None:
            newest = min(newest, self._last_step)
        return self._num_admitted + num_prompts <= newest * self.prompts_per_step

    def admit(self, prompts: Sequence[Prompt]) -> list[Slot]:
        """Open a slot for each of the stream's next prompts."""
        slots = []
        for prompt in prompts:
            slots.append(self._add_slot(prompt))
            self._add_to_order(prompt.queue)
            self._admitted[prompt.queue] += 1
        return slots

    def publish(self, weight_version: int) -> None:
        """Record the weights that draw responses from now on. With ``on_new_weights: continue`` responses in
        progress continue with them."""
        self.published = weight_version
        if self._continues:
            for slot in self._open.values():
                if not slot.is_drawn:
                    self._set_version(slot, weight_version)
        self._wake()

    def version_of(self, samples: Sequence[SampleMeta]) -> int:
        """Return the weights that the age of one prompt's samples counts from.

        These are the oldest of any token; with ``on_new_weights: continue`` those of the newest token of the response
        that was complete first. New weights do not age a response that they overtake: what its tokens are off-policy
        is corrected token by token (``loss.correction``).
        """
        if self._continues:
            return min(sample.newest_version for sample in samples)
        return min(sample.weight_version for sample in samples)

    def is_stale(self, samples: Sequence[SampleMeta]) -> bool:
        """Return whether the next step can no longer train on one prompt's samples."""
        return self._next_step - self.version_of(samples) > self.max_staleness

    def ended(self, slot: Slot, weight_version: int) -> None:
        """Record that one of the slot's responses is complete, and the weights of its newest token: while it waits for
        the prompt's others it ages, and new weights do not make the slot younger any more."""
        if self._continues:
            self._set_version(slot, min(slot.weight_version, weight_version) if slot.is_drawn else weight_version)
            slot.is_drawn = True

    def drawn(self, slot: Slot, samples: Sequence[SampleMeta]) -> bool:
        """Record the weights that drew the slot's samples. ``False``: they are too old already for the next step."""
        slot.is_drawn = True
        self._set_version(slot, self.version_of(samples))
        return not self.is_stale(samples)

    def complete(self, slot: Slot, samples: Sequence[SampleMeta]) -> bool:
        """Take in the slot's samples, all of whose fields are there. ``False``: they are too old for the next step and
        not taken in; call ``again``."""
        if not self.drawn(slot, samples):
            return False
        slot.samples, slot.ready_at = tuple(samples), self._clock()
        heappush(self._ready[slot.prompt.queue].setdefault(slot.weight_version, []), slot.number)
        self._note_complete()
        self._wake()
        return True

    def stale(self) -> list[Slot]:
        """Take back and return the ready slots that the next step cannot train on; call ``again`` for each."""
        gone = []
        for of_queue in self._ready.values():
            for version in [v for v in of_queue if self._next_step - v > self.max_staleness]:
                gone += [self._open[number] for number in of_queue.pop(version)]
        return sorted(gone, key=lambda slot: slot.number)

    def again(self, slot: Slot) -> None:
        """Refuse the slot's samples: its own prompt is drawn once more."""
        self._ended["refused"][slot.prompt.queue] += 1
        self._reopen(slot, replace(slot.prompt, attempt=slot.prompt.attempt + 1))

    def replace(self, slot: Slot, prompt: Prompt) -> None:
        """Discard the slot's samples; ``prompt``, of the same queue, takes its place."""
        self._ended["replaced"][slot.prompt.queue] += 1
        self._reopen(slot, prompt)

    @contextlib.contextmanager
    def contained(self) -> Iterator[None]:
        """Put off the deadline of ``take`` while the block lasts, and let it begin anew at its end. The block is a wait
        that samples need and that has deadlines of its own, such as a request with its attempts and the restarts of
        replicas: it says better than ``take`` what was missing."""
        self._num_contained += 1
        try:
            yield
        finally:
            self._num_contained -= 1
            self._wake()

    async def take(self, *, timeout_s: float) -> list[Slot]:
        """Return the next step's slots, in order of their sample ids, as soon as they are ready.

        Raises:
            UserError: nothing has changed for ``timeout_s`` and no ``contained`` wait was in progress; says what is
                ready and what is missing, by queue.
        """
        self._pace.asked(self._clock(), self._num_complete(most=self.max_staleness + 1))
        self._wake()
        while not self._is_complete():
            # the deadline begins anew with each change: it bounds a standstill, not the wait for a whole batch
            done, _ = await asyncio.wait({self._next_change()}, timeout=timeout_s)
            if not done and not self._num_contained:
                raise UserError(self._describe_wait(timeout_s))
        slots = [self._pop_ready(queue) for queue, count in self._mixes.popleft().items() for _ in range(count)]
        self._next_step += 1
        self._pace.taken(self._clock(), max(slot.ready_at - slot.opened_at for slot in slots))
        self._note_complete()
        self._wake()
        return sorted(slots, key=lambda slot: slot.prompt.sample_id)

    def trained(self, slots: Sequence[Slot]) -> None:
        """Close the slots that one optimizer step has used. ``RuntimeError`` if the accounts do not add up."""
        for slot in slots:
            if self._open.pop(slot.number, None) is not slot:
                raise RuntimeError(f"the prompt of sample {slot.prompt.sample_id} is trained on a second time")
            self._ended["trained"][slot.prompt.queue] += 1
            self._order.popleft()
        self.step += 1
        self._check()
        self._wake()

    @property
    def slots(self) -> list[Slot]:
        """Open slots, oldest first."""
        return [slot for _, slot in sorted(self._open.items())]

    def state_dict(self) -> dict[str, Any]:
        """Return, for JSON, every prompt that is admitted and not trained on, oldest first, and the accounts."""
        return {
            "open": [asdict(slot.prompt) for slot in self.slots],
            "order": list(self._order),
            "admitted": dict(self._admitted),
            **{end: dict(counts) for end, counts in self._ended.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any], prompt_of: Callable[[int, str, int], Prompt]) -> None:
        """Open the slots of a checkpoint again, to be drawn anew.

        Args:
            prompt_of: ``(sample_id, domain, row)`` as a prompt of the data; ``UserError`` if there is none.

        Raises:
            UserError: the state is not what ``state_dict`` gives, or its accounts do not add up.
        """
        try:
            for entry in state["open"]:
                prompt = prompt_of(_number(entry["sample_id"]), entry["domain"], _number(entry["row"]))
                self._add_slot(replace(prompt, attempt=_number(entry["attempt"])))
            for queue in state["order"]:
                self._add_to_order(queue)
            self._admitted.update({queue: _number(count) for queue, count in state["admitted"].items()})
            for end, counts in self._ended.items():
                counts.update({queue: _number(count) for queue, count in state[end].items()})
            ids = [slot.prompt.sample_id for slot in self._open.values()]
            if len(set(ids)) != len(ids) or Counter(self._order) != self._in_flight():
                raise ValueError("its open prompts do not fit its order")
            self._check()
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise UserError(
                f"the checkpoint's open prompts cannot be read ({error}): resume from another one"
            ) from error

    def _add_slot(self, prompt: Prompt) -> Slot:
        slot = Slot(number=self._num_admitted, prompt=prompt, weight_version=self.published, opened_at=self._clock())
        self._open[slot.number] = slot
        self._versions[prompt.queue][self.published] += 1
        self._num_admitted += 1
        return slot

    def _add_to_order(self, queue: str) -> None:
        if len(self._order) % self.prompts_per_step == 0:
            self._mixes.append(Counter())
        self._order.append(queue)
        self._mixes[-1][queue] += 1

    def _set_version(self, slot: Slot, weight_version: int) -> None:
        self._forget_version(slot)
        self._versions[slot.prompt.queue][weight_version] += 1
        slot.weight_version = weight_version

    def _forget_version(self, slot: Slot) -> None:
        versions = self._versions[slot.prompt.queue]
        versions[slot.weight_version] -= 1
        if not versions[slot.weight_version]:
            del versions[slot.weight_version]

    def _reopen(self, slot: Slot, prompt: Prompt) -> None:
        if prompt.queue != slot.prompt.queue:
            raise RuntimeError(f"a prompt of {prompt.queue!r} cannot replace one of {slot.prompt.queue!r}")
        slot.prompt, slot.samples, slot.is_drawn = prompt, (), False
        self._set_version(slot, self.published)
        self._admitted[prompt.queue] += 1
        self._wake()

    def _pop_ready(self, queue: str) -> Slot:
        """Take the queue's ready slot of the oldest weights; of several, the one that was admitted first."""
        of_queue = self._ready[queue]
        oldest = min(of_queue)
        slot = self._open[heappop(of_queue[oldest])]
        if not of_queue[oldest]:
            del of_queue[oldest]
        self._forget_version(slot)
        return slot

    def _is_complete(self) -> bool:
        """Return whether the next batch can be taken."""
        return self._num_complete(most=1) == 1 and not self._held()

    def _note_complete(self) -> None:
        if self.max_staleness and self._is_complete():
            self._pace.completed(self._clock())

    def _num_complete(self, most: int) -> int:
        """Return the number of batches, up to ``most``, that the ready slots are enough for."""
        wanted: Counter[str] = Counter()
        for number, mix in enumerate(itertools.islice(self._mixes, most)):
            wanted.update(mix)
            if mix.total() < self.prompts_per_step or any(self._num_ready(q) < count for q, count in wanted.items()):
                return number
        return min(most, len(self._mixes))

    def _num_ready(self, queue: str) -> int:
        return sum(map(len, self._ready[queue].values()))

    def _held(self) -> list[str]:
        """Return the queues whose ready slots a batch must not take yet: older ones would become too old."""
        return [queue for queue in self._mixes[0] if self._leaves_too_many(queue)] if self._holds else []

    def _leaves_too_many(self, queue: str) -> bool:
        """Return whether the next batch would take slots of newer weights of the queue and leave more slots of some
        weights v or older than the later steps up to v + n + 1 take: one of these would become too old.

        A batch without such newer slots cannot do better: it never waits.
        """
        left = Counter(self._versions[queue])
        num_wanted, newest = self._mixes[0][queue], self._next_step
        # `left`: open slots by weights after this batch; `newest`: the newest weights that it takes
        for version, numbers in sorted(self._ready[queue].items()):
            if num_wanted > 0:
                newest = version
                left[version] -= min(num_wanted, len(numbers))
                num_wanted -= len(numbers)
        num_left = 0
        # oldest weights first: the slots up to `version` must fit into the steps that may still train on them
        for version in sorted(left):
            if version >= newest:
                return False
            num_left += left[version]
            last = version + self.max_staleness - self._next_step  # of ``_mixes``; the next batch's is number 0
            if num_left > sum(mix[queue] for mix in itertools.islice(self._mixes, 1, max(1, last + 1))):
                return True
        return False

    def _in_flight(self) -> Counter[str]:
        return Counter(slot.prompt.queue for slot in self._open.values())

    def _check(self) -> None:
        """Raise ``RuntimeError`` unless admitted = trained + in flight + refused + replaced, in every queue."""
        ends = sum((self._ended[end] for end in ENDS), self._in_flight())
        if +self._admitted != +ends:
            queues = [q for q in sorted(self._admitted | ends) if self._admitted[q] != ends[q]]
            counts = ", ".join(f"{q!r}: {self._admitted[q]} admitted, {ends[q]} accounted for" for q in queues)
            raise RuntimeError(f"prompts were lost or counted twice after step {self.step}: {counts}")

    def _next_change(self) -> asyncio.Future[None]:
        """Return the future of the next change. It exists at once: a change before the waiter runs is not missed."""
        if self._change is None:
            self._change = asyncio.get_running_loop().create_future()
        return self._change

    def _wake(self) -> None:
        if self._change is not None:
            self._change.set_result(None)
            self._change = None

    def _describe_wait(self, timeout_s: float) -> str:
        mix = self._mixes[0] if self._mixes else Counter()
        ready = ", ".join(f"{queue!r} {self._num_ready(queue)} of {count}" for queue, count in sorted(mix.items()))
        held = ", ".join(map(repr, self._held())) if self._num_complete(most=1) else ""
        waits_for = f"; others of {held} would become too old first (schedule.on_expiry: hold)" if held else ""
        return (
            f"waited {timeout_s:g} s (schedule.wait_timeout_s) for the {self.prompts_per_step} prompts of step "
            f"{self._next_step + 1}; ready by domain: {ready or 'none'}{waits_for}; {len(self._open)} are open, "
            "and no request for them is in progress: see the replicas' logs"
        )


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.40} is no count")
    return value

"""What became of every prompt: ids and lengths, by domain, so that none is lost and none is trained on twice.

A slot is a place in the stream of prompts, open from when its prompt is admitted until its samples are trained on::

    stream ──admit──> open ──complete──> ready ──take──> taken ──trained──> gone
     at most           │ ▲                 │
     published + n + 1 │ ├── again: its samples are older than max_staleness (n) allows; the same prompt is drawn anew
     steps' worth      │ │                 │
                       └─┴── replace: its samples cannot be scored; another prompt of its domain takes its place

A batch takes ready slots, the oldest first, as many of each domain as the same stretch of the stream has: whatever
overtakes what, every batch has the stream's mix. A slot that others overtake grows old, and in the end is drawn again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any

from mopd.types import Prompt, SampleMeta, UserError

ENDS = ("trained", "refused", "replaced")
"""What a prompt that was admitted ends as."""


@dataclass(kw_only=True, eq=False, slots=True)
class Slot:
    """One open place in the stream."""

    number: int
    """Counts from 0 in order of admission."""
    prompt: Prompt
    """Who fills it now."""
    samples: tuple[SampleMeta, ...] = ()
    """Its finished samples, once it is ready."""

    @property
    def weight_version(self) -> int:
        """Oldest weights behind any token of its samples."""
        return min(sample.weight_version for sample in self.samples)


class Ledger:
    """Slots and their accounts. Used on one event loop; every change wakes whoever waits here."""

    def __init__(self, *, prompts_per_step: int, max_staleness: int, step: int, last_step: int | None = None) -> None:
        """``step`` optimizer steps are done, and their weights published. No prompt is admitted for a step after
        ``last_step``."""
        self.prompts_per_step, self.max_staleness = prompts_per_step, max_staleness
        self.step = self.published = step
        self._last_step = last_step
        self._num_admitted = step * prompts_per_step
        self._order: deque[str] = deque()
        """Domains of the stream, in its order, from the first prompt on that belongs to no step that is done."""
        self._open: dict[int, Slot] = {}
        self._ready: dict[str, list[int]] = {}
        """Domain -> heap of the numbers of its ready slots."""
        self._admitted: Counter[str] = Counter()
        self._ended: dict[str, Counter[str]] = {end: Counter() for end in ENDS}
        self._mix: Counter[str] | None = None
        """``_wanted``'s answer, once the stream is long enough for it to stay."""
        self._change: asyncio.Future[None] | None = None
        """Of the next change, where somebody waits for it."""

    async def room(self, num_prompts: int) -> None:
        """Wait until ``num_prompts`` more may be admitted: the newest could then still be trained on in time.

        This wait has no deadline of its own: it ends when newer weights are published, which has one, or when the
        trainer stops and cancels it.
        """
        while not self.has_room(num_prompts):
            await asyncio.wait({self._next_change()})

    def has_room(self, num_prompts: int = 1) -> bool:
        """``room`` would not wait."""
        newest = self.published + self.max_staleness + 1
        if self._last_step is not None:
            newest = min(newest, self._last_step)
        return self._num_admitted + num_prompts <= newest * self.prompts_per_step

    def admit(self, prompts: Sequence[Prompt]) -> list[Slot]:
        """Open a slot for each of the stream's next prompts."""
        slots = []
        for prompt in prompts:
            slots.append(Slot(number=self._num_admitted, prompt=prompt))
            self._open[self._num_admitted] = slots[-1]
            self._num_admitted += 1
            self._order.append(prompt.domain)
            self._admitted[prompt.domain] += 1
        return slots

    def publish(self, weight_version: int) -> None:
        """Responses are drawn with weights of ``weight_version`` from now on."""
        self.published = weight_version
        self._wake()

    def is_stale(self, samples: Sequence[SampleMeta]) -> bool:
        """The next step could not train on them any more."""
        return self.step - min(sample.weight_version for sample in samples) > self.max_staleness

    def complete(self, slot: Slot, samples: Sequence[SampleMeta]) -> None:
        """All fields of the slot's samples are there."""
        slot.samples = tuple(samples)
        heappush(self._ready.setdefault(slot.prompt.domain, []), slot.number)
        self._wake()

    def stale(self) -> list[Slot]:
        """Ready slots that the next step cannot train on; they are ready no more (``again`` is to follow)."""
        gone = [slot for slot in self._open.values() if slot.samples and self.is_stale(slot.samples)]
        for slot in gone:
            self._ready[slot.prompt.domain].remove(slot.number)
        for heap in self._ready.values():
            heap.sort()  # a sorted list is a heap
        return gone

    def again(self, slot: Slot) -> None:
        """The slot's samples are refused: its own prompt is drawn once more."""
        self._end(slot, "refused")
        self._reopen(slot, replace(slot.prompt, attempt=slot.prompt.attempt + 1))

    def replace(self, slot: Slot, prompt: Prompt) -> None:
        """The slot's samples are discarded; ``prompt``, of the same domain, takes its place."""
        self._end(slot, "replaced")
        self._reopen(slot, prompt)

    async def take(self, *, timeout_s: float) -> list[Slot]:
        """The next step's slots, in order of their sample ids, as soon as they are ready.

        Raises:
            UserError: nothing has changed for ``timeout_s``; says what is ready and what is missing, by domain.
        """
        while (slots := self._try_take()) is None:
            done, _ = await asyncio.wait({self._next_change()}, timeout=timeout_s)
            if not done:
                raise UserError(self._describe_wait(timeout_s))
        return slots

    def trained(self, slots: Sequence[Slot]) -> None:
        """One optimizer step has used them. ``RuntimeError`` if the accounts do not add up."""
        for slot in slots:
            if self._open.pop(slot.number, None) is not slot:
                raise RuntimeError(f"the prompt of sample {slot.prompt.sample_id} is trained on a second time")
            self._end(slot, "trained")
        for _ in slots:
            self._order.popleft()
        self._mix = None
        self.step += 1
        self._check()
        self._wake()

    def counts(self, end: str) -> Counter[str]:
        """Prompts that were ``trained``, ``refused`` or ``replaced`` so far, by domain."""
        return Counter(self._ended[end])

    @property
    def slots(self) -> list[Slot]:
        """The open ones, oldest first."""
        return [slot for _, slot in sorted(self._open.items())]

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: every prompt that is admitted and not trained on, oldest first, and the accounts."""
        return {
            "open": [
                {
                    "sample_id": slot.prompt.sample_id,
                    "domain": slot.prompt.domain,
                    "row": slot.prompt.row,
                    "attempt": slot.prompt.attempt,
                }
                for slot in self.slots
            ],
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
                prompt = replace(
                    prompt_of(_number(entry["sample_id"]), entry["domain"], _number(entry["row"])),
                    attempt=_number(entry["attempt"]),
                )
                self._open[self._num_admitted] = Slot(number=self._num_admitted, prompt=prompt)
                self._num_admitted += 1
            self._order.extend(state["order"])
            self._admitted.update({domain: _number(count) for domain, count in state["admitted"].items()})
            for end, counts in self._ended.items():
                counts.update({domain: _number(count) for domain, count in state[end].items()})
            ids = [slot.prompt.sample_id for slot in self._open.values()]
            if len(set(ids)) != len(ids) or Counter(self._order) != self._in_flight():
                raise ValueError("its open prompts do not fit its order")
            self._check()
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise UserError(
                f"the checkpoint's open prompts cannot be read ({error}): resume from another one"
            ) from error

    def _reopen(self, slot: Slot, prompt: Prompt) -> None:
        if prompt.domain != slot.prompt.domain:
            raise RuntimeError(f"a prompt of {prompt.domain!r} cannot replace one of {slot.prompt.domain!r}")
        slot.prompt, slot.samples = prompt, ()
        self._admitted[prompt.domain] += 1

    def _end(self, slot: Slot, end: str) -> None:
        self._ended[end][slot.prompt.domain] += 1

    def _try_take(self) -> list[Slot] | None:
        if len(self._order) < self.prompts_per_step:
            return None
        wanted = self._wanted()
        if any(len(self._ready.get(domain, ())) < count for domain, count in wanted.items()):
            return None
        taken = [self._open[heappop(self._ready[domain])] for domain, count in wanted.items() for _ in range(count)]
        return sorted(taken, key=lambda slot: slot.prompt.sample_id)

    def _wanted(self) -> Counter[str]:
        """Domains of the stream's next stretch of one step."""
        if self._mix is not None:
            return self._mix
        mix = Counter(itertools.islice(self._order, self.prompts_per_step))
        if len(self._order) >= self.prompts_per_step:
            self._mix = mix
        return mix

    def _in_flight(self) -> Counter[str]:
        return Counter(slot.prompt.domain for slot in self._open.values())

    def _check(self) -> None:
        """admitted = trained + in flight + refused + replaced, in every domain."""
        ends = sum((self._ended[end] for end in ENDS), self._in_flight())
        if +self._admitted != +ends:
            domains = [d for d in sorted(self._admitted | ends) if self._admitted[d] != ends[d]]
            told = ", ".join(f"{d!r}: {self._admitted[d]} admitted, {ends[d]} accounted for" for d in domains)
            raise RuntimeError(f"prompts were lost or counted twice after step {self.step}: {told}")

    def _next_change(self) -> asyncio.Future[None]:
        """There from now on: what changes before its waiter's turn comes is not missed."""
        if self._change is None:
            self._change = asyncio.get_running_loop().create_future()
        return self._change

    def _wake(self) -> None:
        if self._change is not None:
            self._change.set_result(None)
            self._change = None

    def _describe_wait(self, timeout_s: float) -> str:
        wanted = self._wanted()
        told = ", ".join(
            f"{domain!r} {len(self._ready.get(domain, ()))} of {count}" for domain, count in sorted(wanted.items())
        )
        return (
            f"waited {timeout_s:g} s (schedule.wait_timeout_s) for the {self.prompts_per_step} prompts of step "
            f"{self.step + 1}; ready by domain: {told or 'none'}; {len(self._open)} are open: see the replicas' logs, "
            "or raise it for very long responses"
        )


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.40} is no count")
    return value

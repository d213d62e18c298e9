"""How a server drives its engine: a blocking one in a thread, where small requests are joined; an asynchronous one
directly."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Hashable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from mopd.engines.images import Item, join, split
from mopd.engines.interface import (
    Described,
    Generation,
    Generator,
    Images,
    Incoming,
    OnRunning,
    Reception,
    SamplingParams,
    Scorer,
    Scores,
    Told,
)
from mopd.engines.vision import EngineSight

T = TypeVar("T")


class HostedEngine(Scorer, Generator, Described, Protocol):
    """What a server needs of an engine."""

    sight: EngineSight | None
    """Of its model; ``None`` for one of text."""
    incoming: Incoming
    """Its way into a process group; a ``ThreadHost`` calls ``receive`` in its thread."""

    @property
    def weight_slots(self) -> Mapping[str, Tensor]:
        """Where new weights go, by ``hf_name``: their shapes and dtypes."""
        ...

    def prepared_weights(
        self, weights: Collection[tuple[str, Tensor]], *, kept: Set[str]
    ) -> AbstractAsyncContextManager[Any]:
        """Everything about new weights that can be done while the engine works; gives what ``swap_weights`` takes, for
        as long as the block lasts. Raises as ``TakesWeights.load_weights``, which see, does before it replaces a
        weight."""
        ...

    async def swap_weights(self, prepared: Any, weight_version: int) -> None:
        """Answer with these weights from now on. An engine that a ``ThreadHost`` drives does nothing else meanwhile;
        another freezes what runs, and goes on with it under the new weights."""
        ...

    async def check_health(self) -> None:
        """``EngineUnavailable`` when it is dead."""
        ...

    async def close(self) -> None:
        """End what it has started."""
        ...


class BlockingEngine(HostedEngine, Protocol):
    """What a ``ThreadHost`` needs of an engine."""

    def interrupt(self) -> None:
        """Called from another thread: the ``generate`` that runs hands back what it has."""
        ...


@runtime_checkable
class CanSleep(Protocol):
    """An engine that may be able to give its memory back for a while."""

    @property
    def can_sleep(self) -> bool:
        """It was started so that it can."""
        ...

    async def sleep(self) -> None:
        """Until ``wake_up`` it does no work. One whose weights come from a student has none afterwards."""
        ...

    async def wake_up(self, *, weights_only: bool = False) -> None:
        """As before ``sleep``, in one step or two: ``weights_only`` takes the memory of the weights, so that new ones
        can come; the rest follows with a second call."""
        ...


class EngineHost:
    """The engine as the server sees it: one that batches by itself and never blocks the loop (vLLM)."""

    swaps_between_calls = False
    """``swap_weights`` with ``finish`` may be called at any time: the call that runs ends before it, those that wait
    come after it."""

    def __init__(self, engine: HostedEngine) -> None:
        self.engine = engine

    async def start(self) -> None:
        """Before the first call, on the server's event loop."""

    async def close(self) -> None:
        """After the last call; waiting work is cancelled."""

    async def score(
        self,
        tokens: Sequence[Tensor],
        prompt_lengths: Sequence[int],
        *,
        top_k: int,
        temperature: float,
        images: Images = None,
    ) -> list[Scores]:
        """See ``Scorer.score``."""
        return await self.engine.score(tokens, prompt_lengths, top_k=top_k, temperature=temperature, images=images)

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        seeds: Sequence[int],
        *,
        told: Told | None = None,
        images: Images = None,
    ) -> list[Generation]:
        """See ``Generator.generate``."""
        return await self.engine.generate(prompts, sampling, seeds, told=told, images=images)

    async def swap_weights(self, prepared: Any, weight_version: int, *, on_running: OnRunning) -> None:
        """See ``HostedEngine.swap_weights``. With ``finish`` no other call may be running."""
        await self.engine.swap_weights(prepared, weight_version)

    async def receive_weights(
        self, weight_version: int, *, verify: bool, patience_s: float, on_running: OnRunning, ready: Callable[[], None]
    ) -> Reception:
        """See ``Incoming.receive``, and ``swap_weights``. ``ready`` is called on this event loop."""
        return await self.engine.incoming.receive(weight_version, verify=verify, patience_s=patience_s, ready=ready)


_Call = Callable[[list[Any], Callable[..., object]], Coroutine[Any, Any, list[Any]]]
"""``call(items, tell)``: all results in order; ``tell(i, result)`` of some of them earlier."""


@dataclass(slots=True)
class _Job:
    key: Hashable
    """Jobs of one key can share a call."""
    items: list[Any]
    """One per sample."""
    num_tokens: int
    call: _Call
    result: asyncio.Future[list[Any]]
    told: Callable[[int, Any], None] | None = None
    """``told(i, result)`` for item i, on the host's event loop, as soon as it is known."""


class ThreadHost(EngineHost):
    """The host of an engine that blocks while it computes (torch).

    One call runs at a time, in one thread. Requests that wait are joined with the oldest one when they ask for the same
    (top-k and temperature, or sampling parameters), up to ``max_batch_tokens``. A waiting request whose caller has gone
    is dropped; a running call is interrupted by new weights alone, and only where it can be continued under them.
    """

    swaps_between_calls = True

    def __init__(self, engine: BlockingEngine, *, max_batch_tokens: int) -> None:
        super().__init__(engine)
        self._blocking = engine
        self._max_batch_tokens = max_batch_tokens
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._computing = threading.Event()
        self._waiting: deque[_Job] = deque()
        self._arrival = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None

    @property
    def is_computing(self) -> bool:
        """A call runs in the thread."""
        return self._computing.is_set()

    async def start(self) -> None:
        """See ``EngineHost.start``."""
        self._worker = asyncio.create_task(self._work())

    async def close(self) -> None:
        """See ``EngineHost.close``. A running call ends in its thread, unheard."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait({self._worker})
        for job in self._waiting:
            job.result.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def score(
        self,
        tokens: Sequence[Tensor],
        prompt_lengths: Sequence[int],
        *,
        top_k: int,
        temperature: float,
        images: Images = None,
    ) -> list[Scores]:
        """See ``Scorer.score``."""

        async def call(items: list[Item[Tensor]], _: Any) -> list[Scores]:
            sequences, starts, own = split(items)
            return await self.engine.score(sequences, starts, top_k=top_k, temperature=temperature, images=own)

        items = join(tokens, prompt_lengths, images)
        return await self._submit(("score", top_k, temperature), items, sum(map(len, tokens)), call)

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        seeds: Sequence[int],
        *,
        told: Told | None = None,
        images: Images = None,
    ) -> list[Generation]:
        """See ``Generator.generate``."""

        async def call(items: list[Item[Sequence[int]]], tell: Told) -> list[Generation]:
            texts, numbers, own = split(items)
            return await self.engine.generate(texts, sampling, numbers, told=tell, images=own)

        items = join(prompts, seeds, images)
        num_tokens = sum(map(len, prompts)) + len(prompts) * sampling.max_new_tokens
        return await self._submit(("generate", sampling), items, num_tokens, call, told)

    async def swap_weights(self, prepared: Any, weight_version: int, *, on_running: OnRunning) -> None:
        """See ``EngineHost.swap_weights``: the next call of all. What waits is done with the new weights."""

        async def swap() -> None:
            await self.engine.swap_weights(prepared, weight_version)

        await self._next(swap, on_running)

    async def receive_weights(
        self, weight_version: int, *, verify: bool, patience_s: float, on_running: OnRunning, ready: Callable[[], None]
    ) -> Reception:
        """See ``EngineHost.receive_weights``: the next call of all, as ``swap_weights``."""
        loop = asyncio.get_running_loop()

        async def receive() -> Reception:
            return await self.engine.incoming.receive(
                weight_version,
                verify=verify,
                patience_s=patience_s,
                ready=lambda: loop.call_soon_threadsafe(ready),
            )

        return await self._next(receive, on_running)

    async def _next(self, work: Callable[[], Coroutine[Any, Any, T]], on_running: OnRunning) -> T:
        results: list[T] = []

        async def call(_: list[Any], __: Any) -> list[Any]:
            results.append(await work())
            return []

        if on_running == "continue":
            self._blocking.interrupt()
        await self._submit(object(), [], 0, call, is_next=True)
        return results[0]

    async def _submit(
        self,
        key: Hashable,
        items: list[Any],
        num_tokens: int,
        call: Any,
        told: Callable[[int, Any], None] | None = None,
        *,
        is_next: bool = False,
    ) -> list[Any]:
        if self._worker is None or self._worker.done():
            raise RuntimeError("the engine's host is not running")
        job = _Job(key, items, num_tokens, call, asyncio.get_running_loop().create_future(), told)
        if is_next:
            self._waiting.appendleft(job)
        else:
            self._waiting.append(job)
        self._arrival.set()
        return await job.result

    async def _work(self) -> None:
        """Take what waits, call the engine, hand results and errors to those who asked."""
        loop = asyncio.get_running_loop()
        while True:
            await self._arrival.wait()
            batch = self._take_batch()
            if not batch:
                self._arrival.clear()
                continue
            items = [item for job in batch for item in job.items]
            try:
                work = functools.partial(self._compute, batch[0].call, items, _teller(batch, loop))
                results = await loop.run_in_executor(self._pool, work)
            except asyncio.CancelledError:
                for job in batch:
                    job.result.cancel()
                raise
            except Exception as error:  # belongs to the callers, who raise it
                for job in batch:
                    if not job.result.done():
                        job.result.set_exception(error)
                continue
            rest = iter(results)
            for job in batch:
                share = [next(rest) for _ in job.items]
                if not job.result.done():
                    job.result.set_result(share)

    def _compute(self, call: _Call, items: list[Any], tell: Callable[..., object]) -> list[Any]:
        """In the thread, on a loop of its own: the engine's coroutines compute without ever waiting."""
        self._computing.set()
        try:
            results = asyncio.run(call(items, tell))
        finally:
            self._computing.clear()
        if len(results) != len(items):
            raise RuntimeError(f"the engine answered {len(results)} of {len(items)} samples")
        return results

    def _take_batch(self) -> list[_Job]:
        """The oldest job and all that can join it; none when nobody waits."""
        waiting = [job for job in self._waiting if not job.result.done()]
        batch: list[_Job] = []
        num_tokens = 0
        for job in waiting:
            fits = num_tokens + job.num_tokens <= self._max_batch_tokens
            if not batch or (job.key == batch[0].key and fits):
                batch.append(job)
                num_tokens += job.num_tokens
        chosen = {id(job) for job in batch}
        self._waiting = deque(job for job in waiting if id(job) not in chosen)
        return batch


def _teller(batch: Sequence[_Job], loop: asyncio.AbstractEventLoop) -> Callable[[int, Any], None]:
    """``tell(i, result)`` of a joined call, where i counts the items of all jobs; for any thread."""
    owners = [(job, i) for job in batch for i in range(len(job.items))]

    def pass_on(place: int, result: Any) -> None:
        job, i = owners[place]
        if job.told is not None and not job.result.done():
            job.told(i, result)

    def tell(place: int, result: Any) -> None:
        loop.call_soon_threadsafe(pass_on, place, result)

    return tell

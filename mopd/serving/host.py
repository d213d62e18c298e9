"""Hosts that run a server's engine: a blocking one in a thread, where small requests are joined; an asynchronous one
directly."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from mopd.engines.interface import (
    Generation,
    Generator,
    ResponseCallback,
    Scorer,
    Scores,
    TakesWeights,
    ToDraw,
    ToScore,
    joined,
)
from mopd.engines.vision import EngineVision

T = TypeVar("T")


class Work(Scorer, Generator, Protocol):
    """What requests ask for: scores and responses."""


class HostedEngine(Work, TakesWeights, Protocol):
    """The interface of an engine that a server needs."""

    sight: EngineVision | None
    """Vision side of its model; ``None`` for a text model."""
    can_sleep: bool
    """Whether it was started so that it can release its memory for a while."""

    async def check_health(self) -> None:
        """Raise ``EngineUnavailable`` if the engine is dead."""
        ...

    async def close(self) -> None:
        """End what the engine has started."""
        ...

    async def sleep(self) -> None:
        """Release the memory; no work is done until ``wake_up``. Weights that come from a student are lost."""
        ...

    async def wake_up(self, *, weights_only: bool = False) -> None:
        """Undo ``sleep``, in one step or two: ``weights_only`` allocates the memory of the weights, so that new ones
        can come; a second call does the rest."""
        ...


class BlockingEngine(HostedEngine, Protocol):
    """The interface of an engine that a ``ThreadHost`` needs."""

    def interrupt(self) -> None:
        """Let the running ``generate`` hand back what it has. Called from another thread."""
        ...


class EngineHost:
    """Host of an engine that batches by itself and never blocks the event loop (vLLM)."""

    swaps_between_calls = False
    """Whether ``between_calls`` may come at any time: it runs after the running call, before waiting ones."""

    def __init__(self, engine: HostedEngine) -> None:
        self.engine = engine
        self.work: Work = engine
        """Takes requests for scores and responses."""

    async def start(self) -> None:
        """Start on the server's event loop. Call before the first call of the engine."""

    async def close(self) -> None:
        """Cancel waiting work. Call after the last call of the engine."""

    async def between_calls(self, change: Callable[[], Coroutine[Any, Any, T]], *, interrupt: bool) -> T:
        """Return the result of ``change``, which gives the engine new weights. Unless it may ``interrupt`` requests, no
        other call may be running."""
        return await change()


_Call = Callable[[list[Any], Callable[..., object]], Coroutine[Any, Any, list[Any]]]
"""``call(requests, tell)`` returns all results in order and may report some earlier by ``tell(i, result)``."""


@dataclass(slots=True)
class _Job:
    """One request that waits for the engine."""

    key: Hashable
    """Jobs of equal keys can share a call."""
    asked: ToScore | ToDraw | tuple[()]
    num_tokens: int
    call: _Call
    result: asyncio.Future[list[Any]]
    on_result: Callable[[int, Any], None] | None = None
    """``on_result(i, result)`` for sample i, called on the host's event loop as soon as it is known."""


class ThreadHost(EngineHost):
    """Host of an engine that blocks while it computes (torch).

    One call runs at a time, in one thread. Waiting requests join the oldest one if they ask for the same (adapter,
    top-k and temperature, or sampling parameters), up to ``max_batch_tokens``. A waiting request whose caller has gone
    is dropped; a running call is interrupted only by new weights, and only if it can be continued under them.
    """

    swaps_between_calls = True

    def __init__(self, engine: BlockingEngine, *, max_batch_tokens: int) -> None:
        super().__init__(engine)
        self._blocking, self.work = engine, self
        self._max_batch_tokens = max_batch_tokens
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._computing = threading.Event()
        self._waiting: deque[_Job] = deque()
        self._arrival = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None

    @property
    def weight_version(self) -> int:
        """Version of the engine's weights."""
        return self.engine.weight_version

    @property
    def is_computing(self) -> bool:
        """Whether a call runs in the thread."""
        return self._computing.is_set()

    async def start(self) -> None:
        """Start the task that takes waiting requests."""
        self._worker = asyncio.create_task(self._work())

    async def close(self) -> None:
        """Cancel waiting work. A running call ends in its thread; its result is dropped."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait({self._worker})
        for job in self._waiting:
            job.result.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def score(self, asked: ToScore) -> list[Scores]:
        """Score in the engine's thread (``Scorer.score``), joined with waiting requests of the same kind."""

        async def call(requests: list[ToScore], _: Any) -> list[Scores]:
            return await self.engine.score(joined(requests))

        return await self._submit(asked.kind, asked, sum(map(len, asked.tokens)), call)

    async def generate(self, asked: ToDraw, *, on_response: ResponseCallback | None = None) -> list[Generation]:
        """Draw responses in the engine's thread (``Generator.generate``), joined as those of ``score``."""

        async def call(requests: list[ToDraw], tell: ResponseCallback) -> list[Generation]:
            return await self.engine.generate(joined(requests), on_response=tell)

        num_tokens = sum(map(len, asked.prompts)) + len(asked) * asked.sampling.max_new_tokens
        return await self._submit(asked.kind, asked, num_tokens, call, on_response)

    async def between_calls(self, change: Callable[[], Coroutine[Any, Any, T]], *, interrupt: bool) -> T:
        """Run ``change`` in the engine's thread as the very next call: waiting requests are done after it."""
        results: list[T] = []

        async def call(_: list[Any], __: Any) -> list[Any]:
            results.append(await change())
            return []

        if interrupt:
            self._blocking.interrupt()
        # a key of its own: no other job can join this call
        await self._submit(object(), (), 0, call, is_next=True)
        return results[0]

    async def _submit(
        self,
        key: Hashable,
        asked: ToScore | ToDraw | tuple[()],
        num_tokens: int,
        call: Any,
        on_response: Callable[[int, Any], None] | None = None,
        *,
        is_next: bool = False,
    ) -> list[Any]:
        if self._worker is None or self._worker.done():
            raise RuntimeError("the engine's host is not running")
        job = _Job(key, asked, num_tokens, call, asyncio.get_running_loop().create_future(), on_response)
        if is_next:
            self._waiting.appendleft(job)
        else:
            self._waiting.append(job)
        self._arrival.set()
        return await job.result

    async def _work(self) -> None:
        """Take waiting jobs, call the engine, and pass results and errors to their callers."""
        loop = asyncio.get_running_loop()
        while True:
            await self._arrival.wait()
            batch = self._take_batch()
            if not batch:
                self._arrival.clear()
                continue
            requests = [job.asked for job in batch]
            try:
                work = functools.partial(self._compute, batch[0].call, requests, _reporter(batch, loop))
                results = await loop.run_in_executor(self._pool, work)
            except asyncio.CancelledError:
                for job in batch:
                    job.result.cancel()
                raise
            except Exception as error:  # raised by the callers
                for job in batch:
                    if not job.result.done():
                        job.result.set_exception(error)
                continue
            # results lie in the order of the joined jobs' samples
            rest = iter(results)
            for job in batch:
                share = [next(rest) for _ in range(len(job.asked))]
                if not job.result.done():
                    job.result.set_result(share)

    def _compute(self, call: _Call, requests: list[Any], tell: Callable[..., object]) -> list[Any]:
        """Run the call in the thread, on a loop of its own: the engine's coroutines compute without ever waiting."""
        self._computing.set()
        try:
            results = asyncio.run(call(requests, tell))
        finally:
            self._computing.clear()
        if len(results) != (count := sum(map(len, requests))):
            raise RuntimeError(f"the engine answered {len(results)} of {count} samples")
        return results

    def _take_batch(self) -> list[_Job]:
        """Take the oldest job and all that can join it; none if no job waits."""
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


def _reporter(batch: Sequence[_Job], loop: asyncio.AbstractEventLoop) -> Callable[[int, Any], None]:
    """Return ``tell(i, result)`` of a joined call, where i counts the samples of all jobs. Thread-safe."""
    owners = [(job, i) for job in batch for i in range(len(job.asked))]

    def pass_on(place: int, result: Any) -> None:
        job, i = owners[place]
        if job.on_result is not None and not job.result.done():
            job.on_result(i, result)

    def tell(place: int, result: Any) -> None:
        loop.call_soon_threadsafe(pass_on, place, result)

    return tell

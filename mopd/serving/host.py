"""How a server drives its engine: a blocking one in a thread, where small requests are joined; an asynchronous one
directly."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from mopd.engines.interface import (
    Described,
    Generation,
    Generator,
    SamplingParams,
    Scorer,
    Scores,
    TakesWeights,
    Told,
)


class HostedEngine(Scorer, Generator, TakesWeights, Described, Protocol):
    """What a server needs of an engine."""

    @property
    def weight_slots(self) -> Mapping[str, Tensor]:
        """Where new weights go, by ``hf_name``: their shapes and dtypes."""
        ...

    async def check_health(self) -> None:
        """``EngineUnavailable`` when it is dead."""
        ...

    async def close(self) -> None:
        """End what it has started."""
        ...


@runtime_checkable
class CanSleep(Protocol):
    """An engine that can give its memory back for a while."""

    async def sleep(self) -> None:
        """Until ``wake_up`` it does no work."""
        ...

    async def wake_up(self) -> None:
        """As before ``sleep``."""
        ...


class EngineHost:
    """The engine as the server sees it: one that batches by itself and never blocks the loop (vLLM)."""

    def __init__(self, engine: HostedEngine) -> None:
        self.engine = engine

    async def start(self) -> None:
        """Before the first call, on the server's event loop."""

    async def close(self) -> None:
        """After the last call; waiting work is cancelled."""

    async def score(
        self, tokens: Sequence[Tensor], prompt_lengths: Sequence[int], *, top_k: int, temperature: float
    ) -> list[Scores]:
        """See ``Scorer.score``."""
        return await self.engine.score(tokens, prompt_lengths, top_k=top_k, temperature=temperature)

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        seeds: Sequence[int],
        *,
        told: Told | None = None,
    ) -> list[Generation]:
        """See ``Generator.generate``."""
        return await self.engine.generate(prompts, sampling, seeds, told=told)

    async def load_weights(self, weights: Iterable[tuple[str, Tensor]], weight_version: int) -> None:
        """See ``TakesWeights.load_weights``; no other call may be running."""
        await self.engine.load_weights(weights, weight_version)


@dataclass(slots=True)
class _Job:
    key: Hashable
    """Jobs of one key can share a call."""
    items: list[Any]
    """One per sample."""
    num_tokens: int
    call: Callable[[list[Any]], Coroutine[Any, Any, list[Any]]]
    result: asyncio.Future[list[Any]]


class ThreadHost(EngineHost):
    """The host of an engine that blocks while it computes (torch).

    One call runs at a time, in one thread. Requests that wait are joined with the oldest one when they ask for the same
    (top-k and temperature, or sampling parameters), up to ``max_batch_tokens``. A waiting request whose caller has gone
    is dropped; a running call is not interrupted.
    """

    def __init__(self, engine: HostedEngine, *, max_batch_tokens: int) -> None:
        super().__init__(engine)
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
        self, tokens: Sequence[Tensor], prompt_lengths: Sequence[int], *, top_k: int, temperature: float
    ) -> list[Scores]:
        """See ``Scorer.score``."""

        async def call(items: list[tuple[Tensor, int]]) -> list[Scores]:
            sequences, starts = zip(*items, strict=True)
            return await self.engine.score(sequences, starts, top_k=top_k, temperature=temperature)

        items = list(zip(tokens, prompt_lengths, strict=True))
        return await self._submit(("score", top_k, temperature), items, sum(map(len, tokens)), call)

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        seeds: Sequence[int],
        *,
        told: Told | None = None,
    ) -> list[Generation]:
        """See ``Generator.generate``."""

        async def call(items: list[tuple[Sequence[int], int]]) -> list[Generation]:
            texts, numbers = zip(*items, strict=True)
            return await self.engine.generate(texts, sampling, numbers)

        items = list(zip(prompts, seeds, strict=True))
        num_tokens = sum(map(len, prompts)) + len(prompts) * sampling.max_new_tokens
        return await self._submit(("generate", sampling), items, num_tokens, call)

    async def load_weights(self, weights: Iterable[tuple[str, Tensor]], weight_version: int) -> None:
        """See ``TakesWeights.load_weights``."""

        async def call(_: list[Any]) -> list[Any]:
            await self.engine.load_weights(weights, weight_version)
            return []

        await self._submit(object(), [], 0, call)

    async def _submit(self, key: Hashable, items: list[Any], num_tokens: int, call: Any) -> list[Any]:
        if self._worker is None or self._worker.done():
            raise RuntimeError("the engine's host is not running")
        job = _Job(key, items, num_tokens, call, asyncio.get_running_loop().create_future())
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
                results = await loop.run_in_executor(self._pool, self._compute, batch[0].call, items)
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

    def _compute(self, call: Callable[[list[Any]], Coroutine[Any, Any, list[Any]]], items: list[Any]) -> list[Any]:
        """In the thread, on a loop of its own: the engine's coroutines compute without ever waiting."""
        self._computing.set()
        try:
            results = asyncio.run(call(items))
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

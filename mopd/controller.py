"""The one training loop. Moves sample ids and lengths, never a tensor; ``max_staleness: 0`` makes it synchronous.

::

    prompts ──> produce ──────────────────────────────┐            train_step
                 │ rollout.generate: tokens,          │             │ claim a batch that has all loss fields
                 │   rollout_logprobs ──> DATA PLANE  │ ids ready   │ pack it, student.forward_backward, optim_step
                 │ teachers.score: teacher fields ──> ├──> claim ──>│ release, publish weights
                 │   failed: discard, next prompt ──┐ │             ▼
                 ▲ ▲────────────────────────────────┘ │             │
                 └── window.admit <───────── window.advance <── weight_version

produce      consumes prompts; waits in ``window.admit`` for a recent enough student; woken by ``window.advance``.
             A sample that no teacher replica could score ends the run, or (``on_failure: replace``) it is discarded,
             counted, and the next prompt of its domain takes its place: a batch is never smaller.
train_step   consumes ready samples; waits in ``plane.claim``; woken by the teachers' last field.
run          ends the run with the producer's own traceback if the producer fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any, Protocol, TypeVar

from mopd.config.schema import Recipe
from mopd.data.packing import pack
from mopd.metrics import StepMetrics, StepTimer, merge_step
from mopd.types import (
    LOSS_FIELDS,
    Batch,
    DomainSums,
    FailedSample,
    MicroBatchPlan,
    Prompt,
    SampleMeta,
    StaleBatchError,
    UserError,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Prompts(Protocol):
    """Seeded stream of prompts whose position can be stored."""

    def next(self, num_prompts: int) -> list[Prompt]: ...
    def next_of(self, domain: str) -> Prompt: ...
    def state_dict(self) -> dict[str, Any]: ...


class Rollout(Protocol):
    """Samples responses and writes the rollout fields."""

    async def generate(self, prompts: Sequence[Prompt]) -> list[SampleMeta]: ...


class Teachers(Protocol):
    """Score samples, each by its domain's teachers, and write the teacher fields; returns what could not be scored."""

    async def score(self, samples: Sequence[SampleMeta]) -> list[FailedSample]: ...


class Student(Protocol):
    """The Megatron student on all its ranks."""

    dp_size: int

    async def forward_backward(self, plan: MicroBatchPlan, *, diagnostics: bool) -> dict[str, DomainSums]: ...
    async def optim_step(self) -> dict[str, float]: ...
    async def publish(self, weight_version: int) -> None: ...


class Plane(Protocol):
    """The controller's side of the data plane."""

    async def claim(self, num_samples: int, fields: Sequence[str], *, timeout_s: float) -> Batch: ...
    async def release(self, batch: Batch) -> None: ...
    async def discard(self, sample_ids: Sequence[int]) -> None: ...


class Observer(Protocol):
    """What happens between steps without touching training: metrics, validation, checkpoints."""

    def log(self, metrics: StepMetrics) -> None: ...
    async def after_step(self, step: int, prompts_state: Mapping[str, Any]) -> None: ...


class Window:
    """Admits prompts while their samples can still be fresh when trained; refuses batches that are not."""

    def __init__(self, *, max_staleness: int, weight_version: int) -> None:
        self.max_staleness = max_staleness
        self.weight_version = weight_version
        self._batches_admitted = weight_version
        self._changed = asyncio.Condition()

    async def admit(self) -> None:
        """Wait until one more batch may be sampled: at most ``max_staleness`` batches beyond the one in training.

        This wait has no deadline of its own: it ends when the trainer advances, whose waits have one, or when the
        trainer stops and cancels it.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._batches_admitted <= self.weight_version + self.max_staleness)
            self._batches_admitted += 1

    async def advance(self, weight_version: int) -> None:
        """Weights of ``weight_version`` now answer rollout requests."""
        async with self._changed:
            self.weight_version = weight_version
            self._changed.notify_all()

    def check(self, batch: Batch, weight_version: int) -> None:
        """Raise ``StaleBatchError`` if a sample of ``batch`` is older than the bound."""
        staleness = weight_version - batch.min_weight_version
        if staleness > self.max_staleness:
            raise StaleBatchError(
                f"samples {list(batch.sample_ids)} are {staleness} weight versions behind, "
                f"schedule.max_staleness is {self.max_staleness}"
            )


@dataclass(kw_only=True)
class Controller:
    """Orders the three workers. ``start_step`` optimizer steps are already done (0 on a fresh run)."""

    recipe: Recipe
    prompts: Prompts
    rollout: Rollout
    teachers: Teachers
    student: Student
    plane: Plane
    observer: Observer
    start_step: InitVar[int]

    def __post_init__(self, start_step: int) -> None:
        self.schedule = self.recipe.schedule
        self.weight_version = start_step
        self.window = Window(max_staleness=self.schedule.max_staleness, weight_version=start_step)
        self.timer = StepTimer()
        self._loss_fields = (*LOSS_FIELDS, "task_advantage") if self.recipe.needs_task_advantage else LOSS_FIELDS
        self._states_before: deque[Mapping[str, Any]] = deque()
        self._replaced: Counter[str] = Counter()

    async def produce(self) -> None:
        """Carry prompts through rollout and scoring, one step's worth at a time."""
        while True:
            await self.window.admit()
            self._states_before.append(self.prompts.state_dict())
            prompts = self.prompts.next(self.schedule.prompts_per_step)
            num_left = self.schedule.prompts_per_step  # replacements for one batch: after that something is wrong
            while prompts:
                with self.timer("rollout"):
                    samples = await self.rollout.generate(prompts)
                with self.timer("teachers"):
                    failed = await self.teachers.score(samples)
                prompts = await self._replace(prompts, samples, failed, num_left)
                num_left -= len(prompts)

    async def _replace(
        self,
        prompts: Sequence[Prompt],
        samples: Sequence[SampleMeta],
        failed: Sequence[FailedSample],
        num_left: int,
    ) -> list[Prompt]:
        """Discard and count every sample of a prompt of which one failed (they may share a baseline); returns as many
        new prompts of the same domains. ``UserError`` when more than ``num_left`` are needed."""
        per_prompt = self.recipe.rollout.samples_per_prompt
        lost = {failure.sample.sample_id // per_prompt: failure for failure in failed}
        if len(lost) > num_left:
            last = failed[-1]
            raise UserError(
                f"on_failure replace: more than {self.schedule.prompts_per_step} prompts of one step could not be "
                f"scored, the last one by teachers.{last.teacher} (domain {last.sample.domain!r}): {last.reason}: "
                "see the replicas' logs"
            )
        for failure in lost.values():
            logger.warning(
                "sample %d of domain %r is replaced: teachers.%s: %s",
                failure.sample.sample_id,
                failure.sample.domain,
                failure.teacher,
                failure.reason,
            )
        gone = [sample for sample in samples if sample.sample_id // per_prompt in lost]
        await self.plane.discard([sample.sample_id for sample in gone])
        self._replaced.update(sample.domain for sample in gone)
        return [self.prompts.next_of(prompt.domain) for prompt in prompts if prompt.sample_id in lost]

    async def train_step(self) -> StepMetrics:
        """One optimizer step of the student."""
        step = self.weight_version + 1
        with self.timer("wait_batch"):
            batch = await self.plane.claim(
                self.recipe.samples_per_step, self._loss_fields, timeout_s=self.schedule.wait_timeout_s
            )
        self.window.check(batch, self.weight_version)
        plan = pack(
            batch.samples,
            dp_size=self.student.dp_size,
            max_tokens=self.recipe.student.max_tokens_per_micro_batch,
            micro_batch_size=self.recipe.student.micro_batch_size,
        )
        diagnostics = step == 1 or step % self.recipe.metrics.diagnostics_every_steps == 0
        with self.timer("forward_backward"):
            sums = await self.student.forward_backward(plan, diagnostics=diagnostics)
        with self.timer("optim_step"):
            values = await self.student.optim_step()
        staleness = self.weight_version - batch.min_weight_version
        self.weight_version = step
        await self.plane.release(batch)
        with self.timer("weight_sync"):
            await self.student.publish(self.weight_version)
        values["staleness"] = float(staleness)
        if self.recipe.on_failure == "replace":
            values |= self._take_replaced(batch)
        return merge_step(step, batch=batch, sums=sums, values=values, timings=self.timer.flush())

    def _take_replaced(self, batch: Batch) -> dict[str, float]:
        """Samples replaced since the last step, by domain; 0 for the batch's other domains."""
        domains = sorted({sample.domain for sample in batch.samples} | self._replaced.keys())
        counts = {f"replaced_samples/{domain}": float(self._replaced[domain]) for domain in domains}
        self._replaced.clear()
        return counts

    async def run(self) -> None:
        """Train until ``schedule.steps`` optimizer steps are done."""
        producer = asyncio.create_task(self.produce())
        try:
            while self.weight_version < self.schedule.steps:
                self.observer.log(await _unless_failed(producer, self.train_step()))
                self._states_before.popleft()
                await self.observer.after_step(self.weight_version, self.prompts_state)
                await self.window.advance(self.weight_version)
        finally:
            await _end(producer)

    @property
    def prompts_state(self) -> Mapping[str, Any]:
        """Stream position before the first prompt that no finished step has used; what a checkpoint stores."""
        return self._states_before[0] if self._states_before else self.prompts.state_dict()


async def _unless_failed(producer: asyncio.Task[None], work: Awaitable[T]) -> T:
    """Await ``work``, or raise the producer's error as soon as it fails, steps named."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({producer, task}, return_when=asyncio.FIRST_COMPLETED)
        if producer.done():
            producer.result()
            raise UserError("the prompt producer ended before the last step")
        return task.result()
    finally:
        await _end(task)


async def _end(task: asyncio.Future[Any]) -> None:
    """Cancel and wait: nothing of it may still run when the engines are closed."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

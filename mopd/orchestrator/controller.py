"""The one training loop. Moves sample ids and lengths, never a tensor; ``max_staleness: 0`` makes it synchronous.

::

    prompts ──> produce ─────────────────────────────────────┐           train_step
                 │ ledger.admit; then each by itself:        │            │ ledger.take: the stream's mix, oldest first
                 │ rollout.generate: tokens, … ──────> DATA PLANE ──────> │ student.forward_backward, optim_step
                 │ teachers.score ∥ rewards.judge ──────>    │ ids        │ plane.release
                 │ ledger.complete ──────────────────────> LEDGER ──────> │ publish: student.stage, student.send
                 │   too old: _redraw, ledger.again                       │
                 ▲   cannot be scored: ledger.replace                     ▼
                 └── ledger.room <────── ledger.publish <──────── weight_version

produce      admits prompts; waits in ``ledger.room`` for recent enough weights; woken by ``ledger.publish``. A sample
             that no teacher replica could score ends the run, or (``on_failure: replace``) its prompt is discarded,
             counted, and the next prompt of its domain takes its place: a batch is never smaller.
train_step   consumes ready samples; waits in ``ledger.take``; woken by ``ledger.complete``, ended by a request to stop.
publish      hands the weights over (``stage``: the student is then free) and waits until they are used (``send``),
             beside the next step where ``max_staleness`` allows.
run          ends the run with the traceback of whichever of them fails, or, on request, once what is done is saved.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from mopd.base.metrics import StepMetrics, StepTimer, age_metrics, merge_step
from mopd.base.tasks import Stop, StopAsked, Tasks
from mopd.base.types import (
    Batch,
    DomainSums,
    FailedSample,
    MicroBatchPlan,
    Prompt,
    SampleMeta,
    StaleBatchError,
    UserError,
)
from mopd.config.schema import Recipe
from mopd.data.packing import PackingRules, pack, plan_metrics
from mopd.orchestrator.ledger import Ledger, Slot

logger = logging.getLogger(__name__)


class Prompts(Protocol):
    """Seeded stream of prompts whose position can be stored."""

    def next(self, num_prompts: int) -> list[Prompt]: ...
    def next_of(self, domain: str) -> Prompt: ...
    def state_dict(self) -> dict[str, Any]: ...


class Rollout(Protocol):
    """Samples responses and writes the rollout fields; samples come prompt after prompt."""

    async def generate(self, prompts: Sequence[Prompt], *, ended: Callable[[Prompt, int], None]) -> list[SampleMeta]:
        """Draw all responses; ``ended(prompt, weight_version)`` is called for each as soon as it is complete, with the
        weights of its newest token."""
        ...


class Teachers(Protocol):
    """Score samples, each by its domain's teachers, and write the teacher fields; returns what could not be scored."""

    async def score(self, samples: Sequence[SampleMeta]) -> list[FailedSample]: ...


class Rewards(Protocol):
    """Judges samples and writes ``task_advantage``."""

    async def judge(self, prompts: Sequence[Prompt], samples: Sequence[SampleMeta]) -> None: ...


class Student(Protocol):
    """The Megatron student on all its ranks."""

    dp_size: int
    packing: PackingRules

    async def expect_step(self) -> None:
        """Nothing is being drawn any more, and nothing will be before new weights."""
        ...

    async def forward_backward(self, plan: MicroBatchPlan, *, diagnostics: bool) -> dict[str, DomainSums]: ...
    async def optim_step(self) -> dict[str, float]: ...
    async def stage(self, weight_version: int) -> None: ...
    async def send(self) -> None: ...


class Plane(Protocol):
    """The controller's side of the data plane."""

    async def claim(self, sample_ids: Sequence[int], fields: Sequence[str]) -> Batch: ...
    async def release(self, batch: Batch) -> None: ...
    async def discard(self, sample_ids: Sequence[int]) -> None: ...


class Observer(Protocol):
    """What happens between steps without touching training: metrics, validation, checkpoints."""

    def needs_weights(self, step: int) -> bool: ...
    async def log(self, metrics: StepMetrics) -> None: ...
    async def after_step(self, step: int, state: Mapping[str, Any]) -> None: ...
    async def on_stop(self, step: int, state: Mapping[str, Any]) -> None: ...


@dataclass(kw_only=True)
class Controller:
    """Orders the workers; goes on from the step of ``ledger``, with the prompts that are open in it."""

    recipe: Recipe
    prompts: Prompts
    rollout: Rollout
    teachers: Teachers
    rewards: Rewards | None
    student: Student
    plane: Plane
    observer: Observer
    ledger: Ledger
    stop: Stop
    unit: int
    """Prompts that go through rollout and scoring together: one, or a step's where engines in the controller's own
    process work batch by batch."""

    def __post_init__(self) -> None:
        self.schedule = self.recipe.schedule
        self.weight_version = self.ledger.step
        self.timer = StepTimer()
        self._tasks = Tasks()
        self._sending: asyncio.Task[None] | None = None
        # A ledger of a checkpoint has counts of its own, which earlier steps told.
        self._told = {end: self.ledger.counts(end) for end in ("refused", "replaced")}
        self._lengths: dict[str, Counter[str]] = {
            name: Counter() for name in ("drawn_samples", "drawn_tokens", "refused_tokens")
        }
        """Metric -> domain -> what was counted since the last step."""
        self._num_drawing = 0
        self._num_replaced: Counter[int] = Counter()
        """Replacements by the step that a slot was admitted for."""

    async def produce(self) -> None:
        """Admit prompts as there is room, and see each unit of them through."""
        while True:
            await self.ledger.room(self.unit)
            self._tasks.start(self._see_through(self.ledger.admit(self.prompts.next(self.unit))))

    async def _see_through(self, slots: Sequence[Slot]) -> None:
        """Carry prompts from the rollout to samples that can be trained on. Slots that cannot be scored go round
        again; each that is too old does so by itself (``_redraw``), or it would wait for the slowest of the others."""
        while slots:
            prompts = [slot.prompt for slot in slots]
            of_prompt = {slot.prompt.sample_id: slot for slot in slots}
            self._num_drawing += 1
            with self.timer("rollout"):
                samples = await self.rollout.generate(prompts, ended=partial(self._ended, of_prompt))
            self._num_drawing -= 1
            for sample in samples:
                self._lengths["drawn_samples"][sample.domain] += 1
                self._lengths["drawn_tokens"][sample.domain] += sample.response_length
            if not self._num_drawing and not self.ledger.has_room():
                await self.student.expect_step()
            of_slot = _by_slot(slots, samples)
            fresh = [slot for slot in slots if self.ledger.drawn(slot, of_slot[slot])]
            for slot in slots:
                if slot not in fresh:
                    self._tasks.start(self._redraw(slot, of_slot[slot]))
            failed = await self._score(fresh, of_slot)
            slots = await self._replace(fresh, of_slot, failed)
            for slot in fresh:
                # Between the ledger's look at the age and the slot's being ready no step can end: nothing is awaited.
                if slot not in slots and not self.ledger.complete(slot, of_slot[slot]):
                    self._tasks.start(self._redraw(slot, of_slot[slot]))

    def _ended(self, of_prompt: Mapping[int, Slot], prompt: Prompt, weight_version: int) -> None:
        self.ledger.ended(of_prompt[prompt.sample_id], weight_version)

    async def _score(self, slots: Sequence[Slot], of_slot: Mapping[Slot, list[SampleMeta]]) -> list[FailedSample]:
        """Teachers and rewards side by side; what a teacher could not score."""
        samples = [sample for slot in slots for sample in of_slot[slot]]
        if not samples:
            return []

        async def score() -> list[FailedSample]:
            with self.timer("teachers"):
                return await self.teachers.score(samples)

        async def judge(rewards: Rewards) -> None:
            with self.timer("rewards"):
                await rewards.judge([slot.prompt for slot in slots], samples)

        if self.rewards is None:
            return await score()
        async with Tasks() as beside:
            judging = beside.start(judge(self.rewards))
            failed = await beside.unless_failed(score())
            await judging
        return failed

    async def _redraw(self, slot: Slot, samples: Sequence[SampleMeta]) -> None:
        """Discard and count samples that are too old for any step to come, and draw the prompt again."""
        await self.plane.discard([sample.sample_id for sample in samples])
        self._lengths["refused_tokens"][slot.prompt.domain] += sum(sample.response_length for sample in samples)
        self.ledger.again(slot)
        await self._see_through([slot])

    async def _replace(
        self, slots: Sequence[Slot], of_slot: Mapping[Slot, Sequence[SampleMeta]], failed: Sequence[FailedSample]
    ) -> list[Slot]:
        """Discard and count every sample of a prompt of which one failed (they may share a baseline) and put the next
        prompt of the domain in its place. ``UserError`` when a step needs more new prompts than it has."""
        lost = {failure.sample.sample_id: failure for failure in failed}
        replaced = []
        for slot in slots:
            failure = next((lost[s.sample_id] for s in of_slot[slot] if s.sample_id in lost), None)
            if failure is None:
                continue
            step = slot.number // self.schedule.prompts_per_step
            self._num_replaced[step] += 1
            if self._num_replaced[step] > self.schedule.prompts_per_step:
                raise UserError(
                    f"on_failure replace: more than {self.schedule.prompts_per_step} prompts of one step could not be "
                    f"scored, the last one by teachers.{failure.teacher} (domain {failure.sample.domain!r}): "
                    f"{failure.reason}: see the replicas' logs"
                )
            logger.warning(
                "sample %d of domain %r is replaced: teachers.%s: %s",
                failure.sample.sample_id,
                failure.sample.domain,
                failure.teacher,
                failure.reason,
            )
            await self.plane.discard([sample.sample_id for sample in of_slot[slot]])
            self.ledger.replace(slot, self.prompts.next_of(slot.prompt.domain))
            replaced.append(slot)
        return replaced

    async def train_step(self) -> StepMetrics:
        """One optimizer step of the student."""
        step = self.weight_version + 1
        with self.timer("wait_batch"):
            for slot in self.ledger.stale():
                self._tasks.start(self._redraw(slot, slot.samples))
            slots = await self.stop.unless_asked(self.ledger.take(timeout_s=self.schedule.wait_timeout_s))
            ids = [sample.sample_id for slot in slots for sample in slot.samples]
            batch = await self.plane.claim(ids, self.recipe.loss_fields)
        self._check_staleness(slots)
        with self.timer("pack"):
            plan = pack(batch.samples, self.student.packing, dp_size=self.student.dp_size)
        diagnostics = step == 1 or step % self.recipe.metrics.diagnostics_every_steps == 0
        with self.timer("forward_backward"):
            sums = await self.student.forward_backward(plan, diagnostics=diagnostics)
        with self.timer("optim_step"):
            values = await self.student.optim_step()
        values |= self._batch_metrics(batch, slots) | plan_metrics(plan, self.student.packing)
        self.weight_version = step
        await self.plane.release(batch)
        self.ledger.trained(slots)
        if step % self.schedule.sync_every_steps == 0 or self.observer.needs_weights(step):
            await self.publish()
        timings = self.timer.flush()
        # Prompts never end: where nothing is being sampled, none was admitted.
        timings["window_closed"] = max(0.0, timings["step"] - timings.get("rollout", 0.0))
        return merge_step(step, batch=batch, sums=sums, values=values, timings=timings)

    async def publish(self) -> None:
        """Give the student's weights to the rollout; the wait for their use goes on beside the next step if samples of
        the old ones may still be trained on. Nobody needs them where the run is to stop."""
        version = self.weight_version
        with self.timer("weight_sync"):
            await self._sent()
        if self.stop.is_asked:
            return
        with self.timer("stage_weights"):
            await self.student.stage(version)

        async def send() -> None:
            await self.student.send()
            if self.schedule.max_staleness:
                self.ledger.publish(version)

        self._sending = self._tasks.start(send())
        if not self.schedule.max_staleness or self.observer.needs_weights(version):
            with self.timer("weight_sync"):
                await self._sent()

    async def _sent(self) -> None:
        if self._sending is not None:
            with contextlib.suppress(StopAsked):  # the step that these weights come from counts all the same
                await self.stop.unless_asked(self._sending)

    def _check_staleness(self, slots: Sequence[Slot]) -> None:
        """Check what the ledger promises once more: training on an older sample would go unnoticed."""
        for slot in slots:
            staleness = self.weight_version - slot.weight_version
            if staleness > self.schedule.max_staleness:
                raise StaleBatchError(
                    f"the samples of prompt {slot.prompt.sample_id} are {staleness} weight versions behind, "
                    f"schedule.max_staleness is {self.schedule.max_staleness}"
                )

    def _batch_metrics(self, batch: Batch, slots: Sequence[Slot]) -> dict[str, float]:
        """Age of the batch's samples, and what was drawn and discarded since the last one."""
        ages = [self.weight_version - slot.weight_version for slot in slots for _ in slot.samples]
        values = age_metrics(batch, self.weight_version, ages, max_staleness=self.schedule.max_staleness)
        domains = sorted({sample.domain for sample in batch.samples})
        if self.recipe.on_failure == "replace":
            values |= self._since_last("replaced", domains)
        if self.schedule.max_staleness:
            values |= self._since_last("refused", domains)
            for name, counts in self._lengths.items():
                told = sorted({*domains, *counts})  # also of a domain that this batch lacks
                values |= {f"{name}/{domain}": float(counts[domain]) for domain in told}
                counts.clear()
        return values

    def _since_last(self, end: str, domains: Sequence[str]) -> dict[str, float]:
        """Samples ``refused`` or ``replaced`` since the last step, by domain; 0 for the batch's other domains."""
        total = self.ledger.counts(end)
        new = total - self._told[end]
        self._told[end] = total
        per_prompt = self.recipe.rollout.samples_per_prompt
        return {f"{end}_samples/{domain}": float(new[domain] * per_prompt) for domain in sorted({*domains, *new})}

    async def run(self) -> None:
        """Train until ``schedule.steps`` optimizer steps are done.

        Raises:
            StopAsked: somebody asked for the end; the steps that are done are saved, the one that was waited for is not
                begun.
        """
        self.timer.begin()
        state: Mapping[str, Any] | None = None
        try:
            async with self._tasks:
                for slot in self.ledger.slots:  # of the checkpoint that it goes on from
                    if not slot.samples:
                        self._tasks.start(self._see_through([slot]))
                self._tasks.start(self.produce())
                while self.weight_version < self.schedule.steps:
                    self.stop.check()
                    await self.observer.log(await self._tasks.unless_failed(self.train_step()))
                    state = self.state
                    await self._tasks.unless_failed(self.observer.after_step(self.weight_version, state))
                    if not self.schedule.max_staleness:
                        self.ledger.publish(self.weight_version)
                    self.timer.begin()
        except StopAsked:
            if state is not None:
                await self.observer.on_stop(self.weight_version, state)
            raise

    @property
    def state(self) -> Mapping[str, Any]:
        """What a checkpoint stores: the stream's position, and the prompts before it that no step has used yet."""
        return {"prompts": self.prompts.state_dict(), "ledger": self.ledger.state_dict()}


def _by_slot(slots: Sequence[Slot], samples: Sequence[SampleMeta]) -> dict[Slot, list[SampleMeta]]:
    per_prompt = len(samples) // len(slots)
    return {slot: list(samples[i * per_prompt : (i + 1) * per_prompt]) for i, slot in enumerate(slots)}

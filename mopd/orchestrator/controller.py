"""The one training loop. Moves sample ids and lengths, never a tensor; ``max_staleness: 0`` makes it synchronous.

::

    prompts ──> produce ─────────────────────────────────────┐           train_step
                 │ ledger.admit; then each by itself:        │            │ ledger.take: the stream's mix, oldest first
                 │ rollout.generate: tokens, … ──────> DATA PLANE ──────> │ student.forward_backward, optim_step
                 │  (or answers.generate, stored.load)       │            │
                 │ teachers.score ∥ rewards.judge ──────>    │ ids        │ plane.release
                 │ ledger.complete ──────────────────────> LEDGER ──────> │ publish: student.stage, student.send
                 │   too old: _redraw, ledger.again                       │
                 ▲   cannot be scored, or cut: ledger.replace             ▼
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
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from mopd.base.metrics import StepMetrics, StepTimer, age_metrics, horizon_metrics, merge_step, share_metrics
from mopd.base.tasks import Stop, StopRequested, Tasks
from mopd.base.types import Batch, DomainSums, FailedSample, MicroBatchPlan, Prompt, SampleMeta, UserError
from mopd.config.losses import Objective, budget_of, has_domain_baseline
from mopd.config.schema import Recipe
from mopd.data.packing import PackingRules, pack, plan_metrics
from mopd.engines.concurrency import all_or_none
from mopd.orchestrator.ledger import Ledger, Slot

if TYPE_CHECKING:  # these import torch
    from mopd.data.stream import PromptStream
    from mopd.data_plane.interface import Storage
    from mopd.orchestrator.answers import AnswerWorker
    from mopd.orchestrator.gate import Gate
    from mopd.orchestrator.kept.samples import SampleKeeper, StoredWorker
    from mopd.orchestrator.rewards import RewardWorker
    from mopd.orchestrator.rollout import RolloutWorker
    from mopd.orchestrator.teachers import TeacherWorker

logger = logging.getLogger(__name__)
MAX_DROPPED = 8
"""Prompts that may be dropped for each one of a step: with more, nearly all responses are cut."""
MAX_SKIPPED = 20
"""Prompts that gates may skip for one that a step has, before the run ends."""


class Student(Protocol):
    """The Megatron student on all its ranks; ``StudentGroup``, or a stand-in of a benchmark."""

    dp_size: int
    packing: PackingRules

    async def expect_step(self) -> None:
        """Announce that nothing is being drawn any more, and nothing will be before new weights."""
        ...

    async def forward_backward(self, plan: MicroBatchPlan, *, diagnostics: bool) -> dict[str, DomainSums]: ...
    async def optim_step(self) -> dict[str, float]: ...
    async def refresh(self, step: int) -> None: ...
    async def stage(self, weight_version: int) -> None: ...
    async def send(self) -> None: ...


class Observer(Protocol):
    """Work between steps that does not touch training: metrics, validation, checkpoints."""

    def needs_weights(self, step: int) -> bool: ...
    async def log(self, metrics: StepMetrics) -> None: ...
    async def after_step(self, step: int, state: Mapping[str, Any]) -> None: ...
    async def on_stop(self, step: int, state: Mapping[str, Any]) -> None: ...


@dataclass(kw_only=True)
class Controller:
    """Orders the workers; goes on from the step of ``ledger``, with the prompts that are open in it."""

    recipe: Recipe
    prompts: PromptStream
    rollout: RolloutWorker | None
    """Present where some steps are on-policy."""
    answers: AnswerWorker | None = None
    """Present where some steps train on the teachers' own answers."""
    teachers: TeacherWorker
    rewards: RewardWorker | None
    student: Student
    plane: Storage
    observer: Observer
    ledger: Ledger
    stop: Stop
    unit: int
    """Prompts that go through rollout and scoring together: one, or a step's where engines in the controller's own
    process work batch by batch."""
    stored: StoredWorker | None = None
    """Where the samples of stored prompts come from, if the stream has any."""
    keeper: SampleKeeper | None = None
    """Keeps what is trained on, if that is wanted."""
    gate: Gate | None = None
    """Present where a domain has a gate."""

    def __post_init__(self) -> None:
        self.schedule = self.recipe.schedule
        self.weight_version = self.ledger.step
        self.timer = StepTimer()
        self._tasks = Tasks()
        self._sending: asyncio.Task[None] | None = None
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Metric -> domain -> count of samples or tokens since the last step."""
        self._num_drawing = 0
        self._num_replaced: Counter[int] = Counter()
        """Replacements by the step that a slot was admitted for."""
        self._num_dropped: Counter[int] = Counter()
        """The same of prompts with a truncated response."""
        self._num_skipped: Counter[int] = Counter()
        """Likewise, of prompts that gates skip."""

    async def produce(self) -> None:
        """Admit prompts as there is room, and see each unit of them through."""
        while True:
            await self.ledger.room(self.unit)
            self._start(self.ledger.admit(self.prompts.next(self.unit)))

    def _start(self, slots: Sequence[Slot]) -> None:
        """Begin with open slots; those of stored prompts wait for no response of the others."""
        for is_stored in (False, True):
            own = [slot for slot in slots if slot.prompt.is_stored == is_stored]
            if own:
                self._tasks.start(self._see_through(own))

    async def _see_through(self, slots: Sequence[Slot]) -> None:
        """Carry prompts from the rollout to samples that can be trained on. Slots that cannot be scored go round
        again; each that is too old does so by itself (``_redraw``), or it would wait for the slowest of the others."""
        while slots:
            if slots[0].prompt.is_stored:
                assert self.stored is not None, "the stream has stored prompts"
                samples = await self.stored.load([slot.prompt for slot in slots], self.ledger.published)
            else:
                samples = await self._draw(slots)
            per_prompt = len(samples) // len(slots)  # samples come prompt after prompt
            of_slot = {slot: samples[i * per_prompt : (i + 1) * per_prompt] for i, slot in enumerate(slots)}
            fresh = []
            for slot, own in of_slot.items():
                if self.ledger.drawn(slot, own):
                    fresh.append(slot)
                else:
                    self._tasks.start(self._redraw(slot, own))
            dropped = await self._drop_truncated(fresh, of_slot)
            fresh = [slot for slot in fresh if slot not in dropped]
            distilled, skipped = await self._sort(fresh, of_slot)
            failed = await self._score(distilled, of_slot)
            replaced = await self._replace(distilled, of_slot, failed)
            slots = [*dropped, *replaced, *await self._skip(skipped, of_slot)]
            gone = set(slots)
            for slot in fresh:
                # No step can end between the ledger's look at the age and the slot's being ready: nothing is awaited.
                if slot not in gone and not self.ledger.complete(slot, of_slot[slot]):
                    self._tasks.start(self._redraw(slot, of_slot[slot]))

    def _objective_of(self, slot: Slot) -> Objective:
        """Return the objective of the step that a slot was admitted for: a batch has slots of one objective."""
        return self.recipe.objective_at(slot.number // self.schedule.prompts_per_step + 1)

    async def _draw(self, slots: Sequence[Slot]) -> list[SampleMeta]:
        """Have the student respond to the slots' prompts, or the teachers."""
        prompts = [slot.prompt for slot in slots]
        self._num_drawing += 1
        if self._objective_of(slots[0]) == "on_policy":
            assert self.rollout is not None
            by_id = {slot.prompt.sample_id: slot for slot in slots}
            with self.timer("rollout"):
                samples = await self.rollout.generate(prompts, ended=partial(self._ended, by_id))
        else:
            assert self.answers is not None
            with self.timer("answers"):
                samples = await self.answers.generate(prompts, version=lambda: self.ledger.published)
        self._num_drawing -= 1
        for sample in samples:
            self._counts["drawn_samples"][sample.domain] += 1
            self._counts["drawn_tokens"][sample.domain] += sample.response_length
        if not self._num_drawing and not self.ledger.has_room():
            await self.student.expect_step()
        return samples

    def _ended(self, by_id: Mapping[int, Slot], prompt: Prompt, weight_version: int) -> None:
        self.ledger.ended(by_id[prompt.sample_id], weight_version)

    async def _sort(
        self, slots: Sequence[Slot], of_slot: Mapping[Slot, list[SampleMeta]]
    ) -> tuple[list[Slot], list[Slot]]:
        """Have the gates of their domains decide; return the slots that teachers are to score, and those to skip."""
        if self.gate is None:
            return [*slots], []
        gated = [slot for slot in slots if slot.prompt.domain in self.gate.gates]
        if not gated:
            return [*slots], []
        with self.timer("rewards"):
            samples = [sample for slot in gated for sample in of_slot[slot]]
            verdicts = dict(zip(gated, await self.gate.sort([slot.prompt for slot in gated], samples), strict=True))
        for slot, verdict in verdicts.items():
            self._counts[f"gate_{verdict}"][slot.prompt.domain] += 1
        distilled = [slot for slot in slots if verdicts.get(slot, "distil") == "distil"]
        return distilled, [slot for slot, verdict in verdicts.items() if verdict == "skip"]

    async def _skip(self, slots: Sequence[Slot], of_slot: Mapping[Slot, Sequence[SampleMeta]]) -> list[Slot]:
        """Discard the samples of prompts that a gate skips, and put the next prompts of their domains in their places.
        ``UserError`` when a step skips many times the prompts that it has."""
        most = MAX_SKIPPED * self.schedule.prompts_per_step
        for slot in slots:
            step, domain = slot.number // self.schedule.prompts_per_step, slot.prompt.domain
            self._num_skipped[step] += 1
            if self._num_skipped[step] > most:
                raise UserError(
                    f"domains.{domain}.gate: more than {most} prompts were skipped for one step of "
                    f"{self.schedule.prompts_per_step}, which finds too few to learn from: change threshold, or others"
                )
            await self.plane.discard([sample.sample_id for sample in of_slot[slot]])
            self.ledger.replace(slot, self.prompts.next_of(domain))
        return [*slots]

    async def _score(self, slots: Sequence[Slot], of_slot: Mapping[Slot, list[SampleMeta]]) -> list[FailedSample]:
        """Have teachers and rewards judge the samples side by side, as far as the objective needs it; return what a
        teacher could not score."""
        samples = [sample for slot in slots for sample in of_slot[slot]]
        if not samples or self._objective_of(slots[0]) == "sft_on_teacher":
            return []

        drawn = [slot for slot in slots if not slot.prompt.is_stored]
        rows = {sample.sample_id: slot.prompt.row for slot in drawn for sample in of_slot[slot]}

        async def score() -> list[FailedSample]:
            with self.timer("teachers"):
                return await self.teachers.score(samples, rows)

        async def judge(rewards: RewardWorker) -> list[FailedSample]:
            gates = self.recipe.gates
            unjudged = [slot for slot in slots if slot.prompt.domain not in gates]
            if unjudged and self.recipe.needs_task_advantage:
                own = [sample for slot in unjudged for sample in of_slot[slot]]
                with self.timer("rewards"):
                    await rewards.judge([slot.prompt for slot in unjudged], own)
            return []  # a reward that cannot be had ends the run

        # Rewards of stored samples are those of their time.
        if self.rewards is None or slots[0].prompt.is_stored or self._objective_of(slots[0]) != "on_policy":
            return await score()
        failed, _ = await all_or_none([score(), judge(self.rewards)])
        return failed

    async def _redraw(self, slot: Slot, samples: Sequence[SampleMeta]) -> None:
        """Discard and count samples that are too old for any step to come, and draw the prompt again."""
        await self.plane.discard([sample.sample_id for sample in samples])
        self._counts["refused_samples"][slot.prompt.domain] += len(samples)
        self._counts["refused_tokens"][slot.prompt.domain] += sum(sample.response_length for sample in samples)
        self.ledger.again(slot)
        await self._see_through([slot])

    async def _drop_truncated(self, slots: Sequence[Slot], of_slot: Mapping[Slot, Sequence[SampleMeta]]) -> set[Slot]:
        """With ``rollout.on_truncated: drop`` discard every sample of a drawn prompt of which one was cut, and put the
        next prompt of the domain in its place. ``UserError`` when a step needs too many."""
        cfg = self.recipe.rollout
        if cfg.on_truncated != "drop":
            return set()
        cut = [s for s in slots if not s.prompt.is_stored and any(sample.truncated for sample in of_slot[s])]
        for slot in cut:
            step = slot.number // self.schedule.prompts_per_step
            self._num_dropped[step] += 1
            if self._num_dropped[step] > MAX_DROPPED * self.schedule.prompts_per_step:
                raise UserError(
                    f"rollout.on_truncated drop: more than {MAX_DROPPED} prompts for each of a step's "
                    f"{self.schedule.prompts_per_step} had a response that was cut, the last one of domain "
                    f"{slot.prompt.domain!r}: raise rollout.max_response_length ({cfg.max_response_length}), or set "
                    "on_truncated: mask_tail"
                )
            await self._next_prompt(slot, of_slot[slot], "dropped_samples")
        return set(cut)

    async def _next_prompt(self, slot: Slot, samples: Sequence[SampleMeta], count: str) -> None:
        """Discard and count a slot's samples, and put the next prompt of its domain in its place."""
        await self.plane.discard([sample.sample_id for sample in samples])
        self._counts[count][slot.prompt.domain] += len(samples)
        self.ledger.replace(slot, self.prompts.next_of(slot.prompt.domain))

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
            if slot.prompt.is_stored:
                raise UserError(
                    f"data.scored: teachers.{failure.teacher} could not score a stored sample of domain "
                    f"{slot.prompt.domain!r}, and no other takes its place: {failure.reason}: see the replicas' logs"
                )
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
            await self._next_prompt(slot, of_slot[slot], "replaced_samples")
            replaced.append(slot)
        return replaced

    async def train_step(self) -> StepMetrics:
        """Do one optimizer step of the student on the next batch, and return its metrics."""
        step = self.weight_version + 1
        with self.timer("wait_batch"):
            for slot in self.ledger.stale():
                self._tasks.start(self._redraw(slot, slot.samples))
            slots = await self.stop.unless_stop_requested(self.ledger.take(timeout_s=self.schedule.wait_timeout_s))
            ids = [sample.sample_id for slot in slots for sample in slot.samples]
            batch = await self.plane.claim(ids, self.recipe.loss_fields(step))
        with self.timer("pack"):
            if has_domain_baseline(self.recipe.loss) and self.recipe.objective_at(step) == "on_policy":
                await self.teachers.compare(batch)
            plan = pack(batch.samples, self.student.packing, dp_size=self.student.dp_size)
        diagnostics = step == 1 or step % self.recipe.metrics.diagnostics_every_steps == 0
        covered = diagnostics and "teacher_logprobs" in self.recipe.loss_fields(step)
        coverage = await self.teachers.coverage(batch) if covered else {}
        with self.timer("forward_backward"):
            sums = await self.student.forward_backward(plan, diagnostics=diagnostics)
        with self.timer("optim_step"):
            values = await self.student.optim_step()
        values |= coverage | self._batch_metrics(batch, slots) | plan_metrics(plan, self.student.packing)
        prompts = self.prompts.shares(self.weight_version * self.schedule.prompts_per_step)
        values |= share_metrics(batch, sums, prompts=prompts, budget=budget_of(self.recipe.loss, prompts))
        self.weight_version = step
        if self.keeper is not None:
            with self.timer("keep_samples"):
                await self.keeper.keep(step, batch)
        await self.plane.release(batch)
        self.ledger.trained(slots)
        if any(step % own.every_steps == 0 for own in self.recipe.refreshed.values()):
            with self.timer("refresh_teachers"):
                await self.student.refresh(step)
        if self._publishes(step):
            await self.publish()
        elif self.schedule.max_staleness and self.recipe.objective_at(step + 1) != "on_policy":
            self.ledger.publish(step)  # answers do not wait for weights
        timings = self.timer.flush()
        # The stream of prompts never ends: where nothing is being sampled, none was admitted.
        drawing_s = timings.get("rollout", 0.0) + timings.get("answers", 0.0)
        timings["window_closed"] = max(0.0, timings["step"] - drawing_s)
        return merge_step(step, batch=batch, sums=sums, values=values, timings=timings)

    def _publishes(self, step: int) -> bool:
        """Return whether the rollout is given the weights of ``step``."""
        if self.observer.needs_weights(step):
            return True
        if self.recipe.objective_at(step + 1) != "on_policy" or self.schedule.on_policy_fraction == 0:
            return False
        return step % self.schedule.sync_every_steps == 0 or self.recipe.objective_at(step) != "on_policy"

    async def publish(self) -> None:
        """Give the student's weights to the rollout, unless the run is to stop. The wait for their use goes on beside
        the next step if samples of the old ones may still be trained on."""
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
            with contextlib.suppress(StopRequested):  # the step that these weights come from counts all the same
                await self.stop.unless_stop_requested(self._sending)

    def _batch_metrics(self, batch: Batch, slots: Sequence[Slot]) -> dict[str, float]:
        """Return the ages of the batch's samples, and what was drawn and discarded since the last one, by domain: 0 for
        the batch's other domains."""
        ages = [self.weight_version - slot.weight_version for slot in slots for _ in slot.samples]
        values = age_metrics(batch, self.weight_version, ages, max_staleness=self.schedule.max_staleness)
        if self.schedule.warm_up is not None:
            values["is_warm_up"] = float(self.weight_version < self.schedule.warm_up.steps)
        if self.stored is not None:
            values["stored_share"] = sum(slot.prompt.is_stored for slot in slots) / len(slots)
        if self.recipe.rollout.horizon is not None:
            values |= horizon_metrics(batch, self.recipe.rollout.horizon.at(self.weight_version))
        domains = {sample.domain for sample in batch.samples}
        names = ["replaced_samples"] if self.recipe.on_failure == "replace" else []
        names += ["dropped_samples"] if self.recipe.rollout.on_truncated == "drop" else []
        names += [f"gate_{verdict}" for verdict in ("distil", "reinforce", "skip") if self.recipe.gates]
        if self.schedule.max_staleness:
            names += ["refused_samples", "drawn_samples", "drawn_tokens", "refused_tokens"]
        for name in names:
            counts = self._counts.pop(name, Counter())
            values |= {f"{name}/{domain}": float(counts[domain]) for domain in sorted(domains | counts.keys())}
        return values

    async def run(self) -> None:
        """Train until ``schedule.steps`` optimizer steps are done.

        Raises:
            StopRequested: the end was requested; the steps that are done are saved, the one whose batch was missing
                is not begun.
        """
        self.timer.begin()
        state: Mapping[str, Any] | None = None
        try:
            async with self._tasks:
                for slot in self.ledger.slots:  # open in the checkpoint that the run goes on from
                    if not slot.samples:
                        self._start([slot])
                self._tasks.start(self.produce())
                while self.weight_version < self.schedule.steps:
                    self.stop.check()
                    await self.observer.log(await self._tasks.unless_failed(self.train_step()))
                    state = self.state
                    await self._tasks.unless_failed(self.observer.after_step(self.weight_version, state))
                    if not self.schedule.max_staleness:
                        self.ledger.publish(self.weight_version)
                    self.timer.begin()
        except StopRequested:
            if state is not None:
                await self.observer.on_stop(self.weight_version, state)
            raise

    @property
    def state(self) -> Mapping[str, Any]:
        """State of a checkpoint: the stream's position, and the prompts before it that no step has used yet."""
        return {"prompts": self.prompts.state_dict(), "ledger": self.ledger.state_dict()}

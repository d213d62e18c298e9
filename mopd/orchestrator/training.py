"""A training run, once its workers stand: from the checkpoint to the loop, what happens between steps, the export.

Nothing that happens between steps touches training: metric sinks, validation, checkpoints.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mopd.base.files.writing import write_json
from mopd.base.metrics import MAX_LINE_BYTES, StepMetrics, truncate_jsonl
from mopd.base.tasks import StopRequested
from mopd.base.text import json_lines
from mopd.base.types import SampleMeta, UserError
from mopd.config.load import Loaded
from mopd.config.schema import Recipe
from mopd.conversion.hf.manifest import Manifest
from mopd.data.hub.push import HubPusher, make_repository
from mopd.data.prompts import PromptDataset
from mopd.data.stream import MixedStream, PromptStream, headroom_shares
from mopd.data_plane.queue_plane import QueuePlane
from mopd.orchestrator.controller import Controller
from mopd.orchestrator.kept.samples import SampleKeeper, StoredSamples, StoredWorker, open_stored
from mopd.orchestrator.kept.scores import open_score_cache
from mopd.orchestrator.leading import Orchestrator, RunParts
from mopd.orchestrator.ledger import Ledger
from mopd.orchestrator.preflight.checks import Preflight
from mopd.orchestrator.student import StudentGroup
from mopd.orchestrator.teachers import Rule
from mopd.orchestrator.traces import traces_of
from mopd.orchestrator.validation import append_record, is_due, plain_examples
from mopd.orchestrator.workers import Workers
from mopd.placement.sharing.rollout import TurnsGenerator
from mopd.report.build import build_report, print_summary
from mopd.report.run_files import Best, best_of, mean
from mopd.report.sinks import Sinks
from mopd.report.terminal import Terminal, log_to_terminal
from mopd.run import resuming
from mopd.run.callbacks import CallbackProcess, callbacks_beside
from mopd.run.checkpointing import Checkpointer, complete_steps
from mopd.run.folder import RunDir
from mopd.run.machine import describe_machine
from mopd.run.manifests import (
    check_commits,
    check_plugins,
    check_unchanged,
    engine_extras,
    make_manifests,
    plugin_hashes,
    read_fingerprints,
    write_manifests,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Training:
    """Parts of a training run."""

    recipe: Recipe
    run: RunDir
    parts: RunParts
    prompts: PromptStream
    stored: StoredWorker | None = None
    keeper: SampleKeeper | None = None

    async def save_samples(self, folder: Path) -> str | None:
        """Write what the data plane holds into a folder, and return its hash; ``None`` where it cannot be saved: those
        samples are drawn again."""
        plane = self.parts.workers.plane
        return await plane.save(folder) if isinstance(plane, QueuePlane) else None

    async def load_samples(self, folder: Path, digest: str) -> list[SampleMeta]:
        """Inverse of ``save_samples``: the samples that have all fields that the loss needs; none from a plane that
        saves nothing, as another one wrote the folder. ``UserError`` for changed files."""
        plane = self.parts.workers.plane
        if not isinstance(plane, QueuePlane):
            return []
        return await plane.load(folder, digest, self.recipe.loss_fields(self.parts.student.weight_version + 1))

    def reweigh(self, record: Mapping[str, Any]) -> None:
        """Give an adaptive stream the shares that a validation's head-room asks for, from the first prompt on that
        cannot be admitted yet: which prompts follow does not depend on times.

        Raises:
            UserError: a domain's head-room is not known.
        """
        data, schedule, domains = self.recipe.data, self.recipe.schedule, self.parts.workers.dataset.rows_by_domain
        if data.domain_weights != "adaptive":
            return
        teachers, student, step = self.run.teacher_rewards(), record["rewards"], record["step"]
        for domain in domains:
            if domain not in teachers or domain not in student:
                raise UserError(
                    f"data.domain_weights is adaptive, but the head-room of domain {domain!r} is not known: restore "
                    f"{self.run.headroom.name} and {self.run.validation.name}, or give every domain its weight"
                )
        ahead = schedule.max_staleness + 1 if step and schedule.max_staleness else 0
        shares = headroom_shares(student, {d: teachers[d] for d in domains}, floor=data.adaptive_floor)
        self.prompts.reweigh((step + ahead) * schedule.prompts_per_step, shares)


def train_task(orchestrator: Orchestrator, *, resume: bool, from_step: str | None, as_json: bool) -> str | None:
    """Train in the recipe's run folder, with ``resume`` from the newest checkpoint or the one that ``from_step`` names
    (``step_100``); the line of a run that was asked to stop.

    Raises:
        UserError: anything the user can cure; nothing is half-written.
    """
    log_to_terminal()
    loaded = orchestrator.loaded
    recipe = loaded.recipe
    with RunDir(recipe.run_dir) as run:
        resuming.check_layout(run)
        run.open(loaded, resume=resume)
        orchestrator.keep_stacks()
        manifests = make_manifests(recipe)
        stored = open_stored(recipe, manifests["student"])
        start = resuming.choose(run, recipe, wanted=from_step) if resume else None
        if start is not None:
            check_commits(run.manifest, loaded.commits)
            check_unchanged(run.manifest, manifests)
            check_plugins(run.manifest, plugin_hashes(recipe))
        elif resume:
            logger.warning("%s has no complete checkpoint: the run starts again from step 0", run.checkpoints)

        async def work(parts: RunParts) -> None:
            prompts = make_stream(recipe, parts.workers.dataset, stored)
            plane, student = parts.workers.plane, manifests["student"]
            training = Training(
                recipe=recipe,
                run=run,
                parts=parts,
                prompts=prompts,
                stored=None if stored is None else StoredWorker(stored, plane, recipe.loss_fields(1)),
                keeper=SampleKeeper(run.samples_kept, recipe, student, plane) if recipe.metrics.keep_samples else None,
            )
            is_fresh = start is None
            ledger = fresh_ledger(recipe) if start is None else await load_checkpoint(training, start)
            extend_wait_for_batch(ledger, parts.workers)
            parts.stop.check()
            cache = await open_score_cache(recipe, parts.workers.routers, manifests)
            await parts.student.publish(ledger.step)
            async with callbacks_beside(recipe.callbacks, run.path) as callbacks:
                await begin(training, loaded, manifests, is_fresh=is_fresh)
                parts.workers.teachers.cache = cache
                parts.workers.teachers.traces = traces_of(recipe, plane, parts.workers.tokenizer)
                join_teachers(training)
                await train(training, ledger, callbacks, is_fresh=is_fresh, as_json=as_json)

        return orchestrator.with_workers(work, run.path)


def make_stream(recipe: Recipe, dataset: PromptDataset, stored: StoredSamples | None) -> PromptStream:
    """Return the sequence of prompts; raise ``UserError`` for stored ones of a domain that the data does not have."""
    rows, weights = dataset.rows_by_domain, recipe.data.fixed_weights
    if stored is None or recipe.schedule.on_policy_fraction is None:
        return PromptStream(rows, weights, recipe.seed)
    unknown = sorted(set(stored.domains) - set(rows))
    if unknown:
        raise UserError(
            f"data.scored has samples of domain {unknown[0]!r}, and data.train no row of it: add rows, or name other "
            "samples"
        )
    fraction = recipe.schedule.on_policy_fraction
    return MixedStream(rows, weights, recipe.seed, stored=stored.domains, on_policy_fraction=fraction)


def fresh_ledger(recipe: Recipe, step: int = 0) -> Ledger:
    """Return a ledger without open prompts, after ``step`` optimizer steps."""
    schedule = recipe.schedule
    return Ledger(
        prompts_per_step=schedule.prompts_per_step,
        max_staleness=schedule.max_staleness,
        step=step,
        last_step=schedule.steps,
        warm_up=schedule.warm_up.steps if schedule.warm_up is not None else 0,
        on_expiry=schedule.on_expiry,
        on_new_weights=recipe.on_new_weights,
    )


def extend_wait_for_batch(ledger: Ledger, workers: Workers) -> None:
    """Have ``Ledger.take`` wait as long as a request, a reward, a call of an environment or of
    the data plane goes on: each ends by
    deadlines of its own, which may be longer together (four attempts and the restarts of a replica are)."""
    for router in workers.routers.values():
        router.around_calls = ledger.contained
    if workers.inputs.rewards is not None:
        workers.inputs.rewards.around_calls = ledger.contained
    if workers.inputs.environments is not None:
        workers.inputs.environments.around_calls = ledger.contained
    if isinstance(workers.plane, QueuePlane):
        workers.plane.enter_around_calls(ledger.contained)


async def load_checkpoint(training: Training, start: Path) -> Ledger:
    """Put student, prompt stream and ledger where they were at ``start``.

    Raises:
        UserError: the checkpoint cannot be used; names those before it.
    """
    run, student, prompts = training.run, training.parts.student, training.prompts
    state = await student.load(start, cure=resuming.older_ones(run, start))
    progress = resuming.progress_of(start, state, weight_version=student.weight_version)
    for record in run.validations():
        if record["step"] <= progress.step:
            training.reweigh(record)
    prompts.load_state_dict(progress.prompts)
    ledger = fresh_ledger(training.recipe, progress.step)
    if progress.ledger is not None:
        ledger.load_state_dict(progress.ledger, prompts.prompt)
    if progress.samples is not None and run.samples(progress.step).is_dir():
        await _read_back(training, ledger, progress.samples)
    return ledger


async def _read_back(training: Training, ledger: Ledger, digest: str) -> None:
    """Put finished samples of a checkpoint into the data plane again: their prompts need not be drawn anew."""
    per_prompt, plane = training.recipe.rollout.samples_per_prompt, training.parts.workers.plane
    by_prompt: dict[int, list[SampleMeta]] = {}
    for sample in await training.load_samples(training.run.samples(ledger.step), digest):
        by_prompt.setdefault(sample.sample_id // per_prompt, []).append(sample)
    for slot in ledger.slots:
        samples = by_prompt.pop(slot.prompt.sample_id, [])
        if len(samples) == per_prompt and not ledger.is_stale(samples):
            ledger.complete(slot, sorted(samples, key=lambda sample: sample.sample_id))
        elif samples:
            await plane.discard([sample.sample_id for sample in samples])
    for samples in by_prompt.values():  # drawn after the checkpoint's account was written
        await plane.discard([sample.sample_id for sample in samples])


async def begin(training: Training, loaded: Loaded, manifests: Mapping[str, Manifest], *, is_fresh: bool) -> None:
    """Do the checks before the first step, then write a fresh run's first files.

    Raises:
        UserError: the first check that failed; nothing was written.
        StopRequested: the end was requested meanwhile.
    """
    run, stop = training.run, training.parts.stop
    preflight = Preflight(
        training.recipe,
        training.parts.workers,
        training.parts.student,
        manifests,
        is_fresh=is_fresh,
        fingerprints={} if is_fresh else read_fingerprints(run.manifest),
    )
    push = training.recipe.checkpoint.push_to_hub
    if is_fresh and push is not None:  # a resumed run has its repository, and goes on where the Hub is away
        await asyncio.to_thread(make_repository, push, loaded.where("checkpoint", "push_to_hub"))
    failure = await stop.unless_stop_requested(preflight.find_failure())
    if failure is not None:
        raise UserError(failure)
    run.write_recipe(loaded)
    write_json(run.machine, describe_machine())
    if is_fresh or not run.parity.exists():
        write_json(run.parity, {name: asdict(measured) for name, measured in preflight.parity.items()})
    if not is_fresh:
        return
    more = {"extras": engine_extras(loaded.recipe), "plugins": plugin_hashes(loaded.recipe)}
    write_manifests(run.manifest, manifests, preflight.fingerprints, loaded.commits, **more)
    for path in (run.metrics, run.validation, run.pushed):
        path.unlink(missing_ok=True)  # of a run that died before its first checkpoint
    if preflight.headroom is not None:
        write_json(run.headroom, preflight.headroom)
    if preflight.validation is not None:
        append_record(run.validation, preflight.validation)
        training.reweigh(preflight.validation)


def join_teachers(training: Training) -> None:
    """Have ensembles scored by the recipe's rule, ``best_reward`` by the rewards before the first step.

    Raises:
        UserError: the reward of a domain's teachers is not known.
    """
    recipe, run, workers = training.recipe, training.run, training.parts.workers
    best: dict[str, str] = {}
    if recipe.combine == "best_reward":
        known = run.best_teachers()
        for domain in workers.dataset.rows_by_domain:
            names = recipe.assignment.teachers_of(domain)
            if len(names) > 1 and known.get(domain) not in names:
                raise UserError(
                    f"combine is 'best_reward', but {run.headroom.name} names none of {', '.join(names)} as the best "
                    f"on {domain!r}: add validation prompts of that domain, or set combine: weighted_mean"
                )
            if len(names) > 1:
                best[domain] = known[domain]
                logger.info("domain %r: combine best_reward chooses teachers.%s", domain, best[domain])
    workers.teachers.join_by(Rule(recipe.combine, recipe.support_width), best)


async def train(
    training: Training,
    ledger: Ledger,
    callbacks: Sequence[CallbackProcess] = (),
    *,
    is_fresh: bool,
    as_json: bool = False,
) -> None:
    """Train from the ledger's step until the last one, then export and report: on standard output, as a table or as
    the JSON of ``report.json``, in which case the progress goes to standard error.

    Raises:
        StopRequested: the end was requested; says what is saved.
    """
    recipe, run, workers = training.recipe, training.run, training.parts.workers
    resume_step = None if is_fresh else ledger.step
    if resume_step is not None:
        resuming.set_aside(run, after_step=resume_step)
        truncate_jsonl(run.validation, after_step=resume_step)
    sinks = Sinks(recipe, run.path, resume_step=resume_step, console=Terminal(stderr=as_json))
    for callback in callbacks:
        callback.follow(after_step=-1 if resume_step is None else resume_step)
    try:
        observer = RunObserver(training, sinks)
        try:
            if resume_step is not None:
                await observer.catch_up(resume_step)
            await Controller(
                recipe=recipe,
                prompts=training.prompts,
                rollout=workers.rollout,
                answers=workers.answers,
                teachers=workers.teachers,
                rewards=workers.rewards,
                student=training.parts.student,
                plane=workers.plane,
                observer=observer,
                ledger=ledger,
                stop=training.parts.stop,
                unit=recipe.prompts_together,
                gate=workers.gate,
                stored=training.stored,
                keeper=training.keeper,
            ).run()
        except StopRequested as asked:
            raise StopRequested(asked.by, _stopped(run, recipe, asked.by)) from asked
    finally:
        sinks.close()
    await _export(recipe, run, training.parts.student, observer.best)
    if observer.pusher is not None:
        if recipe.checkpoint.export_hf:
            observer.pusher.push(run.hf, "the result")
        await asyncio.to_thread(observer.pusher.finish)
    report = build_report(run.path)
    if as_json:
        print(json_lines(asdict(report)))
        return
    print_summary(report)
    print(f"report: {run.path / 'report.html'}")


def _stopped(run: RunDir, recipe: Recipe, by: str) -> str:
    """Return the line of a run that was asked to stop, once what it has done is saved."""
    steps = complete_steps(run.checkpoints)
    if not steps:
        return f"stopped before the end of step 1, as {by} asked: start again with --resume"
    return f"stopped after step {steps[-1]} of {recipe.schedule.steps}, as {by} asked: go on with --resume"


class RunObserver:
    """Implements the controller's ``Observer`` for a run folder.

    A step's record gets ``teachers/…`` and ``rollout/…`` (``engines/replicas/statistics.py``), ``kl_floor/DOMAIN`` and
    ``kl_net/DOMAIN``: the KL that the domain's teachers measured against their own folders before the first step, and
    ``kl_k1`` less that.
    """

    def __init__(self, training: Training, sinks: Sinks) -> None:
        recipe, run, student = training.recipe, training.run, training.parts.student
        self.recipe, self.run, self.sinks, self.stop = recipe, run, sinks, training.parts.stop
        self.student = student
        self.reweigh = training.reweigh
        self.workers = training.parts.workers
        self.floors = run.floors()
        """Teacher -> KL floor; a domain with a teacher that could not be compared has none."""
        self.checkpointer = Checkpointer(
            run=run, cfg=recipe.checkpoint, student=student, samples=training, last_step=recipe.schedule.steps
        )
        push = recipe.checkpoint.push_to_hub
        self.pusher = None if push is None else HubPusher(push, run.pushed, run.commits_on_hub())
        # The best step must be one with a checkpoint where that checkpoint is exported.
        kept = complete_steps(run.checkpoints) if recipe.checkpoint.keep_best else None
        self.best = best_of(run.validations(), kept=kept)

    def needs_weights(self, step: int) -> bool:
        """Return whether what follows ``step`` asks the rollout for its weights."""
        is_last = step == self.recipe.schedule.steps and self.recipe.needs_rollout
        return is_last or is_due(self.recipe, step)

    async def log(self, metrics: StepMetrics) -> None:
        """Send one step's numbers to every sink."""
        values = self.workers.take_numbers() | self.checkpointer.take_numbers()
        values |= {} if self.pusher is None else self.pusher.take_numbers()
        for domain, kl in metrics.by_domain("kl_k1").items():
            names, weights = self.workers.teachers.teachers_of(domain)
            is_mean = self.recipe.combine == "weighted_mean" or len(names) == 1  # of joint ones no floor is known
            if is_mean and all(name in self.floors for name in names):
                floor = sum(w * self.floors[name] for w, name in zip(weights, names, strict=True))
                values |= {f"kl_floor/{domain}": floor, f"kl_net/{domain}": kl - floor}
        self.sinks.log(metrics.plus(values))

    async def after_step(self, step: int, state: Mapping[str, Any]) -> None:
        """Validate, then save: a checkpoint misses the validation of its own step only where a request to stop came
        between, and then the resumed run catches up. An export comes before the checkpoint: no resumed run lacks it."""
        if is_due(self.recipe, step):
            await self._validate(step)
        every = self.recipe.checkpoint.export_hf_every_steps
        if every is not None and step % every == 0:
            await _write_hf(self.student, self.run.hf_at(step))
            if self.pusher is not None:
                self.pusher.push(self.run.hf_at(step), f"step {step}")
        await self.checkpointer.save_if_due(step, state, best_step=self._best_step)

    async def on_stop(self, step: int, state: Mapping[str, Any]) -> None:
        """Save what is done, unless that has happened, and wait until it is written."""
        rollout = self.workers.rollout
        if rollout is not None and isinstance(rollout.generator, TurnsGenerator):
            rollout.generator.stop()  # no response keeps the student from GPUs that it shares
        await self.checkpointer.save(step, state, best_step=self._best_step)
        await self.checkpointer.finish()

    async def catch_up(self, step: int) -> None:
        """Validate the step before the first one of a resumed run, if its record is missing, and upload what was
        exported until then and is not on the Hub."""
        if is_due(self.recipe, step) and all(line["step"] != step for line in self.run.validations()):
            await self._validate(step)
        if self.pusher is not None:
            for earlier in range(1, step + 1):
                folder = self.run.hf_at(earlier)
                if folder.is_dir() and not self.pusher.has_pushed(folder):
                    self.pusher.push(folder, f"step {earlier}")

    @property
    def _best_step(self) -> int | None:
        return self.best.step if self.best else None

    async def _validate(self, step: int) -> None:
        validator = self.workers.validator
        assert validator is not None, "nothing is due without a validation section"
        record = await self.stop.unless_stop_requested(validator.record(self.workers.generator, step))
        traces = self.workers.teachers.traces
        if traces is not None and (shown := traces.take_shown()):
            told = plain_examples(shown, self.run.traces.name, MAX_LINE_BYTES)
            write_json(self.run.traces, {"step": step, "domains": told})
        append_record(self.run.validation, record)
        self.reweigh(record)
        self.sinks.log_validation(step, record["rewards"] | record["watched"])
        reward = mean(record["rewards"])
        if self.best is None or reward > self.best.reward:
            self.best = Best(step=step, reward=reward)


async def _export(recipe: Recipe, run: RunDir, student: StudentGroup, best: Best | None) -> None:
    """Write the result as a Hugging Face folder: the best validated checkpoint if kept, else the last."""
    if not recipe.checkpoint.export_hf:
        return
    if recipe.checkpoint.keep_best and best is not None and best.step != recipe.schedule.steps:
        await student.load(run.checkpoint(best.step))
    await _write_hf(student, run.hf)


async def _write_hf(student: StudentGroup, folder: Path) -> None:
    """Write a folder of the run, in the place of what an earlier life of this run left there, whole or cut off."""
    for earlier in (folder, *folder.parent.glob(f".{folder.name}.*")):
        if earlier.exists():
            shutil.rmtree(earlier)
    await student.save_hf(folder)

"""A run on rank 0, once its workers stand: from the checkpoint to the loop, what happens between steps, the export.

Nothing that happens between steps touches training: metric sinks, validation, checkpoints.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mopd.config.groups import Assignment
from mopd.config.schema import Recipe
from mopd.controller import Controller
from mopd.engines.interface import Generator
from mopd.metrics import StepMetrics, truncate_jsonl
from mopd.replicas.router import Router
from mopd.replicas.statistics import group_metrics
from mopd.report.build import build_report, print_summary
from mopd.report.run_files import Best, best_of, mean
from mopd.report.sinks import Sinks
from mopd.report.terminal import Terminal
from mopd.run import resuming
from mopd.run.checkpointing import Checkpointer, complete_steps
from mopd.run.folder import RunDir
from mopd.run.validation import Validator
from mopd.run.workers import Workers
from mopd.text import json_lines


async def load_checkpoint(run: RunDir, workers: Workers, start: Path) -> int:
    """Put student and prompt stream where they were at ``start``; the number of steps done.

    Raises:
        UserError: the checkpoint cannot be used; names those before it.
    """
    state = await workers.student.load(start, cure=resuming.older_ones(run, start))
    weight_version = workers.student.worker.weight_version
    step, position = resuming.progress_of(start, state, weight_version=weight_version)
    workers.prompts.load_state_dict(position)
    return step


async def train(
    recipe: Recipe, run: RunDir, workers: Workers, *, resume_step: int | None, as_json: bool = False
) -> None:
    """Train from ``resume_step`` (``None``: a fresh run) until the last step, then export and report: on standard
    output, as a table or as the JSON of ``report.json``, in which case the progress goes to standard error."""
    if resume_step is not None:
        resuming.set_aside(run, after_step=resume_step)
        truncate_jsonl(run.validation, after_step=resume_step)
    # The best step must be one with a checkpoint where that checkpoint is exported.
    kept = complete_steps(run.checkpoints) if recipe.checkpoint.keep_best else None
    sinks = Sinks(recipe, run.path, resume_step=resume_step, console=Terminal(stderr=as_json))
    try:
        observer = RunObserver(
            sinks=sinks,
            routers=[*workers.routers.values()],
            assignment=recipe.assignment,
            floors=run.floors(),
            checkpointer=Checkpointer(
                run=run, cfg=recipe.checkpoint, student=workers.student, last_step=recipe.schedule.steps
            ),
            validator=workers.validator,
            generator=workers.generator,
            best=best_of(run.validations(), kept=kept),
        )
        await Controller(
            recipe=recipe,
            prompts=workers.prompts,
            rollout=workers.rollout,
            teachers=workers.teachers,
            student=workers.student,
            plane=workers.plane,
            observer=observer,
            start_step=resume_step or 0,
        ).run()
    finally:
        sinks.close()
    await _export(recipe, run, workers, observer.best)
    report = build_report(run.path)
    if as_json:
        print(json_lines(asdict(report)))
        return
    print_summary(report)
    print(f"report: {run.path / 'report.html'}")


@dataclass(kw_only=True)
class RunObserver:
    """Implements the controller's ``Observer`` for a run folder.

    A step's record gets ``teachers/…`` and ``rollout/…`` (see ``mopd.replicas.statistics``), ``kl_floor/DOMAIN`` and
    ``kl_net/DOMAIN``: the KL that the domain's teachers measured against their own folders before the first step, and
    ``kl_k1`` less that.
    """

    sinks: Sinks
    routers: Sequence[Router]
    assignment: Assignment
    floors: Mapping[str, float]
    """By teacher; a domain with a teacher that could not be compared has no floor."""
    checkpointer: Checkpointer
    validator: Validator | None
    generator: Generator
    best: Best | None

    def log(self, metrics: StepMetrics) -> None:
        """One step's numbers to every sink."""
        values: dict[str, float] = {}
        for router in self.routers:
            values |= group_metrics(router.take_numbers())
        for domain, kl in metrics.by_domain("kl_k1").items():
            names = self.assignment.teachers_of(domain)
            if all(name in self.floors for name in names):
                weights = self.assignment.weights_of(domain)
                floor = sum(w * self.floors[name] for w, name in zip(weights, names, strict=True))
                values |= {f"kl_floor/{domain}": floor, f"kl_net/{domain}": kl - floor}
        self.sinks.log(metrics.plus(values))

    async def after_step(self, step: int, prompts_state: Mapping[str, Any]) -> None:
        """Validate, then save: a checkpoint never misses the validation of its own step."""
        if self.validator is not None and self.validator.is_due(step):
            result = await self.validator.record(self.generator, step)
            self.sinks.log_validation(step, result.rewards)
            reward = mean(result.rewards)
            if self.best is None or reward > self.best.reward:
                self.best = Best(step=step, reward=reward)
        best_step = self.best.step if self.best else None
        await self.checkpointer.save_if_due(step, {"prompts": dict(prompts_state)}, best_step=best_step)


async def _export(recipe: Recipe, run: RunDir, workers: Workers, best: Best | None) -> None:
    """Write the result as a Hugging Face folder: the best validated checkpoint if kept, else the last."""
    if not recipe.checkpoint.export_hf:
        return
    if recipe.checkpoint.keep_best and best is not None and best.step != recipe.schedule.steps:
        await workers.student.load(run.checkpoint(best.step))
    for earlier in (run.hf, *run.path.glob(f".{run.hf.name}.*")):  # ends of this run, also those that were cut off
        if earlier.exists():
            shutil.rmtree(earlier)
    await workers.student.save_hf(run.hf)

"""``mopd train`` and ``mopd check`` on one rank: rank 0 builds all and runs the controller, the others follow."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from mopd.config.load import Loaded
from mopd.config.schema import Recipe
from mopd.controller import Controller
from mopd.conversion.hf.manifest import Manifest
from mopd.data_plane.local import LocalDataPlane
from mopd.files.writing import write_json
from mopd.launch.failure import rank_and_world_size
from mopd.launch.joining import joined
from mopd.launch.ranks import CommandChannel, serve
from mopd.metrics import apart, truncate_jsonl
from mopd.placement.groups import Groups
from mopd.preflight.checks import Check, Preflight
from mopd.preflight.parity import write_parity
from mopd.replicas.interface import SampleFailed
from mopd.replicas.watch import GroupWatch
from mopd.report.build import build_report, print_summary
from mopd.report.run_files import RunFiles
from mopd.report.sinks import Sinks
from mopd.report.terminal import LogFormatter, Terminal
from mopd.run import checkpointing, resuming
from mopd.run.folder import RunDir
from mopd.run.manifests import check_unchanged, make_manifests, read_fingerprints, write_manifests
from mopd.run.observer import RunObserver
from mopd.run.step_watch import StepWatch, read_floors
from mopd.run.validation import best_of
from mopd.run.workers import Inputs, Workers, build_workers, read_inputs
from mopd.student.worker import StudentWorker
from mopd.text import json_lines
from mopd.types import UserError

logger = logging.getLogger(__name__)


def train(loaded: Loaded, *, resume: bool, from_step: str | None = None) -> None:
    """Train on this rank until the recipe's last step. ``from_step`` names the checkpoint to resume from
    (``step_100``); the newest when ``None``.

    Raises:
        UserError: anything the user can cure; nothing is half-written.
    """
    with RunDir(loaded.recipe.run_dir).telling() as run:
        if rank_and_world_size()[0]:
            _follow(loaded.recipe)
            return
        _log_to_terminal()
        with run:
            resuming.check_layout(run)
            run.open(loaded, resume=resume)
            manifests = make_manifests(loaded.recipe)
            start = resuming.choose(run, loaded.recipe, wanted=from_step) if resume else None
            if start is not None:
                check_unchanged(run.manifest, manifests)
            elif resume:
                logger.warning("%s has no complete checkpoint: the run starts again from step 0", run.checkpoints)
            _lead(loaded.recipe, run, lambda workers: _train(loaded, run, workers, manifests, start))


def check(loaded: Loaded, *, as_json: bool) -> None:
    """Run the preflight and print its outcomes; writes nothing.

    Raises:
        UserError: the first failed check.
    """
    if rank_and_world_size()[0]:
        _follow(loaded.recipe)
        return
    _log_to_terminal()
    manifests = make_manifests(loaded.recipe)

    async def work(workers: Workers) -> None:
        await workers.student.publish(0)
        preflight = Preflight(loaded.recipe, workers, manifests, is_fresh=True)
        checks = []
        async for outcome in preflight.run():
            checks.append(outcome)
            if outcome.status == "failed":
                break
        _print_checks(checks, as_json=as_json)
        _raise_if_failed(checks[-1])

    _lead(loaded.recipe, None, work)


async def _train(
    loaded: Loaded, run: RunDir, workers: Workers, manifests: dict[str, Manifest], start: Path | None
) -> None:
    recipe = loaded.recipe
    step = 0
    if start is not None:
        state = await workers.student.load(start, cure=resuming.older_ones(run, start))
        weight_version = workers.student.worker.weight_version
        step, position = resuming.progress_of(start, state, weight_version=weight_version)
        workers.prompts.load_state_dict(position)
    await workers.student.publish(step)
    await _preflight(recipe, run, workers, manifests, loaded, is_fresh=start is None)
    if start is not None:
        resuming.set_aside(run, after_step=step)
        truncate_jsonl(run.validation, after_step=step)
    sinks = Sinks(recipe, run.path, resume_step=None if start is None else step)
    try:
        checkpointer = checkpointing.Checkpointer(
            run.checkpoints, recipe.checkpoint, workers.student, last_step=recipe.schedule.steps
        )
        observer = RunObserver(
            sinks=sinks,
            watch=StepWatch(GroupWatch([*workers.routers.values()]), recipe.assignment, read_floors(run.parity)),
            checkpointer=checkpointer,
            validator=workers.validator,
            generator=workers.generator,
            best=best_of(RunFiles(run.path).validations(), kept=_kept(recipe, run)),
        )
        await Controller(
            recipe,
            prompts=workers.prompts,
            rollout=workers.rollout,
            teachers=workers.teachers,
            student=workers.student,
            plane=workers.plane,
            observer=observer,
            start_step=step,
        ).run()
    finally:
        sinks.close()
    await _export(recipe, run, workers, observer)
    print_summary(build_report(run.path))
    print(f"report: {run.path / 'report.html'}")


async def _preflight(
    recipe: Recipe,
    run: RunDir,
    workers: Workers,
    manifests: dict[str, Manifest],
    loaded: Loaded,
    *,
    is_fresh: bool,
) -> None:
    """Raise at the first failed check. A fresh run's first files are written here, after the last check."""
    stored = {} if is_fresh else read_fingerprints(run.manifest)
    preflight = Preflight(recipe, workers, manifests, is_fresh=is_fresh, fingerprints=stored)
    with apart():
        async for outcome in preflight.run():
            _raise_if_failed(outcome)
            log = logger.warning if outcome.status == "warning" else logger.info
            log("preflight %s: %s: %s", outcome.status, outcome.name, outcome.detail)
    run.write_recipe(loaded)
    if is_fresh or not run.parity.exists():
        write_parity(run.parity, preflight.parity)
    if not is_fresh:
        return
    write_manifests(run.manifest, manifests, preflight.fingerprints)
    for path in (run.metrics, run.validation):
        path.unlink(missing_ok=True)  # of a run that died before its first checkpoint
    if preflight.rewards is not None and workers.validator is not None:
        teachers = {domain: {"teacher": reward} for domain, reward in preflight.rewards.teachers.items()}
        write_json(run.headroom, teachers)
        workers.validator.append(0, preflight.rewards.student, wall_s=preflight.rewards.student_wall_s)


def _kept(recipe: Recipe, run: RunDir) -> list[int] | None:
    """Steps of which the best must be one: those with a checkpoint, where the best one is exported."""
    return checkpointing.complete_steps(run.checkpoints) if recipe.checkpoint.keep_best else None


async def _export(recipe: Recipe, run: RunDir, workers: Workers, observer: RunObserver) -> None:
    """Write the result as a Hugging Face folder: the best validated checkpoint if kept, else the last."""
    if not recipe.checkpoint.export_hf:
        return
    if recipe.checkpoint.keep_best and observer.best is not None and observer.best.step != recipe.schedule.steps:
        await workers.student.load(run.checkpoint(observer.best.step))
    for earlier in (run.hf, *run.path.glob(f".{run.hf.name}.*")):  # ends of this run, also those that were cut off
        if earlier.exists():
            shutil.rmtree(earlier)
    await workers.student.save_hf(run.hf)


def _lead(recipe: Recipe, run: RunDir | None, work: Callable[[Workers], Coroutine[Any, Any, None]]) -> None:
    """Rank 0: start every group, build everything, do ``work``, release the other ranks. ``run`` is the folder to write
    in, if any."""
    inputs = read_inputs(recipe)
    try:
        with joined(recipe, list(inputs.train.domain_counts)) as (worker, plane, channel):
            asyncio.run(_with_groups(recipe, run, inputs, worker, plane, channel, work))
            channel.send({"call": "stop", "kwargs": {}})
    finally:
        if inputs.rewards is not None:
            inputs.rewards.close()


async def _with_groups(
    recipe: Recipe,
    run: RunDir | None,
    inputs: Inputs,
    worker: StudentWorker,
    plane: LocalDataPlane,
    channel: CommandChannel,
    work: Callable[[Workers], Coroutine[Any, Any, None]],
) -> None:
    log_dir, validation_path = (None, None) if run is None else (run.logs, run.validation)
    async with Groups(recipe, log_dir=log_dir, device=worker.layout.device) as groups:
        try:
            await work(
                await build_workers(recipe, inputs, worker, plane, channel, groups, validation_path=validation_path)
            )
        except SampleFailed as error:
            raise UserError(f"{error}: see the replicas' logs") from error


def _follow(recipe: Recipe) -> None:
    """Every other rank: build its part of the student and do what rank 0 says."""
    with joined(recipe, None) as (worker, _, channel):
        serve(worker, channel)


def _raise_if_failed(outcome: Check) -> None:
    if outcome.status == "failed":
        raise UserError(outcome.detail)


def _print_checks(checks: list[Check], *, as_json: bool) -> None:
    if as_json:
        rows = [{"name": c.name, "status": c.status, "detail": c.detail} for c in checks]
        print(json_lines(rows))
        return
    table = Table("check", "status", "detail")
    colours = {"ok": "green", "failed": "red", "warning": "yellow", "skipped": "dim"}
    for outcome in checks:
        table.add_row(outcome.name, Text(outcome.status, style=colours[outcome.status]), outcome.detail)
    Terminal().print(table)


def _log_to_terminal() -> None:
    """mopd's own messages on standard error; other libraries' only when they warn."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("mopd").setLevel(logging.INFO)

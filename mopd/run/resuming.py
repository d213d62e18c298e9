"""The checkpoint that a run goes on from, those that were written after it, and the count of automatic starts."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mopd.base.files.json_text import read_json_object
from mopd.base.files.reading import shown_path
from mopd.base.files.writing import write_json, writing
from mopd.base.text import one_line
from mopd.base.types import UserError
from mopd.config.schema import Recipe
from mopd.run.checkpointing import complete_steps, latest
from mopd.run.folder import RunDir, folder_name, is_step_name
from mopd.run.manifests import read_fingerprints

logger = logging.getLogger(__name__)

MAX_NAMED = 10
ASIDE = ".aside"
MAX_STARTS = 3
"""Starts in a row that may add no checkpoint; after them ``--resume=auto`` does not try again."""
MAX_ATTEMPTS_BYTES, MAX_LAST = 2**16, 2**12
FORGET = "remove the file"


def choose(run: RunDir, recipe: Recipe, *, wanted: str | None) -> Path | None:
    """Return the complete checkpoint that a resumed run goes on from: ``wanted`` (``step_100``, from ``--from``),
    else the newest; ``None`` when there is none at all and none was wanted.

    Raises:
        UserError: ``wanted`` is not there, or ``schedule.steps`` is below what is done.
    """
    steps = complete_steps(run.checkpoints)
    if wanted is not None:
        return _wanted_checkpoint(run, recipe, steps, wanted)
    if steps and steps[-1] > recipe.schedule.steps:
        earlier = [step for step in steps if step <= recipe.schedule.steps]
        back = f", or go back with --from {folder_name(earlier[-1])}" if earlier else ""
        raise UserError(
            f"schedule.steps is {recipe.schedule.steps}, the run in {shown_path(run.path)} has done {steps[-1]}: raise "
            f"schedule.steps{back}"
        )
    return latest(run)


def check_files(run: RunDir) -> None:
    """Read what the run has written beside its checkpoints, as a resumed run will, to report damage before ranks start.

    Raises:
        UserError: names the file.
    """
    run.steps()
    run.validations()
    run.teacher_rewards()
    run.teacher_examples()
    read_fingerprints(run.manifest)
    run.floors()
    if run.wandb.exists():
        run.wandb_id()
    run.commits_on_hub()


def older_ones(run: RunDir, start: Path) -> str:
    """Return the end of the error line for a ``start`` that cannot be read: the complete checkpoints before it."""
    before = [step for step in complete_steps(run.checkpoints) if folder_name(step) < start.name]
    if not before:
        return ""
    return f"; --from {folder_name(before[-1])} goes on from an older one (complete: {_listed(before)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a run had come at a checkpoint."""

    step: int
    prompts: Mapping[str, Any]
    """Position of the prompt stream."""
    ledger: Mapping[str, Any] | None
    """Prompts that were admitted and not trained on; ``None`` in checkpoints of version 0.2."""
    samples: str | None
    """Hash of the finished samples beside the checkpoint, where the data plane saved them."""


def progress_of(start: Path, state: Mapping[str, Any], *, weight_version: int) -> Progress:
    """Check and return the progress in the ``state`` of the checkpoint ``start``.

    Raises:
        UserError: the state is not what a run saves, or of another step than its weights or the folder's name.
    """
    step, prompts, ledger, samples = (state.get(name) for name in ("step", "prompts", "ledger", "samples"))
    is_of_step = type(step) is int and step == weight_version and start.name == folder_name(step)
    is_whole = isinstance(ledger, (dict, type(None))) and isinstance(samples, (str, type(None)))
    if not is_of_step or not isinstance(prompts, dict) or not is_whole:
        raise UserError(
            f"{shown_path(start)}: its state says step {str(step)[:20]}: resume from another checkpoint, under its own "
            "name"
        )
    return Progress(step=weight_version, prompts=prompts, ledger=ledger, samples=samples)


def set_aside(run: RunDir, *, after_step: int) -> None:
    """Rename the complete checkpoints of later steps to ``step_N.aside``: the run writes them anew, and a second
    ``--resume`` must not take the old ones for its own. The user may delete them."""
    for step in complete_steps(run.checkpoints):
        if step > after_step:
            path = run.checkpoint(step)
            target, number = path.with_name(f"{path.name}{ASIDE}"), 1
            while target.exists() or target.is_symlink():
                number += 1
                target = path.with_name(f"{path.name}{ASIDE}-{number}")
            path.rename(target)
            logger.warning("%s is set aside as %s: the run goes on from step %d", path, target.name, after_step)


def check_layout(run: RunDir) -> None:
    """Refuse a folder or pipe in a file's place, and a file in a folder's, before the run reads or writes there.

    Raises:
        UserError: names the path.
    """
    if not run.path.is_dir():
        return
    files = (run.lock_path, run.recipe, run.manifest, run.metrics, run.validation, run.parity, run.headroom)
    for path in (*files, run.machine, run.report_html, run.report_json, run.wandb, run.attempts, run.pushed):
        if os.path.lexists(path) and not path.is_file():
            raise UserError(f"{shown_path(path)}: not a regular file: remove it, or set another run_dir")
    for path in (run.checkpoints, run.tensorboard, run.logs, run.hf):
        is_replaced = path == run.hf  # removed and written anew
        if os.path.lexists(path) and (not path.is_dir() or (is_replaced and path.is_symlink())):
            raise UserError(f"{shown_path(path)}: not a folder: remove it, or set another run_dir")
    for path in run.checkpoints.glob("step_*") if run.checkpoints.is_dir() else ():
        if is_step_name(path.name) and (path.is_symlink() or not path.is_dir()):  # the run will write or remove it
            raise UserError(f"{shown_path(path)}: not a folder: move it away, or put a folder there")


def read_attempts(run: RunDir) -> tuple[int, str | None, str]:
    """Return the starts by ``--resume=auto`` since the newest checkpoint, that checkpoint, and how the last one ended.

    Raises:
        UserError: the file is none that ``count_start`` writes.
    """
    record = read_json_object(run.attempts, cure=FORGET, max_bytes=MAX_ATTEMPTS_BYTES)
    starts, checkpoint, last = (record.get(name) for name in ("starts", "checkpoint", "last"))
    if type(starts) is not int or not isinstance(checkpoint, (str, type(None))) or not isinstance(last, str):
        raise UserError(f"{shown_path(run.attempts)}: does not count starts: {FORGET}")
    return starts if checkpoint == _newest(run) else 0, checkpoint, last


def _newest(run: RunDir) -> str | None:
    steps = complete_steps(run.checkpoints)
    return folder_name(steps[-1]) if steps else None


def count_start(run: RunDir) -> None:
    """Count one start more by ``--resume=auto``.

    Raises:
        UserError: the last ``MAX_STARTS`` have added no checkpoint; says how the last one ended.
    """
    starts, newest, last = read_attempts(run) if run.attempts.exists() else (0, None, "")
    if starts >= MAX_STARTS:
        raise UserError(
            f"{shown_path(run.attempts)}: {starts} starts in a row, and no new checkpoint "
            f"{f'since {newest}' if newest else 'at all'}; the last one: {one_line(last)}: see "
            f"{shown_path(run.logs)}, cure it and {FORGET}"
        )
    with writing(run.path):
        run.path.mkdir(parents=True, exist_ok=True)
    _write_attempts(run, starts + 1, "killed, or its machine was lost")


def _write_attempts(run: RunDir, starts: int, last: str) -> None:
    write_json(run.attempts, {"starts": starts, "checkpoint": _newest(run), "last": last[:MAX_LAST]})


def note_end(run: RunDir, line: str, *, is_users: bool = False) -> None:
    """Record how the start that ``count_start`` counted has ended. An empty ``line`` (it ended well) forgets the count;
    a start that a person ended (``is_users``) does not count."""
    starts = read_attempts(run)[0] - is_users if line and run.attempts.exists() else 0
    if starts > 0:
        _write_attempts(run, starts, line)
    else:
        run.attempts.unlink(missing_ok=True)


def _wanted_checkpoint(run: RunDir, recipe: Recipe, steps: list[int], wanted: str) -> Path:
    digits = wanted.removeprefix("step_")
    step = int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 18 else -1
    if step not in steps:
        there = f"complete are {_listed(steps)}" if steps else "there is none"
        raise UserError(f"--from {wanted[:80]}: no complete checkpoint in {shown_path(run.checkpoints)}: {there}")
    if step > recipe.schedule.steps:
        raise UserError(
            f"--from {wanted}: schedule.steps is {recipe.schedule.steps}: raise it, or name an earlier step"
        )
    return run.checkpoint(step)


def _listed(steps: list[int]) -> str:
    more = f" and {len(steps) - MAX_NAMED} earlier ones" if len(steps) > MAX_NAMED else ""
    return ", ".join(folder_name(step) for step in reversed(steps[-MAX_NAMED:])) + more

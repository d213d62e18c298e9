"""When checkpoints are written, which are kept, and which one a run resumes from."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mopd.config.schema import CheckpointConfig
from mopd.run.folder import RunDir, is_step_name

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
"""Written last by ``mopd.student.checkpoints.checkpoint``: a folder without it is incomplete."""


class Saver(Protocol):
    """The student on all its ranks."""

    async def save(self, folder: Path, state: Mapping[str, Any]) -> None: ...


class SampleSaver(Protocol):
    """Whoever holds the samples."""

    async def save_samples(self, folder: Path) -> str | None: ...


@dataclass(frozen=True, kw_only=True)
class Checkpointer:
    """Writes ``checkpoints/step_N``; keeps the newest ``keep_last`` and the best."""

    run: RunDir
    cfg: CheckpointConfig
    student: Saver
    samples: SampleSaver
    last_step: int

    async def save_if_due(self, step: int, state: Mapping[str, Any], *, best_step: int | None) -> None:
        """Save after ``step`` when the rhythm, the last step or a new best asks for it."""
        is_new_best = self.cfg.keep_best and best_step == step
        if step % self.cfg.every_steps == 0 or step == self.last_step or is_new_best:
            await self.save(step, state, best_step=best_step)

    async def save(self, step: int, state: Mapping[str, Any], *, best_step: int | None) -> None:
        """Save after ``step``, unless that is done, and remove what need not be kept."""
        if step in complete_steps(self.run.checkpoints):
            return
        target = self.run.checkpoint(step)
        if target.exists():  # left by a run that died before its manifest
            shutil.rmtree(target)
        samples = self.run.samples(step)
        shutil.rmtree(samples, ignore_errors=True)
        digest = await self.samples.save_samples(samples)
        await self.student.save(target, {**state, "step": step, "samples": digest})
        steps = complete_steps(self.run.checkpoints)
        keep = {*steps[-self.cfg.keep_last :], *([best_step] if self.cfg.keep_best else [])}
        for old in map(self.run.checkpoint, sorted({*steps} - keep)):
            (old / MANIFEST).unlink()  # without it a half-removed folder is incomplete, not corrupt
            shutil.rmtree(old)
            shutil.rmtree(old.with_name(f"{old.name}.samples"), ignore_errors=True)


def complete_steps(folder: Path) -> list[int]:
    """Steps with a complete checkpoint, ascending. A folder of another name (``step_00000002.bak``) is none."""
    return sorted(step for step, path in _folders(folder).items() if (path / MANIFEST).is_file())


def latest(run: RunDir) -> Path | None:
    """Newest complete checkpoint, if there is one; warns of incomplete ones."""
    steps = complete_steps(run.checkpoints)
    for step, path in sorted(_folders(run.checkpoints).items()):
        if step not in steps:
            logger.warning("%s is incomplete (no %s) and is ignored", path, MANIFEST)
    return run.checkpoint(steps[-1]) if steps else None


def _folders(folder: Path) -> dict[int, Path]:
    """Step -> its folder, complete or not."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return {int(path.name.removeprefix("step_")): path for path in paths if is_step_name(path.name) and path.is_dir()}

"""When checkpoints are written, which are kept, and which one a run resumes from."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mopd.config.output import CheckpointConfig
from mopd.run.folder import RunDir, is_step_name

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
"""Written last by ``mopd.student.checkpoints.checkpoint``: a folder without it is incomplete."""


class Saver(Protocol):
    """The student on all its ranks (``orchestrator/student.py``)."""

    async def is_saving(self) -> bool: ...
    async def save(self, folder: Path, state: Mapping[str, Any], *, is_async: bool) -> None: ...
    async def finish_save(self) -> None: ...


class SampleSaver(Protocol):
    """The ledger's samples, which the data plane may be able to save."""

    async def save_samples(self, folder: Path) -> str | None: ...


@dataclass(kw_only=True)
class Checkpointer:
    """Writer of ``checkpoints/step_N``, which keeps the newest ``keep_last`` and the best.

    With ``async_save`` a checkpoint is written while later steps go on, one at a time. Its completion is looked for at
    the end of each step; the next save, the last step and a request to stop wait for it. Until then nothing older is
    removed. An error that ends the run waits for it on every rank (``CheckpointThread``).
    """

    run: RunDir
    cfg: CheckpointConfig
    student: Saver
    samples: SampleSaver
    last_step: int

    def __post_init__(self) -> None:
        self._begun: tuple[int, int | None, float] | None = None
        """Step, best step and start time of the checkpoint that is being written."""
        self._numbers: dict[str, float] = {}

    async def save_if_due(self, step: int, state: Mapping[str, Any], *, best_step: int | None) -> None:
        """Save after ``step`` if it is a multiple of ``every_steps``, the last one or a new best; after the last step
        wait for completion."""
        if self._begun is not None and not await self.student.is_saving():
            await self.finish()
        is_new_best = self.cfg.keep_best and best_step == step
        if step % self.cfg.every_steps == 0 or step == self.last_step or is_new_best:
            await self.save(step, state, best_step=best_step)
        if step == self.last_step:
            await self.finish()

    async def save(self, step: int, state: Mapping[str, Any], *, best_step: int | None) -> None:
        """Save after ``step``, unless that is done or begun; once the checkpoint is whole, remove those that need not
        be kept."""
        if self._begun is not None and self._begun[0] == step:
            return
        await self.finish()
        if step in complete_steps(self.run.checkpoints):
            return
        with self._waiting():
            since = time.perf_counter()
            target = self.run.checkpoint(step)
            if target.exists():  # left by a run that died before its manifest
                shutil.rmtree(target)
            samples = self.run.samples(step)
            shutil.rmtree(samples, ignore_errors=True)
            digest = await self.samples.save_samples(samples)
            saved = {**state, "step": step, "samples": digest}
            await self.student.save(target, saved, is_async=self.cfg.async_save)
            self._begun = (step, best_step, since)
        if not self.cfg.async_save:
            await self.finish()

    async def finish(self) -> None:
        """Wait for the checkpoint that is being written, if there is one.

        Raises:
            UserError: it could not be written.
        """
        if self._begun is None:
            return
        (_, best_step, since), self._begun = self._begun, None
        with self._waiting():
            await self.student.finish_save()
            self._remove_old(best_step)
        self._numbers["timing/checkpoint_s"] = time.perf_counter() - since

    def take_numbers(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        numbers, self._numbers = self._numbers, {}
        return numbers

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Count the time of the block, in which no step goes on."""
        name, start = "timing/checkpoint_wait_s", time.perf_counter()
        yield
        self._numbers[name] = self._numbers.get(name, 0.0) + time.perf_counter() - start

    def _remove_old(self, best_step: int | None) -> None:
        steps = complete_steps(self.run.checkpoints)
        keep = {*steps[-self.cfg.keep_last :], *([best_step] if self.cfg.keep_best else [])}
        for old in map(self.run.checkpoint, sorted({*steps} - keep)):
            (old / MANIFEST).unlink()  # without it a half-removed folder is incomplete, not corrupt
            shutil.rmtree(old)
            shutil.rmtree(old.with_name(f"{old.name}.samples"), ignore_errors=True)


def complete_steps(folder: Path) -> list[int]:
    """Return the steps with a complete checkpoint, ascending. A folder of another name (``step_00000002.bak``) is left
    out."""
    return sorted(step for step, path in _folders(folder).items() if (path / MANIFEST).is_file())


def latest(run: RunDir) -> Path | None:
    """Return the newest complete checkpoint, if there is one; warn of incomplete ones."""
    steps = complete_steps(run.checkpoints)
    for step, path in sorted(_folders(run.checkpoints).items()):
        if step not in steps:
            logger.warning("%s is incomplete (no %s) and is ignored", path, MANIFEST)
    return run.checkpoint(steps[-1]) if steps else None


def _folders(folder: Path) -> dict[int, Path]:
    """Return step -> its folder, complete or not."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return {int(path.name.removeprefix("step_")): path for path in paths if is_step_name(path.name) and path.is_dir()}

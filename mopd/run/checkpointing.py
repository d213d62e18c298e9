"""When checkpoints are written, which are kept, and which one a run resumes from."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from mopd.config.schema import CheckpointConfig

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
"""Written last by ``mopd.student.checkpoints.checkpoint``: a folder without it is incomplete."""
_PREFIX = "step_"
_NAME = re.compile(r"step_([0-9]{8}|[1-9][0-9]{8,17})")


class Saver(Protocol):
    """The student on all its ranks."""

    async def save(self, folder: Path, state: Mapping[str, Any]) -> None: ...


class Checkpointer:
    """Writes ``checkpoints/step_N``; keeps the newest ``keep_last`` and the best."""

    def __init__(self, folder: Path, cfg: CheckpointConfig, student: Saver, *, last_step: int) -> None:
        self._folder = folder
        self._cfg = cfg
        self._student = student
        self._last_step = last_step

    async def save_if_due(self, step: int, state: Mapping[str, Any], *, best_step: int | None) -> bool:
        """Save after ``step`` when the rhythm, the last step or a new best asks for it; returns whether it did."""
        is_new_best = self._cfg.keep_best and best_step == step
        if step % self._cfg.every_steps and step != self._last_step and not is_new_best:
            return False
        target = self.path(step)
        if target.exists():  # left by a run that died before its manifest
            shutil.rmtree(target)
        await self._student.save(target, {**state, "step": step})
        self._remove_old(best_step if self._cfg.keep_best else None)
        return True

    def path(self, step: int) -> Path:
        """Folder of the checkpoint after ``step``."""
        return self._folder / folder_name(step)

    def _remove_old(self, best_step: int | None) -> None:
        steps = complete_steps(self._folder)
        keep = {*steps[-self._cfg.keep_last :], best_step}
        for step in steps:
            if step not in keep:
                # Without its manifest a half-removed folder is incomplete, not corrupt.
                (self.path(step) / MANIFEST).unlink()
                shutil.rmtree(self.path(step))


def folder_name(step: int) -> str:
    """Name of the folder of the checkpoint after ``step``."""
    return f"{_PREFIX}{step:08d}"


def is_step_name(name: str) -> bool:
    """Whether ``folder_name`` gives this name for some step."""
    return _NAME.fullmatch(name) is not None


def complete_steps(folder: Path) -> list[int]:
    """Steps with a complete checkpoint, ascending. A folder of another name (``step_00000002.bak``) is none."""
    return sorted(step for step, path in _folders(folder).items() if (path / MANIFEST).is_file())


def latest(folder: Path) -> Path | None:
    """Newest complete checkpoint, if there is one; warns of incomplete ones."""
    steps = complete_steps(folder)
    for step, path in sorted(_folders(folder).items()):
        if step not in steps:
            logger.warning("%s is incomplete (no %s) and is ignored", path, MANIFEST)
    return folder / folder_name(steps[-1]) if steps else None


def _folders(folder: Path) -> dict[int, Path]:
    """Step -> its folder, complete or not."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return {int(path.name.removeprefix(_PREFIX)): path for path in paths if is_step_name(path.name) and path.is_dir()}

"""The Python API: what the commands do, for a program or a notebook (``docs/api.md``). Light to import.

Each function goes its command's way: it calls the same functions, starts ranks as the command does, and raises the line
that the command would print as a ``UserError``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mopd.base.files.reading import shown_path
from mopd.base.files.writing import refusal
from mopd.base.hardware import this_hardware
from mopd.base.metrics import JsonlTail
from mopd.base.types import LostError, UserError
from mopd.cli import main
from mopd.cli import plan as plan_command
from mopd.cli import train as train_command
from mopd.cli.ranks import on_students_ranks
from mopd.config import schema
from mopd.config.load import Draft, Loaded, dump, load_recipe, to_tree
from mopd.launch.failure import STOPPED_CODE, Ended, is_rank
from mopd.launch.preparing import agreed
from mopd.run.checkpointing import MANIFEST, complete_steps
from mopd.run.folder import RunDir
from mopd.run.stopping import request_stop

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from mopd.cli.watching.status import RunStatus
    from mopd.launch.checks.inputs import Check
    from mopd.report.build import Report

WATCH_S = 0.5
"""Seconds between two looks into the run's folder for callbacks."""


class Recipe:
    """A checked recipe. Values are those of YAML, or objects of the schema: text, numbers, lists, mappings, ``None``.

    Example::

        recipe = mopd.Recipe.load("my.yaml", run_dir="runs/short", schedule={"steps": 10})
        recipe.values.schedule.steps  # 10
    """

    loaded: Loaded
    """The values and where each of them comes from, as the commands have them."""

    def __init__(self, **keys: Any) -> None:
        """Make a recipe from the sections of a recipe file (``docs/recipes.md``) as keywords.

        Raises:
            UserError: a key or value that a recipe file could not have either.
        """
        self.loaded = load_recipe(None, _overrides(keys))

    @classmethod
    def load(cls, path: str | Path, **overrides: Any) -> Recipe:
        """Read a recipe file. An override merges with the file's section; ``**{"schedule.steps": 10}`` names one key.

        Raises:
            UserError: file, line and key of what is wrong.
        """
        recipe = cls.__new__(cls)
        recipe.loaded = load_recipe(path, _overrides(overrides))
        return recipe

    @property
    def values(self) -> schema.Recipe:
        """All values, defaults included: frozen dataclasses, an attribute for each key."""
        return self.loaded.recipe

    def to_yaml(self) -> str:
        """Return the recipe file with every value and its origin, as ``mopd config`` prints it."""
        return dump(self.loaded)


class Run:
    """A run in its folder: one of ``train``, or any other, finished or not. It reads the files anew at each call."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One record a step (``docs/metrics.md``), as ``pandas.DataFrame`` takes them; empty before the first."""
        return RunDir(self.path).steps()

    @property
    def validations(self) -> list[dict[str, Any]]:
        """One record a validation: its ``step``, ``rewards`` by domain, ``examples`` of answers."""
        return RunDir(self.path).validations()

    @property
    def checkpoints(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return complete_steps(RunDir(self.path).checkpoints)

    def status(self) -> RunStatus:
        """Return what ``mopd status`` tells. ``UserError`` for a folder without a run."""
        from mopd.cli.watching.status import status_of

        return status_of(self.path)

    def report(self) -> Report:
        """Write ``report.html`` and ``report.json`` as ``mopd report`` does, and return the latter's content."""
        from mopd.report.build import build_report

        return build_report(self.path)

    def student(self, *, device: str = "cpu", dtype: str | None = None) -> PreTrainedModel:
        """Load the exported student with transformers; ``dtype`` is the recipe's ``student.dtype`` if absent.

        Raises:
            UserError: there is no export (yet), or it is damaged.
        """
        folder = self._export()
        import torch

        from mopd.engines.torch.loading import load_model

        dtype = dtype or str(RunDir(self.path).recipe_tree()["student"]["dtype"])
        return load_model(folder, dtype, torch.device(device))

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the exported student's tokenizer. Raises as ``student`` does."""
        folder = self._export()
        from mopd.conversion.hf.pretrained import load_tokenizer

        return load_tokenizer(folder)

    def stop(self) -> None:
        """Ask the run to end after its step, with a checkpoint, as ``mopd stop`` does; return at once."""
        request_stop(self.path, "Run.stop", is_users=True)

    def _export(self) -> Path:
        folder = RunDir(self.path).hf
        if not (folder / "config.json").is_file():
            raise UserError(f"{shown_path(folder)}: the run has no export: let it end, with checkpoint.export_hf: true")
        return folder


class Callback:
    """What a program does while a run goes on: override the methods that you need.

    They are called in the process and thread that called ``train``, at most ``WATCH_S`` after the run has written the
    event to its folder, in the order of steps. The ranks do not wait for them. Nothing that a callback does changes a
    step; ``run.stop()`` ends the run in order, and an exception ends it at once and leaves ``train``.
    """

    def on_step(self, run: Run, record: Mapping[str, Any]) -> None:
        """Take a step's record, as in ``Run.metrics``."""

    def on_validation(self, run: Run, record: Mapping[str, Any]) -> None:
        """Take a validation's record, as in ``Run.validations``; the one of step 0 is the untrained student's."""

    def on_checkpoint(self, run: Run, step: int) -> None:
        """Take the step of a checkpoint that is complete. One that was removed meanwhile is left out."""


def check(recipe: Recipe, *, static: bool = False) -> list[Check]:
    """Run the checks before a run, as ``mopd check``: what needs no model; then, unless ``static``, ranks with the
    models, which print their table.

    Returns:
        Outcomes of the checks that need no model: ``name``, ``status`` (ok, warning, skipped) and ``detail``.

    Raises:
        UserError: a line for each check that failed.
    """
    from mopd.launch.checks.static import StaticChecks

    draft = Draft(loaded=recipe.loaded, problems=(), broken=frozenset())
    checks = list(StaticChecks(draft, this_hardware()).run())
    failed = [one.detail for one in checks if one.status == "failed"]
    if failed:
        raise UserError("\n".join(failed))
    if not static:
        words = ["check", _recipe_file(recipe)]
        _on_ranks(lambda: on_students_ranks(agreed(lambda: recipe.loaded, "check"), words, lambda: None))
    return checks


def plan(
    recipe: Recipe,
    *,
    gpu: str | None = None,
    gpu_memory: float | None = None,
    tflops: float | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    prompt_length: float | None = None,
    response_length: float | None = None,
    image_length: float = 0.0,
) -> dict[str, Any]:
    """Plan a run, with the options that ``mopd plan`` has under these names.

    Returns:
        What ``mopd plan --json`` prints: ``places``, ``ranks``, ``replicas``, ``times``, … in bytes and seconds.

    Raises:
        UserError: what cannot fit, by key, or options that do not go together.
    """
    from mopd.planning.plan import make_plan

    args = argparse.Namespace(
        gpu=gpu,
        gpu_memory=gpu_memory,
        tflops=tflops,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        prompt_length=prompt_length,
        response_length=response_length,
        image_length=image_length,
        configs=None,
        probe=False,
        suggest=False,
    )
    loaded, given, pool, rates = plan_command.given_of(args, recipe.loaded)
    made = make_plan(given, pool, rates)
    plan_command.refuse(loaded, made)
    return plan_command.plain_plan(loaded, made, rates)


def train(
    recipe: Recipe,
    *,
    resume: bool | Literal["auto"] = False,
    from_step: int | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Train as ``mopd train`` does on one machine: start the ranks and wait for their end.

    Call it in the main thread. Ctrl-C ends the run at once, SIGTERM or ``Run.stop`` after its step.

    Args:
        resume: go on with the run in ``run_dir``; ``"auto"``: if there is one.
        from_step: resume from the checkpoint of this step instead of the newest.
        callbacks: are told of steps, validations and checkpoints.

    Returns:
        The run, which was trained to its end, or was asked to stop (``Run.status``).

    Raises:
        UserError: the line that the command would end with; ``exit_code`` 69 where a process was lost.
        RuntimeError: a rank failed; its traceback is on standard error.
    """
    words = ["train", _recipe_file(recipe)]
    if from_step is not None:
        words += ["--resume", "--from", f"step_{from_step}"]
    elif resume:
        words.append("--resume=auto" if resume == "auto" else "--resume")
    run = Run(recipe.values.run_dir)
    start = max(run.checkpoints, default=-1) if from_step is None else from_step
    events = Events(run, callbacks, after_step=start)
    args = main.parse(words)
    _on_ranks(lambda: train_command.start(lambda: recipe.loaded, args, words, events.watch))
    events.deliver()
    return run


def _overrides(keys: Mapping[str, Any]) -> list[str]:
    """Return keys and their values as a command line has them."""
    texts = []
    for key, value in keys.items():
        try:
            texts.append(f"{key}={json.dumps(to_tree(value), ensure_ascii=False, default=os.fspath)}")
        except (TypeError, ValueError) as error:
            raise UserError(f"{key}: no value of a recipe ({error}): give text, numbers, lists or mappings") from error
    return texts


def _recipe_file(recipe: Recipe) -> str:
    """Return the recipe's name on the ranks' command line. They have it from the launcher, and do not read a file."""
    return os.path.abspath(RunDir(recipe.values.run_dir).recipe)


def _on_ranks(start: Callable[[], Ended]) -> None:
    """Start ranks, and raise how they ended; return where they ended well or were asked to stop."""
    if is_rank():
        raise UserError("mopd starts the ranks by itself: run this program without torchrun")
    if threading.current_thread() is not threading.main_thread():
        raise UserError("signals end the ranks, and only the main thread receives them: call mopd there")
    try:
        ended = start()
    except OSError as error:
        refused = refusal(error)
        if refused is None:
            raise
        raise refused from error
    if ended.code in (UserError.exit_code, LostError.exit_code):
        raise (UserError if ended.code == UserError.exit_code else LostError)(ended.line)
    if ended.code == 128 + signal.SIGINT:
        raise KeyboardInterrupt(ended.line)
    if ended.code not in (0, STOPPED_CODE):
        raise RuntimeError(ended.line)


class Events:
    """Follows the files of a run, and tells callbacks what is new in them."""

    def __init__(self, run: Run, callbacks: Sequence[Callback], *, after_step: int, is_cut: bool = False) -> None:
        """Begin behind a step, -1 for the run's beginning. Unless ``is_cut`` the run has not begun, and what is there
        of later steps will be cut."""
        self._run, self._callbacks, self._next_s = run, callbacks, 0.0
        folder = RunDir(run.path)
        self._records = [
            JsonlTail(path, after_step=after_step, is_cut=is_cut) for path in (folder.metrics, folder.validation)
        ]
        self._checkpoints = {one for one in self._complete() if one[0] <= after_step or not is_cut}

    def watch(self) -> None:
        """Call this often: it looks into the folder every ``WATCH_S``."""
        if time.monotonic() >= self._next_s:
            self.deliver()
            self._next_s = time.monotonic() + WATCH_S

    def deliver(self) -> None:
        """Call the callbacks for everything that is new."""
        if not self._callbacks:
            return
        events: list[tuple[int, int, Any]] = []
        for kind, tail in enumerate(self._records):
            events += [(record["step"], kind, record) for record in tail.new()]
        complete = self._complete()
        events += [(step, 2, step) for step, _ in complete - self._checkpoints]
        self._checkpoints |= complete
        for _, kind, what in sorted(events, key=lambda event: event[:2]):
            for callback in self._callbacks:
                (callback.on_step, callback.on_validation, callback.on_checkpoint)[kind](self._run, what)

    def _complete(self) -> set[tuple[int, int]]:
        """Return step and time of each complete checkpoint: a run that went back writes later ones anew."""
        folder, found = RunDir(self._run.path), set()
        for step in self._run.checkpoints:
            with suppress(FileNotFoundError):  # removed since it was listed
                found.add((step, (folder.checkpoint(step) / MANIFEST).stat().st_mtime_ns))
        return found

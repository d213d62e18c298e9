"""Where numbers go during a run: ``metrics.jsonl``, the terminal, TensorBoard and, if asked, Weights & Biases."""

from __future__ import annotations

import math
import os
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from mopd.base.files.writing import write_text, writing
from mopd.base.metrics import JsonlWriter, StepMetrics, truncate_jsonl
from mopd.base.text import one_line, visible
from mopd.base.types import UserError
from mopd.config.load import to_tree
from mopd.config.output import WandBConfig
from mopd.config.schema import Recipe
from mopd.report.progress import make_progress
from mopd.report.run_files import RunFiles
from mopd.report.terminal import Terminal


class Sink(Protocol):
    """Takes numbers; never changes them."""

    def log(self, metrics: StepMetrics) -> None: ...
    def log_validation(self, step: int, rewards: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class Sinks:
    """All sinks of one run, on rank 0. Every call goes to each of them in turn."""

    def __init__(
        self, recipe: Recipe, run_dir: Path, *, resume_step: int | None, console: Terminal | None = None
    ) -> None:
        """Open the sinks that ``recipe.metrics`` asks for.

        Args:
            run_dir: the run's folder; it exists.
            resume_step: step that a resumed run goes on from: ``metrics.jsonl`` is cut after it. ``None``: a fresh run.
            console: the terminal; standard output when absent.

        Raises:
            UserError: Weights & Biases refuses, or ``metrics.jsonl`` is damaged.
        """
        files = RunFiles(run_dir)
        if resume_step is not None:
            truncate_jsonl(files.metrics, after_step=resume_step)
        self._sinks: list[Sink] = []
        with ExitStack() as unwind:  # if a later sink cannot open, close those that did

            def add(sink: Sink) -> None:
                unwind.callback(sink.close)
                self._sinks.append(sink)

            add(JsonlSink(files.metrics))
            if recipe.metrics.tensorboard:
                add(TensorBoardSink(run_dir / "tensorboard", resume_step))
            if recipe.metrics.wandb is not None:
                add(WandBSink(recipe.metrics.wandb, run_dir, to_tree(recipe)))
            # Last: its live display must not be open while another sink fails.
            terminal, steps = console or Terminal(), recipe.schedule.steps
            add(make_progress(terminal, steps, resume_step or 0, files.last_rewards()))
            self._close = unwind.pop_all().close

    def log(self, metrics: StepMetrics) -> None:
        """One step's numbers."""
        for sink in self._sinks:
            sink.log(metrics)

    def log_validation(self, step: int, rewards: Mapping[str, float]) -> None:
        """Mean reward by domain on the validation prompts after ``step`` optimizer steps."""
        for sink in self._sinks:
            sink.log_validation(step, rewards)

    def close(self) -> None:
        """Flush and close everything."""
        self._close()


class JsonlSink:
    """``metrics.jsonl``: one line per step. Validation has a file of its own."""

    def __init__(self, path: Path) -> None:
        self._writer = JsonlWriter(path)

    def log(self, metrics: StepMetrics) -> None:
        self._writer.write(metrics.record)

    def log_validation(self, step: int, rewards: Mapping[str, float]) -> None:
        """Nothing: ``validation.jsonl`` is written by whoever validates."""

    def close(self) -> None:
        self._writer.close()


class TensorBoardSink:
    """TensorBoard event files; ``kl_k1/math`` becomes the chart ``math`` of the group ``kl_k1``.

    Written here, not by torch's ``SummaryWriter``: its thread would meet a full disk behind the run's back.
    """

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        # Imported here: it takes a second, and a recipe may do without it.
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard.summary import scalar

        self._event, self._scalar = event_pb2.Event, scalar
        # TensorBoard takes files by this prefix, in the order of their names.
        self._path = folder / f"events.out.tfevents.{time.time():.6f}.{os.getpid()}"
        with writing(self._path):
            folder.mkdir(parents=True, exist_ok=True)
            self._records = RecordWriter(self._path.open("wb", buffering=0))
        self._write(file_version="brain.Event:2")
        if resume_step is not None:  # what stands in older files above this step is superseded
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(step=resume_step + 1, session_log=start)

    def log(self, metrics: StepMetrics) -> None:
        for name, value in metrics.values.items():
            self._write(step=metrics.step, summary=self._scalar(visible(name), value))

    def log_validation(self, step: int, rewards: Mapping[str, float]) -> None:
        for domain, reward in rewards.items():
            self._write(step=step, summary=self._scalar(visible(f"reward/{domain}"), reward))

    def close(self) -> None:
        self._records.close()

    def _write(self, **fields: Any) -> None:
        with writing(self._path):
            self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())


class WandBSink:
    """A Weights & Biases run, found again at resume by the id kept in ``wandb_id`` of the run folder."""

    def __init__(self, cfg: WandBConfig, run_dir: Path, recipe_tree: Mapping[str, Any]) -> None:
        import wandb

        id_file = run_dir / "wandb_id"
        if not id_file.exists():
            write_text(id_file, uuid.uuid4().hex)
        try:
            self._run = wandb.init(
                project=cfg.project,
                name=cfg.name or run_dir.resolve().name,
                mode=cfg.mode,
                dir=str(run_dir),
                id=RunFiles(run_dir).wandb_id(),
                resume="allow",
                config=dict(recipe_tree),
            )
        except wandb.Error as error:
            raise UserError(
                f"metrics.wandb: {one_line(error)}: run wandb login, or set metrics.wandb.mode: offline"
            ) from error
        # Our own axis: W&B's refuses steps below the last one it saw, and a resume repeats some.
        self._run.define_metric("*", step_metric="step")

    def log(self, metrics: StepMetrics) -> None:
        finite = {name: value for name, value in metrics.values.items() if math.isfinite(value)}
        self._run.log({"step": metrics.step, **finite})

    def log_validation(self, step: int, rewards: Mapping[str, float]) -> None:
        self._run.log({"step": step, **{f"reward/{domain}": reward for domain, reward in rewards.items()}})

    def close(self) -> None:
        self._run.finish()

"""Where numbers go during a run: ``metrics.jsonl``, the terminal, TensorBoard and, if asked, Weights & Biases.

The terminal shows a live table with a bar, or plain lines where output is no terminal (a log, a pipe).
"""

from __future__ import annotations

import math
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from mopd.base.files.writing import write_text, writing
from mopd.base.metrics import JsonlWriter, StepMetrics, truncate_jsonl
from mopd.base.text import one_line, visible
from mopd.base.types import UserError
from mopd.config.load import to_tree
from mopd.config.output import WandBConfig
from mopd.config.schema import Recipe
from mopd.report.groups import ALL, BREAKER_STATES, LATENCY_HEADING, Room, group_values, label, latencies, trouble
from mopd.report.pipeline import ages_line, pipeline_line, summarise_ages, summarise_pipeline
from mopd.report.run_files import RunFiles
from mopd.report.terminal import Terminal, make_table


class Sink:
    """Destination of a run's numbers; it never changes them."""

    def log(self, metrics: StepMetrics) -> None:
        """Take one step's numbers."""

    def log_validation(self, step: int, rewards: Mapping[str, float]) -> None:
        """Take the mean rewards by domain of a validation."""

    def close(self) -> None:
        """Flush and release what the sink holds."""


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
        """Pass one step's numbers to every sink."""
        for sink in self._sinks:
            sink.log(metrics)

    def log_validation(self, step: int, rewards: Mapping[str, float]) -> None:
        """Pass on the mean reward by domain on the validation prompts after ``step`` optimizer steps."""
        for sink in self._sinks:
            sink.log_validation(step, rewards)

    def close(self) -> None:
        """Flush and close everything."""
        self._close()


class JsonlSink(JsonlWriter, Sink):
    """Writer of ``metrics.jsonl``: one line per step. The validation writes ``validation.jsonl`` itself."""

    def log(self, metrics: StepMetrics) -> None:
        self.write(metrics.record)


class TensorBoardSink(Sink):
    """Writer of TensorBoard event files; ``kl_k1/math`` becomes the chart ``math`` of the group ``kl_k1``.

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


def verify_wandb(cfg: WandBConfig) -> None:
    """Ask the server of Weights & Biases whether it takes this machine's credentials: before ranks start, as its run is
    only opened after the preflight.

    Raises:
        UserError: it refuses them, or does not answer within W&B's own deadline.
    """
    if cfg.mode == "online":
        import wandb

        with _refused_by(wandb.Error):
            wandb.login(verify=True)


@contextmanager
def _refused_by(kind: type[Exception]) -> Iterator[None]:
    """Turn W&B's errors into one line."""
    try:
        yield
    except kind as error:
        raise UserError(
            f"metrics.wandb: {one_line(error)}: run wandb login, or set metrics.wandb.mode: offline"
        ) from error


class WandBSink(Sink):
    """Sink to a Weights & Biases run, found again at resume by the id kept in ``wandb_id`` of the run folder."""

    def __init__(self, cfg: WandBConfig, run_dir: Path, recipe_tree: Mapping[str, Any]) -> None:
        import wandb

        id_file = run_dir / "wandb_id"
        if not id_file.exists():
            write_text(id_file, uuid.uuid4().hex)
        with _refused_by(wandb.Error):
            self._run = wandb.init(
                project=cfg.project,
                name=cfg.name or run_dir.resolve().name,
                entity=cfg.entity,
                group=cfg.group,
                tags=cfg.tags,
                mode=cfg.mode,
                dir=str(run_dir),
                id=RunFiles(run_dir).wandb_id(),
                resume="allow",
                config=dict(recipe_tree),
            )
        # Our own axis: W&B's refuses steps below the last one it saw, and a resume repeats some.
        self._run.define_metric("*", step_metric="step")

    def log(self, metrics: StepMetrics) -> None:
        finite = {name: value for name, value in metrics.values.items() if math.isfinite(value)}
        self._run.log({"step": metrics.step, **finite})

    def log_validation(self, step: int, rewards: Mapping[str, float]) -> None:
        self._run.log({"step": step, **{f"reward/{domain}": reward for domain, reward in rewards.items()}})

    def close(self) -> None:
        self._run.finish()


LINE_EVERY_S = 10.0
"""Least time between two plain lines, however fast the steps are."""
COLUMNS = {"kl_k1": "KL", "loss": "loss", "topk_overlap": "overlap", "response_length": "length"}
"""Metric -> heading of the live table. Overlap comes on diagnostic steps only and stays until the next."""
FLOOR = "kl_floor"
"""Metric that does not change in a run, and is missing where the teachers could not be compared with their folders."""


def make_progress(console: Terminal, steps: int, start_step: int, rewards: Mapping[str, float]) -> Sink:
    """Make the progress that suits ``console``. ``rewards`` are those of the last validation, empty before it."""
    if console.is_terminal:
        return LiveProgress(console, steps, start_step, rewards)
    return PlainProgress(console, steps, start_step)


class LiveProgress(Sink):
    """Live table with a row per domain, and a bar with the time left."""

    def __init__(self, console: Terminal, steps: int, start_step: int, rewards: Mapping[str, float]) -> None:
        self._rows: dict[str, dict[str, float]] = {}
        self._rewards = dict(rewards)
        self._validated = ""
        self._groups: dict[str, Room] = {}
        self._pipeline: list[str] = []
        bar = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None), TextColumn("{task.description}"))
        self._bar = Progress(*bar, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), expand=True)
        self._task = self._bar.add_task("", total=steps, completed=start_step)
        self._live = Live(console=console, get_renderable=self._draw, refresh_per_second=2)
        self._live.start()

    def log(self, metrics: StepMetrics) -> None:
        for metric in (*COLUMNS, FLOOR):
            for domain, value in metrics.by_domain(metric).items():
                self._rows.setdefault(domain, {})[metric] = value
        self._groups = group_values(metrics.values)
        self._pipeline = _pipeline(metrics)
        self._bar.update(self._task, completed=metrics.step, description=_speed(metrics))

    def log_validation(self, step: int, rewards: Mapping[str, float]) -> None:
        self._rewards = dict(rewards)
        self._validated = f" at {step}"

    def close(self) -> None:
        self._live.stop()

    def _draw(self) -> Group:
        table = Table(box=None, pad_edge=False)
        table.add_column("domain", overflow="fold")
        columns = {**COLUMNS, FLOOR: "KL floor"} if any(FLOOR in row for row in self._rows.values()) else COLUMNS
        for heading in (*columns.values(), f"reward{self._validated}"):
            table.add_column(heading, justify="right")
        for domain in sorted({*self._rows, *self._rewards}):
            row = self._rows.get(domain, {})
            cells = [_number(row.get(metric)) if metric != FLOOR else _tiny(row.get(metric)) for metric in columns]
            table.add_row(domain, *cells, _number(self._rewards.get(domain)))
        below = [_group_table(self._groups)] if self._groups else []
        return Group(table, *below, *self._pipeline, self._bar)


class PlainProgress(Sink):
    """Lines for the first step, the last, some between, and each validation."""

    def __init__(
        self, console: Terminal, steps: int, start_step: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._steps = steps
        self._start_step = start_step
        self._clock = clock
        self._started = clock()
        self._last_line = -math.inf
        self._trouble: list[str] = []

    def log(self, metrics: StepMetrics) -> None:
        self._log_trouble(metrics)
        now = self._clock()
        if metrics.step < self._steps and now - self._last_line < LINE_EVERY_S:
            return
        self._last_line = now
        left = (now - self._started) / (metrics.step - self._start_step) * (self._steps - metrics.step)
        by_domain = "  ".join(f"{domain} {_number(value)}" for domain, value in metrics.by_domain("kl_k1").items())
        floors = metrics.by_domain(FLOOR)
        if floors and metrics.step == self._start_step + 1:
            self._line("  KL floor  " + "  ".join(f"{domain} {_tiny(value)}" for domain, value in floors.items()))
        self._line(
            f"step {metrics.step}/{self._steps}  loss {_number(metrics.values['loss'])}  KL {by_domain}  "
            f"{_speed(metrics)}  {_duration(left)} left"
        )
        for room, names in group_values(metrics.values).items():
            rates = (
                f"{'' if name == ALL else f'{name} '}{_rate(values)}"
                for name, values in names.items()
                if "replicas" in values
            )
            self._line(f"  {room}  {'  '.join(rates)}")
        for text in _pipeline(metrics):
            self._line(f"  {text}")

    def log_validation(self, step: int, rewards: Mapping[str, float]) -> None:
        by_domain = "  ".join(f"{domain} {_number(reward)}" for domain, reward in rewards.items())
        self._line(f"step {step}/{self._steps}  reward {by_domain}")

    def _log_trouble(self, metrics: StepMetrics) -> None:
        """Print at once, and once, that a replica stops working or works again."""
        texts = trouble(metrics.values)
        for text in texts:
            if text not in self._trouble:
                self._line(f"step {metrics.step}/{self._steps}  {text}")
        for text in self._trouble:
            if text not in texts and text.rsplit(" ", 1)[-1] in BREAKER_STATES:
                self._line(f"step {metrics.step}/{self._steps}  {text.rsplit(' ', 1)[0]} works again")
        self._trouble = texts

    def _line(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)


def _group_table(groups: Mapping[str, Room]) -> Table:
    """Make a table of each group's and replica's rates and state in the last step."""
    headings = map(Text, ("group", "up", "tok/s", LATENCY_HEADING, "MB", "queue", "in\nflight", "retries"))
    table = make_table(*headings, box=None, pad_edge=False)
    for room, names in groups.items():
        for name, values in names.items():
            is_group = "replicas" in values
            up = f"{values['replicas_up']:.0f}/{values['replicas']:.0f}" if is_group else _state(values)
            rate = _short(values["tokens_per_s"]) if "tokens_per_s" in values else ""
            times = latencies(*(values.get(f"latency_{p}_s") for p in ("p50", "p95", "p99")))
            megabytes = _short(values["payload_bytes"] / 1e6) if "payload_bytes" in values else ""
            counts = ("queue_depth", "in_flight_tokens", "retries" if is_group else "failures")
            cells = (f"{values[key]:.0f}" if key in values else "" for key in counts)
            table.add_row(label(room, name), up, rate, times, megabytes, *cells)
    return table


def _pipeline(metrics: StepMetrics) -> list[str]:
    """Return lines on the stages' shares and the samples' ages in this step; none if they are not recorded."""
    pipeline, ages = summarise_pipeline([metrics.values]), summarise_ages([metrics.values])
    lines = ["" if pipeline is None else pipeline_line(pipeline), "" if ages is None else ages_line(ages)]
    return [line for line in lines if line]


def _rate(values: Mapping[str, float]) -> str:
    parts = [f"{values['tokens_per_s']:,.0f} tokens/s"] if "tokens_per_s" in values else ["idle"]
    if "latency_p95_s" in values:
        parts.append(f"p95 {values['latency_p95_s']:.3g} s")
    if "payload_bytes" in values:
        parts.append(f"{_short(values['payload_bytes'] / 1e6)} MB")
    return " ".join(parts)


def _state(values: Mapping[str, float]) -> str:
    return BREAKER_STATES[int(values["breaker"])]


def _speed(metrics: StepMetrics) -> str:
    seconds = metrics.values.get("timing/step_s")
    rate = metrics.values.get("rate/train_tokens_per_s")
    parts = [] if seconds is None else [f"{seconds:.2f} s/step"]
    return "  ".join(parts if rate is None else [*parts, f"{rate:,.0f} tokens/s"])


def _short(value: float) -> str:
    """Write three digits, without powers of ten."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _tiny(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}" if abs(value) >= 100 else f"{value:.3f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

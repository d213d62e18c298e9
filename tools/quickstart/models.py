"""Train one tiny model, save it as a Hugging Face folder and measure it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mopd.conversion.hf.pretrained import load_weights
from tools.quickstart.tasks import Question
from tools.quickstart.training import Phase, exact_match, new_model, train

LINE_EVERY_S = 10.0


class ModelMaker:
    """Trains with one set of numbers and measures on one set of validation questions (by domain)."""

    def __init__(
        self,
        tokenizer: transformers.PreTrainedTokenizerFast,
        validation: dict[str, list[Question]],
        *,
        seed: int,
        shape: dict[str, int],
        batch_size: int,
        lr: float,
        threads: int,
    ) -> None:
        if threads:
            torch.set_num_threads(threads)
        transformers.logging.disable_progress_bar()
        self._tokenizer = tokenizer
        self._validation = validation
        self._held_out = frozenset(question.prompt for asked in validation.values() for question in asked)
        self._seed = seed
        self._shape = shape
        self._batch_size = batch_size
        self._lr = lr

    def make(
        self,
        out: Path,
        start: Path | None,
        domains: tuple[str, ...],
        lengths: tuple[int, int],
        steps: int,
        *,
        shows_answers: bool = False,
    ) -> dict[str, Any]:
        """Train on ``domains`` from the folder ``start`` (``None``: fresh weights) and save into ``out``.

        Returns exact match by domain, without answers in the prompts, and the seconds of training.
        """
        if start is None:
            model = new_model(self._tokenizer, self._shape, self._seed)
        else:
            model, _ = load_weights(start, torch.float32)
        label = "base" if start is None else f"expert in {domains[0]}"
        phase = Phase(domains, lengths, steps, self._batch_size, self._lr, f"{label}/{self._seed}", shows_answers)
        with progress(label, steps) as report:
            seconds = train(model, self._tokenizer, phase, self._held_out, report)
        model.save_pretrained(out)
        self._tokenizer.save_pretrained(out)
        scores = {name: exact_match(model, self._tokenizer, asked) for name, asked in self._validation.items()}
        return {"exact_match": scores, "train_s": round(seconds, 1)}


@contextmanager
def progress(label: str, steps: int) -> Iterator[Callable[[int, float], None]]:
    """A bar on a terminal; elsewhere a line now and then, and one at the end."""
    if sys.stdout.isatty():
        columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, TextColumn("loss {task.fields[loss]:.3f}")) as bar:
            task = bar.add_task(label, total=steps, loss=float("nan"))
            yield lambda step, loss: bar.update(task, completed=step, loss=loss)
        return
    last = time.monotonic()

    def line(step: int, loss: float) -> None:
        nonlocal last
        if step == steps or time.monotonic() - last >= LINE_EVERY_S:
            last = time.monotonic()
            print(f"{label}: step {step}/{steps}  loss {loss:.3f}", flush=True)

    yield line

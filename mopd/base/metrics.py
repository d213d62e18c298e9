"""Measurements of a run: times of phases, one flat record per step, and the files of records. Light to import.

Names of a record are flat: ``kl_k1/math`` is a metric of one domain, ``timing/rollout_s`` a time. ``docs/metrics.md``
explains each.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mopd.base.files.json_text import parse_json
from mopd.base.files.reading import open_regular, shown_path
from mopd.base.files.writing import append_whole, writing
from mopd.base.types import Batch, DomainSums, UserError

GROUP_ROOMS = ("teachers", "rollout")
"""First parts of the names of groups' numbers: ``teachers/latency_p95_s/math``, ``rollout/latency_p95_s``."""
VOLATILE_PREFIXES = ("timing/", "rate/", "memory/", "hub/", *(f"{room}/" for room in GROUP_ROOMS))
"""Metrics of the machine, not of domains: all times, rates and memory among them differ between two equal runs."""
MAX_LINE_BYTES = 64 * 2**20
"""Longest record in bytes; those of validation hold prompts and responses."""
MAX_STEP = 2**53
TOKEN_MEANS = {"k1": "kl_k1", "k3": "kl_k3", "clamped": "clamped_share", "tail_floored": "tail_floored_share"}
TOKEN_MEANS |= {"score": "token_score"}
"""Final names of the student's sums that are renamed as means over tokens; other sums keep their name."""
BATCH_SHARES = {"weight": "loss_weight_share", "weighted_loss": "loss_share", "gradient_squares": "gradient_share"}
"""The student's sums of which each domain's share of the step is told, and the names of the shares."""
OF_ALL_TOKENS = {"k1", "k3", "teacher_mass", "student_mass", "rollout_kl", "entropy", "topk_overlap", "score"}
"""The student's sums over all loss tokens; the others hold those that ``loss.tokens`` lets count."""
SAMPLE_SHARES = {"masked_sequences": "masked_sequences_share"}
"""The student's sums that count samples, and the names of their shares."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """The numbers of one optimizer step.

    Example: ``StepMetrics(step=3, values={"loss": 0.2, "kl_k1/math": 0.1, "timing/step_s": 1.5})``.
    """

    step: int
    """Optimizer steps done, this one included."""
    values: Mapping[str, float]

    def by_domain(self, metric: str) -> dict[str, float]:
        """Return the values of ``metric/<domain>`` by domain."""
        start = f"{metric}/"
        return {name.removeprefix(start): value for name, value in self.values.items() if name.startswith(start)}

    def plus(self, values: Mapping[str, float]) -> StepMetrics:
        """Return these numbers and more. ``ValueError`` for a name that exists already."""
        again = sorted(set(values) & set(self.values))
        if again:
            raise ValueError(f"metrics {', '.join(again)} of step {self.step} are given twice")
        return StepMetrics(step=self.step, values={**self.values, **values})

    @property
    def record(self) -> dict[str, float | None]:
        """One line of ``metrics.jsonl``; NaN and infinity, which JSON does not have, are null."""
        return {"step": self.step, **{k: v if math.isfinite(v) else None for k, v in self.values.items()}}


class StepTimer:
    """Measures the seconds of each phase since the last ``flush``. Phases may overlap, and so may blocks of one phase
    (many prompts are sampled at a time): a phase lasts while at least one of its blocks is open.

    Example::

        timer.begin()
        with timer("rollout"):
            ...
        timer.flush()  # {"rollout": 1.2, "step": 1.3}
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._open: dict[str, int] = {}
        """Phase -> number of its open blocks."""
        self._since: dict[str, float] = {}
        """Phase with an open block -> time from which on it is not in ``_seconds`` yet."""
        self._begun: float | None = None

    def begin(self) -> None:
        """Begin a step. The time between a flush and this (validation, checkpoints) belongs to no step, nor do the
        phases that run meanwhile."""
        self._begun = self._clock()
        self._seconds = {}
        self._since = dict.fromkeys(self._since, self._begun)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the ``with`` block to ``phase``, also if it raises."""
        if not self._open.get(phase):
            self._since[phase] = self._clock()
        self._open[phase] = self._open.get(phase, 0) + 1
        try:
            yield
        finally:
            self._open[phase] -= 1
            if not self._open[phase]:
                self._add(phase, self._clock())
                del self._since[phase]

    def flush(self) -> dict[str, float]:
        """Return the seconds since ``begin`` of each phase, running ones up to now, and of ``step``. Starts anew."""
        now = self._clock()
        for phase in self._since:
            self._add(phase, now)
        seconds, self._seconds = self._seconds, {}
        if self._begun is not None:
            seconds["step"] = now - self._begun
            self._begun = None
        return seconds

    def _add(self, phase: str, now: float) -> None:
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._since[phase]
        self._since[phase] = now


def merge_step(
    step: int,
    *,
    batch: Batch,
    sums: Mapping[str, DomainSums],
    values: Mapping[str, float],
    timings: Mapping[str, float],
) -> StepMetrics:
    """Build one step's record.

    Args:
        batch: the samples that were trained on.
        sums: the student's sums over loss tokens by domain; each becomes a mean, ``<metric>/<domain>``.
        values: numbers that have their final name (``grad_norm``, ``lr``, …).
        timings: seconds by phase, as ``StepTimer.flush`` returns them.

    ``loss`` is what the optimizer minimised (sum of ``weighted_loss``). ``rate/train_tokens_per_s`` counts prompt and
    response tokens of the batch over the whole step, rollout and scoring included.
    """
    flat = {"loss": math.fsum(domain.sums["weighted_loss"] for domain in sums.values()), **values}
    for domain, of_domain in sorted(sums.items()):
        for name, total in of_domain.sums.items():
            if name in SAMPLE_SHARES:
                num_samples = sum(sample.domain == domain for sample in batch.samples)
                flat[f"{SAMPLE_SHARES[name]}/{domain}"] = total / num_samples
            elif name == "loss_tokens":
                flat[f"loss_tokens_share/{domain}"] = total / of_domain.num_tokens
            elif name == "chosen_score":
                whole = of_domain.sums["score"]
                flat[f"chosen_score_share/{domain}"] = total / whole if whole else 1.0
            elif name not in BATCH_SHARES:
                count = of_domain.num_tokens if name in OF_ALL_TOKENS else of_domain.sums.get("loss_tokens")
                flat[f"{TOKEN_MEANS.get(name, name)}/{domain}"] = total / (count or of_domain.num_tokens)
        flat[f"num_tokens/{domain}"] = float(of_domain.num_tokens)
    flat |= _lengths(batch)
    flat["tokens"] = float(batch.num_tokens)
    flat |= {f"timing/{phase}_s": seconds for phase, seconds in timings.items()}
    if timings.get("step"):
        flat["rate/train_tokens_per_s"] = batch.num_tokens / timings["step"]
    return StepMetrics(step=step, values=flat)


def share_metrics(
    batch: Batch, sums: Mapping[str, DomainSums], *, prompts: Mapping[str, float], budget: Mapping[str, float]
) -> dict[str, float]:
    """Return each domain's shares of a step: of samples, loss tokens, the loss's weight, the loss, and the gradient of
    the hidden states at the LM head; 0 for a domain that the batch does not have.

    Args:
        prompts: share that the stream gives each domain of the data.
        budget: share of the loss's weight that each domain is to get; empty for none.

    A loss may be negative (policy gradient), so the share is that of its absolute value. The gradient's share is of the
    sum over domains of its norm.
    """
    amounts: dict[str, dict[str, float]] = {
        "prompts_share": dict(Counter(sample.domain for sample in batch.samples)),
        "tokens_share": {domain: one.num_tokens for domain, one in sums.items()},
    }
    for name, share in BATCH_SHARES.items():
        found = {domain: abs(one.sums[name]) for domain, one in sums.items() if name in one.sums}
        amounts[share] = {d: math.sqrt(value) for d, value in found.items()} if name == "gradient_squares" else found
    values = {f"prompts_share_target/{domain}": share for domain, share in prompts.items()}
    values |= {f"loss_weight_share_target/{domain}": share for domain, share in budget.items()}
    for share, amount in amounts.items():
        total = math.fsum(amount.values())
        values |= {f"{share}/{domain}": amount.get(domain, 0.0) / total for domain in prompts if total > 0}
    if budget:
        values["absent_domains"] = float(sum(domain not in sums for domain in budget))
    return values


def age_metrics(batch: Batch, weight_version: int, ages: Sequence[int], *, max_staleness: int) -> dict[str, float]:
    """Return how many optimizer steps the weights behind a batch's tokens lag ``weight_version``, the weights that
    train on it.

    That is the lag of the oldest token. If ``max_staleness`` allows any, also the share of samples of each of the
    ``ages``, which it bounds, and the number of versions in a response.
    """
    values = {"staleness": float(max(weight_version - sample.weight_version for sample in batch.samples))}
    if max_staleness:
        values |= {f"staleness_share/{age}": ages.count(age) / len(ages) for age in range(max_staleness + 1)}
        versions = [sample.num_versions for sample in batch.samples]
        values |= {
            "response_versions/mean": sum(versions) / len(versions),
            "response_versions/max": float(max(versions)),
        }
    return values


def horizon_metrics(batch: Batch, horizon: int) -> dict[str, float]:
    """Return the step's horizon, and the share of responses by domain that were stopped at theirs."""
    values = {"horizon": float(horizon)}
    for domain in sorted({sample.domain for sample in batch.samples}):
        stopped = [sample.at_horizon for sample in batch.samples if sample.domain == domain]
        values[f"at_horizon_share/{domain}"] = sum(stopped) / len(stopped)
    return values


def _lengths(batch: Batch) -> dict[str, float]:
    """Return response lengths, truncation, repetition and sample counts by domain."""
    flat = {}
    for domain in sorted({sample.domain for sample in batch.samples}):
        samples = [sample for sample in batch.samples if sample.domain == domain]
        flat[f"response_length/{domain}"] = sum(sample.response_length for sample in samples) / len(samples)
        flat[f"truncated_share/{domain}"] = sum(sample.truncated for sample in samples) / len(samples)
        flat[f"repeated_share/{domain}"] = sum(sample.repeated_share for sample in samples) / len(samples)
        flat[f"num_samples/{domain}"] = float(len(samples))
    return flat


_COUNTED: ContextVar[bool] = ContextVar("counted", default=True)


@contextmanager
def apart() -> Iterator[None]:
    """Count requests of this block, and of tasks that it starts, to no step: checks and validation, whose samples would
    otherwise appear among those of the step beside which they run."""
    token = _COUNTED.set(False)
    try:
        yield
    finally:
        _COUNTED.reset(token)


def is_counted() -> bool:
    """Return whether requests made now count to a step."""
    return _COUNTED.get()


class JsonlWriter:
    """Appends records with a ``step``, one JSON object per line; each line is on disk when ``write`` returns.

    Opening a file removes a torn last line, which a crash leaves. ``UserError`` if another line is no such record, or
    if a write is refused: the file then ends with the record before.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            truncate_jsonl(path, after_step=MAX_STEP)
            self._file = path.open("ab", buffering=0)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record; NaN and infinity are refused with ``ValueError``."""
        line = json.dumps(dict(record), ensure_ascii=False, allow_nan=False).encode() + b"\n"
        with writing(self._path):
            append_whole(self._file, line, is_synced=True)

    def close(self) -> None:
        self._file.close()


def truncate_jsonl(path: Path, *, after_step: int) -> None:
    """Remove the records of steps above ``after_step`` and a torn last line, if there is such a file: a resumed run
    writes them anew."""
    if not os.path.lexists(path):
        return
    kept = itertools.takewhile(lambda pair: pair[1]["step"] <= after_step, _complete_lines(path))
    end = sum(len(line) for line, _ in kept)
    if end != path.stat().st_size:
        with writing(path), path.open("r+b") as file:
            file.truncate(end)
            os.fsync(file.fileno())


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file that ``JsonlWriter`` may be writing now: an incomplete last line is left out.

    Returns none if there is no file. ``UserError`` names file and line if a line is no record, or its step is not above
    the one before.
    """
    return [record for _, record in _complete_lines(path)] if os.path.lexists(path) else []


class JsonlTail:
    """Reader of the records that a run adds to a file of ``JsonlWriter``, as the file grows.

    A resumed run cuts the records beyond its checkpoint once it has begun. The first of them tells whether that is
    done: no new record is equal to it, since records hold times.
    """

    def __init__(self, path: Path, *, after_step: int, is_cut: bool = False) -> None:
        """``after_step`` is the step that the run goes on from, -1 for none; ``is_cut`` tells that later records are
        new ones already. Raises as ``read_jsonl`` does."""
        self._path, self._offset, self._stale = path, 0, b""
        for line, record in _complete_lines(path) if os.path.lexists(path) else ():
            if record["step"] > after_step:
                self._stale = b"" if is_cut else line
                break
            self._offset += len(line)

    def new(self) -> list[dict[str, Any]]:
        """Return the complete records since the last call."""
        records: list[dict[str, Any]] = []
        if not os.path.lexists(self._path):
            return records
        with open_regular(self._path, cure="remove it") as file:
            file.seek(self._offset)
            for line in file:
                if line == self._stale or not line.endswith(b"\n"):
                    break
                self._stale, self._offset = b"", self._offset + len(line)
                records.append(parse_json(line))
        return records


def _complete_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    cure = "remove the line, or the file"
    last = -1
    with open_regular(path, cure="remove it") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            where = f"{shown_path(path)}:{number}"
            if len(line) > MAX_LINE_BYTES:
                raise UserError(f"{where}: longer than {MAX_LINE_BYTES} bytes: {cure}")
            if not line.endswith(b"\n"):
                return
            try:
                record = parse_json(line)
            except ValueError as error:
                raise UserError(f"{where}: not a JSON object with a step ({error}): {cure}") from error
            step = record.get("step") if isinstance(record, dict) else None
            if type(step) is not int or not 0 <= step <= MAX_STEP:
                raise UserError(f"{where}: not a JSON object with a step: {cure}")
            if step <= last:
                raise UserError(f"{where}: step {step} after step {last}: {cure}")
            last = step
            yield line, record

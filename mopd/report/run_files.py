"""Files of a run folder, read and checked, also while the run is still writing them; and its logs
(``RUN/logs/NODE/ROLE.log``), what every process wrote, from all nodes as one stream of lines."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from mopd.base.files.json_text import read_json_object
from mopd.base.files.reading import open_regular, read_text, shown_path
from mopd.base.files.yaml_text import read_yaml_object
from mopd.base.metrics import MAX_STEP, read_jsonl
from mopd.base.text import visible
from mopd.base.types import UserError
from mopd.report.thumbnails import are_thumbnails

MAX_NUMBER = 1e150
"""Largest accepted number: sums and products of two are finite, and no measurement comes near."""
CURE = "restore the file that the run wrote"
MAX_METRICS = 10_000
"""Largest number of names in one record; each gets a chart."""


class RunFiles:
    """Reader of one run folder. Every method raises ``UserError`` that names the file for what no run writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / "recipe.yaml"
        self.metrics = path / "metrics.jsonl"
        self.validation = path / "validation.jsonl"
        self.headroom = path / "headroom.json"
        self.parity = path / "parity.json"
        self.machine = path / "machine.json"
        self.wandb = path / "wandb_id"
        self.replicas = path / "replicas"
        self.answers = path / "answers"
        self.samples_kept = path / "samples"
        self.stop = path / "stop"
        self.traces = path / "traces.json"
        self.attempts = path / "attempts.json"
        self.report_json = path / "report.json"
        self.report_html = path / "report.html"

    def require_run(self) -> None:
        """Raise ``UserError`` unless the folder holds a run that has begun."""
        if not os.path.isfile(self.recipe):  # unlike Path.is_file, false for names that no file can have
            raise UserError(f"{shown_path(self.path)!r} holds no run: name the run_dir of a run that has begun")

    def recipe_text(self) -> str:
        """Read the resolved recipe as it was written, origins included."""
        return read_text(self.recipe, cure=CURE)

    def recipe_tree(self) -> dict[str, Any]:
        """Read the resolved recipe as plain values; ``student.model``, ``schedule.steps`` and its ``prompts_per_step``
        are there."""
        tree = read_yaml_object(self.recipe, cure=CURE)
        for section, key, kind in (
            ("schedule", "steps", int),
            ("schedule", "prompts_per_step", int),
            ("student", "model", str),
        ):
            keys = tree.get(section)
            if not isinstance(keys, dict) or type(keys.get(key)) is not kind:
                raise UserError(f"{shown_path(self.recipe)}: {section}.{key} is not there: {CURE}")
        if not 0 < tree["schedule"]["steps"] <= MAX_STEP:
            raise UserError(
                f"{shown_path(self.recipe)}: schedule.steps is {tree['schedule']['steps']}: restore the file"
            )
        return tree

    def steps(self) -> list[dict[str, Any]]:
        """Read the records of ``metrics.jsonl``, in order of steps: numbers and nulls by name."""
        records = read_jsonl(self.metrics)
        for record in records:
            if len(record) > MAX_METRICS:
                raise UserError(f"{_at(self.metrics, record)} has more than {MAX_METRICS} metrics: remove the line")
            for name, value in record.items():
                if value is not None and not is_number(value):
                    raise UserError(f"{_at(self.metrics, record)}: {name[:80]!r} is no number: remove the line")
        return records

    def validations(self) -> list[dict[str, Any]]:
        """Read the records of ``validation.jsonl``, in order of steps, with rewards by domain and perhaps examples."""
        records = read_jsonl(self.validation)
        for record in records:
            problem = _validation_problem(record)
            if problem is not None:
                raise UserError(f"{_at(self.validation, record)} {problem}: remove the line")
        return records

    def last_rewards(self) -> dict[str, float]:
        """Read the rewards by domain of the newest validation; empty before the first."""
        records = self.validations()
        return records[-1]["rewards"] if records else {}

    def teacher_rewards(self) -> dict[str, float]:
        """Read the rewards of each domain's own teacher on the validation prompts; empty if not measured."""
        return _numbers(self.headroom, "teacher", cure=f"{CURE}, or remove it")

    def best_teachers(self) -> dict[str, str]:
        """Read, by domain, the name of the teacher with the best reward; without the domains that have none."""
        return self._of_teachers("name", lambda value: isinstance(value, str))

    def teacher_scores(self) -> dict[str, list[float]]:
        """Read, by domain, the teacher's score of each validation prompt; without the domains that have none."""
        return self._of_teachers("scores", _are_numbers)

    def teacher_examples(self) -> dict[str, list[dict[str, Any]]]:
        """Read, by domain, the teacher's answers to the first validation prompts; without the domains that have
        none."""
        return self._of_teachers("examples", _are_examples)

    def last_traces(self) -> dict[str, Any] | None:
        """Read ``step`` and ``domains`` of the traces of the last validation; ``None`` if there are none."""
        if not os.path.lexists(self.traces):
            return None
        cure = f"{CURE}, or remove it"
        record = read_json_object(self.traces, cure=cure)
        domains = record.get("domains")
        if (
            type(record.get("step")) is not int
            or not isinstance(domains, dict)
            or not all(map(_are_traces, domains.values()))
        ):
            raise UserError(f"{shown_path(self.traces)}: holds what are no traces: {cure}")
        return record

    def _of_teachers(self, key: str, is_sound: Callable[[Any], bool]) -> dict[str, Any]:
        cure = f"{CURE}, or remove it"
        found: dict[str, Any] = {}
        for domain, entry in _entries(self.headroom, cure):
            values = entry.get(key) if isinstance(entry, dict) else None
            if values is not None and not is_sound(values):
                raise UserError(f"{shown_path(self.headroom)}: {domain[:80]!r} has {key} that are none: {cure}")
            if values is not None:
                found[domain] = values
        return found

    def machine_record(self) -> dict[str, Any] | None:
        """Read ``gpus``, ``cpu``, ``num_cores``, ``memory_gib`` and ``packages`` of the machine; ``None`` if not
        kept."""
        if not os.path.lexists(self.machine):
            return None
        cure = f"{CURE}, or remove it"
        record = read_json_object(self.machine, cure=cure)
        gpus, packages = record.get("gpus"), record.get("packages")
        is_sound = (
            isinstance(gpus, list)
            and isinstance(packages, dict)
            and all(isinstance(text, str) for text in (record.get("cpu"), *gpus, *packages.values()))
            and type(record.get("num_cores")) is int
            and is_number(record.get("memory_gib"))
        )
        if not is_sound:
            raise UserError(f"{shown_path(self.machine)}: does not describe a machine: {cure}")
        return record

    def floors(self) -> dict[str, float]:
        """Read each teacher's KL floor, as the preflight measured it; empty if it did not yet. Rounding can make a KL
        of 0 negative, which is a floor of 0."""
        cure = f"{CURE}, or remove it: the preflight then measures again"
        return {name: max(0.0, kl) for name, kl in _numbers(self.parity, "kl", cure=cure).items()}

    def wandb_id(self) -> str:
        """Read the id by which Weights & Biases finds the run again."""
        cure = "remove it: a new run begins there"
        text = read_text(self.wandb, cure=cure, max_bytes=200).strip()
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", text):
            raise UserError(f"{shown_path(self.wandb)}: holds no id of Weights & Biases: {cure}")
        return text


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The validated step with the highest mean reward over domains; the earliest of equals."""

    step: int
    reward: float


def mean(rewards: Mapping[str, float]) -> float:
    """Return the mean reward over domains."""
    return sum(rewards.values()) / len(rewards)


def best_of(validations: Sequence[Mapping[str, Any]], *, kept: Collection[int] | None = None) -> Best | None:
    """Return the best validated step after training began, of those in ``kept`` (``None``: of all); ``None`` before the
    first.

    Going back to an older checkpoint (``--from``) can mean that the best one of that time has been removed since.
    """
    done = [line for line in validations if line["step"] > 0 and (kept is None or line["step"] in kept)]
    candidates = [Best(step=line["step"], reward=mean(line["rewards"])) for line in done]
    return max(candidates, key=lambda best: (best.reward, -best.step), default=None)


def _validation_problem(record: Mapping[str, Any]) -> str | None:
    rewards, examples = record.get("rewards"), record.get("examples", {})
    if not isinstance(rewards, dict) or not rewards:
        return "has no rewards"
    wrong = next((domain for domain, reward in rewards.items() if not is_number(reward)), None)
    if wrong is not None:
        return f"has a reward of {wrong[:80]!r} that is no number"
    for name, is_sound in OF_DOMAINS.items():
        by_domain = record.get(name, {})
        if not isinstance(by_domain, dict) or not all(map(is_sound, by_domain.values())):
            return f"has a {name} that is none"
    if not is_number(record.get("wall_s", 0.0)):
        return "has a wall_s that is no number"
    if not isinstance(examples, dict):
        return "has examples that are not by domain"
    for domain, rows in examples.items():
        if not _are_examples(rows):
            return f"has examples of {domain[:80]!r} without prompt, response, ground_truth and reward"
    return None


def _numbers(path: Path, key: str, *, cure: str) -> dict[str, float]:
    """Read, by name, the number that its object holds under ``key``; empty without such a file."""
    numbers = {}
    for name, entry in _entries(path, cure):
        number = entry.get(key) if isinstance(entry, dict) else None
        if not is_number(number):
            raise UserError(f"{shown_path(path)}: {name[:80]!r} has no number {key}: {cure}")
        numbers[name] = number
    return numbers


def _entries(path: Path, cure: str) -> Iterable[tuple[str, Any]]:
    """Read the entries of the object in a file; none without the file."""
    return read_json_object(path, cure=cure).items() if os.path.lexists(path) else ()


def _are_examples(rows: Any) -> bool:
    return isinstance(rows, list) and all(map(_is_example, rows))


def _is_example(row: Any) -> bool:
    if not isinstance(row, dict) or "ground_truth" not in row:
        return False
    prompt = row.get("prompt")
    is_chat = isinstance(prompt, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt)
    return (
        (isinstance(prompt, str) or is_chat)
        and isinstance(row.get("response"), str)
        and isinstance(row.get("view", ""), str)
        and _are_segments(row.get("segments", []))
        and is_number(row.get("reward"))
        and are_thumbnails(row.get("images", []))
    )


def _are_traces(rows: Any) -> bool:
    return (
        isinstance(rows, list)
        and bool(rows)
        and all(
            isinstance(row, dict)
            and isinstance(row.get("prompt"), str)
            and _are_segments(row.get("segments"))
            and all(one["is_given"] or is_number(one.get("kl")) for one in row["segments"])
            for row in rows
        )
    )


def _are_segments(parts: Any) -> bool:
    return isinstance(parts, list) and all(
        isinstance(one, dict) and isinstance(one.get("text"), str) and isinstance(one.get("is_given"), bool)
        for one in parts
    )


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value of a file is a number that a run may have measured."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(map(is_number, values))


OF_DOMAINS: Mapping[str, Callable[[Any], bool]] = {
    "watched": is_number,
    "scores": _are_numbers,
    "pass_at_k": is_number,
    "prompts": lambda value: isinstance(value, str),
}
"""Key of a validation -> test of what it holds by domain, where it is there."""


def _at(path: Path, record: Mapping[str, Any]) -> str:
    return f"{shown_path(path)}: step {record['step']}"


MAX_FILES = 20_000
"""Largest number of logs, more than the largest run has ranks and servers."""
TAIL_BYTES = MAX_STEP_BYTES = 2**18
"""Largest part of a file that is read for its last lines, or at a time while it grows."""
MAX_LINE = 4000
"""Largest number of characters that are shown of one line."""
BEGUN = "name the run_dir of a run that has begun"


@dataclass(slots=True)
class _Tail:
    """Position in one file."""

    path: Path
    source: str
    """``NODE/ROLE``."""
    offset: int = 0
    rest: bytes = field(default=b"")
    """Bytes of a line that is not complete yet."""


class Logs:
    """The logs of a run's folder. New files are found as they come."""

    def __init__(self, folder: Path, *, node: str = "*", role: str = "*") -> None:
        """``node`` and ``role`` are patterns: ``rank_*``, ``teachers.math.0``.

        Raises:
            UserError: the folder is not there.
        """
        if not folder.is_dir():
            raise UserError(f"{shown_path(folder)}: no logs are there: {BEGUN}")
        self._folder, self._node, self._role = folder, node, role
        self._tails: dict[Path, _Tail] = {}

    def last(self, num_lines: int) -> Iterator[str]:
        """Yield the last lines of each file, each after its ``NODE/ROLE``; ``new`` goes on from there."""
        for tail in self._found():
            with open_regular(tail.path, cure=BEGUN) as file:
                size = file.seek(0, os.SEEK_END)
                tail.offset = file.seek(max(0, size - TAIL_BYTES))
                text = file.read(TAIL_BYTES)
            lines = self._whole(tail, text)
            yield from lines[-num_lines:] if num_lines else ()

    def new(self) -> Iterator[str]:
        """Yield the lines that were written since the last call."""
        for tail in self._found():
            with open_regular(tail.path, cure=BEGUN) as file:
                if file.seek(0, os.SEEK_END) < tail.offset:  # cut off, or another file
                    tail.offset, tail.rest = 0, b""
                file.seek(tail.offset)
                text = file.read(MAX_STEP_BYTES)
            yield from self._whole(tail, text)

    def _whole(self, tail: _Tail, text: bytes) -> list[str]:
        tail.offset += len(text)
        *lines, tail.rest = (tail.rest + text).split(b"\n")
        if len(tail.rest) > MAX_STEP_BYTES:
            lines, tail.rest = [*lines, tail.rest], b""
        shown = (line.decode("utf-8", "replace").rstrip("\r")[:MAX_LINE] for line in lines)
        return [f"{tail.source}: {visible(line, keep=chr(9))}" for line in shown]

    def _found(self) -> list[_Tail]:
        """Return the matching files, sorted by node, then role."""
        paths = sorted(self._folder.glob("*/*.log"))
        if len(paths) > MAX_FILES:
            raise UserError(f"{shown_path(self._folder)}: more than {MAX_FILES} logs: name --node or --role")
        wanted = [
            path
            for path in paths
            if fnmatch.fnmatchcase(path.parent.name, self._node) and fnmatch.fnmatchcase(path.stem, self._role)
        ]
        return [
            self._tails.setdefault(path, _Tail(path, visible(f"{path.parent.name}/{path.stem}"))) for path in wanted
        ]

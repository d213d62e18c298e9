"""Search for the best split of GPUs between the trainer and the groups of engines, and the time of a step.

A synchronous step (``max_staleness: 0``) is max(rollout, teachers) + trainer + weights, as teachers work while the
rollout does; with engines in rank 0's process all come one after another. An asynchronous one takes as long as its
slowest stage (docs/pipeline.md).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mopd.planning.stages import StageTime

ROLLOUT, TRAINER, WEIGHTS = "rollout", "trainer", "weight_sync"
HANDED, TAKEN = "weights, the trainer waits", "weights, on their way"


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Times of the stages of one step, by the names of the report."""

    groups: Mapping[str, StageTime]
    """Stage time of ``rollout`` and of each ``teachers/NAME``."""
    trainer_s: float
    staging_s: float = 0.0
    """Seconds that the student takes to hand the weights over, spread over the steps between two updates."""
    sending_s: float = 0.0
    """Seconds from then until the replicas have the weights, spread likewise; beside the next step of an asynchronous
    run."""
    max_staleness: int = 0
    in_turn: frozenset[str] = frozenset()
    """Groups in rank 0's process, which work in turn."""

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Busy time of each stage in a step."""
        found = {name: time.capacity_s if self.max_staleness else time.step_s for name, time in self.groups.items()}
        # Teachers in one process work at the same time, and each is busy until all of them are done.
        shared = [name for name in found if name in self.in_turn and name != ROLLOUT]
        found |= dict.fromkeys(shared, sum(found[name] for name in shared))
        sync = self.staging_s + self.sending_s
        return {**found, TRAINER: self.trainer_s, **({WEIGHTS: sync} if sync else {})}

    @cached_property
    def spans(self) -> list[tuple[str, float, float]]:
        """What goes on in a step, with the seconds from its begin at which each starts and ends: in an asynchronous run
        all side by side, the trainer's handing over of weights after its work."""
        busy, spans, at = self.seconds, list[tuple[str, float, float]](), 0.0
        for name in sorted(self.in_turn & self.groups.keys()):
            at += self.groups[name].step_s
            spans.append((name, at - self.groups[name].step_s, at))
        beside = [(name, at, at + busy[name]) for name in self.groups if name not in self.in_turn]
        start = 0.0 if self.max_staleness else max([at, *(end for _, _, end in beside)])
        handed = start + self.trainer_s + self.staging_s
        spans += [*beside, (TRAINER, start, start + self.trainer_s), (HANDED, start + self.trainer_s, handed)]
        begin = 0.0 if self.max_staleness else handed
        return [span for span in [*spans, (TAKEN, begin, begin + self.sending_s)] if span[2] > span[1]]

    @property
    def step_s(self) -> float:
        """Seconds of a whole step."""
        return max((end for _, _, end in self.spans), default=0.0)

    @property
    def bound_by(self) -> str:
        """Stage that a step waits for: the one that is busy longest, or in an asynchronous run the slowest of those
        that work side by side, where handing weights over comes after the trainer's work."""
        if not self.max_staleness:
            return max(self.seconds, key=self.seconds.__getitem__)
        last = max(self.spans, key=lambda span: span[2])[0]
        if last == HANDED and self.trainer_s > self.staging_s:
            return TRAINER
        return {HANDED: WEIGHTS, TAKEN: WEIGHTS}.get(last, last)


@dataclass(frozen=True, kw_only=True)
class GroupLoad:
    """Load of a group of engines."""

    name: str
    gpus: int
    """GPUs of one replica."""
    time: Callable[[int], StageTime]
    """Stage time by the number of replicas."""
    at_most: int = 1024

    def replicas_within(self, seconds: float) -> int | None:
        """Return the fewest that keep up with a stage of so many seconds; ``None`` if no number does."""
        numbers = range(1, self.at_most + 1)
        place = bisect_left(numbers, True, key=lambda number: self.time(number).capacity_s <= seconds)
        return numbers[place] if place < len(numbers) else None


@dataclass(frozen=True, kw_only=True)
class TrainerLoad:
    """Load of one layout of the student."""

    gpus: int
    parts: Mapping[str, float]
    """Part of a step's work -> seconds."""
    sync: Callable[[int], tuple[float, float]] = lambda replicas: (0.0, 0.0)
    """Staging and sending seconds (``StepTimes``) by the rollout's number of replicas."""
    label: str = ""
    keys: Mapping[str, int] = field(default_factory=dict)
    """Keys of ``student.parallel`` and their values."""
    student: Mapping[str, Any] = field(default_factory=dict)
    """Other keys of ``student`` that differ from the recipe's, and their values."""
    num_bytes: int = 0
    """Bytes of its fullest GPU."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """Split of the GPUs."""

    trainer: TrainerLoad
    replicas: Mapping[str, int]
    times: StepTimes

    @property
    def gpus(self) -> Mapping[str, int]:
        """GPUs by stage, idle ones left out."""
        return {TRAINER: self.trainer.gpus, **self.replicas}


def times_of(
    trainer: TrainerLoad,
    groups: Sequence[GroupLoad],
    replicas: Mapping[str, int],
    *,
    max_staleness: int,
    in_turn: frozenset[str] = frozenset(),
) -> StepTimes:
    """Return the times of a step with so many replicas of each group; those of ``in_turn`` are in rank 0's process."""
    staging_s, sending_s = trainer.sync(replicas.get(ROLLOUT, 1))
    return StepTimes(
        groups={group.name: group.time(replicas[group.name]) for group in groups},
        trainer_s=sum(trainer.parts.values()),
        staging_s=staging_s,
        sending_s=sending_s,
        max_staleness=max_staleness,
        in_turn=in_turn,
    )


def share_out(num_gpus: int, trainer: TrainerLoad, groups: Sequence[GroupLoad], *, max_staleness: int) -> Split | None:
    """Find the best numbers of replicas beside a trainer: give one more to the slowest group, again and again while
    there are GPUs for it. ``None`` where not one replica each has room."""
    replicas = {group.name: 1 for group in groups}
    by_name = {group.name: group for group in groups}
    free = num_gpus - trainer.gpus - sum(group.gpus for group in groups)
    if free < 0:
        return None
    best: Split | None = None
    while True:
        times = times_of(trainer, groups, replicas, max_staleness=max_staleness)
        if best is None or times.step_s < best.times.step_s:
            best = Split(trainer=trainer, replicas=dict(replicas), times=times)
        slowest = max(by_name, key=lambda name: times.seconds[name])
        if by_name[slowest].gpus > free or replicas[slowest] >= by_name[slowest].at_most:
            return best
        replicas[slowest] += 1
        free -= by_name[slowest].gpus


def ranked(
    num_gpus: int, trainers: Sequence[TrainerLoad], groups: Sequence[GroupLoad], *, max_staleness: int
) -> list[Split]:
    """Return the best split beside each trainer, the fastest first; of equals the one with fewest GPUs for the
    trainer."""
    found = [share_out(num_gpus, trainer, groups, max_staleness=max_staleness) for trainer in trainers]
    return sorted(
        (split for split in found if split is not None), key=lambda split: (split.times.step_s, split.trainer.gpus)
    )

"""What ``mopd bench student`` times: student steps beside others that do the same work, in turns in one process."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mopd.bench.student.inputs import (
    DOMAIN,
    SHAPE,
    Samples,
    make_metas,
    make_recipe,
    make_samples,
    mixed_lengths,
    toy_lengths,
    write_model,
)
from mopd.bench.student.plain import PlainStep
from mopd.conversion.models.reading import read_dims
from mopd.data.packing import pack, packing_rules, plan_metrics
from mopd.files.temporary import TemporaryFolder
from mopd.student import parallel
from mopd.student.worker import StudentWorker

NUM_THREADS = 2
SHORTEST, LONGEST = 64, 4096
MAX_TOKENS = 8192
"""Of a micro-batch of mixed lengths."""
SAMPLES_AS_DRAWN = 4
"""Of a right-padded micro-batch of samples in the order in which they come."""
NUM_RANKS = 4
SAME = 1e-4
"""How far two ways through the same work may lie apart, relative: fp32, sums in another order."""

Step = Callable[[], tuple[float, float]]
"""One optimizer step; returns the loss, and the gradient's norm before clipping."""


@dataclass(frozen=True, kw_only=True)
class Contest:
    """Seconds of each contender's steps, taken in turns on the same samples."""

    name: str
    num_tokens: int
    """Of prompts and responses, in a step."""
    seconds: dict[str, list[float]]

    def median_s(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def tokens_per_s(self, name: str) -> float:
        return self.num_tokens / self.median_s(name)

    def ratio(self, name: str, other: str) -> float:
        """Median over rounds of ``name``'s time over ``other``'s."""
        return statistics.median(a / b for a, b in zip(self.seconds[name], self.seconds[other], strict=True))


def measure_toy(rounds: int) -> Contest:
    """A step of the quickstart's student on 96 samples of its kind, packed and padded, and in plain PyTorch."""
    with scratch_model(max_positions=128) as (folder, device):
        samples = make_samples(toy_lengths())
        recipe = make_recipe(folder, longest=128)
        contenders: dict[str, Step] = {
            "student": student_step(folder, samples, longest=128),
            "student, padded": student_step(folder, samples, longest=128, packing=False),
            "plain PyTorch": PlainStep(folder, samples, recipe.student.optimizer, device),
        }
        return contest("toy", samples, contenders, rounds)


def measure_mixed(rounds: int, num_samples: int) -> Contest:
    """The same student on log-normal lengths: packed, in rectangles of similar lengths, in rectangles as drawn."""
    with scratch_model(max_positions=LONGEST) as (folder, _):
        samples = make_samples(_with_prompts(mixed_lengths(num_samples, low=SHORTEST, high=LONGEST)))
        ways: dict[str, dict[str, Any]] = {
            "packed": {},
            "padded, sorted by length": {"packing": False},
            "padded, as drawn": {"packing": False, "micro_batch_size": SAMPLES_AS_DRAWN},
        }
        contenders: dict[str, Step] = {
            name: student_step(folder, samples, longest=LONGEST, max_tokens_per_micro_batch=MAX_TOKENS, **keys)
            for name, keys in ways.items()
        }
        return contest("mixed lengths", samples, contenders, rounds)


def imbalance(num_samples: int) -> dict[str, float]:
    """The busiest data-parallel rank's cost over the mean: of the plan, and of lengths in order dealt in turn."""
    with TemporaryFolder("mopd-bench-") as folder:
        write_model(Path(folder), max_positions=LONGEST)
        recipe = make_recipe(Path(folder), longest=LONGEST, max_tokens_per_micro_batch=MAX_TOKENS)
        rules = packing_rules(recipe.student, read_dims(Path(folder)), on_gpu=False)
    metas = make_metas(_with_prompts(mixed_lengths(num_samples, low=SHORTEST, high=LONGEST)))
    plan = pack(metas, rules, dp_size=NUM_RANKS)
    ordered = sorted(metas, key=lambda meta: -meta.length)
    turns = [[(meta,) for meta in ordered[rank::NUM_RANKS]] for rank in range(NUM_RANKS)]
    dealt = dataclasses.replace(plan, micro_batches=tuple(map(tuple, turns)))
    plans = {"packed": plan, "dealt in turn": dealt}
    return {name: plan_metrics(one, rules)["packing/cost_max_over_mean"] for name, one in plans.items()}


def _with_prompts(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """A quarter of each is the prompt."""
    return [(length // 4, length - length // 4) for length in lengths]


@contextmanager
def scratch_model(
    *, max_positions: int, shape: Mapping[str, int] = SHAPE, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[Path, torch.device]]:
    """Its folder and the student's device, while ``NUM_THREADS`` work and this process is a world of one rank."""
    threads = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    try:
        with TemporaryFolder("mopd-bench-") as folder:
            write_model(Path(folder), max_positions=max_positions, shape=shape, dtype=dtype)
            yield Path(folder), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    finally:
        torch.set_num_threads(threads)
        if dist.is_initialized():
            parallel.destroy()
            dist.destroy_process_group()


def student_step(folder: Path, samples: Samples, *, longest: int, **student: Any) -> Step:
    """One optimizer step of the student of ``folder``; ``student`` are further keys of its section."""
    worker = StudentWorker(make_recipe(folder, longest=longest, **student), samples.plane().reader(), [DOMAIN])
    plan = pack(list(samples.metas), worker.packing, dp_size=1)

    def step() -> tuple[float, float]:
        sums = worker.forward_backward(plan, diagnostics=False)
        return sums[DOMAIN].sums["weighted_loss"], worker.optim_step()["grad_norm"]

    return step


def contest(name: str, samples: Samples, contenders: Mapping[str, Step], rounds: int, *, same: float = SAME) -> Contest:
    """``rounds`` timed ones after one that is not, each begun by another contender.

    Raises:
        RuntimeError: they do not compute the same.
    """
    results = {contender: step() for contender, step in contenders.items()}
    first = next(iter(results.values()))
    for contender, result in results.items():
        if not all(math.isclose(a, b, rel_tol=same) for a, b in zip(result, first, strict=True)):
            raise RuntimeError(f"{name}: {contender} has (loss, gradient norm) {result} where others have {first}")
    seconds: dict[str, list[float]] = {contender: [] for contender in contenders}
    names = list(contenders)
    for number in range(rounds):
        turn = number % len(names)
        for contender in names[turn:] + names[:turn]:
            began = time.perf_counter()
            contenders[contender]()
            seconds[contender].append(time.perf_counter() - began)
    return Contest(name=name, num_tokens=samples.num_tokens, seconds=seconds)

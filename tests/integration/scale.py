"""Measure one orchestrator at the size of a cluster, without one (``make scale``).

::

    orchestrator (this process) ── link ──> rank 0 ── gloo ──> ranks 1 … N-1     stubs in the place of Megatron
      controller, ledger, routers, workers                     │
      local data plane  <────────── ZeroMQ, own rows ──────────┘

Real are the loop, the ledger, the routers, the rollout, teacher and reward workers, the data plane and its server, the
link, the commands and their broadcast. Stand-ins are the engines, which answer at once, and the ranks' student: each
reads the rows of its own micro-batches from the data plane and computes nothing.

Prints what a sample and a command cost the orchestrator's process (stand-ins of the engines included), its memory, and
with ``--profile`` the functions that take most of it. Exit code 1 below ``GOAL`` samples a second.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import multiprocessing
import pstats
import resource
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.base.tasks import Stop, Tasks
from mopd.base.types import LOSS_FIELDS, DomainSums, MicroBatchPlan
from mopd.bench.pipeline import StepEnds, make_workers
from mopd.bench.stand_ins import Lengths, Scenario, make_recipe, make_stream
from mopd.bench.weights import write_student
from mopd.config.schema import Recipe
from mopd.data_plane.reading import open_reader
from mopd.launch.link import LinkEnded, RankLink
from mopd.launch.ranks import CommandChannel, follow, run_commands
from mopd.orchestrator.controller import Controller
from mopd.orchestrator.leading import collect_rarely
from mopd.orchestrator.ranks import Ranks
from mopd.orchestrator.student import StudentGroup
from mopd.orchestrator.training import fresh_ledger
from mopd.student.sending import LARGE_BYTES
from mopd.weights.parts import TensorMeta, to_json

GOAL = 2000.0
"""Samples a second through one orchestrator."""
NUM_CALLS = 100
WEIGHT, NUM_WEIGHTS = "layers.0.weight", 1_000_000
TIMEOUT_S = 300.0


class StubWorker:
    """What commands need of a ``StudentWorker``: reads its rows, agrees with the other ranks, and learns nothing."""

    constants: frozenset[str] = frozenset()
    saving = SimpleNamespace(is_busy=False)

    def __init__(self, recipe: Recipe, address: dict[str, Any], rank: int) -> None:
        self.recipe, self.weight_version, self._rank = recipe, 0, rank
        self.layout = SimpleNamespace(device=torch.device("cpu"), copy=rank, tp_rank=0, pp_rank=0)
        self._reader = open_reader(address, timeout_s=TIMEOUT_S)

    def forward_backward(self, plan: MicroBatchPlan, *, diagnostics: bool) -> dict[str, DomainSums]:
        """Fetch this rank's rows, one micro-batch after the other; the sums count the tokens of the whole plan."""
        for batch in plan.micro_batches[self._rank]:
            if batch:
                self._reader.fetch([sample.sample_id for sample in batch], sorted(LOSS_FIELDS))
        dist.barrier()
        counts: dict[str, int] = {}
        for samples in (batch for rank in plan.micro_batches for batch in rank):
            for sample in samples:
                counts[sample.domain] = counts.get(sample.domain, 0) + sample.num_loss_tokens
        return {name: DomainSums(num_tokens=count, sums={"weighted_loss": 0.0}) for name, count in counts.items()}

    def optim_step(self) -> dict[str, float]:
        self.weight_version += 1
        return {}

    def memory(self) -> dict[str, float]:
        return {}

    def weights(self, *_: Any, **__: Any) -> Iterator[tuple[str, Tensor]]:
        yield WEIGHT, torch.zeros(NUM_WEIGHTS)


def rank_life(rank: int, num_ranks: int, store: str, recipe: Recipe, end: Any) -> None:
    """Follow the orchestrator as one rank of ``num_ranks``, rank 0 by the link's ``end``, until the run is over."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    channel = CommandChannel(dist.group.WORLD)
    if rank:
        follow(stub(recipe, channel.receive(), rank), channel)
        return
    link = RankLink(end, "the orchestrator")
    with suppress(LinkEnded):
        joining = link.next_command()["kwargs"]
        channel.send(joining)
        worker = stub(recipe, joining, rank)
        weights = to_json([TensorMeta(WEIGHT, torch.float32, (NUM_WEIGHTS,), 0)]).decode()
        announced = {"tensors": weights, "num_senders": 1, "large_bytes": LARGE_BYTES, "num_constants": 0}
        link.answer({"is_on_gpu": False, "announced": {**announced, "checks_values": False}})
        run_commands(worker, channel, link)
    channel.send({"call": "stop", "kwargs": {"is_asked": False}})


def stub(recipe: Recipe, joining: dict[str, Any], rank: int) -> Any:
    """Build a rank's stub from what the orchestrator tells all of them."""
    return StubWorker(recipe, joining["data_plane"], rank)


@contextmanager
def ranks_of(num_ranks: int, recipe: Recipe) -> Iterator[RankLink]:
    """Fork the ranks; yields the orchestrator's end of the link to rank 0."""
    ours, theirs = socket.socketpair()
    forking = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (num_ranks, f"{folder}/store", recipe)
        ranks = [
            forking.Process(target=rank_life, args=(rank, *arguments, theirs if rank == 0 else None), daemon=True)
            for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        theirs.close()
        link = RankLink(ours, "rank 0")
        try:
            yield link
        finally:
            link.close()
            for process in ranks:
                process.join(TIMEOUT_S / 10)
                process.kill()


async def measure(link: RankLink, recipe: Recipe, scenario: Scenario, workers: Any) -> dict[str, Any]:
    """Run the controller over the ranks; returns figures of the steps after the first, and of a command alone."""
    steps = recipe.schedule.steps
    observer = StepEnds(steps)
    async with Tasks() as tasks:
        ranks = Ranks(link)
        tasks.start(ranks.run())
        facts = await tasks.unless_failed(ranks.ask("join", data_plane=workers.plane.address))
        spent = time.process_time()
        for _ in range(NUM_CALLS):
            await tasks.unless_failed(ranks.ask("is_saving"))
        call_s = (time.process_time() - spent) / NUM_CALLS
        student = StudentGroup(recipe, ranks, facts, workers.sync)
        begun, started = time.process_time(), time.perf_counter()
        controller = Controller(
            recipe=recipe,
            prompts=make_stream(recipe.seed),
            rollout=workers.rollout,
            teachers=workers.teachers,
            rewards=None,
            student=student,
            plane=workers.plane,
            observer=observer,
            ledger=fresh_ledger(recipe),
            stop=Stop(),
            unit=1,
        )
        await tasks.unless_failed(controller.run())
        spent, wall = time.process_time() - begun, time.perf_counter() - started
        num = steps * scenario.num_samples
        return {
            "num_samples": num,
            "samples_per_s": num / wall,
            "processor_ms_per_sample": 1e3 * spent / num,
            "processor_ms_per_command": 1e3 * call_s,
            "step_s": [b - a for a, b in zip(observer.times, observer.times[1:], strict=False)],
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }


def run(num_ranks: int, num_prompts: int, steps: int, max_staleness: int, profile: int) -> dict[str, Any]:
    """Build everything and measure."""
    scenario = Scenario(
        name="scale",
        lengths=Lengths(mean=16, sigma=1.0),
        max_response_length=128,
        num_prompts=num_prompts,
        samples_per_prompt=1,
        max_sequences=1024,
    )
    with tempfile.TemporaryDirectory() as folder:
        write_student(Path(folder), 1)
        recipe = make_recipe(scenario, max_staleness=max_staleness, steps=steps)
        parallel = replace(recipe.student.parallel, data_parallel_size=num_ranks)
        recipe = replace(recipe, student=replace(recipe.student, model=folder, parallel=parallel))
        return _run(num_ranks, recipe, scenario, profile)


def _run(num_ranks: int, recipe: Recipe, scenario: Scenario, profile: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    profiler = cProfile.Profile()

    async def work(link: RankLink) -> dict[str, Any]:
        workers = await make_workers(recipe, scenario)
        collect_rarely()
        workers.plane.serve(host=None)
        try:
            return await measure(link, recipe, scenario, workers)
        finally:
            await workers.plane.close()

    with ranks_of(num_ranks, recipe) as link:  # forked while this process has one thread
        if profile:
            profiler.enable()
        figures = asyncio.run(work(link))
        profiler.disable()
    if profile:
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(profile)
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=10_048, help="prompts of a step, a multiple of the ranks")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--max-staleness", type=int, default=1)
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="print the N functions that take most time")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    figures = run(args.ranks, args.prompts, args.steps, args.max_staleness, args.profile)
    if args.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:28} {value}")
    return int(figures["samples_per_s"] < GOAL)


if __name__ == "__main__":
    raise SystemExit(main())

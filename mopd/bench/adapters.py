"""``mopd bench teachers --adapter-rank R``: two adapters of one base on one server, beside two servers of merged
folders. Both teachers score the same sequences at once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mopd.base.files.temporary import TemporaryFolder
from mopd.bench.harness import BenchReport, Comparison, Others, at_most, rounds, rows, say
from mopd.bench.models import DOMAIN, make_recipe, write_model
from mopd.bench.processes import TIMEOUT_S, TOKEN, family_busy_s, servers
from mopd.config.groups import SettledEngine
from mopd.config.student import LoraConfig
from mopd.conversion.adapters import merge_adapter, read_adapter
from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.interface import Scores, ToScore
from mopd.engines.student_adapter import StudentAdapter
from mopd.placement.engine_file import EngineFile, teacher_file

Ask = Callable[[], Awaitable[list[list[Scores]]]]
"""Returns each teacher's scores of all sequences."""

NAMES = ("first", "second")
SHARED, APART = "adapters, one server", "merged, two servers"
STD = 0.02
"""Standard deviation of an adapter's numbers."""
MOST_ERROR_NATS = {"float32": 1e-3, "bfloat16": 0.06}
"""Goal of the largest difference of a token's log-prob between an adapter and its merged folder."""
COLUMNS = {"s": "median_s:.3f", "tokens/s": "tokens_per_s:,.0f", "x merged": "ratio:.2f", "MiB": "memory_mib:,.0f"}
MIB = 2**20


async def measure_adapters(
    report: BenchReport,
    config: Mapping[str, Any],
    engine: SettledEngine,
    tokens: Sequence[Tensor],
    starts: Sequence[int],
    *,
    longest: int,
    rank: int,
    top_k: int,
    count: int,
) -> None:
    """Take a warm-up, then ``count`` rounds of both sides.

    ``config`` is the base's ``config.json``; ``tokens`` are sequences [L] int64, of which the first ``starts`` tokens
    are unscored.

    Raises:
        UserError: a server did not start.
    """
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryFolder("mopd-bench-")))
        num_weights = write_model(folder / "base", config, longest=longest)
        for seed, name in enumerate(NAMES):
            _write_teacher(folder, name, rank, seed)
        file = teacher_file(make_recipe(folder / "base", longest=longest, engine=engine, top_k=top_k), DOMAIN)
        adapters = {name: str(folder / name / "adapter") for name in NAMES}
        shared = await _start(stack, folder, [replace(file, adapters=adapters)])
        apart = await _start(stack, folder, [replace(file, model=str(folder / name / "merged")) for name in NAMES])
        sides: dict[str, Ask] = {
            SHARED: partial(_ask, [(shared[0][0], name) for name in NAMES], tokens, starts, top_k),
            APART: partial(_ask, [(client, "") for client in apart[0]], tokens, starts, top_k),
        }
        answers = {side: await ask() for side, ask in sides.items()}
        memory = {side: sum(map(_family_bytes, pids)) for side, (_, pids) in ((SHARED, shared), (APART, apart))}
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        others = Others(family_busy_s)
        for order in rounds(sides, count):
            for side in order:
                began = time.perf_counter()
                await sides[side]()
                seconds[side].append(time.perf_counter() - began)
            say("teachers: " + ", ".join(f"{side} {times[-1]:.2f} s" for side, times in seconds.items()))
        report.others_cores = others.cores()
    num_tokens = len(NAMES) * sum(map(len, tokens))

    def figures(side: str, median_s: float) -> dict[str, float]:
        return {"tokens_per_s": num_tokens / median_s, "memory_mib": memory[side] / MIB}

    part = Comparison(
        title=f"{engine.type}, rank {rank}, {num_tokens:,} tokens",
        columns=COLUMNS,
        rows=rows(seconds, APART, figures),
        facts={"engine": engine.type, "rank": rank, "num_weights": num_weights, "num_tokens": num_tokens},
        remarks=[f"{num_weights / 1e6:.0f} M weights, two teachers; memory of the servers' processes"],
    )
    error = _largest_difference(answers[SHARED], answers[APART])
    report.add(part, {"error_nats": at_most(error, MOST_ERROR_NATS[str(engine.dtype)])})


def _largest_difference(ours: list[list[Scores]], theirs: list[list[Scores]]) -> float:
    pairs = zip(itertools.chain(*ours), itertools.chain(*theirs), strict=True)
    return max(float((one.token_logprobs - other.token_logprobs).abs().max()) for one, other in pairs)


def _write_teacher(folder: Path, name: str, rank: int, seed: int) -> None:
    """Write a random adapter of ``folder/base`` in PEFT's format, and the folder in which it is merged."""
    base, adapter, target = folder / "base", folder / name / "adapter", folder / name / "merged"
    shape = StudentAdapter.of(base, LoraConfig(rank=rank))
    generator = torch.Generator().manual_seed(seed)
    for made in (adapter, target):
        made.mkdir(parents=True)
    save_file(
        {name: STD * torch.randn(slot.shape, generator=generator) for name, slot in shape.slots.items()},
        adapter / "adapter_model.safetensors",
    )
    (adapter / "adapter_config.json").write_text(json.dumps(shape.peft_config))
    (target / "config.json").write_text((base / "config.json").read_text())
    weights = load_file(base / "model.safetensors")
    save_file(weights | merge_adapter(weights, read_adapter(adapter, base)), target / "model.safetensors")


async def _start(
    stack: AsyncExitStack, folder: Path, files: Sequence[EngineFile]
) -> tuple[list[RemoteEngine], list[int]]:
    """Return clients and process ids of a server for each file."""
    clients, pids = [], []
    for number, file in enumerate(files):
        say(f"teachers: starting a server of {Path(file.model).relative_to(folder)}")
        own = folder / f"server-{number}-of-{len(files)}"
        own.mkdir()
        ((url, pid),) = (await stack.enter_async_context(servers(own, file))).items()
        client = RemoteEngine(url, token=TOKEN, timeout_s=TIMEOUT_S, name=f"server {number}")
        stack.push_async_callback(client.close)
        clients.append(client)
        pids.append(pid)
    return clients, pids


async def _ask(
    asked: Sequence[tuple[RemoteEngine, str]], tokens: Sequence[Tensor], starts: Sequence[int], top_k: int
) -> list[list[Scores]]:
    request = ToScore(tokens, starts, top_k=top_k, temperature=1.0)
    return await asyncio.gather(*(client.score(replace(request, adapter=name)) for client, name in asked))


def _family_bytes(pid: int) -> int:
    """Return the memory of a process and its children; shared pages count for each in part."""
    total = 0
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            total += process.memory_full_info().pss
    return total

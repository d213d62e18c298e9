"""The student of ``mopd bench weights``: a Megatron model of a given size, without gradients and optimizer."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import socket
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from math import prod
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mopd import cpu_shim
from mopd.config.student import ParallelConfig, StudentConfig
from mopd.conversion.models.dims import ModelDims
from mopd.conversion.models.reading import read_dims
from mopd.launch.link import LinkEnded, RankLink
from mopd.launch.ranks import CommandChannel, follow, obey
from mopd.orchestrator.ranks import Ranks
from mopd.student import parallel
from mopd.student.model.gpt import build_model
from mopd.student.weights import hf_stages, hf_tensors, iter_hf_weights
from mopd.student.worker import WeightPart
from mopd.tasks import Tasks
from mopd.transfer.buckets import TensorMeta, from_json, to_json
from mopd.types import UserError
from mopd.wire.weights import StagedWeights

SMALL_BYTES = 2**27
"""A student below has narrow layers, so that there are several."""
VOCAB_SIZE = 4096
STD = 0.02
TIMEOUT_S = 300.0
END_S = 20.0


def write_config(folder: Path, num_bytes: int, num_stages: int) -> None:
    """A Qwen3 of about so many bytes in fp32, whose layers its stages can share."""
    hidden = 1024 if num_bytes >= SMALL_BYTES else 256
    layer = 4 * hidden * (3 * hidden + 3 * 4 * hidden)  # attention with half as many key heads, and the MLP
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": num_stages * max(1, round((num_bytes - 4 * VOCAB_SIZE * hidden) / layer / num_stages)),
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128,
        "head_dim": 64,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "use_sliding_window": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    _write_zeros(folder / "model.safetensors", hf_tensors(read_dims(folder), torch.float32))


def _write_zeros(path: Path, tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> None:
    """In fp32, without room on the disk. A rollout's server looks at names and shapes and loads nothing."""
    header, end = {}, 0
    for name, _, shape in tensors:
        start, end = end, end + 4 * prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def forks() -> ForkServerContext:
    """Processes from one that has imported everything and done nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


class Stage:
    """One rank: a pipeline stage of the model, with what commands need of a ``StudentWorker``."""

    recipe = SimpleNamespace(schedule=SimpleNamespace(wait_timeout_s=TIMEOUT_S))
    constants: frozenset[str] = frozenset()
    weight_version = 0

    def __init__(self, folder: Path, rank: int, num_stages: int) -> None:
        torch.set_num_threads(1)  # as beside as many busy engines
        if num_stages > 1:
            store = dist.FileStore(str(folder / "store"), num_stages)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=num_stages)
        self.dims: ModelDims = read_dims(folder)
        stages = ParallelConfig(pipeline_model_parallel_size=num_stages)
        self.layout = parallel.initialize(stages, timeout_s=TIMEOUT_S, seed=0)
        cfg = StudentConfig(model=str(folder), dtype="float32")
        with cpu_shim.activate():
            self._model = build_model(cfg, self.dims, self.layout).requires_grad_(False)
        for parameter in self._model.parameters():
            parameter.normal_(std=STD)

    def optim_step(self) -> dict[str, float]:
        """Other weights, as after a step."""
        if self.layout.is_last_stage:
            self._model.decoder.final_layernorm.weight.mul_(1.5)
        return {}

    def memory(self) -> dict[str, float]:
        """See ``StudentWorker.memory``; nobody asks."""
        return {}

    def facts(self) -> dict[str, Any]:
        """Of ``BenchStudent``, as JSON."""
        metas = [TensorMeta(*tensor) for tensor in hf_tensors(self.dims, torch.float32)]
        stages = list(hf_stages([self._model], self.dims, self.layout))
        ordered = [metas[i] for i in sorted(range(len(metas)), key=lambda i: stages[i])]
        num = self.layout.pp_size
        return {
            "device": str(self.layout.device),
            "tensors": to_json(ordered).decode(),
            "shares": [stages.count(stage) for stage in range(num)] if num > 1 else [],
        }

    def weights(
        self, part: WeightPart, *, in_place: bool = False, by_stage: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """As ``StudentWorker.weights``; all are trained."""
        return iter_hf_weights([self._model], self.dims, self.layout, in_place=in_place, by_stage=by_stage)


def _be_rank(folder: Path, rank: int, num_stages: int, end: socket.socket | None) -> None:
    """A rank's whole life, as in a run; ``end`` is rank 0's of the link."""
    stage = Stage(folder, rank, num_stages)
    channel = CommandChannel(stage.layout.control_group)
    worker: Any = stage
    if end is None:
        follow(worker, channel)
    else:
        link = RankLink(end, "the benchmark")
        link.next_command()
        link.answer(stage.facts())
        with suppress(LinkEnded):
            obey(worker, channel, link)
        channel.send({"call": "stop", "kwargs": {"is_asked": False}})


@dataclass(frozen=True, kw_only=True)
class BenchStudent:
    """The student's ranks, in processes of their own, as this one asks them: it is their orchestrator."""

    ranks: Ranks
    pid: int
    """Of rank 0."""
    device: torch.device
    """Of rank 0's parameters."""
    tensors: str
    """``to_json`` of every weight, stage by stage."""
    shares: list[int]
    """Of each stage, where there are several."""

    @property
    def num_bytes(self) -> int:
        """Of all weights."""
        return sum(meta.num_bytes for meta in from_json(json.loads(self.tensors)))

    async def change(self) -> None:
        """Other weights, as after a step."""
        await self.ranks.ask("optim_step")

    async def stage(self, weight_version: int) -> StagedWeights:
        """All weights in this process, as they came over the link."""
        told, bodies = await self.ranks.ask_for_frames("weights", part="trained")
        return StagedWeights(
            weight_version=weight_version,
            update_id=told["id"],
            bodies=tuple(bodies),
            num_tensors=told["num_tensors"],
            digest=bytes.fromhex(told["digest"]),
            constants=None,
        )


@asynccontextmanager
async def bench_student(folder: Path, num_stages: int) -> AsyncIterator[BenchStudent]:
    """Start the ranks, until the end of the block."""
    if num_stages > 1 and torch.cuda.is_available():
        raise UserError(f"--stages is {num_stages}: on CUDA the student has one rank here: set 1")
    ours, theirs = socket.socketpair()
    context, processes = forks(), list[BaseProcess]()
    for rank in range(num_stages):
        end = None if rank else theirs
        processes.append(context.Process(target=_be_rank, args=(folder, rank, num_stages, end), daemon=True))
        processes[-1].start()
    theirs.close()
    link = RankLink(ours, "rank 0")
    try:
        async with Tasks() as tasks:
            ranks = Ranks(link)
            tasks.start(ranks.run())
            facts = await tasks.unless_failed(ranks.ask("join"))
            pid = processes[0].pid
            assert pid is not None
            yield BenchStudent(
                ranks=ranks,
                pid=pid,
                device=torch.device(facts["device"]),
                tensors=facts["tensors"],
                shares=facts["shares"],
            )
    finally:
        link.close()
        for process in processes:
            await asyncio.to_thread(process.join, END_S)
            process.kill()
            process.join()

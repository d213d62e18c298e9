"""The student of ``mopd bench weights``: a Megatron model of a given size, without gradients and optimizer."""

from __future__ import annotations

import json
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import prod
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mopd import cpu_shim
from mopd.config.student import ParallelConfig, StudentConfig
from mopd.conversion.models.dims import ModelDims
from mopd.conversion.models.reading import read_dims
from mopd.launch.stages import StageSender
from mopd.student import parallel
from mopd.student.model.gpt import build_model
from mopd.student.weights import hf_stages, hf_tensors, iter_hf_weights
from mopd.student.worker import WeightPart
from mopd.transfer.buckets import TensorMeta
from mopd.types import UserError

SMALL_BYTES = 2**27
"""A student below has narrow layers, so that there are several."""
VOCAB_SIZE = 4096
STD = 0.02
TIMEOUT_S = 300.0


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
    """One rank: a pipeline stage of the model."""

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

    def change(self) -> None:
        """Other weights, as after a step."""
        if self.layout.is_last_stage:
            self._model.decoder.final_layernorm.weight.mul_(1.5)

    def stages(self) -> list[int]:
        """See ``hf_stages``."""
        return list(hf_stages([self._model], self.dims, self.layout))

    def help(self, *, in_place: bool) -> None:
        """Rank 0 gets all weights."""
        deque(self.weights("all", in_place=in_place, by_stage=False), maxlen=0)

    def weights(self, part: WeightPart, *, in_place: bool, by_stage: bool) -> Iterator[tuple[str, Tensor]]:
        """As ``StudentWorker.weights``; all are trained."""
        return iter_hf_weights([self._model], self.dims, self.layout, in_place=in_place, by_stage=by_stage)


class BenchStudent:
    """Rank 0, and the ranks of the other stages, which do as it does."""

    def __init__(self, folder: Path, num_stages: int) -> None:
        context = forks()
        self._others: list[tuple[BaseProcess, Connection]] = []
        for rank in range(1, num_stages):
            end, other = context.Pipe()
            process = context.Process(target=_follow, args=(folder, rank, num_stages, other), daemon=True)
            process.start()
            self._others.append((process, end))
        self._stage = Stage(folder, 0, num_stages)
        self.device = self._stage.layout.device
        """A GPU where there is one."""
        metas = [TensorMeta(*tensor) for tensor in hf_tensors(self._stage.dims, torch.float32)]
        stages = self._stage.stages()
        self.metas = [metas[i] for i in sorted(range(len(metas)), key=lambda i: stages[i])]
        """Of every weight, stage by stage."""
        self.shares = [stages.count(stage) for stage in range(num_stages)] if num_stages > 1 else []
        """Of each stage, where there are several."""

    def change(self) -> None:
        """See ``Stage.change``."""
        self._tell("change", {})
        self._stage.change()

    def read(self, *, in_place: bool) -> Iterator[tuple[str, Tensor]]:
        """All, on rank 0."""
        self._tell("help", {"in_place": in_place})
        return self._stage.weights("all", in_place=in_place, by_stage=False)

    def share(self, current: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """Of rank 0's stage; the others send theirs as in ``current`` (``Transfer.current``)."""
        self._tell("send", current)
        return self._stage.weights("all", in_place=True, by_stage=True)

    def join(self, joining: dict[str, Any]) -> None:
        """See ``Transfer.join_stages``."""
        self._tell("join", joining)

    def close(self) -> None:
        """End the other ranks."""
        for process, _ in self._others:
            process.terminate()
            process.join()

    def _tell(self, what: str, options: dict[str, Any]) -> None:
        for _, end in self._others:
            end.send((what, options))


def _follow(folder: Path, rank: int, num_stages: int, end: Connection) -> None:
    """Another rank's whole life."""
    stage = Stage(folder, rank, num_stages)
    sender = StageSender(stage)
    calls: dict[str, Callable[..., None]] = {
        "change": stage.change,
        "help": stage.help,
        "join": sender.join,
        "send": sender.send,
    }
    while True:
        what, options = end.recv()
        calls[what](**options)


@contextmanager
def bench_student(folder: Path, num_stages: int) -> Iterator[BenchStudent]:
    """While this process is its rank 0."""
    if num_stages > 1 and torch.cuda.is_available():
        raise UserError(f"--stages is {num_stages}: on CUDA the student has one rank here: set 1")
    threads = torch.get_num_threads()
    student = BenchStudent(folder, num_stages)
    try:
        yield student
    finally:
        student.close()
        torch.set_num_threads(threads)
        parallel.destroy()
        dist.destroy_process_group()

"""The student of ``mopd bench weights``: a Megatron model of a given size, without gradients and optimizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mopd import cpu_shim
from mopd.config.student import ParallelConfig, StudentConfig
from mopd.conversion.models.dims import ModelDims
from mopd.conversion.models.reading import read_dims
from mopd.student import parallel
from mopd.student.model.gpt import build_model
from mopd.student.weights import hf_tensors, iter_hf_weights
from mopd.transfer.buckets import TensorMeta

SMALL_BYTES = 2**27
"""A student below has narrow layers, so that there are several."""
VOCAB_SIZE = 4096
STD = 0.02


def write_config(folder: Path, num_bytes: int) -> None:
    """A Qwen3 of about so many bytes in fp32."""
    hidden = 1024 if num_bytes >= SMALL_BYTES else 256
    layer = 4 * hidden * (3 * hidden + 3 * 4 * hidden)  # attention with half as many key heads, and the MLP
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": max(1, round((num_bytes - 4 * VOCAB_SIZE * hidden) / layer)),
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


class BenchStudent:
    """A world of one rank."""

    def __init__(self, folder: Path) -> None:
        self.dims: ModelDims = read_dims(folder)
        self._layout = parallel.initialize(ParallelConfig(), timeout_s=60.0, seed=0)
        cfg = StudentConfig(model=str(folder), dtype="float32")
        with cpu_shim.activate():
            self._model = build_model(cfg, self.dims, self._layout).requires_grad_(False)
        for parameter in self._model.parameters():
            parameter.normal_(std=STD)

    @property
    def device(self) -> torch.device:
        """A GPU where there is one."""
        return self._layout.device

    @property
    def metas(self) -> list[TensorMeta]:
        """Of every weight."""
        return [TensorMeta(*tensor) for tensor in hf_tensors(self.dims, torch.float32)]

    def change(self) -> None:
        """Other weights, as after a step."""
        self._model.decoder.final_layernorm.weight.mul_(1.5)

    def read(self, *, on_device: bool) -> Iterator[tuple[str, Tensor]]:
        """As ``StudentWorker.weights``."""
        return iter_hf_weights([self._model], self.dims, self._layout, on_device=on_device)


@contextmanager
def bench_student(folder: Path) -> Iterator[BenchStudent]:
    """While this process is a rank, with one thread, as beside as many busy engines."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield BenchStudent(folder)
    finally:
        torch.set_num_threads(threads)
        parallel.destroy()
        dist.destroy_process_group()

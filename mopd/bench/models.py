"""Models and samples of benchmarks: random weights, a teacher of its own, the recipe around them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from mopd.base.types import SampleMeta, UserError
from mopd.config.data import DataConfig
from mopd.config.groups import SettledEngine, TeacherConfig, TorchEngineConfig
from mopd.config.losses import TopKLossConfig
from mopd.config.rollout import RolloutConfig
from mopd.config.schedule import ScheduleConfig
from mopd.config.schema import Recipe
from mopd.config.student import OptimizerConfig, StudentConfig
from mopd.conversion.models.reading import read_dims
from mopd.data_plane.local import LocalDataPlane
from mopd.student.weights import hf_tensors

Dtype = Literal["float32", "bfloat16"]
DOMAIN = "all"
TOP_K = 16
SEED = 0
ENGINE = TorchEngineConfig(dtype="float32")


def qwen3(
    hidden: int, intermediate: int, layers: int, heads: int, groups: int, head_dim: int, vocab: int
) -> dict[str, Any]:
    """Return the ``config.json`` of a Qwen3 of these sizes; ``groups`` are its key-value heads."""
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": hidden, "head_dim": head_dim,
        "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": groups, "vocab_size": vocab, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "tie_word_embeddings": True, "attention_bias": False, "use_sliding_window": False,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


TOY = qwen3(128, 192, 4, 4, 2, 32, vocab=33)
"""The quickstart's student (tools/make_quickstart.py)."""
SIZES = {"qwen3-1.7b": qwen3(2048, 6144, 28, 16, 8, 128, vocab=151_936)}
"""Sizes of published models; the weights are random."""


def size_on_gpu(name: str) -> dict[str, Any]:
    """Return the sizes that ``--size`` names.

    Raises:
        UserError: no such size, or no CUDA device.
    """
    if name not in SIZES:
        raise UserError(f"--size is {name!r}: choose among {', '.join(SIZES)}")
    if not torch.cuda.is_available():
        raise UserError(f"--size {name} needs a CUDA device: leave it out on a CPU")
    return SIZES[name]


def write_model(
    folder: Path, config: Mapping[str, Any], *, longest: int, dtype: Dtype = "float32", with_values: bool = True
) -> int:
    """Write a model with random weights and return their number. Without values the file is one of zeros that takes no
    room on the disk: a rollout's server looks at names and shapes and loads nothing."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": longest}))
    shapes = {name: shape for name, _, shape in hf_tensors(read_dims(folder), torch.float32)}
    path, generator = folder / "model.safetensors", torch.Generator().manual_seed(SEED)

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.ones(shape) if len(shape) == 1 else 0.05 * torch.randn(shape, generator=generator)

    if with_values:
        save_file({name: draw(shape).to(getattr(torch, dtype)) for name, shape in shapes.items()}, path)
        return sum(map(prod, shapes.values()))
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return end // 4


def make_tokens(length: int, vocab_size: int, *, seed: int) -> Tensor:
    """Draw tokens evenly, ``[length]`` int64."""
    return torch.randint(3, vocab_size, (length,), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Samples and all fields that a top-k loss reads."""

    metas: Sequence[SampleMeta]
    fields: dict[str, list[Tensor]]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompts and responses."""
        return sum(meta.length for meta in self.metas)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all tensors."""
        return sum(tensor.nbytes for tensors in self.fields.values() for tensor in tensors)

    def plane(self) -> LocalDataPlane:
        """Put the samples into a new data plane and return it."""
        plane = LocalDataPlane()
        asyncio.run(plane.put(list(self.metas), self.fields))
        return plane


def make_metas(lengths: Sequence[tuple[int, int]]) -> list[SampleMeta]:
    """Make the metas of samples of these (prompt, response) lengths."""
    common: dict[str, Any] = {"domain": DOMAIN, "weight_version": 0}
    return [
        SampleMeta(sample_id=i, prompt_length=prompt, response_length=response, num_loss_tokens=response, **common)
        for i, (prompt, response) in enumerate(lengths)
    ]


def make_samples(lengths: Sequence[tuple[int, int]], *, vocab_size: int, top_k: int = TOP_K) -> Samples:
    """Make samples of these (prompt, response) lengths with random tokens and a random teacher's best tokens: one of
    each of ``top_k`` parts of the vocabulary. The sampled token is among them."""
    generator = torch.Generator().manual_seed(SEED)
    part = vocab_size // top_k
    fields: dict[str, list[Tensor]] = {}
    for seed, (prompt, response) in enumerate(lengths):
        outcomes = torch.log_softmax(2 * torch.randn(response, top_k + 1, generator=generator), -1)  # the rest is one
        logprobs = outcomes[:, :top_k].sort(descending=True).values
        ids = part * torch.arange(top_k) + torch.randint(part, (response, top_k), generator=generator)
        sampled = torch.randint(top_k, (response, 1), generator=generator)
        values = {
            "tokens": torch.cat([make_tokens(prompt, vocab_size, seed=seed), ids.gather(1, sampled)[:, 0]]),
            "loss_mask": torch.ones(response, dtype=torch.bool),
            "rollout_logprobs": logprobs.gather(1, sampled)[:, 0],
            "teacher_ids": ids.int(),
            "teacher_logprobs": logprobs,
            "teacher_token_logprobs": logprobs.gather(1, sampled)[:, 0],
        }
        for name, value in values.items():
            fields.setdefault(name, []).append(value)
    return Samples(metas=make_metas(lengths), fields=fields)


def make_recipe(
    folder: Path, *, longest: int, engine: SettledEngine = ENGINE, top_k: int = TOP_K, **student: Any
) -> Recipe:
    """Make a recipe whose models are all that of ``folder``, with these further keys of ``student``."""
    student = {"model": str(folder), "dtype": "float32", "optimizer": OptimizerConfig(lr=1e-4), **student}
    return Recipe(
        run_dir="unused",
        student=StudentConfig(**student),
        teachers={DOMAIN: TeacherConfig(model=str(folder), domains=(DOMAIN,), engine=engine)},
        data=DataConfig(train=("unused",), validation=("unused",), max_prompt_length=longest // 2),
        rollout=RolloutConfig(max_response_length=longest // 2, engine=engine),
        loss=TopKLossConfig(top_k=top_k),
        schedule=ScheduleConfig(steps=10_000, prompts_per_step=1),
    )

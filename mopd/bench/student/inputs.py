"""Models and samples of ``mopd bench student``: random weights, drawn lengths, a teacher of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from mopd.config.data import DataConfig
from mopd.config.groups import TeacherConfig, TorchEngineConfig
from mopd.config.losses import TopKLossConfig
from mopd.config.schema import Recipe, RolloutConfig, ScheduleConfig
from mopd.config.student import OptimizerConfig, StudentConfig
from mopd.data_plane.local import LocalDataPlane
from mopd.engines.torch.engine import TorchEngine
from mopd.types import SampleMeta

Dtype = Literal["float32", "bfloat16"]
DOMAIN = "all"
TOP_K = 16
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 33,
}
"""The quickstart's student (tools/make_quickstart.py)."""
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Samples and the fields that the loss reads."""

    metas: Sequence[SampleMeta]
    fields: dict[str, list[Tensor]]

    @property
    def num_tokens(self) -> int:
        """Of prompts and responses."""
        return sum(meta.length for meta in self.metas)

    def plane(self) -> LocalDataPlane:
        """A data plane that holds them."""
        plane = LocalDataPlane()
        asyncio.run(plane.put(list(self.metas), self.fields))
        return plane


def write_model(
    folder: Path, *, max_positions: int, shape: Mapping[str, int] = SHAPE, dtype: torch.dtype = torch.float32
) -> None:
    """A Qwen3 of these sizes with random weights."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "use_sliding_window": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **shape,
    }
    (folder / "config.json").write_text(json.dumps(config))
    slots = TorchEngine.empty(folder, TorchEngineConfig(dtype="float32")).weight_slots
    generator = torch.Generator().manual_seed(SEED)
    weights = {
        name: (
            torch.ones(slot.shape) if len(slot.shape) == 1 else 0.05 * torch.randn(slot.shape, generator=generator)
        ).to(dtype)
        for name, slot in slots.items()
    }
    save_file(weights, folder / "model.safetensors")


def toy_lengths(num: int = 96) -> list[tuple[int, int]]:
    """(prompt, response) of samples of the quickstart's kind: a question of 3 to 8 letters and its answer."""
    generator = torch.Generator().manual_seed(SEED)
    letters = torch.randint(3, 9, (num,), generator=generator).tolist()
    words = torch.randint(6, 10, (num,), generator=generator).tolist()  # the task's name, marks
    return [(word + letter, letter + 1) for word, letter in zip(words, letters, strict=True)]


def mixed_lengths(num: int, *, low: int, high: int) -> list[int]:
    """Log-normal lengths: median at the geometric mean of ``low`` and ``high``, which lie two deviations off it."""
    generator = torch.Generator().manual_seed(SEED)
    bounds = torch.tensor([float(low), float(high)]).log()
    drawn = bounds.mean() + (bounds[1] - bounds[0]) / 4 * torch.randn(num, generator=generator)
    return drawn.exp().round().clamp(low, high).long().tolist()


def make_metas(lengths: Sequence[tuple[int, int]]) -> list[SampleMeta]:
    """Samples of these (prompt, response) lengths."""
    return [
        SampleMeta(
            sample_id=i,
            domain=DOMAIN,
            weight_version=0,
            prompt_length=prompt,
            response_length=response,
            num_loss_tokens=response,
        )
        for i, (prompt, response) in enumerate(lengths)
    ]


def make_tokens(length: int, vocab_size: int, *, seed: int) -> Tensor:
    """[length] int64, drawn evenly."""
    return torch.randint(3, vocab_size, (length,), generator=torch.Generator().manual_seed(seed))


def make_samples(lengths: Sequence[tuple[int, int]], *, vocab_size: int = SHAPE["vocab_size"]) -> Samples:
    """Samples of these (prompt, response) lengths with random tokens and a random teacher's best tokens: one of each of
    ``TOP_K`` parts of the vocabulary. The sampled token is among them."""
    generator = torch.Generator().manual_seed(SEED)
    part = vocab_size // TOP_K
    fields: dict[str, list[Tensor]] = {}
    for seed, (prompt, response) in enumerate(lengths):
        outcomes = torch.log_softmax(2 * torch.randn(response, TOP_K + 1, generator=generator), -1)  # the rest is one
        logprobs = outcomes[:, :TOP_K].sort(descending=True).values
        ids = part * torch.arange(TOP_K) + torch.randint(part, (response, TOP_K), generator=generator)
        sampled = torch.randint(TOP_K, (response, 1), generator=generator)
        values = {
            "tokens": torch.cat([make_tokens(prompt, vocab_size, seed=seed), ids.gather(1, sampled)[:, 0]]),
            "loss_mask": torch.ones(response, dtype=torch.bool),
            "teacher_ids": ids.int(),
            "teacher_logprobs": logprobs,
            "teacher_token_logprobs": logprobs.gather(1, sampled)[:, 0],
        }
        for name, value in values.items():
            fields.setdefault(name, []).append(value)
    return Samples(metas=make_metas(lengths), fields=fields)


def make_recipe(folder: Path, *, longest: int, dtype: Dtype = "float32", **student: Any) -> Recipe:
    """A recipe on the model of ``folder`` with these keys of ``student``."""
    return Recipe(
        run_dir="unused",
        student=StudentConfig(model=str(folder), dtype=dtype, optimizer=OptimizerConfig(lr=1e-4), **student),
        teachers={DOMAIN: TeacherConfig(model="unused", domains=(DOMAIN,))},
        data=DataConfig(train=("unused",), validation=("unused",), max_prompt_length=longest // 2),
        rollout=RolloutConfig(max_response_length=longest // 2),
        loss=TopKLossConfig(top_k=TOP_K),
        schedule=ScheduleConfig(steps=10_000, prompts_per_step=1),
    )

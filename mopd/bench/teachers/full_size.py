"""Scoring with the torch engine beside a bare forward pass of the same model: a published model's sizes, on a GPU."""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mopd.bench.student.full_size import size_on_gpu
from mopd.bench.student.inputs import Dtype, make_tokens, write_model
from mopd.config.groups import TorchEngineConfig
from mopd.conversion.hf.pretrained import load_weights
from mopd.engines.torch.engine import TorchEngine
from mopd.files.temporary import TemporaryFolder

SEQUENCES, LENGTH, PROMPT = 16, 2048, 512
PER_FORWARD = 4
ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Seconds of each round's passes over the same sequences."""

    size: str
    device: str
    num_tokens: int
    """Prompts included."""
    top_k: int
    engine_s: tuple[float, ...]
    forward_s: tuple[float, ...]
    """Of a forward pass that ends with the logits of the responses' tokens and does nothing with them."""

    def tree(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {
            **dataclasses.asdict(self),
            "engine_tokens_per_s": self.num_tokens / statistics.median(self.engine_s),
            "forward_tokens_per_s": self.num_tokens / statistics.median(self.forward_s),
            "ratio": self.ratio,
        }

    @property
    def ratio(self) -> float:
        """Median over rounds: the engine's throughput relative to the bare forward pass."""
        return statistics.median(a / b for a, b in zip(self.forward_s, self.engine_s, strict=True))


def measure_full_size(name: str, *, top_k: int, rounds: int = ROUNDS) -> Scored:
    """Both in turns.

    Raises:
        UserError: no such size, or no CUDA device.
    """
    return measure_scoring(
        name, size_on_gpu(name), [LENGTH] * SEQUENCES, PROMPT, dtype="bfloat16", top_k=top_k, rounds=rounds
    )


def measure_scoring(
    name: str,
    shape: Mapping[str, int],
    lengths: list[int],
    prompt: int,
    *,
    dtype: Dtype,
    top_k: int,
    rounds: int,
) -> Scored:
    """The same for any shape, on any device: sequences of these lengths, whose first ``prompt`` tokens are unscored."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens = [make_tokens(length, shape["vocab_size"], seed=i) for i, length in enumerate(lengths)]
    starts = [prompt] * len(tokens)
    with TemporaryFolder("mopd-bench-") as made:
        folder = Path(made)
        write_model(folder, max_positions=max(lengths), shape=shape, dtype=getattr(torch, dtype))
        budget = TorchEngineConfig(dtype=dtype, max_tokens_per_batch=PER_FORWARD * max(lengths))
        engine = TorchEngine.from_pretrained(folder, budget, device)
        model, _ = load_weights(folder, getattr(torch, dtype))
        model.eval().to(device)

        def score() -> None:
            asyncio.run(engine.score(tokens, starts, top_k=top_k, temperature=1.0))

        times: dict[Callable[[], None], list[float]] = {score: [], lambda: _forward(model, tokens, prompt, device): []}
        ways = list(times)
        for number in range(-1, rounds):  # the first round is not timed
            for way in ways if number % 2 == 0 else ways[::-1]:
                began = time.perf_counter()
                way()
                if number >= 0:
                    times[way].append(time.perf_counter() - began)
    return Scored(
        size=name,
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        num_tokens=sum(lengths),
        top_k=top_k,
        engine_s=tuple(times[ways[0]]),
        forward_s=tuple(times[ways[1]]),
    )


@torch.inference_mode()
def _forward(model: Any, tokens: list[Tensor], prompt: int, device: torch.device) -> None:
    for start in range(0, len(tokens), PER_FORWARD):
        batch = torch.nn.utils.rnn.pad_sequence(tokens[start : start + PER_FORWARD], batch_first=True).to(device)
        model(input_ids=batch, use_cache=False, logits_to_keep=batch.size(1) - prompt + 1)
    if device.type == "cuda":
        torch.cuda.synchronize()

"""A student of a published model's sizes beside transformers' own model on the same samples: tokens a second, share of
the GPU's peak, memory. Both in bf16; the student keeps fp32 weights and gradients beside, the other does not."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mopd.bench.student.inputs import Dtype, make_recipe, make_samples
from mopd.bench.student.measure import Contest, Step, contest, scratch_model, student_step
from mopd.bench.student.plain import PlainStep
from mopd.conversion.models.reading import read_dims
from mopd.planning.devices import GPUS
from mopd.planning.stages import forward_flops
from mopd.types import UserError

SIZES: dict[str, dict[str, int]] = {
    "qwen3-1.7b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
    }
}
"""config.json of the published model; the weights are random."""
SEQUENCES, LENGTH, PROMPT = 8, 2048, 512
"""16,384 tokens a step."""
PER_FORWARD = 4
"""Sequences of a micro-batch."""
ROUNDS = 5
SAME = 2e-2
"""Relative: bf16 keeps 8 bits; loss and gradient norm of two programs differ by some of its roundings, 0.4 % each."""
LEAST_SHARE, LEAST_SPEED_UP = 0.40, 1.5


class Watched:
    """A contender's steps, and the most device memory that it took: what it holds and what a step adds."""

    def __init__(self, device: torch.device, make: Callable[[], Step]) -> None:
        self._is_on_gpu = device.type == "cuda"
        before = self._allocated()
        self._step = make()
        self._own = self._allocated() - before
        self._peak = 0

    @property
    def peak_gib(self) -> float | None:
        return self._peak / 2**30 if self._is_on_gpu else None

    def __call__(self) -> tuple[float, float]:
        if not self._is_on_gpu:
            return self._step()
        before = self._allocated()
        torch.cuda.reset_peak_memory_stats()
        result = self._step()
        self._peak = max(self._peak, torch.cuda.max_memory_allocated() - before + self._own)
        self._own += self._allocated() - before
        return result

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self._is_on_gpu else 0


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What one contender took."""

    tokens_per_s: float
    share_of_peak: float | None
    """Of the GPU's dense bf16 operations; ``None`` for a device that ``planning/devices.py`` does not know."""
    peak_gib: float | None
    """Its weights, gradients and optimizer states, and the most that a step adds; ``None`` without CUDA."""


@dataclass(frozen=True, kw_only=True)
class FullSize:
    """Both contenders' figures by name, and the speed-up."""

    size: str
    device: str
    num_tokens: int
    trained: Mapping[str, Trained]
    speed_up: float
    """Median over rounds of transformers' time over the student's."""

    @property
    def is_met(self) -> bool:
        share = self.trained["student"].share_of_peak
        return self.speed_up >= LEAST_SPEED_UP and share is not None and share >= LEAST_SHARE

    def tree(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {**dataclasses.asdict(self), "is_met": self.is_met}


def measure_full_size(name: str, *, rounds: int = ROUNDS) -> FullSize:
    """Steps of both in turns.

    Raises:
        UserError: no such size, or no CUDA device.
        RuntimeError: the two do not compute the same.
    """
    lengths = [(PROMPT, LENGTH - PROMPT)] * SEQUENCES
    return measure_sizes(name, size_on_gpu(name), lengths, dtype="bfloat16", per_forward=PER_FORWARD, rounds=rounds)


def size_on_gpu(name: str) -> dict[str, int]:
    """What ``--size`` names.

    Raises:
        UserError: no such size, or no CUDA device.
    """
    if name not in SIZES:
        raise UserError(f"--size is {name!r}: choose among {', '.join(SIZES)}")
    if not torch.cuda.is_available():
        raise UserError(f"--size {name} needs a CUDA device: leave it out on a CPU")
    return SIZES[name]


def measure_sizes(
    name: str,
    shape: Mapping[str, int],
    lengths: list[tuple[int, int]],
    *,
    dtype: Dtype,
    per_forward: int,
    rounds: int,
) -> FullSize:
    """The same for any shape, on any device. ``lengths`` are (prompt, response) of each sample, ``per_forward`` samples
    make a micro-batch."""
    torch_dtype = getattr(torch, dtype)
    longest = max(map(sum, lengths))
    with scratch_model(max_positions=longest, shape=shape, dtype=torch_dtype) as (folder, device):
        samples = make_samples(lengths, vocab_size=shape["vocab_size"])
        keys: dict[str, Any] = {"dtype": dtype, "max_tokens_per_micro_batch": per_forward * longest}
        config = make_recipe(folder, longest=longest, **keys).student.optimizer
        contenders = {
            "student": Watched(device, lambda: student_step(folder, samples, longest=longest, **keys)),
            "transformers": Watched(
                device,
                lambda: PlainStep(folder, samples, config, device, dtype=torch_dtype, per_forward=per_forward),
            ),
        }
        dims = read_dims(folder)
        times = contest(name, samples, contenders, rounds, same=SAME)
    context = statistics.mean(sum(length) / 2 for length in lengths)
    rows = sum(response for _, response in lengths)
    flops = 3 * forward_flops(dims, tokens=times.num_tokens, context=context, rows=rows)
    told = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    peak = next((gpu.flops for key, gpu in GPUS.items() if key in told.lower()), None)
    return FullSize(
        size=name,
        device=told,
        num_tokens=times.num_tokens,
        trained={key: _trained(times, key, flops, peak, one.peak_gib) for key, one in contenders.items()},
        speed_up=times.ratio("transformers", "student"),
    )


def _trained(times: Contest, key: str, flops: float, peak: float | None, peak_gib: float | None) -> Trained:
    seconds = times.median_s(key)
    share = None if peak is None else flops / seconds / peak
    return Trained(tokens_per_s=times.tokens_per_s(key), share_of_peak=share, peak_gib=peak_gib)

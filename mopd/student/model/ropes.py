"""Rotary embeddings: scaled frequencies, for attention whose rope Megatron-Core makes plain, and two ropes in a model.

Latent attention makes its own rope, scaled by its own configuration (``config.py``).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from mopd.conversion.models.dims import LinearRope, Llama3Rope, ModelDims, RopeScaling, YarnRope


class PairedRotary(nn.Module):
    """Two ropes of a model some of whose layers have windows: the angles of the whole-attention layers, then those of
    the windowed ones, in one tensor that Megatron hands to every layer and to its recomputation."""

    def __init__(self, whole: nn.Module, windowed: nn.Module) -> None:
        super().__init__()
        self.ropes = nn.ModuleList((whole, windowed))

    def forward(self, length: int, *, packed_seq: bool) -> Tensor:
        """Return angles [length, 1, 1, 2 D]."""
        return torch.cat([rope(length, packed_seq=packed_seq) for rope in self.ropes], dim=-1)

    @staticmethod
    def choose(layer: nn.Module, inputs: Any, options: dict[str, Any], *, is_windowed: bool) -> Any:
        """Leave a layer its own angles, as a forward pre-hook."""
        return inputs, {**options, "rotary_pos_emb": options["rotary_pos_emb"].chunk(2, dim=-1)[is_windowed]}


def scaled_frequencies(plain: Tensor, dims: ModelDims, scaling: RopeScaling) -> Tensor:
    """Return the frequencies [D / 2] of a scaled rope over D turned channels, from those of the plain one."""
    if isinstance(scaling, LinearRope):
        return plain / scaling.factor
    return _llama3(plain, scaling) if isinstance(scaling, Llama3Rope) else _yarn(plain, dims.rotary_base, scaling)


def _llama3(plain: Tensor, rope: Llama3Rope) -> Tensor:
    """Scale long wavelengths, leave short ones, and let those between pass from one to the other."""
    turns = rope.original_max_positions * plain / (2 * math.pi)
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return plain * (kept + (1 - kept) / rope.factor)


def _yarn(plain: Tensor, base: float, rope: YarnRope) -> Tensor:
    """Scale frequencies that turn fewer than ``beta_slow`` times over the original length, leave those that turn more
    than ``beta_fast`` times, and go from one to the other channel by channel."""
    channels = 2 * len(plain)

    def channel(turns: float) -> float:
        return channels * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, channels - 1)
    width = high - low if high != low else 0.001
    scaled = ((torch.arange(len(plain), device=plain.device) - low) / width).clamp(0, 1)
    return plain * (1 - scaled + scaled / rope.factor)

"""Drawing tokens by inverse transform: one uniform number per token, a function of the sample's seed and the step.

A sample's randomness therefore depends neither on its neighbours nor on torch's generators, on a CPU or a GPU.
Shapes: B rows, V vocabulary, N steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mopd.engines.interface import SamplingParams


def uniforms(seeds: Sequence[int], num_steps: int) -> Tensor:
    """[B, N] fp64 in [0, 1): number n of row b depends on ``seeds[b]`` and n only (counter-based Philox).

    Seeds are non-negative and below 2**63.
    """
    values = np.empty((len(seeds), num_steps), dtype=np.float64)
    for row, seed in enumerate(seeds):
        np.random.Generator(np.random.Philox(key=seed)).random(out=values[row])
    return torch.from_numpy(values)


def draw(logits_BV: Tensor, sampling: SamplingParams, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row: ``(tokens [B] int64, logprobs [B] fp32)``.

    ``logits_BV`` is fp32 and not changed. Log-probs are those of softmax(logits / temperature) over the whole
    vocabulary, before the cuts; greedy decoding (temperature 0) reports temperature 1. ``top_k`` cuts first, ``top_p``
    then keeps the smallest set of the renormalised rest whose mass reaches it.
    """
    if sampling.temperature == 0:
        tokens = logits_BV.argmax(-1)
        return tokens, _gather(logits_BV, tokens) - logits_BV.logsumexp(-1)
    scaled = logits_BV if sampling.temperature == 1 else logits_BV / sampling.temperature
    normaliser = scaled.logsumexp(-1)
    if sampling.top_k == -1 and sampling.top_p == 1:
        tokens = _inverse_cdf((scaled - normaliser[:, None]).exp_(), uniform_B)
    else:
        tokens = _draw_from_top(scaled, sampling, uniform_B)
    return tokens, _gather(scaled, tokens) - normaliser


def _draw_from_top(scaled_BV: Tensor, sampling: SamplingParams, uniform_B: Tensor) -> Tensor:
    vocab_size = scaled_BV.shape[-1]
    num_kept = vocab_size if sampling.top_k == -1 else min(sampling.top_k, vocab_size)
    top = scaled_BV.topk(num_kept, dim=-1)
    probs = top.values.softmax(-1)
    if sampling.top_p < 1:
        mass_before = probs.cumsum(-1, dtype=torch.float64) - probs
        probs = probs.masked_fill(mass_before >= sampling.top_p, 0.0)
    ranks = _inverse_cdf(probs, uniform_B)
    return top.indices.gather(-1, ranks[:, None]).squeeze(-1)


def _inverse_cdf(probs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """First index whose cumulative mass exceeds ``uniform * total``: never an entry of mass 0."""
    cdf = probs_BV.cumsum(-1, dtype=torch.float64)
    threshold = uniform_B * cdf[:, -1]  # uniforms are at most 1 - 2^-53: rounded in fp64, this stays below the total
    return torch.searchsorted(cdf, threshold[:, None], right=True).squeeze(-1)


def _gather(values_BV: Tensor, index_B: Tensor) -> Tensor:
    return values_BV.gather(-1, index_B[:, None]).squeeze(-1)

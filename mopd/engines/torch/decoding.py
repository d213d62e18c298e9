"""Autoregressive decoding of one batch with a transformers model and its KV cache.

Shapes: B rows, P longest prompt, N new tokens at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from mopd.engines.interface import SamplingParams
from mopd.engines.torch.sampling import draw


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoded:
    """Row b's response is ``tokens[b, :lengths[b]]``; what follows is meaningless."""

    tokens: Tensor
    """[B, N] int64."""
    logprobs: Tensor
    """[B, N] fp32."""
    lengths: list[int]
    stopped: list[bool]
    """Whether the last token is a stop token."""


def decode(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    uniform_BN: Tensor,
    stop_ids: Tensor,
) -> Decoded:
    """Sample one response per prompt. Prompts are padded on the left; the logits of prompt tokens are never formed.

    Rows that have ended keep running until they are half of the batch, and then leave it together with their cache:
    each removal copies the cache, so it must pay.
    """
    device, num_steps = model.device, sampling.max_new_tokens
    prompt_ids, visible = _pad_left(prompts, num_steps)
    input_ids, visible = prompt_ids.to(device), visible.to(device)
    width = input_ids.shape[1]
    positions = (visible[:, :width].cumsum(-1) - 1).clamp_(min=0)
    uniform_BN = uniform_BN.to(device)
    tokens = torch.zeros(len(prompts), num_steps, dtype=torch.int64, device=device)
    logprobs = torch.zeros(len(prompts), num_steps, dtype=torch.float32, device=device)
    lengths = torch.full((len(prompts),), num_steps, device=device)
    stopped = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    cache = DynamicCache(config=model.config)
    rows = torch.arange(len(prompts), device=device)
    for step in range(num_steps):
        output = model(
            input_ids=input_ids,
            attention_mask=visible[:, : width + step],
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        drawn, drawn_logprobs = draw(output.logits[:, -1].float(), sampling, uniform_BN[rows, step])
        tokens[rows, step], logprobs[rows, step] = drawn, drawn_logprobs
        ends = torch.isin(drawn, stop_ids) & ~stopped[rows]
        lengths[rows] = torch.where(ends, step + 1, lengths[rows])
        stopped[rows] |= ends
        running = (~stopped[rows]).nonzero().squeeze(-1)
        if len(running) == 0:
            break
        input_ids, positions = drawn[:, None], positions[:, -1:] + 1
        if 2 * len(running) <= len(rows):
            cache.batch_select_indices(running)
            rows, visible = rows[running], visible[running]
            input_ids, positions = input_ids[running], positions[running]
    return Decoded(tokens=tokens.cpu(), logprobs=logprobs.cpu(), lengths=lengths.tolist(), stopped=stopped.tolist())


def _pad_left(prompts: Sequence[Sequence[int]], num_new: int) -> tuple[Tensor, Tensor]:
    """``(token ids [B, P] int64, visibility [B, P + num_new] int64)``: padding is 0 in both."""
    width = max(len(prompt) for prompt in prompts)
    ids = np.zeros((len(prompts), width), dtype=np.int64)
    visible = np.ones((len(prompts), width + num_new), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        visible[row, : width - len(prompt)] = 0
    return torch.from_numpy(ids), torch.from_numpy(visible)

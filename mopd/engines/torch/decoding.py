"""Autoregressive decoding of one batch with a transformers model and its KV cache.

Tokens are drawn by inverse transform: one uniform number per token, a function of the sample's seed and the step. A
sample's randomness therefore depends neither on its neighbours nor on torch's generators, on a CPU or a GPU.
Shapes: B rows, P longest prompt, N new tokens at most, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from mopd.engines.interface import FinishReason, SamplingParams
from mopd.engines.stop_texts import StopTexts
from mopd.engines.torch.routes import RouteRecorder


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenBatch:
    """Inputs of a forward beside the tokens, for a model that sees images."""

    position_ids: Tensor
    """[3, B, S] int64; [B, S] for a text model."""
    extra: dict[str, Any]
    """Keyword arguments of the model: the images' features."""
    barred: Tensor | None
    """[n] int64 ids that are never drawn."""


def decode(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    uniform_BN: Tensor,
    stop_ids: Tensor,
    note: Callable[[int, Tensor, Tensor, Tensor, Tensor | None, FinishReason], None],
    *,
    stop_texts: StopTexts | None = None,
    seen: SeenBatch | None = None,
    routes: RouteRecorder | None = None,
    interrupted: Callable[[], bool] = lambda: False,
) -> None:
    """Sample one response per prompt. Prompts are padded on the left; the logits of prompt tokens are never formed.

    Rows that have ended keep running until they are half of the batch. They are then removed together with their cache:
    each removal copies the cache, so it must pay.

    Args:
        uniform_BN: uniform numbers in [0, 1), on the model's device.
        note: called as ``note(row, tokens [R], logprobs [R], top_ids [R, num_top_ids], routes, finish_reason)`` with
            CPU tensors when a row ends; ``routes`` as ``Generation.routes``.
        stop_texts: texts of ``sampling.stop``, where there are some.
        seen: the prompts' images, padded as the prompts; ``None`` for a text model.
        routes: recorder of the batch's routes, which is recording; ``None``: none are told.
        interrupted: called before each step; once it returns true, running rows are handed back with the tokens so far.
    """
    device, num_steps = model.device, sampling.max_new_tokens
    input_ids, visible = _pad_left(prompts, num_steps, device)
    width = input_ids.shape[1]
    seen = seen or _without_images(visible[:, :width])
    positions = seen.position_ids
    tokens = torch.zeros(len(prompts), num_steps, dtype=torch.int64, device=device)
    logprobs = torch.zeros(len(prompts), num_steps, dtype=torch.float32, device=device)
    top_ids = torch.zeros(len(prompts), num_steps, sampling.num_top_ids, dtype=torch.int32, device=device)
    stopped = torch.zeros(len(prompts), dtype=torch.bool, device=device)

    def end(row: int, reason: FinishReason) -> None:
        tops, told = top_ids[row, :num_done].cpu(), None if routes is None else routes.of(row, len(prompts[row]))
        note(row, tokens[row, :num_done].cpu(), logprobs[row, :num_done].cpu(), tops, told, reason)

    rules = _Rules(prompts, sampling, stop_ids, stop_texts)
    cache = DynamicCache(config=model.config)
    rows, num_done = torch.arange(len(prompts), device=device), 0
    while num_done < num_steps and not interrupted():
        step, num_done = num_done, num_done + 1
        if routes is not None:
            routes.rows = rows
        extra = seen.extra if step == 0 else {}  # later steps find the images in the cache
        logits = _next_logits(model, input_ids, visible[:, : width + step], positions, cache, extra)
        drawn, logprobs[rows, step] = rules.draw(logits, uniform_BN[rows, step], rows, seen.barred)
        tokens[rows, step] = drawn
        if sampling.num_top_ids:
            top_ids[rows, step] = logits.topk(sampling.num_top_ids, dim=-1, sorted=False).indices.int()
        ends = rules.ends(tokens, rows, num_done) & ~stopped[rows]
        stopped[rows] |= ends
        for row in rows[ends].tolist():
            end(row, "stop")
        running = (~stopped[rows]).nonzero().squeeze(-1)
        if len(running) == 0:
            return
        input_ids, positions = drawn[:, None], _next(positions)
        if 2 * len(running) <= len(rows):  # `rows` maps a row of the rest to its row of the result
            cache.reorder_cache(running)  # type: ignore[arg-type]  # the one selection that layers with states know
            rows, visible = rows[running], visible[running]
            input_ids, positions = input_ids[running], positions[..., running, :]
    rest: FinishReason = "length" if num_done == num_steps else "handed_back"
    for row in (~stopped).nonzero().squeeze(-1).tolist():
        end(row, rest)


def _next_logits(
    model: PreTrainedModel, input_ids: Tensor, visible: Tensor, positions: Tensor, cache: DynamicCache, extra: Any
) -> Tensor:
    """Return the logits [B, V] fp32 behind ``input_ids`` [B, S], which follow what the cache holds."""
    output = model(
        input_ids=input_ids,
        attention_mask=visible,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
        **extra,
    )
    logits: Tensor = output.logits[:, -1].float()
    return logits


def _without_images(visible_BS: Tensor) -> SeenBatch:
    return SeenBatch(position_ids=(visible_BS.cumsum(-1) - 1).clamp_(min=0), extra={}, barred=None)


def _next(positions: Tensor) -> Tensor:
    """Return the positions, [B, 1] or [3, B, 1], that follow ``positions`` [B, S] or [3, B, S]: one more than the last
    token's largest coordinate."""
    last = positions[..., -1:]
    return last + 1 if last.dim() == 2 else (last.amax(0, keepdim=True) + 1).expand_as(last)


def _pad_left(prompts: Sequence[Sequence[int]], num_new: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ``(token ids [B, P] int64, visibility [B, P + num_new] int64)``; padding is 0 in both."""
    width = max(len(prompt) for prompt in prompts)
    ids = np.zeros((len(prompts), width), dtype=np.int64)
    visible = np.ones((len(prompts), width + num_new), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        visible[row, : width - len(prompt)] = 0
    return torch.from_numpy(ids).to(device), torch.from_numpy(visible).to(device)


def uniforms(seeds: Sequence[int], num_steps: int) -> Tensor:
    """Return [B, N] fp64 numbers in [0, 1). Number n of row b depends on ``seeds[b]`` and n only (counter-based
    Philox).

    Seeds are non-negative and below 2**63.
    """
    values = np.empty((len(seeds), num_steps), dtype=np.float64)
    for row, seed in enumerate(seeds):
        np.random.Generator(np.random.Philox(key=seed)).random(out=values[row])
    return torch.from_numpy(values)


class _Rules:
    """What was drawn before decides: penalties, as vLLM has them, and the ends of responses."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        stop_ids: Tensor,
        stop_texts: StopTexts | None,
    ) -> None:
        self._prompts, self._sampling = prompts, sampling
        self._stop_ids, self._stop_texts = stop_ids, stop_texts
        self._begun = [list(prompt[len(prompt) - sampling.num_begun :]) for prompt in prompts]
        """Tokens of each response that stand in its prompt."""
        self._held: tuple[Tensor, Tensor] | None = None
        """Which ids each row holds, in prompt or response and in the response alone, [B, V] bool."""

    def draw(self, logits_BV: Tensor, uniform_B: Tensor, rows: Tensor, barred: Tensor | None) -> tuple[Tensor, Tensor]:
        """Draw as ``draw`` does, for some rows of the batch, after penalties."""
        if not self._sampling.has_penalty:
            return draw(logits_BV, self._sampling, uniform_B, barred)
        if self._held is None:
            size, device = logits_BV.shape[-1], logits_BV.device
            self._held = _held(self._prompts, size, device), _held(self._begun, size, device)
        anywhere, own = (held[rows] for held in self._held)
        penalty = self._sampling.repetition_penalty
        repeated = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
        drawn_from = torch.where(anywhere, repeated, logits_BV) - self._sampling.presence_penalty * own
        drawn, logprobs = draw(logits_BV, self._sampling, uniform_B, barred, drawn_from)
        for held in self._held:
            held[rows, drawn] = True
        return drawn, logprobs

    def ends(self, tokens_BN: Tensor, rows: Tensor, num_done: int) -> Tensor:
        """Return which of some rows end with their newest token, number ``num_done``, as bool."""
        ends = torch.isin(tokens_BN[rows, num_done - 1], self._stop_ids)
        if self._stop_texts is None:
            return ends
        newest = tokens_BN[rows, max(0, num_done - self._stop_texts.window) : num_done].tolist()
        begun = [self._begun[row] for row in rows.tolist()]
        found = [self._stop_texts.is_at_end(first + own) for first, own in zip(begun, newest, strict=True)]
        return ends | torch.tensor(found, device=ends.device)


def _held(sequences: Sequence[Sequence[int]], vocab_size: int, device: torch.device) -> Tensor:
    """Return which ids each sequence holds, [B, V] bool."""
    held = torch.zeros(len(sequences), vocab_size, dtype=torch.bool)
    for row, ids in enumerate(sequences):
        held[row, torch.tensor(ids, dtype=torch.int64)] = True
    return held.to(device)


def draw(
    logits_BV: Tensor,
    sampling: SamplingParams,
    uniform_B: Tensor,
    barred: Tensor | None = None,
    drawn_from: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row: ``(tokens [B] int64, logprobs [B] fp32)``.

    ``logits_BV`` is fp32 and not changed. Log-probs are those of softmax(logits / temperature) over the whole
    vocabulary, before penalties and cuts; greedy decoding (temperature 0) reports temperature 1. ``drawn_from``
    [B, V] are the logits after penalties (``None``: there are none). ``barred`` ids are cut first of all, then
    ``top_k`` and ``min_p`` cut, and ``top_p`` keeps the smallest set of the renormalised rest whose mass reaches it.
    """
    if sampling.temperature == 0:
        tokens = _without(logits_BV if drawn_from is None else drawn_from, barred).argmax(-1)
        return tokens, _gather(logits_BV, tokens) - logits_BV.logsumexp(-1)
    scaled = logits_BV if sampling.temperature == 1 else logits_BV / sampling.temperature
    normaliser = scaled.logsumexp(-1)
    candidates = scaled if drawn_from is None else drawn_from / sampling.temperature
    if sampling.top_k == -1 and sampling.top_p == 1 and sampling.min_p == 0:
        largest = normaliser if drawn_from is None else candidates.logsumexp(-1)
        tokens = _inverse_cdf((_without(candidates, barred) - largest[:, None]).exp_(), uniform_B)
    else:
        tokens = _draw_from_top(_without(candidates, barred), sampling, uniform_B)
    return tokens, _gather(scaled, tokens) - normaliser


def _without(logits_BV: Tensor, barred: Tensor | None) -> Tensor:
    return logits_BV if barred is None else logits_BV.index_fill(-1, barred, -torch.inf)


def _draw_from_top(scaled_BV: Tensor, sampling: SamplingParams, uniform_B: Tensor) -> Tensor:
    vocab_size = scaled_BV.shape[-1]
    num_kept = vocab_size if sampling.top_k == -1 else min(sampling.top_k, vocab_size)
    top = scaled_BV.topk(num_kept, dim=-1)
    kept = top.values
    if sampling.min_p > 0:
        kept = kept.masked_fill(kept < kept[:, :1] + math.log(sampling.min_p), -torch.inf)
    probs = kept.softmax(-1)
    if sampling.top_p < 1:
        mass_before = probs.cumsum(-1, dtype=torch.float64) - probs
        probs = probs.masked_fill(mass_before >= sampling.top_p, 0.0)
    ranks = _inverse_cdf(probs, uniform_B)
    return top.indices.gather(-1, ranks[:, None]).squeeze(-1)


def _inverse_cdf(probs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Return the first index whose cumulative mass exceeds ``uniform * total``: never an entry of mass 0."""
    cdf = probs_BV.cumsum(-1, dtype=torch.float64)
    threshold = uniform_B * cdf[:, -1]  # uniforms are at most 1 - 2^-53: rounded in fp64, this stays below the total
    return torch.searchsorted(cdf, threshold[:, None], right=True).squeeze(-1)


def _gather(values_BV: Tensor, index_B: Tensor) -> Tensor:
    return values_BV.gather(-1, index_B[:, None]).squeeze(-1)

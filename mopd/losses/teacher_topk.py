"""The teacher's K most probable ids from its hidden states, without a tensor of all logits.

Only the current chunk exists as logits, and its exponentials overwrite them once the top-k are known.

Shape legend: R rows, C rows of a chunk, H hidden size, V vocabulary, K ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mopd.losses.call import accumulation_dtype


@dataclass(frozen=True)
class TeacherTopK:
    """A teacher's top-k of some rows."""

    ids: Tensor
    """[R, K] int32, most probable first."""
    logprobs: Tensor
    """[R, K] fp32 (float64 for float64 inputs), over the whole vocabulary."""
    mass: Tensor
    """[R] probability of the K ids together."""
    target_logprobs: Tensor | None
    """[R] or [R, N] log-probs of ``target``; None without it."""


@torch.no_grad()
def chunked_topk_logprobs(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    *,
    max_rows: int,
    target: Tensor | None = None,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    true_vocab_size: int | None = None,
) -> TeacherTopK:
    """Return the top-k of softmax((hidden @ weight.T + bias) / temperature), computed ``max_rows`` rows at a time.

    Args:
        hidden: ``[R, H]`` float.
        weight: ``[V, H]``, the whole vocabulary, same dtype.
        k: ids per row, at most the vocabulary; 0 for log-probs of ``target`` alone.
        max_rows: rows whose logits exist at once: in the dtype of ``weight``, and once more in fp32.
        target: int64 ``[R]`` or ``[R, N]``, ids whose log-probs are also returned.
        true_vocab_size: columns from this id on are padding.

    Raises:
        ValueError: shapes, dtypes, or values out of range.
    """
    vocab_size = weight.size(0) if true_vocab_size is None else true_vocab_size
    _check(hidden, weight, bias, target, k, max_rows, temperature, vocab_size)
    num_rows, dtype = hidden.size(0), accumulation_dtype(weight)
    ids = hidden.new_empty(num_rows, k, dtype=torch.int32)
    logprobs = hidden.new_empty(num_rows, k, dtype=dtype)
    target_logprobs = None if target is None else hidden.new_empty(target.shape, dtype=dtype)
    height = min(max_rows, num_rows)
    buffer = hidden.new_empty(height, vocab_size)
    wide = buffer if buffer.dtype == dtype else buffer.new_empty(buffer.shape, dtype=dtype)
    for low in range(0, num_rows, max(1, height)):
        rows = slice(low, min(low + height, num_rows))
        part = hidden[rows]
        logits = torch.mm(part, weight[:vocab_size].t(), out=buffer[: part.size(0)])
        if bias is not None:
            logits += bias[:vocab_size]
        values, chosen = logits.topk(k, dim=1)
        peak = values[:, :1] if k else logits.amax(1, keepdim=True)
        own = None if target is None else logits.gather(1, target[rows].view(part.size(0), -1))
        lse = _log_sum_exp(logits, wide[: part.size(0)], peak, temperature)
        ids[rows] = chosen
        torch.sub(values.to(dtype) / temperature, lse, out=logprobs[rows])
        if own is not None and target_logprobs is not None:
            target_logprobs[rows] = (own.to(dtype) / temperature - lse).view_as(target_logprobs[rows])
    return TeacherTopK(ids, logprobs, logprobs.exp().sum(1), target_logprobs)


def _log_sum_exp(logits: Tensor, wide: Tensor, peak: Tensor, temperature: float) -> Tensor:
    """Return the log-sum-exp ``[C, 1]`` of the scaled logits, relative to their maximum ``peak``. ``wide`` is
    overwritten, and may be ``logits`` itself."""
    peak = peak.to(wide.dtype)
    torch.sub(logits, peak, out=wide)
    if temperature != 1:
        wide /= temperature
    return peak / temperature + wide.exp_().sum(1, keepdim=True).log_()


def _check(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor | None,
    k: int,
    max_rows: int,
    temperature: float,
    vocab_size: int,
) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.size(1) != weight.size(1) or hidden.dtype != weight.dtype:
        raise ValueError(
            f"hidden is {hidden.dtype} {list(hidden.shape)} and weight {weight.dtype} {list(weight.shape)}: "
            "pass [R, H] and [V, H] of one dtype"
        )
    if not 1 <= vocab_size <= weight.size(0):
        raise ValueError(f"true_vocab_size is {vocab_size}: weight {list(weight.shape)} has {weight.size(0)} rows")
    if not 0 <= k <= vocab_size or (k == 0 and target is None):
        raise ValueError(f"k is {k}: the vocabulary has {vocab_size} ids, and 0 needs target")
    if max_rows < 1 or not temperature > 0:
        raise ValueError(f"max_rows is {max_rows} and temperature {temperature}: set both above 0")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias is {list(bias.shape)}: pass {list(weight.shape[:1])}, the rows of weight")
    if target is not None and (target.shape[:1] != hidden.shape[:1] or target.dim() > 2 or target.dtype != torch.int64):
        raise ValueError(f"target is {target.dtype} {list(target.shape)}: pass int64 {list(hidden.shape[:1])} or + [N]")

"""Kernels that only CUDA has, from their definitions, with the conditions of PyTorch's own.

Letters: T rows, H query heads, G key heads, n and m the queries and keys of one sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)
_library = torch.library.Library("aten", "IMPL")


class _Sequence(NamedTuple):
    rows: slice
    key_rows: slice
    query: Tensor
    """[H, n, D] fp32; key and value [H, m, D]."""
    key: Tensor
    value: Tensor
    probs: Tensor
    """[H, n, m]."""
    lse: Tensor
    """[H, n]."""


def _sequences(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, key_starts: Tensor, *, right: int, left: int, scale: float
) -> Iterator[_Sequence]:
    groups = q.shape[1] // k.shape[1]
    for (first, end), (key_first, key_end) in zip(
        pairwise(starts.tolist()), pairwise(key_starts.tolist()), strict=True
    ):
        rows, key_rows = slice(first, end), slice(key_first, key_end)
        query = q[rows].float().transpose(0, 1)
        key, value = (x[key_rows].float().transpose(0, 1).repeat_interleave(groups, 0) for x in (k, v))
        scores = query @ key.transpose(1, 2) * scale
        n, m = scores.shape[1:]
        # The last query is beside the last key.
        ahead = torch.arange(m, device=q.device) - torch.arange(m - n, m, device=q.device)[:, None]
        hidden = (ahead > right if right >= 0 else ahead > m) | (ahead < -left if left >= 0 else ahead < -m)
        scores = scores.masked_fill(hidden, -torch.inf)
        lse = scores.logsumexp(-1)
        yield _Sequence(rows, key_rows, query, key, value, (scores - lse[..., None]).exp(), lse)


def _checked(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, key_starts: Tensor, is_causal: bool, options: dict[str, Any]
) -> dict[str, Any]:
    """Hold the arguments of PyTorch's varlen FlashAttention against its conditions; return the options in full."""
    for tensor in (q, k, v):
        if tensor.dtype not in HALVES:
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        if tensor.stride(-1) != 1:
            raise RuntimeError("Input tensor must have contiguous last dimension")
    if q.shape[-1] % 8 or q.shape[-1] > 256 or q.shape[1] % k.shape[1]:
        raise RuntimeError(f"FlashAttention: heads of {list(q.shape)} over {list(k.shape)}")
    for bounds in (starts, key_starts):
        if not bounds.is_cuda or bounds.dtype != torch.int32 or not bounds.is_contiguous():
            raise RuntimeError("cu_seqlens must be contiguous int32 on the device")
    left, right, scale = (options.get(name) for name in ("window_size_left", "window_size_right", "scale"))
    right = 0 if is_causal else right
    return {
        "left": -1 if left is None else left,
        "right": -1 if right is None else right,
        "scale": q.shape[-1] ** -0.5 if scale is None else scale,
    }


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, key_starts: Tensor, max_q: int, max_k: int,
    dropout: float, is_causal: bool, debug: bool, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """``aten::_flash_attention_forward``: [T, H, D], [T, G, D] twice -> [T, H, D] and log-sum-exp [H, T]."""
    window = _checked(q, k, v, starts, key_starts, is_causal, options)
    out, lse = torch.zeros_like(q), q.new_zeros(q.shape[1], q.shape[0], dtype=torch.float32)
    for one in _sequences(q, k, v, starts, key_starts, **window):
        out[one.rows] = (one.probs @ one.value).transpose(0, 1).to(out.dtype)
        lse[:, one.rows] = one.lse
    none = q.new_empty(0)
    return out, lse, none, none.clone(), none.clone()


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, starts: Tensor, key_starts: Tensor,
    max_q: int, max_k: int, dropout: float, is_causal: bool, rng_state: Tensor, unused: Tensor, **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``aten::_flash_attention_backward``."""
    window = _checked(q, k, v, starts, key_starts, is_causal, options)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for one in _sequences(q, k, v, starts, key_starts, **window):
        d_out, own = (x[one.rows].float().transpose(0, 1) for x in (grad, out))
        d_scores = one.probs * (d_out @ one.value.transpose(1, 2) - (d_out * own).sum(-1, keepdim=True))
        d_scores *= window["scale"]
        dq[one.rows] = (d_scores @ one.key).transpose(0, 1).to(dq.dtype)
        for into, per_head in ((dk, d_scores.transpose(1, 2) @ one.query), (dv, one.probs.transpose(1, 2) @ d_out)):
            of_groups = per_head.unflatten(0, (k.shape[1], -1)).sum(1)
            into[one.key_rows] = of_groups.transpose(0, 1).to(into.dtype)
    return dq, dk, dv


def addmm_out(
    this: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1, out: Tensor
) -> Tensor:
    """``aten::addmm.dtype_out`` (``_addmm_dtype_out_cuda``, torch 2.10 and later)."""
    if a.dtype != b.dtype or not (out_dtype == a.dtype or (out_dtype == torch.float32 and a.dtype in HALVES)):
        raise RuntimeError(f"addmm: {a.dtype} and {b.dtype} to {out_dtype}")
    if out.dtype != out_dtype or this.dtype not in (out_dtype, a.dtype):
        raise RuntimeError(f"addmm: {this.dtype} and a product of {out_dtype} into {out.dtype}")
    product = alpha * (a.to(out_dtype) @ b.to(out_dtype))
    return out.copy_(product + beta * this if beta else product)


def histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """``aten::histc``, which counts whole numbers too."""
    return torch.ops.emulated_gpu.on_cpu(x).double().histc(bins, min, max).to(x.device, x.dtype)


def install() -> None:
    """Register the kernels for CUDA."""
    _library.impl("_flash_attention_forward", flash_forward, "CUDA")
    _library.impl("_flash_attention_backward", flash_backward, "CUDA")
    _library.impl("addmm.dtype_out", addmm_out, "CUDA")
    _library.impl("histc", histc, "CUDA")

"""What the tests of the Triton layer share: where it runs, and one call with its gradient.

With a CUDA device the kernels are compiled and run there; without one they run in Triton's interpreter, whose fp32 to
bf16 stores cut off instead of rounding (``tests/conftest.py`` switches it on). Shapes are small: the interpreter needs
about a millisecond for an operation of a program.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from mopd.losses import parallel_topk_distill

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LOSSES = ("forward_kl", "reverse_kl", "jsd")
TAILS = ("bucket", "generalized", "renormalize", "none")
_patch_lang = interpreter._patch_lang
_patched: set[Any] = set()
"""Modules whose functions are the interpreter's, while a kernel runs."""


def _patch_lang_once(fn: Any) -> Any:
    """The interpreter's own, which looks through the whole language at every call of a function of a kernel: half of a
    kernel's time. Here it does so once for a kernel."""
    modules = {value for value in fn.__globals__.values() if inspect.ismodule(value) and value in (tl, tl.core)}
    if _patched and modules <= _patched:
        return None  # a call within a kernel, whose end restores the language
    is_kernel = not _patched
    _patched.update(modules)
    scope = _patch_lang(fn)
    if is_kernel:
        restore = scope.restore

        def restore_all() -> None:
            _patched.clear()
            restore()

        scope.restore = restore_all
    return scope


interpreter._patch_lang = _patch_lang_once


class _Moved(torch.autograd.Function):
    """``apply(x)``: x on the device in the strides it has, gaps included (``Tensor.to`` closes them)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if 0 in x.stride() or x.numel() == 0:
            return x.to(DEVICE)
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=DEVICE).copy_(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.cpu()


def to_device(value: Any) -> Any:
    """Tensors onto the device, in the strides they have, differentiably; anything else as it is."""
    if not isinstance(value, Tensor) or value.device == DEVICE or DEVICE.type == value.device.type:
        return value
    return _Moved.apply(value)


def to_cpu(value: Any) -> Any:
    """Tensors onto the CPU; anything else as it is."""
    return value.cpu() if isinstance(value, Tensor) else value


def run(
    z: Tensor, ids: Tensor, logq: Tensor, upstream: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss, gradient of ``(upstream * loss).sum()`` and metrics, on the CPU."""
    leaf = to_device(z.detach())
    leaf = (leaf.clone() if leaf.is_contiguous() else leaf).requires_grad_()
    options = {"backend": "triton", **{name: to_device(value) for name, value in options.items()}}
    loss, metrics = parallel_topk_distill(leaf, ids.to(DEVICE), logq.to(DEVICE), **options)
    upstream = torch.ones_like(loss) if upstream is None else upstream.to(DEVICE)
    (gradient,) = torch.autograd.grad(loss, leaf, upstream)
    return loss.detach().cpu(), gradient.cpu(), {name: value.cpu() for name, value in metrics.items()}

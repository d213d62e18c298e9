"""The output matrix of a language model as a vocab-parallel linear layer: rows in, gradients out.

What Megatron-Core's ``ColumnParallelLinear`` does around its matrix product, for any subset of the rows: gather what
sequence parallelism has split, sum the hidden gradient over the tensor-parallel ranks, and put the weight gradient
into ``weight.main_grad`` where asked to. The products themselves are the BLAS library's.

Shape legend: T rows of the whole batch (all leading dims together), N rows that are computed, H hidden size, V
columns of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mopd.losses.chunked import accumulation_dtype

CONVERSION_ELEMENTS = 1 << 20
"""Elements that are converted at a time where the BLAS library cannot accumulate half-precision products in fp32."""


@dataclass(frozen=True)
class Head:
    """How the head is spread over ranks and where its gradients go."""

    group: dist.ProcessGroup | None
    """Tensor-parallel group; None for a single rank."""
    sequence_parallel: bool
    """Hidden states arrive as this rank's share of the first dimension."""
    gradient_accumulation_fusion: bool
    """The weight gradient is added to ``weight.main_grad``; autograd gets none."""
    dummy_weight_grad: bool
    """Autograd gets zeros nevertheless: Megatron's DDP insists on a gradient under ``overlap_grad_reduce``."""

    @property
    def world_size(self) -> int:
        """Ranks that share the vocabulary."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def splits_sequence(self) -> bool:
        """Hidden states must be gathered."""
        return self.sequence_parallel and self.world_size > 1


@dataclass(frozen=True)
class Rows:
    """Rows ``low`` to ``high`` of those that are computed; ``index_N`` numbers these among the T, None means all."""

    index_N: Tensor | None
    low: int
    high: int

    def of(self, per_row: Tensor) -> Tensor:
        """Their part of a per-row tensor ``[T, ...]``."""
        if self.index_N is None:
            return per_row[self.low : self.high]
        return per_row.index_select(0, self.index_N[self.low : self.high])


def row_shape(hidden: Tensor, head: Head) -> tuple[int, ...]:
    """Leading dims of the logits that belong to ``hidden``."""
    first, *rest = hidden.shape[:-1]
    return (first * head.world_size if head.splits_sequence else first, *rest)


def gather_rows(hidden: Tensor, head: Head, index_N: Tensor | None) -> Tensor:
    """The rows that are computed, ``[N, H]``; without a copy where neither a gather nor a choice asks for one."""
    if head.splits_sequence:
        whole = hidden.new_empty(*row_shape(hidden, head), hidden.size(-1))
        dist.all_gather_into_tensor(whole, hidden.contiguous(), group=head.group)
        hidden = whole
    flat = hidden.flatten(0, -2)
    return flat if index_N is None else flat.index_select(0, index_N)


def return_rows(grad_NH: Tensor, hidden: Tensor, head: Head, index_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    """This rank's part of the rows' gradient to the gradient of ``hidden``: summed over the ranks, 0 elsewhere.

    The sum runs in the dtype of ``grad_NH``, which may be overwritten; the result has ``dtype``.
    """
    if head.world_size > 1 and not head.sequence_parallel:
        dist.all_reduce(grad_NH, group=head.group)
    if not head.splits_sequence:
        grad_NH = grad_NH.to(dtype)
    whole = grad_NH
    if index_N is not None:
        num_rows = torch.Size(row_shape(hidden, head)).numel()
        whole = grad_NH.new_zeros(num_rows, grad_NH.size(1)).index_copy_(0, index_N, grad_NH)
    if head.splits_sequence:
        own = whole.new_empty(whole.size(0) // head.world_size, whole.size(1))
        dist.reduce_scatter_tensor(own, whole, group=head.group)
        whole = own.to(dtype)
    return whole.view(hidden.shape)


def sum_dtype(weight: Tensor, head: Head) -> torch.dtype:
    """Type in which hidden gradients are summed: wide where several ranks contribute."""
    return accumulation_dtype(weight) if head.world_size > 1 else weight.dtype


def matmul_into(out: Tensor, a: Tensor, b: Tensor, *, accumulate: bool) -> None:
    """``out (+)= a @ b``. ``out`` may be wider than the factors: the sums are then never rounded to their type."""
    if a.dtype == out.dtype:
        out.addmm_(a, b, beta=int(accumulate))
    elif a.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=int(accumulate), out=out)
    else:
        _matmul_converted(out if accumulate else out.zero_(), a, b)


def _matmul_converted(out: Tensor, a: Tensor, b: Tensor) -> None:
    """``out += a @ b`` in the type of ``out``, converting a part of the factors at a time: the longer dim is cut."""
    inner = a.size(1)
    if inner <= a.size(0):
        wide, step = b.to(out.dtype), max(1, CONVERSION_ELEMENTS // max(1, inner))
        for low in range(0, a.size(0), step):
            out[low : low + step].addmm_(a[low : low + step].to(out.dtype), wide)
        return
    step = max(1, CONVERSION_ELEMENTS // max(1, a.size(0), b.size(1)))
    for low in range(0, inner, step):
        out.addmm_(a[:, low : low + step].to(out.dtype), b[low : low + step].to(out.dtype))


def main_grad(weight: Tensor, head: Head) -> Tensor | None:
    """The buffer that weight gradients are added to, None where autograd is to get them.

    Raises:
        ValueError: ``gradient_accumulation_fusion`` without such a buffer.
    """
    if not head.gradient_accumulation_fusion:
        return None
    buffer: Tensor | None = getattr(weight, "main_grad", None)
    if buffer is None or buffer.shape != weight.shape:
        found = "has none" if buffer is None else f"is {list(buffer.shape)}"
        raise ValueError(
            f"gradient_accumulation_fusion adds to weight.main_grad {list(weight.shape)}, which {found}: "
            "wrap the model in Megatron's DistributedDataParallel, or unset it"
        )
    return buffer


def mark_added(weight: Tensor, head: Head) -> Tensor | None:
    """Tells Megatron that ``main_grad`` is complete; returns what autograd gets for the weight."""
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return weight.new_zeros(()).expand_as(weight) if head.dummy_weight_grad else None


class HeadLogits(torch.autograd.Function):
    """``apply(hidden, weight, head, index_N)`` -> logits ``[N, V]`` in the dtype of the hidden states."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, head: Head, index_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden, weight, index_N)
        ctx.head, ctx.weight = head, weight
        ctx.main_grad = main_grad(weight, head) if ctx.needs_input_grad[1] else None
        return torch.mm(gather_rows(hidden, head, index_N), weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NV: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, index_N = ctx.saved_tensors
        head: Head = ctx.head
        grad_hidden = grad_weight = None
        if ctx.needs_input_grad[1]:
            rows_NH = gather_rows(hidden, head, index_N)
            if ctx.main_grad is None:
                grad_weight = torch.mm(grad_NV.t(), rows_NH)
            else:
                matmul_into(ctx.main_grad, grad_NV.t(), rows_NH, accumulate=True)
                grad_weight = mark_added(ctx.weight, head)
            del rows_NH
        if ctx.needs_input_grad[0]:
            partial = grad_NV.new_empty(grad_NV.size(0), weight.size(1), dtype=sum_dtype(weight, head))
            matmul_into(partial, grad_NV, weight, accumulate=False)
            grad_hidden = return_rows(partial, hidden, head, index_N, hidden.dtype)
        return grad_hidden, grad_weight, None, None

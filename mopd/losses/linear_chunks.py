"""The loss of an LM head, a few rows at a time, with the gradients formed in forward.

A chunk's logits live until its gradient has been multiplied into the hidden states and the weight; nothing of their
size is kept. The loss itself is any function of logits rows, so every loss and metric of this package runs in it.

Shape legend: T rows of the whole batch, N rows that are computed, R rows of a chunk, H hidden size, V columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mopd.losses import rows
from mopd.losses.chunked import accumulation_dtype
from mopd.losses.linear_head import (
    Head,
    HeadLogits,
    Rows,
    gather_rows,
    main_grad,
    mark_added,
    matmul_into,
    return_rows,
    row_shape,
    sum_dtype,
)
from mopd.losses.linear_plan import Plan

Columns = dict[str, Tensor]
RowLoss = Callable[[Tensor, Rows], tuple[Tensor, Columns]]
"""From logits ``[R, V]`` and the rows that they belong to, to their losses ``[R]`` and detached numbers ``[R]`` by
name. May overwrite the logits in backward, and may hold collectives: all ranks call it equally often."""


@dataclass
class _Job:
    """What one call computes, and where its numbers are collected."""

    row_loss: RowLoss
    head: Head
    index_N: Tensor | None
    rows: int
    unit_upstream: bool
    needs_hidden: bool
    needs_weight: bool
    losses: list[Tensor] = field(default_factory=list)
    columns: list[Columns] = field(default_factory=list)


def linear_loss(
    hidden: Tensor,
    weight: Tensor,
    row_loss: RowLoss,
    *,
    plan: Plan,
    head: Head,
    index_N: Tensor | None,
    unit_upstream: bool = False,
) -> tuple[Tensor, Columns]:
    """Sum of ``row_loss`` over the rows of an LM head: the engine below ``linear_topk_distill``.

    Args:
        hidden: ``[T, H]`` or ``[S, B, H]`` (``[S/tp, B, H]`` under sequence parallelism).
        weight: ``[V/tp, H]``, the dtype of ``hidden``.
        plan: ``materialize`` or ``token_chunks`` with its number of rows, equal on all ranks.
        index_N: int64 ``[N]``, N >= 1: numbers of the rows to compute, ascending; None means all.
        unit_upstream: promises that backward starts at the returned loss with gradient 1, so that ``token_chunks``
            may add its weight gradient to ``main_grad`` in forward. Another upstream gradient raises RuntimeError, or
            makes NaN of the gradients where looking at it would wait for the device.

    Returns:
        the scalar loss and ``row_loss``'s numbers as ``[rows]``, 0 in rows that were not computed.
    """
    if plan.strategy == "materialize":
        losses, columns = materialized(hidden, weight, row_loss, head=head, index_N=index_N)
        return losses.sum(), columns
    is_enabled = torch.is_grad_enabled()
    job = _Job(
        row_loss,
        head,
        index_N,
        plan.rows,
        unit_upstream,
        needs_hidden=is_enabled and hidden.requires_grad,
        needs_weight=is_enabled and weight.requires_grad,
    )
    loss = ChunkedLoss.apply(hidden, weight, job)
    names = job.columns[0].keys()
    columns = {name: torch.cat([part[name] for part in job.columns]) for name in names}
    return loss, {name: spread(value, hidden, head, index_N) for name, value in columns.items()}


def materialized(
    hidden: Tensor, weight: Tensor, row_loss: RowLoss, *, head: Head, index_N: Tensor | None
) -> tuple[Tensor, Columns]:
    """Row losses and numbers ``[rows]`` from all logits at once; any upstream gradient."""
    logits = HeadLogits.apply(hidden, weight, head, index_N)
    losses, columns = row_loss(logits, Rows(index_N, 0, logits.size(0)))
    losses = spread(losses, hidden, head, index_N)
    return losses, {name: spread(value, hidden, head, index_N) for name, value in columns.items()}


def spread(value_N: Tensor, hidden: Tensor, head: Head, index_N: Tensor | None) -> Tensor:
    """Numbers of the computed rows as ``[rows]``, 0 elsewhere. Differentiable."""
    shape = row_shape(hidden, head)
    if index_N is None:
        return value_N.view(shape)
    return value_N.new_zeros(torch.Size(shape).numel()).index_copy(0, index_N, value_N).view(shape)


class ChunkedLoss(torch.autograd.Function):
    """``apply(hidden, weight, job)`` -> scalar loss; rows of losses and numbers are left in ``job``."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, job: _Job) -> Tensor:
        head = job.head
        buffer = main_grad(weight, head) if job.needs_weight else None
        rows_NH = gather_rows(hidden, head, job.index_N)
        grad_rows, grad_weight = _gradient_buffers(rows_NH, weight, job, buffer)
        _run_chunks(rows_NH, weight, job, grad_rows, grad_weight)
        del rows_NH
        grad_hidden = None
        if grad_rows is not None:
            dtype = hidden.dtype if job.unit_upstream else grad_rows.dtype
            grad_hidden = return_rows(grad_rows, hidden, head, job.index_N, dtype)
        ctx.done = grad_weight is not None and grad_weight is buffer
        ctx.dummy = mark_added(weight, head) if ctx.done else None
        ctx.save_for_backward(grad_hidden, None if ctx.done else grad_weight)
        ctx.job, ctx.buffer, ctx.weight, ctx.hidden_dtype, ctx.spent = job, buffer, weight, hidden.dtype, False
        return torch.cat(job.losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.spent:
            raise RuntimeError("token_chunks formed the gradients in forward and has handed them out: call it again")
        ctx.spent = True
        grad_hidden, grad_weight = ctx.saved_tensors
        job: _Job = ctx.job
        if job.unit_upstream:
            _hold_to_promise(upstream, [grad_hidden, ctx.buffer if ctx.done else grad_weight])
            return grad_hidden, ctx.dummy if ctx.done else _to(grad_weight, ctx.weight.dtype), None
        if grad_hidden is not None:
            grad_hidden = (grad_hidden.mul_(upstream)).to(ctx.hidden_dtype)
        if grad_weight is not None and ctx.buffer is not None:
            ctx.buffer.addcmul_(grad_weight, upstream.to(grad_weight.dtype))
            return grad_hidden, mark_added(ctx.weight, job.head), None
        return grad_hidden, None if grad_weight is None else grad_weight.mul_(upstream).to(ctx.weight.dtype), None


def _hold_to_promise(upstream: Tensor, gradients: list[Tensor | None]) -> None:
    """Answers an upstream gradient other than 1: raises RuntimeError where that can be seen without waiting for the
    device, else makes NaN of a number in each gradient, so that their norm is not finite and no step takes them."""
    if upstream.device.type in rows.SYNCHRONOUS_DEVICES:
        if bool((upstream != 1).any()):
            raise RuntimeError("unit_upstream: the loss was scaled after linear_loss")
        return
    for gradient in gradients:
        if gradient is not None and gradient.numel():
            first = gradient[(0,) * gradient.dim()]
            first += torch.where((upstream == 1).all(), 0.0, torch.nan)


def _to(value: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if value is None else value.to(dtype)


def _gradient_buffers(
    rows_NH: Tensor, weight: Tensor, job: _Job, buffer: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Room for the gradients of the rows and of the weight; the latter is ``main_grad`` itself where it is final."""
    wide = accumulation_dtype(weight)
    grad_rows = grad_weight = None
    if job.needs_hidden:
        dtype = sum_dtype(weight, job.head) if job.unit_upstream else wide
        grad_rows = rows_NH.new_empty(rows_NH.shape, dtype=dtype)
    if job.needs_weight:
        direct = buffer is not None and job.unit_upstream
        grad_weight = buffer if direct else weight.new_zeros(weight.shape, dtype=wide)
    return grad_rows, grad_weight


def _run_chunks(
    rows_NH: Tensor, weight: Tensor, job: _Job, grad_rows: Tensor | None, grad_weight: Tensor | None
) -> None:
    """Fills the gradients and the job's lists, chunk by chunk, in one buffer of logits."""
    num_rows = rows_NH.size(0)
    buffer = rows_NH.new_empty(min(job.rows, num_rows), weight.size(0))
    needs_grad = job.needs_hidden or job.needs_weight
    for low in range(0, num_rows, job.rows):
        high = min(low + job.rows, num_rows)
        part = rows_NH[low:high]
        logits = torch.mm(part, weight.t(), out=buffer[: high - low]).detach()
        with torch.set_grad_enabled(needs_grad):
            losses, columns = job.row_loss(logits.requires_grad_(needs_grad), Rows(job.index_N, low, high))
        job.losses.append(losses.detach())
        job.columns.append(columns)
        if not needs_grad:
            continue
        (grad_RV,) = torch.autograd.grad(losses, logits, torch.ones_like(losses))
        if grad_rows is not None:
            matmul_into(grad_rows[low:high], grad_RV, weight, accumulate=False)
        if grad_weight is not None:
            matmul_into(grad_weight, grad_RV.t(), part, accumulate=True)

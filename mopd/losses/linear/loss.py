"""The loss of an LM head: any function of logits rows, all of them at once or a few at a time.

If all logits fit, backward overwrites them with their gradient. Otherwise forward already multiplies each chunk's
gradient into those of hidden states and weight while the chunk's logits exist; nothing of their size is kept.

Shape legend: T rows of the whole batch, N rows that are computed, R rows of a chunk, H hidden size, V columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mopd.losses.call import accumulation_dtype
from mopd.losses.chunked.blocks import can_look
from mopd.losses.linear.head import LinearHead, Rows, check_factors, main_grad, mark_added, matmul_into

Columns = dict[str, Tensor]
RowLoss = Callable[[Tensor, Rows], tuple[Tensor, Columns]]
"""Function from logits ``[R, V]`` and their rows to losses ``[R]`` and detached numbers ``[R]`` by name. It may
overwrite the logits in backward, and may hold collectives: all ranks call it equally often."""


def linear_loss(
    hidden: Tensor, weight: Tensor, row_loss: RowLoss, head: LinearHead, rows_at_once: int
) -> tuple[Tensor, Columns]:
    """Return the sum of ``row_loss`` over the rows of an LM head without bias. Backward must start here, with gradient
    1.

    The weight gradient is added to ``weight.main_grad`` (any float dtype) if that exists, and
    ``weight.grad_added_to_main_grad`` is set; else autograd gets it.

    Args:
        hidden: ``[T, H]`` or ``[S, B, H]`` (``[S/tp, B, H]`` under sequence parallelism).
        weight: ``[V/tp, H]``, the dtype of ``hidden``.
        rows_at_once: rows whose logits exist at a time, equal on all ranks; ``LinearHead.rows_within`` returns how many
            keep a budget. With fewer than are computed, forward computes the gradients, and one backward returns them.
            An upstream gradient other than 1 then raises RuntimeError, or makes the gradients NaN where reading it
            would wait for the device.

    Returns:
        the scalar loss and ``row_loss``'s numbers as ``[rows]``, 0 in rows that were not computed.

    Raises:
        ValueError: shapes or dtypes that make no logits.
    """
    check_factors(hidden, weight)
    if rows_at_once >= head.num_rows(hidden):
        logits = HeadLogits.apply(hidden, weight, head)
        losses, columns = row_loss(logits, Rows(head.row_index, 0, logits.size(0)))
        loss = head.spread(losses, hidden).sum()
    else:
        is_enabled = torch.is_grad_enabled()
        needs = is_enabled and hidden.requires_grad, is_enabled and weight.requires_grad
        chunks = _Chunks(row_loss, head, rows_at_once, *needs)
        loss = ChunkedLoss.apply(hidden, weight, chunks)
        columns = {name: torch.cat([part[name] for part in chunks.columns]) for name in chunks.columns[0]}
    return loss, {name: head.spread(value, hidden) for name, value in columns.items()}


class HeadLogits(torch.autograd.Function):
    """``apply(hidden, weight, head)`` -> logits ``[N, V]`` in the dtype of the hidden states."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, head: LinearHead) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.head, ctx.weight = head, weight
        return torch.mm(head.begin_gather(hidden)(), weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NV: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        head: LinearHead = ctx.head
        # The gather of rows overlaps the first product, the sum of their gradients the second.
        gathered = head.begin_gather(hidden) if ctx.needs_input_grad[1] else None
        given_back = grad_weight = None
        if ctx.needs_input_grad[0]:
            partial = grad_NV.new_empty(grad_NV.size(0), weight.size(1), dtype=head.sum_dtype(weight))
            matmul_into(partial, grad_NV, weight, accumulate=False)
            given_back = head.begin_give_back(partial, hidden)
        if gathered is not None:
            rows_NH, buffer = gathered(), main_grad(ctx.weight)
            if buffer is None:
                grad_weight = torch.mm(grad_NV.t(), rows_NH)
            else:
                matmul_into(buffer, grad_NV.t(), rows_NH, accumulate=True)
                # DDP's hook then does not add the gradient a second time.
                mark_added(ctx.weight)
            del rows_NH
        return None if given_back is None else given_back(), grad_weight, None


@dataclass
class _Chunks:
    """Parameters of one call, and the lists that collect its results."""

    row_loss: RowLoss
    head: LinearHead
    rows: int
    needs_hidden: bool
    needs_weight: bool
    losses: list[Tensor] = field(default_factory=list)
    columns: list[Columns] = field(default_factory=list)

    def run(self, rows_NH: Tensor, weight: Tensor, grad_rows: Tensor | None, grad_weight: Tensor | None) -> None:
        """Fill the gradients and the lists, chunk by chunk, in one buffer of logits."""
        num_rows = rows_NH.size(0)
        buffer = rows_NH.new_empty(min(self.rows, num_rows), weight.size(0))
        needs_grad = self.needs_hidden or self.needs_weight
        for low in range(0, num_rows, self.rows):
            high = min(low + self.rows, num_rows)
            part = rows_NH[low:high]
            logits = torch.mm(part, weight.t(), out=buffer[: high - low]).detach()
            with torch.set_grad_enabled(needs_grad):
                rows = Rows(self.head.row_index, low, high)
                losses, columns = self.row_loss(logits.requires_grad_(needs_grad), rows)
            self.losses.append(losses.detach())
            self.columns.append(columns)
            if not needs_grad:
                continue
            # The graph of this chunk ends here, so its logits' buffer is free for the next chunk.
            (grad_RV,) = torch.autograd.grad(losses, logits, torch.ones_like(losses))
            if grad_rows is not None:
                matmul_into(grad_rows[low:high], grad_RV, weight, accumulate=False)
            if grad_weight is not None:
                matmul_into(grad_weight, grad_RV.t(), part, accumulate=True)


class ChunkedLoss(torch.autograd.Function):
    """``apply(hidden, weight, chunks)`` -> scalar loss; rows of losses and numbers are left in ``chunks``."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, chunks: _Chunks) -> Tensor:
        head = chunks.head
        rows_NH = head.begin_gather(hidden)()
        grad_rows = grad_weight = buffer = None
        if chunks.needs_hidden:
            grad_rows = rows_NH.new_empty(rows_NH.shape, dtype=head.sum_dtype(weight))
        if chunks.needs_weight:
            buffer = main_grad(weight)
            grad_weight = weight.new_zeros(weight.shape, dtype=accumulation_dtype(weight)) if buffer is None else buffer
        chunks.run(rows_NH, weight, grad_rows, grad_weight)
        del rows_NH
        grad_hidden = None if grad_rows is None else head.begin_give_back(grad_rows, hidden)()
        if buffer is not None:
            mark_added(weight)
        ctx.save_for_backward(grad_hidden, grad_weight if buffer is None else None)
        ctx.buffer, ctx.dtype, ctx.spent = buffer, weight.dtype, False
        return torch.cat(chunks.losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.spent:
            raise RuntimeError("linear_loss formed the gradients in forward and has handed them out: call it again")
        ctx.spent = True
        grad_hidden, grad_weight = ctx.saved_tensors
        _hold_to_promise(upstream, [grad_hidden, grad_weight if ctx.buffer is None else ctx.buffer])
        return grad_hidden, None if grad_weight is None else grad_weight.to(ctx.dtype), None


def _hold_to_promise(upstream: Tensor, gradients: list[Tensor | None]) -> None:
    """React to an upstream gradient other than 1: raise RuntimeError if it can be read without waiting for the device,
    else make one number of each gradient NaN, so that their norm is not finite and no step uses them."""
    if can_look(upstream):
        if bool((upstream != 1).any()):
            raise RuntimeError("linear_loss formed the gradients in forward, and the loss was scaled after it")
        return
    for gradient in gradients:
        if gradient is not None and gradient.numel():
            first = gradient[(0,) * gradient.dim()]
            first += torch.where((upstream == 1).all(), 0.0, torch.nan)

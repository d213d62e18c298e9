"""Two-dimensional blocks of the rows of a logits tensor, in memory order and without copying.

Shape legend: T rows (all leading dims together), V columns, N selected columns of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 20
"""Largest scratch buffer on a CPU, in elements: 7 rows of a 151,936-token vocabulary, which stay in its cache."""

GPU_BLOCK_BYTES = 1 << 27
"""Size of the fp32 scratch buffer on a GPU, whose kernels want thousands of blocks of threads: 220 such rows."""

SYNCHRONOUS_DEVICES: tuple[str, ...] = ("cpu",)
"""Devices whose values Python code may branch on; on any other, reading a value waits for the device."""


def can_look(x: Tensor) -> bool:
    """Return whether Python code may branch on the values of ``x`` without waiting."""
    return x.device.type in SYNCHRONOUS_DEVICES


@dataclass(frozen=True)
class Slab:
    """Part of ``[A, B, V]`` that is a plain ``[rows, V]`` view; ``rows`` says which of the T rows it holds."""

    axis: int | None
    position: int
    rows: slice

    def view(self, x: Tensor) -> Tensor:
        """Return the slab of ``x`` as ``[rows, V]``, sharing memory."""
        if self.axis is None:
            return x.view(x.shape[:-1].numel(), x.size(-1))
        return x.select(self.axis, self.position)


def slabs(x: Tensor) -> list[Slab]:
    """Split ``[T, V]`` or ``[A, B, V]`` of any strides into two-dimensional views."""
    if x.dim() == 2:
        return [Slab(None, 0, slice(0, x.size(0), 1))]
    outer, inner = x.size(0), x.size(1)
    if outer == 1 or inner == 1 or x.stride(0) == inner * x.stride(1):
        return [Slab(None, 0, slice(0, outer * inner, 1))]
    # No single view exists: one slab for each index of the shorter dimension.
    if outer <= inner:
        return [Slab(0, a, slice(a * inner, (a + 1) * inner, 1)) for a in range(outer)]
    return [Slab(1, b, slice(b, outer * inner, inner)) for b in range(inner)]


@dataclass(frozen=True)
class Block:
    """A few rows of one slab; ``pick`` numbers those whose weight is not 0, None stands for all rows."""

    slab: Slab
    low: int
    high: int
    pick: Tensor | None

    @property
    def empty(self) -> bool:
        """Whether no row of the block has weight."""
        return self.pick is not None and self.pick.numel() == 0

    def of(self, x: Tensor) -> Tensor:
        """Return all rows of the block in ``[..., V]``, as a view."""
        return self.slab.view(x)[self.low : self.high]

    def read(self, x: Tensor) -> Tensor:
        """Return the picked rows of the block in ``[..., V]``."""
        rows = self.of(x)
        return rows if self.pick is None else rows.index_select(0, self.pick)

    def rows_of(self, per_row: Tensor) -> Tensor:
        """Return the picked rows of a per-row tensor ``[T]`` or ``[T, N]``."""
        rows = per_row[self.slab.rows][self.low : self.high]
        return rows if self.pick is None else rows.index_select(0, self.pick)

    def put_rows(self, per_row: Tensor, values: Tensor) -> None:
        """Write ``values`` into the picked rows of a per-row tensor."""
        rows = per_row[self.slab.rows][self.low : self.high]
        if self.pick is None:
            rows.copy_(values)
        else:
            rows.index_copy_(0, self.pick, values)


def blocks(x: Tensor, active: Tensor | None, buffers: int = 1) -> Iterator[Block]:
    """Yield blocks that cover all rows of ``x``; ``active`` ``[T]`` bool marks the rows to compute (None: all).
    ``buffers`` of a block's size together keep to the bound of one scratch buffer.

    Rows are left out on synchronous devices only: choosing them elsewhere would wait for the device.
    """
    elements = GPU_BLOCK_BYTES // 4 if x.is_cuda else BLOCK_ELEMENTS
    height = max(1, elements // (buffers * max(1, x.size(-1))))
    for slab in slabs(x):
        count = slab.view(x).size(0)
        marks = active[slab.rows] if active is not None and can_look(x) else None
        for low in range(0, count, height):
            high = min(low + height, count)
            pick = None
            if marks is not None and not bool(marks[low:high].all()):
                pick = marks[low:high].nonzero().flatten()
            yield Block(slab, low, high, pick)


def scatter_where(block: Tensor, index: Tensor, keep: Tensor, values: Tensor) -> None:
    """Set ``block[t, index[t, n]] = values[t, n]`` where ``keep``, leaving the rest of ``block`` [R, V] untouched.

    Dropped entries repeat a kept one of the same row (or rewrite column 0 with its own value), so that the mask need
    not be turned into indices, which would wait for the device. Equal indices of one row must carry equal values.
    """
    if index.size(1) == 0:
        return
    most, first = keep.to(torch.uint8).max(dim=1, keepdim=True)
    some = most.bool()
    fallback = torch.where(some, values.gather(1, first), block[:, :1].to(values.dtype))
    index = torch.where(keep, index, torch.where(some, index.gather(1, first), 0))
    values = torch.where(keep, values, fallback)
    block.scatter_(1, index, values.to(block.dtype))

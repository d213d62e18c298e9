"""Memory layout of the rows, and the launches of the kernels that pass over them.

Shape legend: T rows, V columns of this rank, K ids of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from mopd.losses.call import VocabShard
from mopd.losses.triton import table
from mopd.losses.triton.ids import neighbours_kernel
from mopd.losses.triton.streaming import GROUP_BITS, dense_kernel, stats_kernel

GROUP_BYTES = GROUP_BITS.value // 8
MOST_LISTED_AT_ONCE = 32
"""Ids that one program of ``neighbours_kernel`` looks at together, one a lane: of several rows, or part of one."""


@dataclass(frozen=True)
class RowLayout:
    """Memory layout of ``[T, V]`` or ``[A, B, V]`` of any strides.

    Row t starts at ``t // inner * stride_a + t % inner * stride_b``. Kernels add ``shift`` and are given ``base``,
    which begins at a multiple of 16 bytes.
    """

    num_rows: int
    width: int
    inner: int
    stride_a: int
    stride_b: int
    stride_v: int
    shift: int
    group: int
    """Columns in 16 bytes."""
    unit: bool
    """Whether columns are neighbours in memory, and groups of them can begin at multiples of 16 bytes."""

    def base(self, x: Tensor) -> Tensor:
        """Return the tensor from the last multiple of 16 bytes at or before its first logit."""
        return x.detach().as_strided((1,), (1,), x.storage_offset() - self.shift) if self.shift else x

    @property
    def starts(self) -> tuple[int, ...]:
        """Numbers that determine where in its 16 bytes a row begins: the last three are 0 if all rows begin at a
        multiple of 16."""
        return self.inner, *(x % self.group for x in (self.stride_a, self.stride_b, self.shift))

    @property
    def address(self) -> tuple[int, int, int, int, int]:
        """Address arguments of the kernels."""
        return self.inner, self.stride_a, self.stride_b, self.stride_v, self.shift


def layout(x: Tensor) -> RowLayout:
    """Return the memory layout of the rows of ``x``."""
    rows, width, group = x.shape[:-1].numel(), x.size(-1), GROUP_BYTES // x.element_size()
    unit = x.stride(-1) == 1 and x.untyped_storage().data_ptr() % GROUP_BYTES == 0  # foreign memory may not be aligned
    inner, stride_a = (max(rows, 1), 0) if x.dim() == 2 else (max(x.size(1), 1), x.stride(0))
    return RowLayout(rows, width, inner, stride_a, x.stride(-2), x.stride(-1), x.storage_offset() % group, group, unit)


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least ``n`` (and 1)."""
    return 1 << max(n - 1, 0).bit_length()


def small_warps(elements: int) -> int:
    """Return the warps of a program that holds ``elements`` numbers of one row: about four a lane."""
    return min(16, max(1, power_of_two(elements) // 128))


@dataclass(frozen=True)
class Logits:
    """The logits of one call, as the kernels see them."""

    x: Tensor
    layout: RowLayout
    shard: VocabShard
    scale: float
    """Factor such that exp(x / temperature) = exp2(x * scale)."""


def _chunk(z: Logits, how: table.Launch, splits: int) -> int:
    """Return the groups of one split: whole steps of the kernel, enough wherever in its 16 bytes a row begins."""
    columns, step = z.shard.num_columns + z.layout.group, how.block * how.stages
    return int(triton.cdiv(triton.cdiv(columns, splits), step)) * (step // z.layout.group)


def new_marks(z: Logits, how: table.Launch, splits: int) -> Tensor:
    """Return int32 [T, words], not yet written: a bit for every group that the statistics may meet."""
    words = triton.cdiv(_chunk(z, how, splits) * splits, 32)
    return z.x.new_empty(z.layout.num_rows, words, dtype=torch.int32)


def neighbours(z: Logits, sorted_ids: Tensor, pay: Tensor, marks: Tensor, entropy: bool, splits: int) -> None:
    """Mark the groups that hold ids; the sums of their other columns go to this rank's first cell of ``pay``."""
    n, at, shard = sorted_ids.size(1) - 1, z.layout, z.shard
    at_once = min(power_of_two(n), MOST_LISTED_AT_ONCE)
    rows = max(1, min(16, MOST_LISTED_AT_ONCE // at_once))
    neighbours_kernel[(triton.cdiv(at.num_rows, rows),)](
        at.base(z.x), sorted_ids, marks, pay, at.num_rows, *at.address, shard.start, shard.num_columns, marks.size(1),
        pay.size(1), shard.rank * splits, shard.world_size * splits, z.scale,
        N=n, UNIT=at.unit, ENTROPY=entropy, ROWS=rows, AT_ONCE=at_once, num_warps=1,
    )  # fmt: skip


def stats(
    z: Logits, marks: Tensor, weight_T: Tensor | None, pay: Tensor, entropy: bool, how: table.Launch, splits: int
) -> None:
    """Run the forward pass over the logits, into ``pay``."""
    at, shard = z.layout, z.shard
    stats_kernel[(at.num_rows * splits,)](
        at.base(z.x), marks, weight_T, pay,
        *at.address, shard.num_columns, _chunk(z, how, splits), splits, shard.rank, shard.world_size,
        marks.size(1), pay.size(1), z.scale,
        WORLD_PAD=power_of_two(shard.world_size), UNIT=at.unit, ENTROPY=entropy,
        BLOCK=how.block, AHEAD=how.stages, num_warps=how.warps,
    )  # fmt: skip


def dense(z: Logits, out: Tensor, row_data: Tensor, grad_T: Tensor | None, how: table.Launch) -> None:
    """Run the backward pass over the logits, without the entries of the ids."""
    at, o = z.layout, layout(out)
    # Tiles begin at groups: a row that begins inside one needs room for up to group - 1 columns before it.
    tiles = triton.cdiv(at.width + (o.group - 1 if any(o.starts[1:]) and o.unit else 0), how.block)
    dense_kernel[(at.num_rows * tiles,)](
        at.base(z.x), o.base(out), row_data, grad_T, at.num_rows, 0 if grad_T is None else grad_T.stride(0),
        *at.address, *o.address, z.shard.num_columns, at.width, tiles, z.scale,
        Z_UNIT=at.unit, OUT_UNIT=o.unit, ALIKE=at.unit == o.unit and at.starts == o.starts,
        BLOCK=how.block, num_warps=how.warps,
    )  # fmt: skip

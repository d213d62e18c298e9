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


def _chunk(z: RowLayout, shard: VocabShard, how: table.Launch, splits: int) -> int:
    """Return the groups of one split: whole steps of the kernel, enough wherever in its 16 bytes a row begins."""
    return triton.cdiv(triton.cdiv(shard.num_columns + z.group, splits), how.block * how.stages) * (
        how.block * how.stages // z.group
    )


def new_marks(inp: Tensor, z: RowLayout, shard: VocabShard, how: table.Launch, splits: int) -> Tensor:
    """Return int32 [T, words], not yet written: a bit for every group that the statistics may meet."""
    words = triton.cdiv(_chunk(z, shard, how, splits) * splits, 32)
    return inp.new_empty(z.num_rows, words, dtype=torch.int32)


def neighbours(
    inp: Tensor,
    z: RowLayout,
    sorted_ids: Tensor,
    pay: Tensor,
    marks: Tensor,
    shard: VocabShard,
    scale: float,
    entropy: bool,
    splits: int,
) -> None:
    """Mark the groups that hold ids; the sums of their other columns go to this rank's first cell of ``pay``."""
    n = sorted_ids.size(1) - 1
    at_once = min(power_of_two(n), MOST_LISTED_AT_ONCE)
    rows = max(1, min(16, MOST_LISTED_AT_ONCE // at_once))
    neighbours_kernel[(triton.cdiv(z.num_rows, rows),)](
        z.base(inp), sorted_ids, marks, pay, z.num_rows, *z.address, shard.start, shard.num_columns, marks.size(1),
        pay.size(1), shard.rank * splits, shard.world_size * splits, scale,
        N=n, UNIT=z.unit, ENTROPY=entropy, ROWS=rows, AT_ONCE=at_once, num_warps=1,
    )  # fmt: skip


def stats(
    inp: Tensor,
    z: RowLayout,
    marks: Tensor,
    weight_T: Tensor | None,
    pay: Tensor,
    shard: VocabShard,
    scale: float,
    entropy: bool,
    how: table.Launch,
    splits: int,
) -> None:
    """Run the forward pass over the logits, into ``pay``."""
    stats_kernel[(z.num_rows * splits,)](
        z.base(inp), marks, weight_T, pay,
        *z.address, shard.num_columns, _chunk(z, shard, how, splits), splits, shard.rank, shard.world_size,
        marks.size(1), pay.size(1), scale,
        WORLD_PAD=power_of_two(shard.world_size), UNIT=z.unit, ENTROPY=entropy,
        BLOCK=how.block, AHEAD=how.stages, num_warps=how.warps,
    )  # fmt: skip


def dense(
    inp: Tensor,
    z: RowLayout,
    out: Tensor,
    o: RowLayout,
    row_data: Tensor,
    grad_T: Tensor | None,
    shard: VocabShard,
    scale: float,
    how: table.Launch,
) -> None:
    """Run the backward pass over the logits, without the entries of the ids."""
    # Tiles begin at groups: a row that begins inside one needs room for up to group - 1 columns before it.
    tiles = triton.cdiv(z.width + (o.group - 1 if any(o.starts[1:]) and o.unit else 0), how.block)
    dense_kernel[(z.num_rows * tiles,)](
        z.base(inp), o.base(out), row_data, grad_T, z.num_rows, 0 if grad_T is None else grad_T.stride(0),
        *z.address, *o.address, shard.num_columns, z.width, tiles, scale,
        Z_UNIT=z.unit, OUT_UNIT=o.unit, ALIKE=z.unit == o.unit and z.starts == o.starts,
        BLOCK=how.block, num_warps=how.warps,
    )  # fmt: skip

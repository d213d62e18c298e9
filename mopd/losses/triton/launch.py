"""Starts the kernels: geometry of tensors, launch parameters, buffers. Nothing here waits for the device.

Shape legend: T rows, V columns of this rank, N selected ids of a row, P parts of the vocabulary (ranks times splits).
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from mopd.losses.triton import table
from mopd.losses.triton.selection import fixup_kernel, select_kernel
from mopd.losses.triton.streaming import dense_kernel, stats_kernel
from mopd.losses.vocab_parallel import VocabShard

LOG2_E = math.log2(math.e)
LONGEST_RANKED = 64
"""Ids of a row (padded) up to which all pairs are compared; a sorting network beyond."""


@dataclass(frozen=True)
class Layout:
    """``[T, V]`` or ``[A, B, V]`` of any strides: row t starts at ``t // inner * stride_a + t % inner * stride_b``."""

    num_rows: int
    width: int
    inner: int
    stride_a: int
    stride_b: int
    stride_v: int

    @property
    def unit(self) -> bool:
        """Columns are neighbours in memory."""
        return self.stride_v == 1

    @property
    def address(self) -> tuple[int, int, int, int]:
        """The arguments that kernels take."""
        return self.inner, self.stride_a, self.stride_b, self.stride_v


def layout(x: Tensor) -> Layout:
    """Where the rows of ``x`` lie."""
    rows, width = x.shape[:-1].numel(), x.size(-1)
    if x.dim() == 2:
        return Layout(rows, width, max(rows, 1), 0, x.stride(0), x.stride(1))
    return Layout(rows, width, max(x.size(1), 1), x.stride(0), x.stride(1), x.stride(2))


def on_device(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device: makes it that of ``x``."""
    return torch.cuda.device_of(x) if x.is_cuda else contextlib.nullcontext()


@dataclass(frozen=True)
class Gathered:
    """What forward knows after the collective."""

    sorted_ids: Tensor
    """int32 [T, N + 1], valid ids first, ``NO_ID`` behind."""
    order: Tensor
    """int32 [T, N]: where each sorted id stood."""
    pay: Tensor
    """fp32 [T, pay_width]: peaks [P], sums [P], with entropy moments [P], raw logits [N] in sorted order, target."""
    parts: int
    begin: int
    """Column of the first raw logit."""


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n`` (and 1)."""
    return 1 << max(n - 1, 0).bit_length()


def small_warps(elements: int) -> int:
    """Warps of a program that holds ``elements`` numbers of one row: about four a lane."""
    return min(16, max(1, power_of_two(elements) // 128))


def scale_of(temperature: float) -> float:
    """exp(x / temperature) = exp2(x * scale)."""
    return LOG2_E / temperature


def entry_for(inp: Tensor, shard: VocabShard, num_rows: int, num_ids: int) -> table.Entry:
    """Launch parameters, the same on all ranks of the group: they follow from the mean shard."""
    mean_width = -(-shard.vocab_size // shard.world_size)
    name = table.device_name(inp.device)
    return table.shipped(mean_width, inp.dtype, power_of_two(num_ids), power_of_two(num_rows), name)


def collect(
    inp: Tensor,
    ids_TN: Tensor,
    shard: VocabShard,
    temperature: float,
    *,
    k: int,
    teacher_logprobs_TN: Tensor | None = None,
    teacher_weights_TD: Tensor | None = None,
    weight_T: Tensor | None = None,
    target_T: Tensor | None = None,
    entropy: bool = False,
) -> Gathered:
    """Sorts the ids, passes once over the logits, and joins the ranks with one SUM all-reduce.

    ``ids_TN`` int32 or int64, contiguous, as are the other row tensors; D teachers of ``k`` ids each make N.
    """
    z = layout(inp)
    rows, n = ids_TN.shape
    entry = entry_for(inp, shard, rows, n)
    parts = shard.world_size * entry.splits
    begin = (3 if entropy else 2) * parts
    pay = inp.new_empty(rows, begin + n + (target_T is not None), dtype=torch.float32)
    sorted_ids = inp.new_empty(rows, n + 1, dtype=torch.int32)
    order = inp.new_empty(rows, n, dtype=torch.int32)
    if rows:
        _select(inp, z, ids_TN, teacher_logprobs_TN, teacher_weights_TD, weight_T, target_T, shard, k, begin,
                (sorted_ids, order, pay))  # fmt: skip
        stats(inp, z, sorted_ids, weight_T, pay, shard, scale_of(temperature), entropy, entry.stats, entry.splits)
    if shard.world_size > 1:
        dist.all_reduce(pay, group=shard.group)
    return Gathered(sorted_ids, order, pay, parts, begin)


def _select(
    inp: Tensor,
    z: Layout,
    ids_TN: Tensor,
    logprobs_TN: Tensor | None,
    teacher_weights_TD: Tensor | None,
    weight_T: Tensor | None,
    target_T: Tensor | None,
    shard: VocabShard,
    k: int,
    begin: int,
    out: tuple[Tensor, Tensor, Tensor],
) -> None:
    sorted_ids, order, pay = out
    rows, n = ids_TN.shape
    padded = max(2, power_of_two(n))
    by_rank = padded <= LONGEST_RANKED
    at_once = max(1, min(16, (4096 // padded**2) if by_rank else (512 // padded)))
    elements = at_once * padded * (padded if by_rank else 1)
    select_kernel[(triton.cdiv(rows, at_once),)](
        inp, ids_TN, logprobs_TN, teacher_weights_TD, weight_T, target_T, sorted_ids, order, pay,
        rows, *z.address, shard.start, shard.num_columns, shard.vocab_size, pay.size(1), begin,
        N=n, K=k, N_PAD=padded, UNIT=z.unit, ROWS=at_once, BY_RANK=by_rank,
        num_warps=min(8, max(1, elements // (2048 if by_rank else 256))),
    )  # fmt: skip


def stats(
    inp: Tensor,
    z: Layout,
    sorted_ids: Tensor,
    weight_T: Tensor | None,
    pay: Tensor,
    shard: VocabShard,
    scale: float,
    entropy: bool,
    how: table.Launch,
    splits: int,
) -> None:
    """The pass over the logits in forward, into ``pay``."""
    n = sorted_ids.size(1) - 1
    chunk = triton.cdiv(triton.cdiv(shard.num_columns, how.block), splits) * how.block
    stats_kernel[(z.num_rows * splits,)](
        inp, sorted_ids, weight_T, pay,
        *z.address, shard.start, shard.num_columns, chunk, splits, shard.rank, shard.world_size, pay.size(1), scale,
        N=n, N_PAD=power_of_two(n), WORLD_PAD=power_of_two(shard.world_size), UNIT=z.unit, ENTROPY=entropy,
        BLOCK=how.block, AHEAD=how.stages, num_warps=how.warps,
    )  # fmt: skip


def dense(
    inp: Tensor,
    z: Layout,
    out: Tensor,
    o: Layout,
    row_data: Tensor,
    grad_T: Tensor | None,
    shard: VocabShard,
    scale: float,
    how: table.Launch,
) -> None:
    """The pass over the logits in backward, without the entries of the ids."""
    tiles = triton.cdiv(z.width, how.block)
    dense_kernel[(z.num_rows * tiles,)](
        inp, out, row_data, grad_T, z.num_rows, 0 if grad_T is None else grad_T.stride(0), *z.address, *o.address,
        shard.num_columns, z.width, tiles, scale,
        Z_UNIT=z.unit, OUT_UNIT=o.unit, BLOCK=how.block, num_warps=how.warps,
    )  # fmt: skip


def write_gradient(
    inp: Tensor,
    out: Tensor,
    *,
    sorted_ids: Tensor,
    entry_TN: Tensor,
    row_data: Tensor,
    runs_T: Tensor,
    grad_T: Tensor | None,
    shard: VocabShard,
    temperature: float,
) -> None:
    """The gradient of every row: the dense part, then the entries of the ids over it. ``out`` may be ``inp``.

    ``entry_TN``, ``row_data`` [2, T] and ``runs_T`` as ``loss_kernel`` makes them; ``grad_T`` fp32 of any stride
    multiplies each row, None stands for 1.
    """
    z, o = layout(inp), layout(out)
    rows, n = entry_TN.shape
    if rows == 0:
        return
    how = entry_for(inp, shard, rows, n).dense
    dense(inp, z, out, o, row_data, grad_T, shard, scale_of(temperature), how)
    grad_stride = 0 if grad_T is None else grad_T.stride(0)
    padded = power_of_two(n)
    fixup_kernel[(rows,)](
        out, sorted_ids, entry_TN, runs_T, grad_T, grad_stride, *o.address, shard.start, shard.num_columns,
        N=n, N_PAD=padded, UNIT=o.unit, num_warps=small_warps(padded),
    )  # fmt: skip

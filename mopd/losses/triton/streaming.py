# mypy: disable-error-code="no-untyped-def"
"""The two kernels that touch every logit. Both are bound by memory: 2 bytes read, then 2 read and 2 written (bf16).

All arithmetic is fp32 on loaded values. Logits stay in their own unit (not divided by the temperature) until the
difference to the row's peak is taken: differences of close numbers are exact, products are not.

Parameters of kernels are pointers, tiles and numbers: Triton admits no annotation on them but ``tl.constexpr``.

Shape legend: T rows, V columns of this rank, N selected ids of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)
MINUS_INFINITY: tl.constexpr = tl.constexpr(float("-inf"))
NO_ID: tl.constexpr = tl.constexpr(2147483647)
"""Stands behind the ids of a row; larger than any id."""


@triton.jit
def row_of(ptr, row, inner, stride_a, stride_b):
    """Pointer to row ``row`` of ``[A, B, V]`` with any strides, where ``inner`` = B."""
    row = row.to(tl.int64)
    return ptr + (row // inner) * stride_a + (row % inner) * stride_b


@triton.jit
def at(column, stride, UNIT: tl.constexpr):
    """Offset of a column. 64 bits where columns are not neighbours: V times the stride passes 2^31."""
    if UNIT:
        return column
    else:
        return column.to(tl.int64) * stride


@triton.jit
def _tile(
    z, lane, begin, cursor, column, ids, start, peak, total, moment, scale, ENTROPY: tl.constexpr, BLOCK: tl.constexpr
):
    """One tile without its selected ids; ``column`` is where the next id lies, ``cursor`` its place in the list.

    The sums are online and lane by lane: one exponential per element, nothing shared between lanes.
    ``total`` = sum exp2((z - peak) * scale); ``moment`` = sum exp2((z - peak) * scale) * (z - peak).
    """
    while column < begin + BLOCK:
        z = tl.where(lane == column - begin, MINUS_INFINITY, z)
        cursor += 1
        column = tl.load(ids + cursor) - start
    d = z - peak
    grows = d > 0
    e = tl.exp2(-tl.abs(d * scale))
    if ENTROPY:
        new = tl.where(e > 0, e * d, 0.0)  # 0 * -inf
        moment = tl.where(grows, e * (moment - total * d), moment + new)
    total = total * tl.where(grows, e, 1.0) + tl.where(grows, 1.0, e)
    return cursor, column, tl.where(grows, z, peak), total, moment


@triton.jit
def stats_kernel(
    z_ptr, ids_ptr, weight_ptr, pay_ptr, inner, stride_a, stride_b, stride_v,
    start, num_columns, chunk, splits, rank, world_size, pay_width, scale,
    N: tl.constexpr, N_PAD: tl.constexpr, WORLD_PAD: tl.constexpr, UNIT: tl.constexpr, ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr, AHEAD: tl.constexpr,
) -> None:  # fmt: skip
    """Peak and sum of exponentials of one row, columns ``[split * chunk, (split + 1) * chunk)``, ids left out.

    Writes this split's cells of all ranks: zeros beside its own. ``chunk`` is a multiple of BLOCK. AHEAD tiles (1 or 2)
    are on their way while one is worked on. Grid: T * splits.
    """
    pid = tl.program_id(0)
    row, split = pid // splits, pid % splits
    active = True
    if weight_ptr is not None:
        active = tl.load(weight_ptr + row) != 0
    top, total, moment = -float("inf"), 0.0, 0.0
    if active:
        high = tl.minimum((split + 1) * chunk, num_columns)
        z = row_of(z_ptr, row, inner, stride_a, stride_b)
        ids = ids_ptr + row.to(tl.int64) * (N + 1)
        top, total, moment = _row_stats(
            z, ids, stride_v, start, split * chunk, high, scale, N, N_PAD, UNIT, ENTROPY, BLOCK, AHEAD
        )
    other = tl.arange(0, WORLD_PAD)
    cell = pay_ptr + row.to(tl.int64) * pay_width + other * splits + split
    parts, inside, own = world_size * splits, other < world_size, other == rank
    tl.store(cell, tl.where(own, top, 0.0), mask=inside)
    tl.store(cell + parts, tl.where(own, total, 0.0), mask=inside)
    if ENTROPY:
        tl.store(cell + 2 * parts, tl.where(own, moment, 0.0), mask=inside)


@triton.jit
def _ahead(lanes, begin, stride, there):
    """A whole tile, nothing where there is none; one mask for all lanes, so that loads stay wide."""
    return tl.load(lanes + begin.to(tl.int64) * stride, mask=there, other=0.0, eviction_policy="evict_first")


@triton.jit
def _row_stats(
    z, ids, stride_v, start, low, high, scale,
    N: tl.constexpr, N_PAD: tl.constexpr, UNIT: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Peak (raw unit), sum and moment over columns [low, high); -inf, 0, 0 where nothing has mass."""
    lane = tl.arange(0, BLOCK)
    peak = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    number = tl.arange(0, N_PAD)
    known = tl.load(ids + number, mask=number < N, other=NO_ID)
    cursor = tl.sum((known < low + start).to(tl.int32), 0)
    column = tl.load(ids + cursor) - start
    num_full = tl.maximum(high - low, 0) // BLOCK
    lanes = z + at(lane, stride_v, UNIT)
    # Whole tiles carry no mask over the columns: an odd vocabulary would make every load a narrow one. The compiler
    # pipelines no loop with a loop inside, so the next tiles are asked for by hand before this one is worked on.
    one = _ahead(lanes, low, stride_v, num_full > 0)
    two = one
    if AHEAD == 2:
        two = _ahead(lanes, low + BLOCK, stride_v, num_full > 1)
    for tile in range(num_full):
        begin = low + tile * BLOCK
        block = one.to(tl.float32)
        if AHEAD == 2:
            one = two
            two = _ahead(lanes, begin + 2 * BLOCK, stride_v, tile + 2 < num_full)
        else:
            one = _ahead(lanes, begin + BLOCK, stride_v, tile + 1 < num_full)
        cursor, column, peak, total, moment = _tile(
            block, lane, begin, cursor, column, ids, start, peak, total, moment, scale, ENTROPY, BLOCK
        )
    begin = low + num_full * BLOCK
    if begin < high:
        inside = begin + lane < high
        block = tl.load(lanes + begin.to(tl.int64) * stride_v, mask=inside, other=0.0).to(tl.float32)
        block = tl.where(inside, block, MINUS_INFINITY)
        cursor, column, peak, total, moment = _tile(
            block, lane, begin, cursor, column, ids, start, peak, total, moment, scale, ENTROPY, BLOCK
        )
    top = tl.max(peak, 0)
    shrink = tl.exp2((peak - top) * scale)
    moment = tl.sum(shrink * (moment + total * (peak - top)), 0) if ENTROPY else 0.0
    total = tl.sum(total * shrink, 0)
    return tl.where(total == 0, MINUS_INFINITY, top), total, moment


@triton.jit
def _put(ptr, values, column, begin, width, stride, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Stores a tile, rounded once to the type of ``ptr``; without a mask where the whole tile lies inside."""
    values = values.to(ptr.dtype.element_ty)
    if begin + BLOCK <= width:
        tl.store(ptr + at(column, stride, UNIT), values, eviction_policy="evict_first")
    else:
        tl.store(ptr + at(column, stride, UNIT), values, mask=column < width)


@triton.jit
def dense_kernel(
    z_ptr, out_ptr, row_data_ptr, grad_ptr, num_rows, grad_stride,
    z_inner, z_stride_a, z_stride_b, z_stride_v, out_inner, out_stride_a, out_stride_b, out_stride_v,
    num_columns, width, tiles, scale,
    Z_UNIT: tl.constexpr, OUT_UNIT: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """``out[t, j] = grad[t] * row_data[0, t] * exp2((z[t, j] - row_data[1, t]) * scale)``; 0 in padded columns.

    Grid: T * tiles. ``out`` may be ``z``: a program reads and writes its own tile only. Rows whose coefficient is 0 are
    not read.
    """
    pid = tl.program_id(0)
    row, begin = pid // tiles, (pid % tiles) * BLOCK
    coefficient = tl.load(row_data_ptr + row)
    column = begin + tl.arange(0, BLOCK)
    out = row_of(out_ptr, row, out_inner, out_stride_a, out_stride_b)
    if coefficient == 0:
        _put(out, tl.zeros([BLOCK], tl.float32), column, begin, width, out_stride_v, OUT_UNIT, BLOCK)
    else:
        if grad_ptr is not None:
            coefficient *= tl.load(grad_ptr + row.to(tl.int64) * grad_stride)
        shift = tl.load(row_data_ptr + num_rows + row)
        z = row_of(z_ptr, row, z_inner, z_stride_a, z_stride_b) + at(column, z_stride_v, Z_UNIT)
        if begin + BLOCK <= num_columns:
            block = tl.load(z, eviction_policy="evict_first").to(tl.float32)
            value = coefficient * tl.exp2((block - shift) * scale)
        else:
            inside = column < num_columns
            block = tl.load(z, mask=inside, other=0.0).to(tl.float32)
            value = tl.where(inside, coefficient * tl.exp2((block - shift) * scale), 0.0)
        _put(out, value, column, begin, width, out_stride_v, OUT_UNIT, BLOCK)


INTERPRETED = not isinstance(stats_kernel, triton.JITFunction)
"""TRITON_INTERPRET=1 was set when this module was imported: the kernels run on the CPU, slowly, for tests."""

# mypy: disable-error-code="no-untyped-def"
"""The two kernels that touch every logit. Both are bound by memory: 2 bytes read, then 2 read and 2 written (bf16).

All arithmetic is fp32 on loaded values. Logits stay in their own unit (not divided by the temperature) until the
difference to the row's peak is taken: differences of close numbers are exact, products are not.

A group is 16 bytes of neighbouring columns, which one lane loads at once: 8 in bf16, 4 in fp32. Groups begin at
addresses that are multiples of 16, whatever the stride of the rows: group 0 begins ``skipped`` columns before its row.
Groups are the unit in which the statistics leave columns out; ``ids.py`` marks them and sums up what is in them.

Parameters of kernels are pointers, tiles and numbers: Triton admits no annotation on them but ``tl.constexpr``.

Shape legend: T rows, V columns of this rank, G groups of a tile, W columns of a group.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)
MINUS_INFINITY: tl.constexpr = tl.constexpr(float("-inf"))
FAR: tl.constexpr = tl.constexpr(-1e30)
"""Lower bound of differences to a peak: the exponential is 0 there, and 0 times this is 0, as 0 times -inf is not."""
NO_ID: tl.constexpr = tl.constexpr(2147483647)
"""Padding behind the ids of a row; larger than any id."""
GROUP_BITS: tl.constexpr = tl.constexpr(128)


@triton.jit
def row_of(ptr, row, inner, stride_a, stride_b, shift):
    """Return a pointer to row ``row`` of ``[A, B, V]`` of any strides; ``inner`` = B; row 0 is at ``ptr + shift``."""
    row = row.to(tl.int64)
    return ptr + ((row // inner) * stride_a + (row % inner) * stride_b + shift)


@triton.jit
def groups_of(ptr, row, inner, stride_a, stride_b, shift, UNIT: tl.constexpr):
    """Return a pointer to group 0 of a row, and the columns of it that lie before the row: 0 if columns are not
    neighbours.

    ``ptr`` is a multiple of 16 bytes; the compiler sees that the result is, and makes loads from there 16 bytes wide.
    """
    row = row.to(tl.int64)
    offset = (row // inner) * stride_a + (row % inner) * stride_b + shift
    if UNIT:
        W: tl.constexpr = GROUP_BITS // ptr.dtype.element_ty.primitive_bitwidth
        return ptr + offset // W * W, (offset % W).to(tl.int32)
    else:
        return ptr + offset, (row * 0).to(tl.int32)


@triton.jit
def at(column, stride, UNIT: tl.constexpr):
    """Return the offset of a column. 64 bits if columns are not neighbours: V times the stride may pass 2^31."""
    if UNIT:
        return column
    else:
        return column.to(tl.int64) * stride


@triton.jit
def _ask(z, group, there, stride, UNIT: tl.constexpr):
    """Start loading groups [G, W] that are ``there``; 16-bit columns as pairs [G, W / 2] in int32.

    Pairs, because the compiler carries 16-bit numbers around a loop one by one, which costs two instructions each.
    """
    BITS: tl.constexpr = z.dtype.element_ty.primitive_bitwidth
    W: tl.constexpr = GROUP_BITS // BITS
    there = there[:, None]
    if UNIT and BITS == 16:
        z = z.to(tl.pointer_type(tl.int32), bitcast=True)
        pair = group[:, None] * (W // 2) + tl.arange(0, W // 2)[None, :]
        return tl.load(z + pair, mask=there, other=0, eviction_policy="evict_first")
    else:
        column = group[:, None] * W + tl.arange(0, W)[None, :]
        return tl.load(z + at(column, stride, UNIT), mask=there, other=0.0, eviction_policy="evict_first")


@triton.jit
def _open(asked, dtype: tl.constexpr, G: tl.constexpr):
    """Convert the result of ``_ask`` to fp32 [G, W]; the columns of a group are in no particular order."""
    if asked.dtype == tl.int32:
        if dtype == tl.bfloat16:
            low = (asked << 16).to(tl.float32, bitcast=True)
            high = (asked & -65536).to(tl.float32, bitcast=True)
        else:
            low = asked.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            high = (asked >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        return tl.join(low, high).reshape(G, 2 * asked.shape[1])
    else:
        return asked.to(tl.float32)


@triton.jit
def _left_out(marks, group):
    """Return which groups are marked: bit ``g % 32`` of word ``g // 32`` of the row is group g's."""
    return (tl.load(marks + (group >> 5)) & (1 << (group & 31))) != 0


@triton.jit
def _largest(x, out, peak):
    """Return ``peak`` [G], raised to the largest column of each group that is not left out."""
    return tl.maximum(peak, tl.where(out, LOWEST, tl.max(x, 1)))


@triton.jit
def _sums(x, out, peak, scale, ENTROPY: tl.constexpr):
    """Return sum of exponentials and moment of each group [G] relative to ``peak``; 0 for groups that are left out."""
    d = x - peak[:, None]
    e = tl.exp2(d * scale)
    moment = tl.sum(e * tl.maximum(d, FAR), 1) if ENTROPY else peak  # not 0 * -inf
    return tl.where(out, 0.0, tl.sum(e, 1)), tl.where(out, 0.0, moment)


@triton.jit
def moved(peak, new, total, moment, scale, ENTROPY: tl.constexpr):
    """Return the sums above peak ``new``: ``total`` = sum exp2((z - peak) * scale), ``moment`` that times z - peak."""
    by = peak - new
    shrink = tl.exp2(by * scale)
    if ENTROPY:
        moment = shrink * (moment + total * tl.maximum(by, FAR))
    return total * shrink, moment


@triton.jit
def _row_stats(
    z, marks, stride_v, low, high, scale,
    UNIT: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Return peak (raw unit), sum and moment over the groups [low, high) that are not marked; LOWEST, 0, 0 without any.

    Online and lane by lane: one exponential a column, the peak inside a lane, one rescale for its AHEAD groups. The
    next AHEAD tiles are being loaded while these are worked on.
    """
    dtype: tl.constexpr = z.dtype.element_ty
    G: tl.constexpr = BLOCK * dtype.primitive_bitwidth // GROUP_BITS
    lane = tl.arange(0, G)
    peak = tl.full([G], LOWEST, tl.float32)
    total = tl.zeros([G], tl.float32)
    moment = tl.zeros([G], tl.float32)
    # Counted apart from the loop's own counter, which the compiler makes 64 bits wide for addresses.
    left = high - low
    one = _ask(z, low + lane, lane < left, stride_v, UNIT)
    if AHEAD == 2:
        two = _ask(z, low + G + lane, lane < left - G, stride_v, UNIT)
    for step in range(tl.cdiv(tl.maximum(left, 0), AHEAD * G)):
        group = low + step * AHEAD * G + lane
        left -= AHEAD * G
        x = _open(one, dtype, G)
        out = _left_out(marks, group)
        new = _largest(x, out, peak)
        # Asked for before this step's exponentials, which then hide the latency of memory.
        one = _ask(z, group + AHEAD * G, lane < left, stride_v, UNIT)
        if AHEAD == 2:
            y = _open(two, dtype, G)
            out_y = _left_out(marks, group + G)
            new = _largest(y, out_y, new)
            two = _ask(z, group + 3 * G, lane < left - G, stride_v, UNIT)
        total, moment = moved(peak, new, total, moment, scale, ENTROPY)
        more, moment_more = _sums(x, out, new, scale, ENTROPY)
        total, moment = total + more, moment + moment_more
        if AHEAD == 2:
            more, moment_more = _sums(y, out_y, new, scale, ENTROPY)
            total, moment = total + more, moment + moment_more
        peak = new
    top = tl.max(peak, 0)
    total, moment = moved(peak, top, total, moment, scale, ENTROPY)
    return top, tl.sum(total, 0), tl.sum(moment, 0)


@triton.jit
def stats_kernel(
    z_ptr, marks_ptr, weight_ptr, pay_ptr, inner, stride_a, stride_b, stride_v, shift,
    num_columns, chunk, splits, rank, world_size, words, pay_width, scale,
    WORLD_PAD: tl.constexpr, UNIT: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
) -> None:  # fmt: skip
    """Compute peak and sum of exponentials of one row's groups ``[split * chunk, (split + 1) * chunk)``, marked ones
    left out.

    Split 0 joins them with the sums that ``neighbours_kernel`` left in its cells for marked groups. Writes this split's
    cells of all ranks: zeros beside its own. ``chunk`` is a multiple of AHEAD tiles. Grid: T * splits.
    """
    pid = tl.program_id(0)
    row, split = pid // splits, pid % splits
    other = tl.arange(0, WORLD_PAD)
    parts, inside, own = world_size * splits, other < world_size, other == rank
    pay = pay_ptr + row.to(tl.int64) * pay_width + split
    active = True
    if weight_ptr is not None:
        active = tl.load(weight_ptr + row) != 0
    top, total, moment = -float("inf"), 0.0, 0.0
    if active:
        z, skipped = groups_of(z_ptr, row, inner, stride_a, stride_b, shift, UNIT)
        W: tl.constexpr = GROUP_BITS // z_ptr.dtype.element_ty.primitive_bitwidth
        marks = marks_ptr + row.to(tl.int64) * words
        low, high = split * chunk, tl.minimum((split + 1) * chunk, (skipped + num_columns) // W)
        top, total, moment = _row_stats(z, marks, stride_v, low, high, scale, UNIT, ENTROPY, BLOCK, AHEAD)
        # One program of the row adds what ``neighbours_kernel`` has left, or it would count once a split.
        if split == 0:
            mine = pay + rank * splits
            peak, beside, beside_moment = tl.load(mine), tl.load(mine + parts), 0.0
            if ENTROPY:
                beside_moment = tl.load(mine + 2 * parts)
            new = tl.maximum(top, peak)
            total, moment = moved(top, new, total, moment, scale, ENTROPY)
            beside, beside_moment = moved(peak, new, beside, beside_moment, scale, ENTROPY)
            top, total, moment = new, total + beside, moment + beside_moment
        # Nothing was summed: the part's peak is -inf, not the value that the search started from.
        top = tl.where(total == 0, MINUS_INFINITY, top)
    cell = pay + other * splits
    tl.store(cell, tl.where(own, top, 0.0), mask=inside)
    tl.store(cell + parts, tl.where(own, total, 0.0), mask=inside)
    if ENTROPY:
        tl.store(cell + 2 * parts, tl.where(own, moment, 0.0), mask=inside)


@triton.jit
def _get(source, begin, inside, num_columns, EDGE: tl.constexpr):
    """Load a tile [G, W] in fp32 where ``inside``, whole groups at once. Groups begin at columns ``begin`` [G, 1]."""
    if EDGE:
        W: tl.constexpr = inside.shape[1]
        whole = (begin >= 0) & (begin + W <= num_columns)
        rest = tl.load(source, mask=inside & ~whole, other=0.0)
        return tl.where(whole, tl.load(source, mask=whole, other=0.0), rest).to(tl.float32)
    else:
        return tl.load(source, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def _put(out, values, begin, column, width, EDGE: tl.constexpr):
    """Store a tile [G, W], rounded once; whole groups at once."""
    values = values.to(out.dtype.element_ty)
    if EDGE:
        W: tl.constexpr = column.shape[1]
        whole = (begin >= 0) & (begin + W <= width)
        tl.store(out, values, mask=whole)
        tl.store(out, values, mask=(column >= 0) & (column < width) & ~whole)
    else:
        tl.store(out, values, eviction_policy="evict_first")


@triton.jit
def dense_kernel(
    z_ptr, out_ptr, row_data_ptr, grad_ptr, num_rows, grad_stride,
    z_inner, z_stride_a, z_stride_b, z_stride_v, z_shift,
    out_inner, out_stride_a, out_stride_b, out_stride_v, out_shift,
    num_columns, width, tiles, scale,
    Z_UNIT: tl.constexpr, OUT_UNIT: tl.constexpr, ALIKE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write ``out[t, j] = grad[t] * row_data[0, t] * exp2((z[t, j] - row_data[1, t]) * scale)``; 0 in padded columns.

    Grid: T * tiles, which begin at groups of ``out``; ALIKE: groups of ``z`` begin in the same columns. ``out`` may be
    ``z``: a program reads and writes its own tile only. Rows whose coefficient is 0 are not read.
    """
    W: tl.constexpr = GROUP_BITS // out_ptr.dtype.element_ty.primitive_bitwidth
    pid = tl.program_id(0)
    row, first = pid // tiles, (pid % tiles) * BLOCK
    coefficient = tl.load(row_data_ptr + row)
    out, skipped = groups_of(out_ptr, row, out_inner, out_stride_a, out_stride_b, out_shift, OUT_UNIT)
    lane = tl.arange(0, W)[None, :]
    group = first + tl.arange(0, BLOCK // W)[:, None] * W
    place, begin = group + lane, group - skipped
    column = begin + lane
    out += at(place, out_stride_v, OUT_UNIT)
    low, high = first - skipped, first - skipped + BLOCK
    if coefficient == 0:
        zero = tl.zeros([BLOCK // W, W], tl.float32)
        # Only a row's first and last tile need masks; the others store whole vectors.
        if (low >= 0) & (high <= width):
            _put(out, zero, begin, column, width, False)
        else:
            _put(out, zero, begin, column, width, True)
    else:
        if grad_ptr is not None:
            coefficient *= tl.load(grad_ptr + row.to(tl.int64) * grad_stride)
        shift = tl.load(row_data_ptr + num_rows + row)
        # Groups of both tensors begin in the same columns: each is one load and one store.
        if ALIKE:
            z, _ = groups_of(z_ptr, row, z_inner, z_stride_a, z_stride_b, z_shift, Z_UNIT)
            z += at(place, z_stride_v, Z_UNIT)
        else:
            z = row_of(z_ptr, row, z_inner, z_stride_a, z_stride_b, z_shift) + at(column, z_stride_v, Z_UNIT)
        inside = (column >= 0) & (column < num_columns)
        if (low >= 0) & (high <= num_columns):
            block = _get(z, begin, inside, num_columns, False)
            _put(out, coefficient * tl.exp2((block - shift) * scale), begin, column, width, False)
        else:
            block = _get(z, begin, inside, num_columns, True)
            value = tl.where(inside, coefficient * tl.exp2((block - shift) * scale), 0.0)
            _put(out, value, begin, column, width, True)


INTERPRETED = not isinstance(stats_kernel, triton.JITFunction)
"""Whether TRITON_INTERPRET=1 was set when this module was imported: the kernels run on the CPU, slowly, for tests."""

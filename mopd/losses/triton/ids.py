# mypy: disable-error-code="no-untyped-def"
"""The kernels on the ids of a row: sorting and gathering before the pass over the logits, the overwriting after it, and
between them log-probs and coefficients of the gather primitive.

Sorting puts equal ids (of several teachers) side by side, and lets the pass over the logits meet them in order.

Shape legend: T rows, N ids of a row (D teachers times K), P parts of the vocabulary (ranks times splits).
"""

from __future__ import annotations

import triton
import triton.language as tl

from mopd.losses.triton.streaming import FAR, GROUP_BITS, LOWEST, MINUS_INFINITY, NO_ID, at, groups_of, moved, row_of

NOWHERE: tl.constexpr = tl.constexpr(2**32 - 1)


@triton.jit
def _rank(ids, number):
    """Return the place of each id [R, N] in its sorted row, earlier entries first among equal ids."""
    mine, other = ids[:, :, None], ids[:, None, :]
    earlier = number[None, None, :] < number[None, :, None]
    return tl.sum(((other < mine) | ((other == mine) & earlier)).to(tl.int32), 2)


@triton.jit
def _mark_beyond(marks_ptr, row, there, skipped, end, words):
    """Write all words of the rows: marks on a group 0 that begins before its row, and on groups from ``end`` on."""
    for begin in range(0, words, 128):
        word = begin + tl.arange(0, 128)
        inside = tl.minimum(tl.maximum(end[:, None] - word[None, :] * 32, 0), 32).to(tl.int64)
        marks = (-1 << inside) | ((word[None, :] == 0) & (skipped[:, None] > 0)).to(tl.int64)
        cell = marks_ptr + row[:, None] * words + word[None, :]
        tl.store(cell, marks.to(tl.int32), mask=there[:, None] & (word < words)[None, :])


@triton.jit
def select_kernel(
    z_ptr, ids_ptr, logq_ptr, teacher_weight_ptr, weight_ptr, target_ptr, sorted_ptr, order_ptr, pay_ptr, marks_ptr,
    num_rows, inner, stride_a, stride_b, stride_v, shift, start, num_columns, vocab_size, pay_width, pay_begin, words,
    N: tl.constexpr, K: tl.constexpr, N_PAD: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr,
    BY_RANK: tl.constexpr,
) -> None:  # fmt: skip
    """Write the sorted valid ids ``sorted`` int32 [T, N + 1], NO_ID behind them; ``order`` int32 [T, N], their unsorted
    places.

    Valid: in the vocabulary, teacher log-prob above -inf, weights of teacher and row not 0. Puts the raw logits of
    owned ids (0 for others) into ``pay[:, pay_begin:]`` in sorted order, then the target's. Writes ``marks`` int32
    [T, words] on what is no whole group; ``neighbours_kernel`` adds those on groups that hold ids. Grid: T / ROWS.

    ``BY_RANK`` compares all pairs of ids, which is the faster sort for short lists.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    number = tl.arange(0, N_PAD)
    there = row < num_rows
    row64 = row.to(tl.int64)
    cell = row64[:, None] * N + number[None, :]
    listed = there[:, None] & (number < N)[None, :]
    ids = tl.load(ids_ptr + cell, mask=listed, other=-1).to(tl.int64)
    valid = listed & (ids >= 0) & (ids < vocab_size)
    active = there
    if weight_ptr is not None:
        active = there & (tl.load(weight_ptr + row, mask=there, other=0.0) != 0)
        valid = valid & active[:, None]
    if logq_ptr is not None:
        valid = valid & (tl.load(logq_ptr + cell, mask=listed, other=0.0) != MINUS_INFINITY)
    if teacher_weight_ptr is not None:
        teacher = row64[:, None] * (N // K) + (number // K)[None, :]
        valid = valid & (tl.load(teacher_weight_ptr + teacher, mask=listed, other=0.0) != 0)
    ids = tl.where(valid, ids, NO_ID).to(tl.int32)
    if BY_RANK:
        place = _rank(ids, number)
        order = number[None, :] + tl.zeros_like(place)
    else:
        # The entry's number in the low bits makes keys unique, so that the sort is stable.
        key = tl.sort((ids.to(tl.int64) << 32) | number[None, :].to(tl.int64))
        ids, order = (key >> 32).to(tl.int32), (key & 0xFFFFFFFF).to(tl.int32)
        place = number[None, :] + tl.zeros_like(order)
    tl.store(sorted_ptr + row64[:, None] * (N + 1) + place, ids, mask=listed)
    tl.store(sorted_ptr + row64 * (N + 1) + N, tl.full([ROWS], NO_ID, tl.int32), mask=there)
    tl.store(order_ptr + row64[:, None] * N + place, order, mask=listed)
    W: tl.constexpr = GROUP_BITS // z_ptr.dtype.element_ty.primitive_bitwidth
    _, skipped = groups_of(z_ptr, row, inner, stride_a, stride_b, shift, UNIT)
    _mark_beyond(marks_ptr, row64, there, skipped, (skipped + num_columns) // W, words)
    z = row_of(z_ptr, row, inner, stride_a, stride_b, shift)
    column = ids - start
    owned = listed & (column >= 0) & (column < num_columns)
    logits = tl.load(z[:, None] + at(column, stride_v, UNIT), mask=owned, other=0.0).to(tl.float32)
    # 0 for ids of other ranks: the SUM all-reduce then brings every owner's logit to all ranks.
    pay = pay_ptr + row64 * pay_width + pay_begin
    tl.store(pay[:, None] + place, logits, mask=listed)
    if target_ptr is not None:
        column = tl.load(target_ptr + row, mask=there, other=-1).to(tl.int64) - start
        owned = active & (column >= 0) & (column < num_columns)
        logits = tl.load(z + at(column, stride_v, UNIT), mask=owned, other=0.0).to(tl.float32)
        tl.store(pay + N, logits, mask=there)


@triton.jit
def _joined_columns(x, peak, total, moment, scale, ENTROPY: tl.constexpr):
    """Add columns [R, S, W], in fp32 and -inf where there is none, to the sums [R, S]."""
    new = tl.maximum(peak, tl.max(x, 2))
    total, moment = moved(peak, new, total, moment, scale, ENTROPY)
    d = x - new[:, :, None]
    e = tl.exp2(d * scale)
    if ENTROPY:
        moment += tl.sum(e * tl.maximum(d, FAR), 2)
    return new, total + tl.sum(e, 2), moment


@triton.jit
def _joined_slots(peak, total, moment, top, scale, ENTROPY: tl.constexpr):
    """Join the sums [R, S] of rows, relative to the peaks ``top`` [R]."""
    total, moment = moved(peak, top[:, None], total, moment, scale, ENTROPY)
    return tl.sum(total, 1), tl.sum(moment, 1)


@triton.jit
def _place(ids_ptr, number, there, start, skipped, num_columns, N: tl.constexpr):
    """Return where the ids at ``number`` of the sorted lists lie, counted from group 0; NOWHERE for ids of other ranks.

    uint32: one comparison finds ids before the shard and behind it, and NOWHERE lies in no group either.
    """
    listed = there & (number >= 0) & (number < N)
    column = (tl.load(ids_ptr + number, mask=listed, other=NO_ID) - start).to(tl.uint32)
    return tl.where(column < num_columns.to(tl.uint32), column + skipped.to(tl.uint32), NOWHERE)


@triton.jit
def _bits(lists, number, place, before, there, start, skipped, num_columns, N: tl.constexpr, W: tl.constexpr):
    """Return which entries are the first id of their group, and for those the group's listed columns as bits."""
    first = (place != NOWHERE) & (before // W != place // W)
    bits = 1 << (place % W).to(tl.int32)
    same = first
    while tl.max(tl.max(same.to(tl.int32), 1), 0) > 0:
        number += 1
        after = _place(lists, number, there, start, skipped, num_columns, N)
        same = same & (after // W == place // W)
        bits = tl.where(same, bits | (1 << (after % W).to(tl.int32)), bits)
    return first, bits


@triton.jit
def neighbours_kernel(
    z_ptr, ids_ptr, marks_ptr, pay_ptr,
    num_rows, inner, stride_a, stride_b, stride_v, shift, start, num_columns, words, pay_width, cell, parts, scale,
    N: tl.constexpr, UNIT: tl.constexpr, ENTROPY: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
) -> None:  # fmt: skip
    """Mark the groups that hold ids, and sum up the other columns in them and in the incomplete groups at a row's ends.

    Peak, sum and moment go to ``pay[:, cell + (0, 1, 2) * parts]``: LOWEST, 0, 0 without a column. Grid: T / ROWS.
    """
    W: tl.constexpr = GROUP_BITS // z_ptr.dtype.element_ty.primitive_bitwidth
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there, row64 = (row < num_rows)[:, None], row.to(tl.int64)
    lists = (ids_ptr + row64 * (N + 1))[:, None]
    z, skipped = groups_of(z_ptr, row, inner, stride_a, stride_b, shift, UNIT)
    z, skipped = z[:, None, None], skipped[:, None]
    last, lane = ((skipped + num_columns) // W).to(tl.uint32), tl.arange(0, W)[None, None, :]
    head, tail = tl.zeros([ROWS, AT_ONCE], tl.int32), tl.zeros([ROWS, AT_ONCE], tl.int32)
    peak = tl.full([ROWS, AT_ONCE], LOWEST, tl.float32)
    total, moment = tl.zeros([ROWS, AT_ONCE], tl.float32), tl.zeros([ROWS, AT_ONCE], tl.float32)
    for begin in range(0, N, AT_ONCE):
        number = begin + tl.arange(0, AT_ONCE)[None, :]
        place = _place(lists, number, there, start, skipped, num_columns, N)
        before = _place(lists, number - 1, there, start, skipped, num_columns, N)
        first, bits = _bits(lists, number, place, before, there, start, skipped, num_columns, N, W)
        group = place // W
        word = marks_ptr + row64[:, None] * words + group // 32
        # Atomic: other lanes may mark groups in the same word. Bits are only added, in any order.
        tl.atomic_or(word, 1 << (group % 32).to(tl.int32), mask=first, sem="relaxed")
        # The incomplete groups at the row's ends wait for the end of the kernel.
        head, tail = tl.where(first & (group == 0), bits, head), tl.where(first & (group == last), bits, tail)
        whole = first & (group < last) & ((group > 0) | (skipped == 0))
        x = tl.load(z + at(group[:, :, None] * W + lane, stride_v, UNIT), mask=whole[:, :, None], other=MINUS_INFINITY)
        # Listed columns are left out of the sums: their logits are exchanged one by one.
        x = tl.where(((bits[:, :, None] >> lane) & 1) != 0, MINUS_INFINITY, x.to(tl.float32))
        peak, total, moment = _joined_columns(x, peak, total, moment, scale, ENTROPY)
    # The two ends of the row: group 0 if it begins before the row, and the last group.
    side = tl.arange(0, 2)[None, :]
    last = last.to(tl.int32)
    broken = there & ((side == 1) | ((skipped > 0) & (last > 0)))
    bits = tl.where(side == 1, tl.max(tail, 1)[:, None], tl.max(head, 1)[:, None])
    place = (side * last)[:, :, None] * W + lane
    column = place - skipped[:, :, None]
    free = broken[:, :, None] & (column >= 0) & (column < num_columns) & (((bits[:, :, None] >> lane) & 1) == 0)
    x = tl.load(z + at(place, stride_v, UNIT), mask=free, other=MINUS_INFINITY).to(tl.float32)
    none = tl.zeros([ROWS, 2], tl.float32)
    end_peak, end_total, end_moment = _joined_columns(x, none + LOWEST, none, none, scale, ENTROPY)
    top = tl.maximum(tl.max(peak, 1), tl.max(end_peak, 1))
    total, moment = _joined_slots(peak, total, moment, top, scale, ENTROPY)
    end_total, end_moment = _joined_slots(end_peak, end_total, end_moment, top, scale, ENTROPY)
    total, moment = total + end_total, moment + end_moment
    pay = pay_ptr + row64 * pay_width + cell
    tl.store(pay, top, mask=row < num_rows)
    tl.store(pay + parts, total, mask=row < num_rows)
    if ENTROPY:
        tl.store(pay + 2 * parts, moment, mask=row < num_rows)


@triton.jit
def listed_ids(ids_ptr, order_ptr, number, N: tl.constexpr):
    """Return a row's sorted ids, their unsorted places, which are valid, and a mark on one entry for each id."""
    ids = tl.load(ids_ptr + number, mask=number < N, other=NO_ID)
    order = tl.load(order_ptr + number, mask=number < N, other=0)
    valid = ids != NO_ID
    first = valid & (ids != tl.load(ids_ptr + number - 1, mask=valid & (number > 0), other=-1))
    return ids, order, valid, first


@triton.jit
def joined(pay, selected, first, parts, scale, PARTS_PAD: tl.constexpr):
    """Join all parts of the vocabulary: shift (raw unit), sum of exponentials relative to it, the tail's share of that
    sum.

    ``pay`` points to a row; ``selected`` [N_PAD] raw logits; ``first`` marks one entry for each id.
    """
    part = tl.arange(0, PARTS_PAD)
    peak = tl.load(pay + part, mask=part < parts, other=MINUS_INFINITY)
    total = tl.load(pay + parts + part, mask=part < parts, other=0.0)
    shift = tl.maximum(tl.max(peak, 0), tl.max(tl.where(first, selected, MINUS_INFINITY), 0))
    outside = tl.sum(tl.where(total != 0, total * tl.exp2((peak - shift) * scale), 0.0), 0)
    inside = tl.sum(tl.where(first, tl.exp2((selected - shift) * scale), 0.0), 0)
    return shift, outside + inside, outside


@triton.jit
def fixup_kernel(
    out_ptr, sorted_ptr, entry_ptr, runs_ptr, target_ptr, target_entry_ptr, grad_ptr, grad_stride,
    inner, stride_a, stride_b, stride_v, shift, start, num_columns,
    N: tl.constexpr, N_PAD: tl.constexpr, UNIT: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradient at this rank's ids: the entries of equal ids summed in order, times ``grad``. Grid: T.

    Never reads ``out``: the entries are rounded once. ``runs`` is the length of the row's longest run of equal ids.
    ``target_entry`` [T] is written at ``target`` where no id is equal to it.
    """
    row = tl.program_id(0)
    row64 = row.to(tl.int64)
    number = tl.arange(0, N_PAD)
    listed = number < N
    ids = tl.load(sorted_ptr + row64 * (N + 1) + number, mask=listed, other=NO_ID)
    before = tl.load(sorted_ptr + row64 * (N + 1) + number - 1, mask=listed & (number > 0), other=-1)
    column = ids - start
    # The first of equal ids writes the sum of them all.
    write = listed & (ids != before) & (column >= 0) & (column < num_columns)
    value = tl.load(entry_ptr + row64 * N + number, mask=write, other=0.0)
    for step in range(1, tl.load(runs_ptr + row)):
        follower = number + step
        there = write & (follower < N)
        same = there & (tl.load(sorted_ptr + row64 * (N + 1) + follower, mask=there, other=NO_ID) == ids)
        value += tl.load(entry_ptr + row64 * N + follower, mask=same, other=0.0)
    if grad_ptr is not None:
        # 0 stays 0 even if the upstream gradient is not finite.
        value = tl.where(value == 0, 0.0, value * tl.load(grad_ptr + row64 * grad_stride))
    out = row_of(out_ptr, row, inner, stride_a, stride_b, shift)
    tl.store(out + at(column, stride_v, UNIT), value.to(out_ptr.dtype.element_ty), mask=write)
    if target_ptr is not None:
        target = tl.load(target_ptr + row)
        column = target - start
        alone = (column >= 0) & (column < num_columns) & (tl.max((ids == target).to(tl.int32), 0) == 0)
        value = tl.load(target_entry_ptr + row)
        if grad_ptr is not None:
            value = tl.where(value == 0, 0.0, value * tl.load(grad_ptr + row64 * grad_stride))
        tl.store(out + at(column, stride_v, UNIT), value.to(out_ptr.dtype.element_ty), mask=alone)


@triton.jit
def logprobs_kernel(
    pay_ptr, ids_ptr, order_ptr, weight_ptr, logprobs_ptr, lse_ptr, row_data_ptr, runs_ptr,
    num_rows, parts, pay_width, pay_begin, scale, inv_tau,
    N: tl.constexpr, N_PAD: tl.constexpr, PARTS_PAD: tl.constexpr,
) -> None:  # fmt: skip
    """Compute log-probs [T, N] in the caller's order (-inf outside the vocabulary), log-sum-exp [T], 0 on rows of
    weight 0.

    ``row_data`` [2, T]: 1 over the row's sum of exponentials relative to the shift, 0 on rows of weight 0; and the
    shift. ``runs`` int32 [T]: the longest run of equal ids. Grid: T.
    """
    row = tl.program_id(0)
    row64 = row.to(tl.int64)
    number = tl.arange(0, N_PAD)
    ids_ptr += row64 * (N + 1)
    pay = pay_ptr + row64 * pay_width
    weight = tl.full([], 1.0, tl.float32)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + row)
    active = weight != 0
    ids, order, valid, first = listed_ids(ids_ptr, order_ptr + row64 * N, number, N)
    selected = tl.load(pay + pay_begin + number, mask=number < N, other=0.0)
    shift, total, _ = joined(pay, selected, first, parts, scale, PARTS_PAD)
    log_total = tl.log(total)
    logprob = tl.where(valid, (selected - shift) * inv_tau - log_total, MINUS_INFINITY)
    tl.store(logprobs_ptr + row64 * N + order, tl.where(active, logprob, 0.0), mask=number < N)
    tl.store(lse_ptr + row, tl.where(active, shift * inv_tau + log_total, 0.0))
    tl.store(row_data_ptr + row, tl.where(active, 1.0 / total, 0.0))
    tl.store(row_data_ptr + num_rows + row, tl.where(active, shift, 0.0))
    run = tl.full([], 1, tl.int32)
    same = valid & (tl.load(ids_ptr + number + 1, mask=number + 1 < N, other=NO_ID) == ids)
    while tl.max(same.to(tl.int32), 0) > 0:
        run += 1
        same = same & (tl.load(ids_ptr + number + run, mask=number + run < N, other=NO_ID) == ids)
    tl.store(runs_ptr + row, run)


@triton.jit
def gather_gradient_kernel(
    ids_ptr, order_ptr, logprobs_ptr, row_data_ptr, grad_ptr, grad_stride_t, grad_stride_n,
    grad_lse_ptr, grad_lse_stride, entry_ptr, out_row_data_ptr, num_rows, inv_tau,
    N: tl.constexpr, N_PAD: tl.constexpr,
) -> None:  # fmt: skip
    """Compute coefficients of the gradient from the upstream of log-probs and log-sum-exp (either may be None).

    ``entry`` [T, N] in sorted order: the sum over equal ids is the id's gradient. ``out_row_data`` [2, T] as the dense
    kernel takes it. Grid: T.
    """
    row = tl.program_id(0)
    row64 = row.to(tl.int64)
    number = tl.arange(0, N_PAD)
    _, order, valid, first = listed_ids(ids_ptr + row64 * (N + 1), order_ptr + row64 * N, number, N)
    entry = tl.zeros([N_PAD], tl.float32)
    if grad_ptr is not None:
        upstream = grad_ptr + row64 * grad_stride_t + order.to(tl.int64) * grad_stride_n
        entry = tl.load(upstream, mask=valid, other=0.0).to(tl.float32) * inv_tau
    total = tl.sum(entry, 0)
    if grad_lse_ptr is not None:
        total -= tl.load(grad_lse_ptr + row64 * grad_lse_stride) * inv_tau
    logprob = tl.load(logprobs_ptr + row64 * N + order, mask=first, other=MINUS_INFINITY)
    entry -= tl.where(first, tl.exp(logprob) * total, 0.0)
    tl.store(entry_ptr + row64 * N + number, entry, mask=number < N)
    share = tl.load(row_data_ptr + row)
    tl.store(out_row_data_ptr + row, tl.where(share == 0, 0.0, -total * share))
    tl.store(out_row_data_ptr + num_rows + row, tl.load(row_data_ptr + num_rows + row))

# mypy: disable-error-code="no-untyped-def"
"""The kernels on the ids of a row: sorting and gathering before the pass over the logits, the overwriting after it, and
between them log-probs and coefficients of the gather primitive.

Sorted ids put equal ids (of several teachers) side by side, and let the pass over the logits meet them in order.

Shape legend: T rows, N ids of a row (D teachers times K), P parts of the vocabulary (ranks times splits).
"""

from __future__ import annotations

import triton
import triton.language as tl

from mopd.losses.triton.streaming import MINUS_INFINITY, NO_ID, at, row_of


@triton.jit
def _rank(ids, number):
    """Place of each id [R, N] in its sorted row, earlier entries first among equal ids."""
    mine, other = ids[:, :, None], ids[:, None, :]
    earlier = number[None, None, :] < number[None, :, None]
    return tl.sum(((other < mine) | ((other == mine) & earlier)).to(tl.int32), 2)


@triton.jit
def select_kernel(
    z_ptr, ids_ptr, logq_ptr, teacher_weight_ptr, weight_ptr, target_ptr, sorted_ptr, order_ptr, pay_ptr,
    num_rows, inner, stride_a, stride_b, stride_v, start, num_columns, vocab_size, pay_width, pay_begin,
    N: tl.constexpr, K: tl.constexpr, N_PAD: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr,
    BY_RANK: tl.constexpr,
) -> None:  # fmt: skip
    """Sorted valid ids ``sorted`` int32 [T, N + 1], NO_ID behind them; ``order`` int32 [T, N], where each one stood.

    Valid: in the vocabulary, teacher log-prob above -inf, weights of teacher and row not 0. Puts the raw logits of
    owned ids (0 for others) into ``pay[:, pay_begin:]`` in sorted order, then the target's. Grid: T / ROWS.

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
        key = tl.sort((ids.to(tl.int64) << 32) | number[None, :].to(tl.int64))
        ids, order = (key >> 32).to(tl.int32), (key & 0xFFFFFFFF).to(tl.int32)
        place = number[None, :] + tl.zeros_like(order)
    tl.store(sorted_ptr + row64[:, None] * (N + 1) + place, ids, mask=listed)
    tl.store(sorted_ptr + row64 * (N + 1) + N, tl.full([ROWS], NO_ID, tl.int32), mask=there)
    tl.store(order_ptr + row64[:, None] * N + place, order, mask=listed)
    z = row_of(z_ptr, row, inner, stride_a, stride_b)
    column = ids - start
    owned = listed & (column >= 0) & (column < num_columns)
    logits = tl.load(z[:, None] + at(column, stride_v, UNIT), mask=owned, other=0.0).to(tl.float32)
    pay = pay_ptr + row64 * pay_width + pay_begin
    tl.store(pay[:, None] + place, logits, mask=listed)
    if target_ptr is not None:
        column = tl.load(target_ptr + row, mask=there, other=-1).to(tl.int64) - start
        owned = active & (column >= 0) & (column < num_columns)
        logits = tl.load(z + at(column, stride_v, UNIT), mask=owned, other=0.0).to(tl.float32)
        tl.store(pay + N, logits, mask=there)


@triton.jit
def listed_ids(ids_ptr, order_ptr, number, N: tl.constexpr):
    """A row's sorted ids, where they stood, which are valid, and one mark for each id."""
    ids = tl.load(ids_ptr + number, mask=number < N, other=NO_ID)
    order = tl.load(order_ptr + number, mask=number < N, other=0)
    valid = ids != NO_ID
    first = valid & (ids != tl.load(ids_ptr + number - 1, mask=valid & (number > 0), other=-1))
    return ids, order, valid, first


@triton.jit
def joined(pay, selected, first, parts, scale, PARTS_PAD: tl.constexpr):
    """All parts of the vocabulary together: shift (raw unit), sum of exponentials above it, the tail's share of that.

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
    out_ptr, sorted_ptr, entry_ptr, runs_ptr, grad_ptr, grad_stride,
    inner, stride_a, stride_b, stride_v, start, num_columns,
    N: tl.constexpr, N_PAD: tl.constexpr, UNIT: tl.constexpr,
) -> None:  # fmt: skip
    """Writes the gradient at this rank's ids: the entries of equal ids summed in order, times ``grad``. Grid: T.

    Never reads ``out``: the entries are rounded once. ``runs`` is the length of the row's longest run of equal ids.
    """
    row = tl.program_id(0)
    row64 = row.to(tl.int64)
    number = tl.arange(0, N_PAD)
    listed = number < N
    ids = tl.load(sorted_ptr + row64 * (N + 1) + number, mask=listed, other=NO_ID)
    before = tl.load(sorted_ptr + row64 * (N + 1) + number - 1, mask=listed & (number > 0), other=-1)
    column = ids - start
    write = listed & (ids != before) & (column >= 0) & (column < num_columns)
    value = tl.load(entry_ptr + row64 * N + number, mask=write, other=0.0)
    for step in range(1, tl.load(runs_ptr + row)):
        follower = number + step
        there = write & (follower < N)
        same = there & (tl.load(sorted_ptr + row64 * (N + 1) + follower, mask=there, other=NO_ID) == ids)
        value += tl.load(entry_ptr + row64 * N + follower, mask=same, other=0.0)
    if grad_ptr is not None:
        value = tl.where(value == 0, 0.0, value * tl.load(grad_ptr + row64 * grad_stride))
    out = row_of(out_ptr, row, inner, stride_a, stride_b)
    tl.store(out + at(column, stride_v, UNIT), value.to(out_ptr.dtype.element_ty), mask=write)


@triton.jit
def logprobs_kernel(
    pay_ptr, ids_ptr, order_ptr, weight_ptr, logprobs_ptr, lse_ptr, row_data_ptr, runs_ptr,
    num_rows, parts, pay_width, pay_begin, scale, inv_tau,
    N: tl.constexpr, N_PAD: tl.constexpr, PARTS_PAD: tl.constexpr,
) -> None:  # fmt: skip
    """Log-probs [T, N] in the caller's order (-inf outside the vocabulary), log-sum-exp [T], 0 on rows of weight 0.

    ``row_data`` [2, T]: 1 over the row's sum of exponentials above the shift, 0 on rows of weight 0; and the shift.
    ``runs`` int32 [T]: the longest run of equal ids. Grid: T.
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
    """Coefficients of the gradient for given upstream of log-probs and log-sum-exp (either may be None).

    ``entry`` [T, N] in sorted order: the sum over equal ids is what the id gets. ``out_row_data`` [2, T] as the dense
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

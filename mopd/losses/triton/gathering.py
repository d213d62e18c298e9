# mypy: disable-error-code="no-untyped-def"
"""The small kernels of the gather primitive: log-probs of given ids, and the coefficients of their gradient.

Shape legend: T rows, N ids of a row, P parts of the vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mopd.losses.triton.selection import joined, listed_ids
from mopd.losses.triton.streaming import MINUS_INFINITY, NO_ID


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

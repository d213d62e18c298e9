# mypy: disable-error-code="no-untyped-def"
"""The kernel between the two passes: everything of a top-k loss that lives on [T, D, K], one program a row.

It does what ``divergences.py`` and ``topk.solve`` do in torch, in one launch. Vectors over a row's N entries stand in
the sorted order of the ids.

Shape legend: T rows, D teachers, K ids of a teacher, N = D * K, P parts of the vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mopd.losses.triton.formulas import (
    BUCKET,
    FORWARD,
    RENORMALIZE,
    REVERSE,
    by_teacher,
    forward_kl,
    jsd,
    reverse_kl,
    spread,
)
from mopd.losses.triton.selection import joined, listed_ids
from mopd.losses.triton.streaming import MINUS_INFINITY, NO_ID

UNWEIGHTED: tl.constexpr = tl.constexpr(0)
TEACHER_MASS: tl.constexpr = tl.constexpr(1)
STUDENT_MASS: tl.constexpr = tl.constexpr(2)
CLAMPED: tl.constexpr = tl.constexpr(3)
CLAMPED_ENTRIES: tl.constexpr = tl.constexpr(4)
TAIL_FLOORED: tl.constexpr = tl.constexpr(5)
TARGET: tl.constexpr = tl.constexpr(6)
"""Rows of the metrics tensor, in the order of ``topk.METRICS``; the target's log-prob if asked for, then entropy."""
NO_CAP: tl.constexpr = tl.constexpr(0)
HARD: tl.constexpr = tl.constexpr(1)
SOFT: tl.constexpr = tl.constexpr(2)


@triton.jit
def _occurrences(ids, order, ids_ptr, order_ptr, valid, number, N: tl.constexpr, K: tl.constexpr, D_PAD: tl.constexpr):
    """How often each teacher lists an id, [D, N], right at the first of equal ids; and the longest run of equal ids."""
    d = tl.arange(0, D_PAD)
    count = ((order // K)[None, :] == d[:, None]).to(tl.float32)
    run = tl.full([], 1, tl.int32)
    same = valid & (tl.load(ids_ptr + number + 1, mask=number + 1 < N, other=NO_ID) == ids)
    while tl.max(same.to(tl.int32), 0) > 0:
        teacher = tl.load(order_ptr + number + run, mask=same, other=0) // K
        count += (same[None, :] & (teacher[None, :] == d[:, None])).to(tl.float32)
        run += 1
        same = same & (tl.load(ids_ptr + number + run, mask=number + run < N, other=NO_ID) == ids)
    return count, run


@triton.jit
def _teacher_masses(logq, member):
    """Mass on S, tail, and what clamping the tail at 0 added, [D] each. float64: 1 - Q in fp32 would have no digits."""
    mass = tl.sum(tl.where(member, tl.exp(logq.to(tl.float64))[None, :], 0.0), 1)
    rest = 1.0 - mass
    tail = tl.maximum(rest, 0.0)
    return mass.to(tl.float32), tail.to(tl.float32), (tail - rest).to(tl.float32)


@triton.jit
def _capped(value, limit, CAP: tl.constexpr):
    """Capped loss, gradient factor, and where the cap bites; [D] each."""
    if CAP == HARD:
        over = value > limit
        return tl.where(over, limit, value), tl.where(over, 0.0, 1.0), over
    elif CAP == SOFT:
        ratio = value / limit
        over = ratio > 1
        ratio = tl.where(ratio < 1, 1.0, ratio)
        return tl.where(over, limit * (1.0 + tl.log(ratio)), value), 1.0 / ratio, over
    else:
        return value, tl.where(value < value, 0.0, 1.0), value < value


@triton.jit
def _divergence(
    p, logp, logq, valid, member, mass_p, tail_p, tail_q, excess_q, min_clamp, clamp_floor,
    beta, rest, log_beta, log_rest, LOSS: tl.constexpr, TAIL: tl.constexpr, CLAMP: tl.constexpr,
):  # fmt: skip
    """Value [D], gradient at the ids [N], G [D], floored [D], and the entries that the clamp holds [N]."""
    moving = valid
    p_seen = p
    q = tl.where(valid, tl.exp(logq), 0.0)
    excess = excess_q
    if CLAMP:
        moving = valid & (logp > min_clamp)
        logp = tl.maximum(logp, min_clamp)
        logq = tl.maximum(logq, min_clamp)
        p_seen = tl.where(valid, tl.maximum(p, clamp_floor), 0.0)
        raised = tl.where(valid, tl.maximum(q, clamp_floor), 0.0)
        excess += by_teacher(raised - q, member) - by_teacher(p_seen - p, member)
        q = raised
    if LOSS == FORWARD:
        value, a, b, floored, a_held = forward_kl(p, logp, p_seen, q, logq, valid, member, tail_p, tail_q, TAIL)
        if TAIL == BUCKET:
            value += excess
    elif LOSS == REVERSE:
        value, a, b, floored, a_held = reverse_kl(p, logp, p_seen, q, logq, valid, member, tail_p, tail_q, TAIL)
        if TAIL == BUCKET:
            value -= excess
    else:
        value, a, b, floored, a_held = jsd(
            p, logp, p_seen, q, logq, valid, member, tail_p, tail_q, beta, rest, log_beta, log_rest, TAIL
        )
    a = tl.where(moving, a, a_held)
    total = tl.where(mass_p < mass_p, 1.0, 0.0)
    if TAIL != RENORMALIZE or CLAMP:  # else 0 exactly: the sum of a closed form
        total = by_teacher(a, member)
    if TAIL == BUCKET:
        at_ids = a + p * spread(b * tail_p - total, member)
        total += b * mass_p
    else:
        at_ids = a - p * spread(total, member)
    return value, at_ids, total, floored, valid & (moving == 0)


@triton.jit
def _entropy(pay, parts, shift, total, p, logp, first, scale, inv_tau, PARTS_PAD: tl.constexpr):
    """-sum p log p over the vocabulary: the parts from their sums and moments, the selected ids one by one."""
    part = tl.arange(0, PARTS_PAD)
    inside = part < parts
    peak = tl.load(pay + part, mask=inside, other=MINUS_INFINITY)
    mass = tl.load(pay + parts + part, mask=inside, other=0.0)
    moment = tl.load(pay + 2 * parts + part, mask=inside, other=0.0)
    share = tl.where(mass != 0, tl.exp2((peak - shift) * scale) / total, 0.0)
    below = tl.where(mass != 0, tl.log(total) - (peak - shift) * inv_tau, 0.0)
    of_parts = tl.sum(share * (mass * below - moment * inv_tau), 0)
    return of_parts - tl.sum(tl.where(first & (p > 0), p * logp, 0.0), 0)


@triton.jit
def _target_logprob(target, above, inv_tau, log_total, vocab_size):
    """Log-prob of a target id from its logit above the shift; -inf outside the vocabulary."""
    return tl.where((target >= 0) & (target < vocab_size), above * inv_tau - log_total, MINUS_INFINITY)


@triton.jit
def _any(mark):
    """1 where any element of a vector holds, else 0."""
    return tl.max(mark.to(tl.int32), 0).to(tl.float32)


@triton.jit
def _put_metrics(metrics, num_rows, active, loss, mass_q, mass_p, teacher_weight, held, over, floored, valid):
    """The metrics that every call has; with several teachers masses are weighted means, marks hold if any does."""
    used = teacher_weight != 0
    share = tl.abs(teacher_weight) / tl.maximum(tl.sum(tl.abs(teacher_weight), 0), 1e-30)
    held_share = tl.sum(held.to(tl.float32), 0) / tl.maximum(tl.sum(valid.to(tl.float32), 0), 1.0)
    tl.store(metrics + UNWEIGHTED * num_rows, tl.where(active, loss, 0.0))
    tl.store(metrics + TEACHER_MASS * num_rows, tl.where(active, tl.sum(mass_q * share, 0), 0.0))
    tl.store(metrics + STUDENT_MASS * num_rows, tl.where(active, tl.sum(mass_p * share, 0), 0.0))
    tl.store(metrics + CLAMPED * num_rows, tl.where(active, tl.maximum(_any(held), _any(over & used)), 0.0))
    tl.store(metrics + CLAMPED_ENTRIES * num_rows, tl.where(active, held_share, 0.0))
    tl.store(metrics + TAIL_FLOORED * num_rows, tl.where(active, _any(floored & used), 0.0))


@triton.jit
def loss_kernel(
    pay_ptr, ids_ptr, order_ptr, logq_ptr, teacher_weight_ptr, weight_ptr, target_ptr,
    loss_ptr, metrics_ptr, entry_ptr, row_data_ptr, runs_ptr,
    num_rows, vocab_size, parts, pay_width, pay_begin, scale, inv_tau, min_clamp, clamp_floor, limit,
    beta, rest, log_beta, log_rest,
    N: tl.constexpr, K: tl.constexpr, N_PAD: tl.constexpr, D_PAD: tl.constexpr, PARTS_PAD: tl.constexpr,
    LOSS: tl.constexpr, TAIL: tl.constexpr, CLAMP: tl.constexpr, CAP: tl.constexpr, ENTROPY: tl.constexpr,
) -> None:  # fmt: skip
    """Loss [T], metrics [M, T], gradient at the ids [T, N] (sorted order), ``row_data`` [2, T], ``runs`` int32 [T].

    Gradients carry the row's weight and 1 / temperature. ``row_data`` is what the dense kernel takes: the factor of
    ``exp2((z - shift) * scale)``, and the shift. All fp32. Grid: T.
    """
    row = tl.program_id(0)
    row64 = row.to(tl.int64)
    number = tl.arange(0, N_PAD)
    ids_ptr += row64 * (N + 1)
    order_ptr += row64 * N
    pay = pay_ptr + row64 * pay_width
    weight = tl.full([], 1.0, tl.float32)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + row)
    active = weight != 0
    ids, order, valid, first = listed_ids(ids_ptr, order_ptr, number, N)
    selected = tl.load(pay + pay_begin + number, mask=number < N, other=0.0)
    shift, total_exp, outside = joined(pay, selected, first, parts, scale, PARTS_PAD)
    log_total = tl.log(total_exp)
    logp = tl.where(valid, (selected - shift) * inv_tau - log_total, 0.0)
    p = tl.where(valid, tl.exp2((selected - shift) * scale) / total_exp, 0.0)
    logq = tl.load(logq_ptr + row64 * N + order, mask=valid, other=0.0).to(tl.float32)

    d = tl.arange(0, D_PAD)
    member = valid[None, :] & ((order // K)[None, :] == d[:, None])
    teacher_weight = tl.where(d < N // K, 1.0, 0.0)
    if teacher_weight_ptr is not None:
        teacher_weight = tl.load(teacher_weight_ptr + row64 * (N // K) + d, mask=d < N // K, other=0.0).to(tl.float32)
    count, run = _occurrences(ids, order, ids_ptr, order_ptr, valid, number, N, K, D_PAD)
    surplus = tl.where(first[None, :], count - 1.0, 0.0)  # -1: another teacher's id, part of this teacher's tail
    mass_p = by_teacher(p, member)
    tail_p = outside / total_exp - tl.sum(surplus * p[None, :], 1)
    mass_q, tail_q, excess_q = _teacher_masses(logq, member)
    value, at_ids, total, floored, held = _divergence(
        p, logp, logq, valid, member, mass_p, tail_p, tail_q, excess_q, min_clamp, clamp_floor,
        beta, rest, log_beta, log_rest, LOSS, TAIL, CLAMP,
    )  # fmt: skip
    value, factor, over = _capped(value, limit, CAP)

    factor = tl.where(teacher_weight != 0, teacher_weight * factor, 0.0)
    total = tl.where(teacher_weight != 0, factor * total, 0.0)
    loss = tl.sum(tl.where(teacher_weight != 0, teacher_weight * value, 0.0), 0)
    entry = at_ids * spread(factor, member) + p * tl.sum(surplus * total[:, None], 0)
    tl.store(loss_ptr + row, tl.where(active, loss * weight, 0.0))
    tl.store(entry_ptr + row64 * N + number, tl.where(valid, entry * (weight * inv_tau), 0.0), mask=number < N)
    tl.store(row_data_ptr + row, tl.where(active, -tl.sum(total, 0) * (weight * inv_tau) / total_exp, 0.0))
    tl.store(row_data_ptr + num_rows + row, tl.where(active, shift, 0.0))
    tl.store(runs_ptr + row, run)
    metrics = metrics_ptr + row
    _put_metrics(metrics, num_rows, active, loss, mass_q, mass_p, teacher_weight, held, over, floored, valid)
    if target_ptr is not None:
        above = tl.load(pay + pay_begin + N) - shift
        logprob = _target_logprob(tl.load(target_ptr + row), above, inv_tau, log_total, vocab_size)
        tl.store(metrics + TARGET * num_rows, tl.where(active, logprob, 0.0))
    if ENTROPY:
        entropy = _entropy(pay, parts, shift, total_exp, p, logp, first, scale, inv_tau, PARTS_PAD)
        tl.store(metrics + (TARGET + (0 if target_ptr is None else 1)) * num_rows, tl.where(active, entropy, 0.0))

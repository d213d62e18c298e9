# mypy: disable-error-code="no-untyped-def"
"""The kernel between the two passes: everything of a top-k loss that lives on [T, D, K], one program a row.

It does what ``divergences.py`` and ``topk.solve`` do in torch, in one launch. Vectors over a row's N entries are in the
sorted order of the ids.

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
    SMALLEST,
    by_teacher,
    forward_kl,
    jsd,
    reverse_kl,
    spread,
)
from mopd.losses.triton.ids import joined, listed_ids
from mopd.losses.triton.streaming import MINUS_INFINITY, NO_ID

UNWEIGHTED: tl.constexpr = tl.constexpr(0)
TEACHER_MASS: tl.constexpr = tl.constexpr(1)
STUDENT_MASS: tl.constexpr = tl.constexpr(2)
CLAMPED: tl.constexpr = tl.constexpr(3)
CLAMPED_ENTRIES: tl.constexpr = tl.constexpr(4)
TAIL_FLOORED: tl.constexpr = tl.constexpr(5)
TARGET: tl.constexpr = tl.constexpr(6)
"""Rows of the metrics tensor, in the order of ``topk.METRICS``; if asked for, the target's log-prob, ``TASK_METRICS``,
entropy."""
NO_CAP: tl.constexpr = tl.constexpr(0)
HARD: tl.constexpr = tl.constexpr(1)
SOFT: tl.constexpr = tl.constexpr(2)
NAN: tl.constexpr = tl.constexpr(float("nan"))
INFINITY: tl.constexpr = tl.constexpr(float("inf"))


@triton.jit
def _occurrences(ids, order, ids_ptr, order_ptr, valid, number, N: tl.constexpr, K: tl.constexpr, D_PAD: tl.constexpr):
    """Return how often each teacher lists an id, [D, N], right at the first of equal ids; and their longest run."""
    d = tl.arange(0, D_PAD)
    count = ((order // K)[None, :] == d[:, None]).to(tl.float32)
    run = tl.full([], 1, tl.int32)
    same = valid & (tl.load(ids_ptr + number + 1, mask=number + 1 < N, other=NO_ID) == ids)
    # Sorted, equal ids are neighbours: step ``run`` compares each entry with the one ``run`` places behind it.
    while tl.max(same.to(tl.int32), 0) > 0:
        teacher = tl.load(order_ptr + number + run, mask=same, other=0) // K
        count += (same[None, :] & (teacher[None, :] == d[:, None])).to(tl.float32)
        run += 1
        same = same & (tl.load(ids_ptr + number + run, mask=number + run < N, other=NO_ID) == ids)
    return count, run


@triton.jit
def _teacher_masses(logq, member):
    """Return mass on S, tail, and what clamping the tail at 0 added, [D] each. float64: fp32 has no digits of 1 - Q."""
    mass = tl.sum(tl.where(member, tl.exp(logq.to(tl.float64))[None, :], 0.0), 1)
    rest = 1.0 - mass
    tail = tl.maximum(rest, 0.0)
    return mass.to(tl.float32), tail.to(tl.float32), (tail - rest).to(tl.float32)


@triton.jit
def _broken(logq, order, number, N: tl.constexpr, K: tl.constexpr, D_PAD: tl.constexpr):
    """Return the teachers whose list holds NaN or +inf, [D]."""
    wrong = (number < N) & ((logq != logq) | (logq == INFINITY))
    mine = (order // K)[None, :] == tl.arange(0, D_PAD)[:, None]
    return tl.max((wrong[None, :] & mine).to(tl.int32), 1) > 0


@triton.jit
def _far_tails(
    pay, selected, surplus, tail_p, shift, parts, scale, PARTS_PAD: tl.constexpr, LOSS: tl.constexpr, TAIL: tl.constexpr
):  # fmt: skip
    """Return the teachers of a forward bucket whose student tail is below SMALLEST and not empty [D], where
    ``divergences.py`` uses logarithms; and the reference points from which the kernel measures such tails:

    the peak of the logits outside all ids (raw unit, a number); for each teacher the peak of everything outside its own
    ids [D], and the sum of exponentials relative to that [D].
    """
    far = tail_p < SMALLEST
    top, high, mass = shift, tl.zeros_like(tail_p), tl.zeros_like(tail_p)
    if LOSS == FORWARD and TAIL == BUCKET:  # noqa: SIM102 - decided by the compiler
        if tl.max(far.to(tl.int32), 0) > 0:
            part = tl.arange(0, PARTS_PAD)
            peak = tl.load(pay + part, mask=part < parts, other=MINUS_INFINITY)
            total = tl.load(pay + parts + part, mask=part < parts, other=0.0)
            top = tl.max(tl.where(total != 0, peak, MINUS_INFINITY), 0)
            outside = tl.sum(tl.where(total != 0, total * tl.exp2((peak - top) * scale), 0.0), 0)
            others = surplus < 0
            # A teacher's tail: the ids that only other teachers list, and everything outside all ids.
            high = tl.maximum(tl.max(tl.where(others, selected[None, :], MINUS_INFINITY), 1), top)
            mass = tl.sum(tl.where(others, tl.exp2((selected[None, :] - high[:, None]) * scale), 0.0), 1)
            mass += tl.where(outside != 0, outside * tl.exp2((top - high) * scale), 0.0)
    return far & (mass > 0), top, high, mass


@triton.jit
def _pull_of_far_tails(pull, entry, dense, shift, far, top, high, mass, selected, surplus, scale, unit):
    """Add ``pull`` [D], the push of a far tail on all of its ids, to ``entry`` and, times ``unit``, to ``dense``.

    ``dense`` is then measured from the returned shift, the peak of the tail.
    """
    if tl.max(far.to(tl.int32), 0) > 0:
        pull = tl.where(far, pull / mass, 0.0)
        theirs = tl.exp2((selected[None, :] - high[:, None]) * scale) * pull[:, None]
        entry -= tl.sum(tl.where((surplus < 0) & far[:, None], theirs, 0.0), 0)
        if top > MINUS_INFINITY:
            outside = tl.sum(tl.where(far, pull * tl.exp2((top - high) * scale), 0.0), 0)
            dense = dense * tl.exp2((top - shift) * scale) - outside * unit
            shift = top
    return entry, dense, shift


@triton.jit
def _capped(value, limit, CAP: tl.constexpr):
    """Return the capped loss, the gradient factor, and where the cap takes effect; [D] each."""
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
    p, logp, logq, valid, member, mass_p, tail_p, tail_q, excess_q, far, min_clamp, clamp_floor,
    beta, rest, log_beta, log_rest, entry_limit,
    LOSS: tl.constexpr, TAIL: tl.constexpr, CLAMP: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Return value [D], gradient at the ids [N], G [D], floored [D], and the entries that a clamp holds [N].

    G leaves out the pull of tails that are ``far`` [D].
    """
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
        value, a, b, floored, a_held, over = forward_kl(
            p, logp, p_seen, q, logq, valid, member, tail_p, tail_q, entry_limit, TAIL, LIMIT
        )
        if TAIL == BUCKET:
            value += excess
    elif LOSS == REVERSE:
        value, a, b, floored, a_held, over = reverse_kl(
            p, logp, p_seen, q, logq, valid, member, tail_p, tail_q, entry_limit, TAIL, LIMIT
        )
        if TAIL == BUCKET:
            value -= excess
    else:
        value, a, b, floored, a_held, over = jsd(
            p, logp, p_seen, q, logq, valid, member, tail_p, tail_q, beta, rest, log_beta, log_rest, entry_limit,
            TAIL, LIMIT,
        )  # fmt: skip
    if LIMIT and TAIL != RENORMALIZE:  # whose sum has left them out
        a = tl.where(over, a_held, a)
    a = tl.where(moving, a, a_held)
    total = tl.where(mass_p < mass_p, 1.0, 0.0)
    if TAIL != RENORMALIZE or CLAMP:  # else 0 exactly: the sum of a closed form
        total = by_teacher(a, member)
    if TAIL == BUCKET:
        at_ids = a + p * spread(tl.where(far, tail_q, b * tail_p) - total, member)
        total += tl.where(far, 0.0, b * mass_p)
    else:
        at_ids = a - p * spread(total, member)
    held = valid & (moving == 0)
    if LIMIT:
        held = held | (valid & over)
    return value, at_ids, total, floored, held


@triton.jit
def _entropy(pay, parts, shift, total, p, logp, first, scale, inv_tau, PARTS_PAD: tl.constexpr):
    """Return -sum p log p over the vocabulary: the parts from their sums and moments, the selected ids one by one."""
    part = tl.arange(0, PARTS_PAD)
    inside = part < parts
    peak = tl.load(pay + part, mask=inside, other=MINUS_INFINITY)
    mass = tl.load(pay + parts + part, mask=inside, other=0.0)
    moment = tl.load(pay + 2 * parts + part, mask=inside, other=0.0)
    # A part's entropy follows from its sum and moment, so the logits need no second pass.
    share = tl.where(mass != 0, tl.exp2((peak - shift) * scale) / total, 0.0)
    below = tl.where(mass != 0, tl.log(total) - (peak - shift) * inv_tau, 0.0)
    of_parts = tl.sum(share * (mass * below - moment * inv_tau), 0)
    return of_parts - tl.sum(tl.where(first & (p != 0), p * logp, 0.0), 0)


@triton.jit
def _any(mark):
    """Return 1 where any element of a vector holds, else 0."""
    return tl.max(mark.to(tl.int32), 0).to(tl.float32)


@triton.jit
def _put_metrics(metrics, num_rows, active, loss, mass_q, mass_p, teacher_weight, held, over, floored, valid):
    """Store the metrics that every call has; with several teachers masses are weighted means, marks hold if any do."""
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
def _sampled_token(
    row, pay, place, target_ptr, advantage_ptr, rollout_ptr, shift, log_total, inv_tau, vocab_size, least, most, beyond
):  # fmt: skip
    """Return the sampled token, its logit and log-prob (-inf outside the vocabulary); the policy gradient's loss, which
    is its gradient at that log-prob too, and the weight of its correction."""
    target, logit, logprob, pull, weight = -1, 0.0, NAN, 0.0, 1.0
    if target_ptr is not None:
        target, logit = tl.load(target_ptr + row), tl.load(pay + place)
        known = (target >= 0) & (target < vocab_size)
        logprob = tl.where(known, (logit - shift) * inv_tau - log_total, MINUS_INFINITY)
    if rollout_ptr is not None:
        ratio = tl.exp(logprob - tl.load(rollout_ptr + row))
        weight = tl.where(ratio < least, 0.0, tl.where(ratio > most, beyond, ratio))
    if advantage_ptr is not None:
        is_finite = (logprob > MINUS_INFINITY) & (logprob < INFINITY)
        pull = tl.where(is_finite, -weight * tl.load(advantage_ptr + row), NAN)
    return target, logit, logprob, pull, weight


@triton.jit
def _put_extras(
    metrics, target_entry, num_rows, active, has_target: tl.constexpr, has_task: tl.constexpr,
    logprob, pull, corrected, alone, pay, parts, shift, total, p, logp, first, scale, inv_tau,
    PARTS_PAD: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """Store the optional metrics, and the gradient at a target that no teacher lists."""
    if has_target:
        tl.store(metrics + TARGET * num_rows, tl.where(active, logprob, 0.0))
    if has_task:
        tl.store(metrics + (TARGET + 1) * num_rows, tl.where(active, pull, 0.0))
        tl.store(metrics + (TARGET + 2) * num_rows, tl.where(active, corrected, 0.0))
        tl.store(target_entry, tl.where(active, alone, 0.0))
    if ENTROPY:
        entropy = _entropy(pay, parts, shift, total, p, logp, first, scale, inv_tau, PARTS_PAD)
        entropy = tl.where(total > 0, entropy, NAN)
        place: tl.constexpr = TARGET + (1 if has_target else 0) + (2 if has_task else 0)
        tl.store(metrics + place * num_rows, tl.where(active, entropy, 0.0))


@triton.jit
def _weight_of_row(ptr, row):
    """Return the row's weight, 1 if none are given, and whether it is not 0."""
    weight = tl.full([], 1.0, tl.float32)
    if ptr is not None:
        weight = tl.load(ptr + row)
    return weight, weight != 0


@triton.jit
def _of_all_teachers(value, factor, total, teacher_weight, broken, undefined):
    """Return the row's loss, and the teachers' gradient factors and G [D] with their weights."""
    used = teacher_weight != 0
    factor = tl.where(used, teacher_weight * tl.where(broken, NAN, factor), 0.0)
    loss = tl.where(undefined, NAN, tl.sum(tl.where(used, teacher_weight * value, 0.0), 0))
    return loss, factor, tl.where(used, factor * total, 0.0)


@triton.jit
def _put_row(loss_ptr, row_data_ptr, runs_ptr, row, num_rows, active, loss, dense, shift, run):
    """Store loss, what the dense kernel takes, and the longest run of equal ids."""
    tl.store(loss_ptr + row, tl.where(active, loss, 0.0))
    tl.store(row_data_ptr + row, tl.where(active, dense, 0.0))
    tl.store(row_data_ptr + num_rows + row, tl.where(active, shift, 0.0))
    tl.store(runs_ptr + row, run)


@triton.jit
def _weights_of_teachers(ptr, row, D: tl.constexpr, D_PAD: tl.constexpr):
    """Return the teachers' weights [D], 1 if none are given; 0 in the padding."""
    d = tl.arange(0, D_PAD)
    weight = tl.where(d < D, 1.0, 0.0)
    if ptr is not None:
        weight = tl.load(ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    return weight


@triton.jit
def loss_kernel(
    pay_ptr, ids_ptr, order_ptr, logq_ptr, teacher_weight_ptr, weight_ptr, target_ptr,
    advantage_ptr, rollout_ptr, least, most, beyond, loss_ptr, metrics_ptr, entry_ptr, row_data_ptr, runs_ptr,
    num_rows, vocab_size, parts, pay_width, pay_begin, scale, inv_tau, min_clamp, clamp_floor, limit,
    beta, rest, log_beta, log_rest, entry_limit, LIMIT: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, N_PAD: tl.constexpr, D_PAD: tl.constexpr, PARTS_PAD: tl.constexpr,
    LOSS: tl.constexpr, TAIL: tl.constexpr, CLAMP: tl.constexpr, CAP: tl.constexpr, ENTROPY: tl.constexpr,
) -> None:  # fmt: skip
    """Compute loss [T], metrics [M, T], gradient at the ids [T, N] (sorted order), ``row_data`` [2, T], ``runs`` int32
    [T].

    Gradients carry the row's weight and 1 / temperature. ``row_data`` is what the dense kernel takes: the factor of
    ``exp2((z - shift) * scale)``, and the shift; with an advantage a third row, the gradient at a target that no
    teacher lists. All fp32. Grid: T.
    """
    row = tl.program_id(0)
    row64 = row.to(tl.int64)
    number = tl.arange(0, N_PAD)
    ids_ptr, order_ptr, pay = ids_ptr + row64 * (N + 1), order_ptr + row64 * N, pay_ptr + row64 * pay_width
    weight, active = _weight_of_row(weight_ptr, row)
    ids, order, valid, first = listed_ids(ids_ptr, order_ptr, number, N)
    selected = tl.load(pay + pay_begin + number, mask=number < N, other=0.0)
    shift, total_exp, outside = joined(pay, selected, first, parts, scale, PARTS_PAD)
    log_total = tl.log(total_exp)
    logp = tl.where(valid, (selected - shift) * inv_tau - log_total, 0.0)
    p = tl.where(valid, tl.exp2((selected - shift) * scale) / total_exp, 0.0)
    undefined = (total_exp > 0) == 0  # NaN or +inf among the logits, or all of them -inf
    listed_logq = tl.load(logq_ptr + row64 * N + order, mask=number < N, other=0.0).to(tl.float32)
    logq = tl.where(valid, listed_logq, 0.0)
    member = valid[None, :] & ((order // K)[None, :] == tl.arange(0, D_PAD)[:, None])
    teacher_weight = _weights_of_teachers(teacher_weight_ptr, row64, N // K, D_PAD)
    count, run = _occurrences(ids, order, ids_ptr, order_ptr, valid, number, N, K, D_PAD)
    surplus = tl.where(first[None, :], count - 1.0, 0.0)  # -1: another teacher's id, part of this teacher's tail
    mass_p = by_teacher(p, member)
    tail_p = outside / total_exp - tl.sum(surplus * p[None, :], 1)
    mass_q, tail_q, excess_q = _teacher_masses(logq, member)
    far, top, high, rest_mass = _far_tails(pay, selected, surplus, tail_p, shift, parts, scale, PARTS_PAD, LOSS, TAIL)
    value, at_ids, total, floored, held = _divergence(
        p, logp, logq, valid, member, mass_p, tail_p, tail_q, excess_q, far, min_clamp, clamp_floor,
        beta, rest, log_beta, log_rest, entry_limit, LOSS, TAIL, CLAMP, LIMIT,
    )  # fmt: skip
    broken = undefined | _broken(listed_logq, order, number, N, K, D_PAD)
    value, factor, over = _capped(tl.where(broken, NAN, value), limit, CAP)
    loss, factor, total = _of_all_teachers(value, factor, total, teacher_weight, broken, undefined)
    entry = at_ids * spread(factor, member) + p * tl.sum(surplus * total[:, None], 0)
    target, target_logit, target_logprob, pull, corrected = _sampled_token(
        row, pay, pay_begin + N, target_ptr, advantage_ptr, rollout_ptr, shift, log_total, inv_tau, vocab_size,
        least, most, beyond,
    )  # fmt: skip
    if advantage_ptr is not None:
        loss += pull
        entry += tl.where(first, pull * ((ids == target).to(tl.float32) - p), 0.0)
    dense, dense_shift = -(tl.sum(total, 0) + pull) * (weight * inv_tau) / total_exp, shift
    if LOSS == FORWARD and TAIL == BUCKET:
        entry, dense, dense_shift = _pull_of_far_tails(
            factor * tail_q * mass_p, entry, dense, shift, far, top, high, rest_mass, selected, surplus, scale,
            weight * inv_tau,
        )  # fmt: skip
    tl.store(entry_ptr + row64 * N + number, tl.where(valid, entry * (weight * inv_tau), 0.0), mask=number < N)
    _put_row(loss_ptr, row_data_ptr, runs_ptr, row, num_rows, active, loss * weight, dense, dense_shift, run)
    _put_metrics(metrics_ptr + row, num_rows, active, loss, mass_q, mass_p, teacher_weight, held, over, floored, valid)
    alone = dense * tl.exp2((target_logit - dense_shift) * scale) + pull * (weight * inv_tau)
    _put_extras(
        metrics_ptr + row, row_data_ptr + 2 * num_rows + row, num_rows, active, target_ptr is not None,
        advantage_ptr is not None, target_logprob, pull, corrected, alone, pay, parts, shift, total_exp, p, logp, first,
        scale, inv_tau, PARTS_PAD, ENTROPY,
    )  # fmt: skip

# mypy: disable-error-code="no-untyped-def"
"""The losses of ``mopd/losses/divergences.py`` on one row, as functions of a Triton program.

Vectors over the N entries of a row are in sorted order; vectors over its D teachers are sums over ``member`` [D, N],
and ``spread`` brings them back to the entries. fp32 throughout; ``expm1`` and ``log1p`` are series, because their
library versions do not exist in the interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl

FORWARD: tl.constexpr = tl.constexpr(0)
REVERSE: tl.constexpr = tl.constexpr(1)
JSD: tl.constexpr = tl.constexpr(2)
BUCKET: tl.constexpr = tl.constexpr(0)
GENERALIZED: tl.constexpr = tl.constexpr(1)
RENORMALIZE: tl.constexpr = tl.constexpr(2)
NONE: tl.constexpr = tl.constexpr(3)

TAIL_FLOOR: tl.constexpr = tl.constexpr(1e-6)
LOG_TAIL_FLOOR: tl.constexpr = tl.constexpr(-13.815510557964274)
SMALLEST: tl.constexpr = tl.constexpr(1e-30)


@triton.jit
def by_teacher(x, member):
    """Sum over each teacher's entries: [N] to [D]."""
    return tl.sum(tl.where(member, x[None, :], 0.0), 1)


@triton.jit
def spread(per_teacher, member):
    """Return each entry's own teacher's value: [D] to [N]; 0 outside S."""
    return tl.sum(tl.where(member, per_teacher[:, None], 0.0), 0)


@triton.jit
def expm1_rest(d):
    """Return ``expm1(d) - d`` for |d| <= 1, without cancellation: the series up to d^13 / 13!."""
    r = 1.0 + d * (1.0 / 13.0)
    for n in tl.static_range(12, 2, -1):
        r = 1.0 + d * (1.0 / n) * r
    return 0.5 * d * d * r


@triton.jit
def log1p(y):
    """Return ``log(1 + y)`` for y in [1/e - 1, e - 1], as 2 atanh(y / (2 + y)): the series up to s^21 / 21."""
    s = y / (2.0 + y)
    t = s * s
    r = 1.0 / 21.0
    for n in tl.static_range(19, 1, -2):
        r = 1.0 / n + t * r
    return 2.0 * s * (1.0 + t * r)


@triton.jit
def bregman(x, log_x, y, log_y):
    """Return ``x log(x / y) - x + y``, accurate for x near y; y where x = 0."""
    d = log_y - log_x
    near = x * expm1_rest(tl.minimum(tl.maximum(d, -1.0), 1.0))
    far = y - x - x * d
    return tl.where(x == 0, y, tl.where(tl.abs(d) < 1, near, far))


@triton.jit
def times(p, factor):
    """Return ``p * factor`` with 0 * inf = 0."""
    return tl.where(p == 0, 0.0, p * factor)


@triton.jit
def conditional(log, valid, member):
    """Return the probabilities conditional on S, and their logarithms; 0 outside S."""
    peak = tl.max(tl.where(member, log[None, :], float("-inf")), 1)
    above = tl.exp(log - spread(peak, member))
    log = tl.where(valid, (log - spread(peak, member)) - tl.log(spread(by_teacher(above, member), member)), 0.0)
    return tl.where(valid, tl.exp(log), 0.0), log


@triton.jit
def mixture(p, log_p, q, log_q, beta, rest, log_beta, log_rest):
    """Return, per outcome, the Jensen-Shannon term and log(p / M) with M = beta q + rest p, rest = 1 - beta."""
    d = log_p - log_q
    near = tl.minimum(tl.maximum(d, -1.0), 1.0)
    a, b = log_q + log_beta, log_p + log_rest
    top = tl.maximum(a, b)
    log_m = top + tl.log(1.0 + tl.exp(tl.minimum(a, b) - top))
    close = tl.abs(d) < 1
    m_over_q = tl.where(close, log1p(rest * (near + expm1_rest(near))), log_m - log_q)
    m_over_p = tl.where(close, log1p(beta * (expm1_rest(-near) - near)), log_m - log_p)
    m = beta * q + rest * p
    value = beta * bregman(q, 0.0, m, m_over_q) + rest * bregman(p, 0.0, m, m_over_p)
    return value, -m_over_p


@triton.jit
def sum_terms(terms, rest, limit, member, LIMIT: tl.constexpr):
    """Return the sum [D] of the terms of S, and which of them the entry clamp holds [N]: an id's term of the divergence
    is ``terms + rest``, of which ``rest`` cancels in the sum over all outcomes."""
    over = terms != terms
    if LIMIT:
        over = terms + rest > limit
        terms = tl.where(over, limit - rest, terms)
    return by_teacher(terms, member), over


@triton.jit
def without(a, own, share, over, member, LIMIT: tl.constexpr):
    """Return the gradient ``a`` [N] of a renormalised loss without the terms ``own`` that the entry clamp holds."""
    if LIMIT:
        held = tl.where(over, own, 0.0)
        a += share * spread(by_teacher(held, member), member) - held
    return a


@triton.jit
def forward_kl(p, logp, p_seen, q, logq, valid, member, u, t, limit, TAIL: tl.constexpr, LIMIT: tl.constexpr):
    """Return KL(teacher || student): value [D], a [N], b [D], floored [D], a_held [N], over [N]; ``u``, ``t`` are tails
    [D]. No term of S is above ``limit``, which holds those in ``over``."""
    # False for every teacher, in the shape of ``u``.
    floored = u < u
    b, a_held = tl.where(floored, 1.0, 0.0), tl.zeros_like(p)
    if TAIL == RENORMALIZE:
        p, logp = conditional(logp, valid, member)
        q, logq = conditional(logq, valid, member)
        value, over = sum_terms(bregman(q, logq, p, logp), q - p, limit, member, LIMIT)
        a = without(p - q, -q, p, over, member, LIMIT)
    elif TAIL == NONE:
        value, over = sum_terms(tl.where(q == 0, 0.0, q * (logq - logp)), a_held, limit, member, LIMIT)
        a = -q
    elif TAIL == GENERALIZED:
        value, over = sum_terms(bregman(q, logq, p_seen, logp), a_held, limit, member, LIMIT)
        a = p_seen - q
    else:
        value, over = sum_terms(bregman(q, logq, p_seen, logp), q - p_seen, limit, member, LIMIT)
        a = -q
        u = tl.maximum(u, SMALLEST)
        log_t = tl.log(tl.maximum(t, SMALLEST))
        extended = t * (log_t - LOG_TAIL_FLOOR - (u / TAIL_FLOOR - 1.0)) - t + u
        floored = u < TAIL_FLOOR
        value += tl.where(floored, extended, bregman(t, log_t, u, tl.log(u)))
        b = t / u
    return value, a, b, floored, a_held, over


@triton.jit
def reverse_kl(p, logp, p_seen, q, logq, valid, member, u, t, limit, TAIL: tl.constexpr, LIMIT: tl.constexpr):
    """Return KL(student || teacher), in the form of ``forward_kl``."""
    floored = u < u
    b, a_held = tl.where(floored, 1.0, 0.0), tl.zeros_like(p)
    if TAIL == RENORMALIZE:
        p, logp = conditional(logp, valid, member)
        q, logq = conditional(logq, valid, member)
        terms = bregman(p, logp, q, logq)
        value, over = sum_terms(terms, p - q, limit, member, LIMIT)
        a = times(p, logp - logq - spread(by_teacher(terms, member), member))
        a = without(a, times(p, logp - logq + 1.0), p, over, member, LIMIT)
    else:
        a = times(p_seen, logp - logq)
        if TAIL == NONE:
            value, over = sum_terms(a, a_held, limit, member, LIMIT)
            a += p_seen
        elif TAIL == BUCKET:
            value, over = sum_terms(bregman(p_seen, logp, q, logq), p_seen - q, limit, member, LIMIT)
        else:
            value, over = sum_terms(bregman(p_seen, logp, q, logq), a_held, limit, member, LIMIT)
        if TAIL == BUCKET:
            floored = t < TAIL_FLOOR
            held = tl.maximum(t, TAIL_FLOOR)
            log_u = tl.log(tl.maximum(u, SMALLEST))
            value += bregman(tl.maximum(u, 0.0), log_u, held, tl.log(held)) - (held - t)
            b = tl.log(held) - log_u
            a_held = -p
    return value, a, b, floored, a_held, over


@triton.jit
def jsd(
    p, logp, p_seen, q, logq, valid, member, u, t, beta, rest, log_beta, log_rest, limit,
    TAIL: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Return beta KL(teacher || M) + (1 - beta) KL(student || M), in the form of ``forward_kl``."""
    floored = u < u
    b, a_held = tl.where(floored, 1.0, 0.0), tl.zeros_like(p)
    seen = p_seen
    if TAIL == RENORMALIZE:
        seen, logp = conditional(logp, valid, member)
        q, logq = conditional(logq, valid, member)
    terms, slope = mixture(seen, logp, q, logq, beta, rest, log_beta, log_rest)
    value, over = sum_terms(terms, a_held, limit, member, LIMIT)
    a = rest * times(seen, slope)
    if TAIL == RENORMALIZE:
        a = without(a - seen * spread(by_teacher(a, member), member), a, seen, over, member, LIMIT)
    elif TAIL == BUCKET:
        u = tl.maximum(u, 0.0)
        log_u, log_t = tl.log(tl.maximum(u, SMALLEST)), tl.log(tl.maximum(t, SMALLEST))
        on_tail, slope = mixture(u, log_u, t, log_t, beta, rest, log_beta, log_rest)
        value += on_tail
        b = -rest * slope
    return value, a, b, floored, a_held, over

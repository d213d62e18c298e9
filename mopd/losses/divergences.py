"""The losses of one teacher as functions of a row's K log-probs: value and closed-form gradient.

Every loss here depends on the student's logits only through log p at the ids in S. Written as

    g_k = dLoss/dlog p_k = a_k + b p_k,        A = sum a_k,        P = sum p_k,        u = 1 - P,

the gradient at the ids is ``g_k - G p_k = a_k + p_k (b u - A)`` and elsewhere ``-G p_j`` with ``G = A + b P``. The
first form has no cancellation: with b = q_tail / u, the naive ``g_k - G p_k`` subtracts numbers of size 1 / u.

Values are sums of ``x log(x / y) - x + y``, each >= 0 and quadratic near x = y. The sum of the extra terms is known
exactly (0 over K + 1 outcomes) and subtracted again, so that a loss near 0 keeps its digits.

Shape legend: T rows, D teachers, K ids; all of this module works on [T, D, K] and [T, D].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LOSSES = ("forward_kl", "reverse_kl", "jsd")
TAILS = ("bucket", "generalized", "renormalize", "none")
TAIL_FLOOR = 1e-6
"""Smallest tail that is taken as it is. Below it the value of the forward bucket continues log p_tail on its tangent,
while the gradient stays that of the plain form (p - q on the ids, bounded everywhere); the reverse bucket uses this
value for q_tail."""
SMALLEST = 1e-30
"""Floor that keeps logarithms of an empty tail finite; always multiplied by that tail. The forward bucket divides by
the tail, and below this floor leaves its pull to ``Terms.far``."""


@dataclass(frozen=True)
class Outcomes:
    """Both distributions on S and on the tail. Entries outside S (not valid) have p = q = 0 and log-probs 0."""

    logp: Tensor
    """[T, D, K] student, after the clamp."""
    logq: Tensor
    """[T, D, K] teacher, after the clamp."""
    p: Tensor
    """[T, D, K] student, before the clamp."""
    p_seen: Tensor
    """[T, D, K] exp(logp)"""
    q: Tensor
    """[T, D, K] exp(logq)"""
    valid: Tensor
    moving: Tensor
    """Entries in S whose student log-prob is above the clamp, so that they have a gradient."""
    mass_p: Tensor
    """[T, D] sum of p (unclamped)."""
    mass_q: Tensor
    """[T, D] sum of exp(teacher log-prob) (unclamped); up to 1 + 1e-4 by rounding."""
    tail_p: Tensor
    """[T, D] 1 - mass_p, known without cancellation."""
    log_tail_p: Tensor | None
    """[T, D] log of ``tail_p`` if the loss needs it, finite where ``tail_p`` underflows."""
    tail_q: Tensor
    """[T, D] 1 - mass_q, at least 0."""
    excess_p: Tensor
    """[T, D] amount that the clamp added to the sum of p: exactly 0 without one."""
    excess_q: Tensor
    """[T, D] amount that the clamps added to the teacher's K + 1 probabilities: exactly 0 without any."""


@dataclass(frozen=True)
class Terms:
    """Value and gradient coefficients of a loss: ``a`` [T, D, K]; ``b`` [T, D] or None for 0; ``floored`` [T, D]."""

    value: Tensor
    a: Tensor
    b: Tensor | None
    floored: Tensor | None = None
    closed: bool = False
    """Whether sum a = 0 by construction."""
    a_held: Tensor | None = None
    """[T, D, K] a_k of entries at the clamp; None for 0."""
    own: Tensor | None = None
    """[T, D, K] gradient of an id's own term by its renormalised log-prob; None for ``a`` itself."""
    share: Tensor | None = None
    """[T, D, K] renormalised student, with ``own``: a = own - share x sum of own."""
    over: Tensor | None = None
    """[T, D, K] marks terms of S that the entry clamp holds; None without one."""
    far: Tensor | None = None
    """[T, D] marks student tails below ``SMALLEST``, where ``b`` is 0: the tail's pull on its own ids, -q_tail P in
    all, has to be distributed by ratios of their probabilities."""


def outcomes(
    logprobs: Tensor,
    teacher_logprobs: Tensor,
    valid: Tensor,
    tail_p: Tensor,
    log_tail_p: Tensor | None,
    logprob_min_clamp: float | None,
) -> Outcomes:
    """Apply the clamp and form masses. ``valid`` marks S; other entries may hold anything."""
    logp = torch.where(valid, logprobs, 0)
    logq = torch.where(valid, teacher_logprobs, 0)
    p, q = logp.exp().masked_fill(~valid, 0), logq.exp().masked_fill(~valid, 0)
    mass = torch.where(valid, teacher_logprobs.double(), -torch.inf).exp().sum(-1)  # fp32 has no digits of 1 - Q
    exact_tail = (1 - mass).clamp_min(0)
    mass_q, tail_q = mass.to(q.dtype), exact_tail.to(q.dtype)
    excess_q = (exact_tail - (1 - mass)).to(q.dtype)
    p_seen, moving, excess_p = p, valid, torch.zeros_like(mass_q)
    if logprob_min_clamp is not None:
        floor = math.exp(logprob_min_clamp)
        moving = valid & (logp > logprob_min_clamp)
        logp, logq = logp.clamp_min(logprob_min_clamp), logq.clamp_min(logprob_min_clamp)
        p_seen = torch.where(valid, p.clamp_min(floor), 0)
        raised = torch.where(valid, q.clamp_min(floor), 0)
        excess_p, excess_q = (p_seen - p).sum(-1), excess_q + (raised - q).sum(-1)
        q = raised
    return Outcomes(
        logp, logq, p, p_seen, q, valid, moving, p.sum(-1), mass_q, tail_p, log_tail_p, tail_q, excess_p, excess_q
    )


def bregman(x: Tensor, log_x: Tensor, y: Tensor, log_y: Tensor) -> Tensor:
    """Return ``x log(x / y) - x + y``, accurate for x near y; y where x = 0."""
    d = log_y - log_x
    near = x * (torch.expm1(d) - d)
    far = y - x - x * d
    return torch.where(x == 0, y, torch.where(d.abs() < 1, near, far))


def _renormalized(o: Outcomes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return p / P and q / Q on S with their logarithms: p, log p, q, log q."""
    result = []
    for log in (o.logp, o.logq):
        total = torch.logsumexp(log.masked_fill(~o.valid, -torch.inf), -1, keepdim=True)
        log = torch.where(o.valid, log - total, 0)
        result += [log.exp().masked_fill(~o.valid, 0), log]
    return result[0], result[1], result[2], result[3]


def _sum_terms(terms: Tensor, rest: Tensor | float, limit: float | None) -> tuple[Tensor, Tensor | None]:
    """Return the sum [T, D] of the terms of S, and which of them the entry clamp holds: an id's term of the divergence
    is ``terms + rest``, of which ``rest`` cancels in the sum over all outcomes."""
    if limit is None:
        return terms.sum(-1), None
    over = terms + rest > limit
    return torch.where(over, limit - rest, terms).sum(-1), over


def forward_kl(o: Outcomes, tail: str, limit: float | None = None) -> Terms:
    """Return KL(teacher || student) over the teacher's K ids; no term of S above ``limit``."""
    if tail == "renormalize":
        p, log_p, q, log_q = _renormalized(o)
        value, over = _sum_terms(bregman(q, log_q, p, log_p), q - p, limit)
        return Terms(value, p - q, None, closed=True, own=-q, over=over, share=p)
    if tail == "none":
        value, over = _sum_terms(torch.where(o.q == 0, 0, o.q * (o.logq - o.logp)), 0.0, limit)
        return Terms(value, -o.q, None, over=over)
    rest = o.q - o.p_seen if tail == "bucket" else 0.0
    on_ids, over = _sum_terms(bregman(o.q, o.logq, o.p_seen, o.logp), rest, limit)
    if tail == "generalized":
        return Terms(on_ids, o.p_seen - o.q, None, over=over)
    u, t = o.tail_p.clamp_min(SMALLEST), o.tail_q
    log_t = t.clamp_min(SMALLEST).log()
    extended = t * (log_t - math.log(TAIL_FLOOR) - (u / TAIL_FLOOR - 1)) - t + u
    on_tail = torch.where(u < TAIL_FLOOR, extended, bregman(t, log_t, u, u.log()))
    far = torch.zeros_like(u, dtype=torch.bool)
    if o.log_tail_p is not None:  # an empty tail has no ids to pull
        far = (o.tail_p < SMALLEST) & (o.log_tail_p > -torch.inf)
    b = torch.where(far, 0, t / u)
    return Terms(on_ids + on_tail + o.excess_q - o.excess_p, -o.q, b, u < TAIL_FLOOR, far=far, over=over)


def reverse_kl(o: Outcomes, tail: str, limit: float | None = None) -> Terms:
    """Return KL(student || teacher) over the teacher's K ids; no term of S above ``limit``."""
    if tail == "renormalize":
        p, log_p, q, log_q = _renormalized(o)
        terms, ratio = bregman(p, log_p, q, log_q), log_p - log_q
        value, over = _sum_terms(terms, p - q, limit)
        a = _times(p, ratio - terms.sum(-1, keepdim=True))
        return Terms(value, a, None, closed=True, own=_times(p, ratio + 1), over=over, share=p)
    weighted = _times(o.p_seen, o.logp - o.logq)
    if tail == "none":
        value, over = _sum_terms(weighted, 0.0, limit)
        return Terms(value, weighted + o.p_seen, None, over=over)
    rest = o.p_seen - o.q if tail == "bucket" else 0.0
    on_ids, over = _sum_terms(bregman(o.p_seen, o.logp, o.q, o.logq), rest, limit)
    if tail == "generalized":
        return Terms(on_ids, weighted, None, over=over)
    u, t = o.tail_p, o.tail_q.clamp_min(TAIL_FLOOR)
    log_u = u.clamp_min(SMALLEST).log()
    value = on_ids + bregman(u.clamp_min(0), log_u, t, t.log()) + o.excess_p - o.excess_q - (t - o.tail_q)
    # d(x log x)/dx = log x + 1: the ones of ids and tail cancel, except at ids whose own the clamp stops
    return Terms(value, weighted, t.log() - log_u, o.tail_q < TAIL_FLOOR, a_held=-o.p, over=over)


def jsd(o: Outcomes, tail: str, beta: float, limit: float | None = None) -> Terms:
    """Return beta KL(teacher || M) + (1 - beta) KL(student || M), M = beta teacher + (1 - beta) student; no term of S
    above ``limit``.

    beta 0 is the forward and 1 the reverse KL, by special case.
    """
    if beta == 0:
        return forward_kl(o, tail, limit)
    if beta == 1:
        return reverse_kl(o, tail, limit)
    p, log_p, q, log_q = _renormalized(o) if tail == "renormalize" else (o.p_seen, o.logp, o.q, o.logq)
    terms, slope = _mixture(p, log_p, q, log_q, beta)
    (value, over), weighted = _sum_terms(terms, 0.0, limit), (1 - beta) * _times(p, slope)
    if tail == "renormalize":
        a = weighted - p * weighted.sum(-1, keepdim=True)
        return Terms(value, a, None, closed=True, own=weighted, over=over, share=p)
    if tail != "bucket":
        return Terms(value, weighted, None, over=over)
    u, t = o.tail_p.clamp_min(0), o.tail_q
    on_tail, slope = _mixture(u, u.clamp_min(SMALLEST).log(), t, t.clamp_min(SMALLEST).log(), beta)
    return Terms(value + on_tail, weighted, -(1 - beta) * slope, over=over)


def _times(p: Tensor, factor: Tensor) -> Tensor:
    """Return ``p * factor`` with 0 * inf = 0: a student log-prob of -inf contributes nothing to a reverse KL."""
    return torch.where(p == 0, 0, p * factor)


def _mixture(p: Tensor, log_p: Tensor, q: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return, per outcome, the Jensen-Shannon term and log(p / M)."""
    d = log_p - log_q
    # log1p and expm1 keep the digits where p is near q; logaddexp is right far from there.
    near = d.clamp(-1, 1)
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
    m_over_q = torch.where(d.abs() < 1, torch.log1p((1 - beta) * torch.expm1(near)), log_m - log_q)
    m_over_p = torch.where(d.abs() < 1, torch.log1p(beta * torch.expm1(-near)), log_m - log_p)
    m = beta * q + (1 - beta) * p
    zero = torch.zeros_like(p)
    value = beta * bregman(q, zero, m, m_over_q) + (1 - beta) * bregman(p, zero, m, m_over_p)
    return value, -m_over_p


def divergence(
    o: Outcomes, tail: str, beta: float, entry_max_clamp: float | None = None
) -> tuple[Terms, Tensor, Tensor]:
    """Return the loss, its gradient at the ids ``g_k - G p_k`` [T, D, K] and the coefficient ``G`` [T, D], without
    ``far``.

    ``beta`` is the teacher's share in the mixture, as ``jsd`` takes it. Gradients are with respect to z / temperature.
    """
    terms = jsd(o, tail, beta, entry_max_clamp)
    a, moving = terms.a, o.moving
    if terms.over is not None and terms.own is not None and terms.share is not None:
        held = torch.where(terms.over, terms.own, 0)
        a = a - held + terms.share * held.sum(-1, keepdim=True)
    elif terms.over is not None:
        moving = moving & ~terms.over
    a = torch.where(moving, a, 0 if terms.a_held is None else terms.a_held)
    exact_zero = terms.closed and o.moving is o.valid
    total_a = torch.zeros_like(o.mass_p) if exact_zero else a.sum(-1)
    if terms.b is None:
        return terms, a - o.p * total_a.unsqueeze(-1), total_a
    pull = terms.b * o.tail_p if terms.far is None else torch.where(terms.far, o.tail_q, terms.b * o.tail_p)
    at_ids = a + o.p * (pull - total_a).unsqueeze(-1)
    return terms, at_ids, total_a + terms.b * o.mass_p


def cap(
    value: Tensor, loss_max_clamp: float | None, loss_soft_cap: float | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the capped loss, the gradient factor, and where the cap takes effect (both None without a cap).

    ``loss_max_clamp``: min(x, c), factor 0 above c. ``loss_soft_cap``: c (1 + log(x / c)) above c, factor c / x.
    """
    if loss_max_clamp is not None:
        over = value > loss_max_clamp
        return value.clamp_max(loss_max_clamp), (~over).to(value.dtype), over
    if loss_soft_cap is not None:
        ratio = (value / loss_soft_cap).clamp_min(1)
        return torch.where(ratio > 1, loss_soft_cap * (1 + ratio.log()), value), 1 / ratio, ratio > 1
    return value, None, None

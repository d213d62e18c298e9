"""The losses as their formulas, in float64, differentiated by autograd; single rank, whole vocabulary in memory.

Slow and large on purpose: the other layers are tested against it. ``p`` is the student, ``q`` the teacher, ``S`` the
teacher's ids, ``tail`` everything else.

Shape legend: T rows, V vocabulary, D teachers, K ids of a teacher.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mopd.losses.call import LossCall
from mopd.losses.chunked.full import FullLoss
from mopd.losses.sampled import TASK_METRICS, TaskTerm
from mopd.losses.topk import TeacherRows, TopKLoss, group_ids, solve

TAIL_FLOOR = 1e-6
TINY = 1e-30
Tails = tuple[Tensor, Tensor]
"""The student's mass outside S and its logarithm, [T] each."""


def topk_rows(
    inp: Tensor, call: LossCall, kind: TopKLoss, teacher: TeacherRows, task: TaskTerm | None, with_entropy: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return weighted losses [T] and metrics [T]; the metrics come from the closed forms on this layer's log-probs."""
    log_p = scaled_logits(inp, call).log_softmax(1)
    loss, extra = topk_loss(log_p, kind, teacher), {}
    if teacher.target_T is not None:
        own = _of_targets(log_p, teacher.target_T, call)
        extra["student_logprobs"] = own.detach()
        if task is not None:
            loss, terms = _with_task(loss, own, task)
            extra |= terms
    with torch.no_grad():
        valid = teacher.valid_TDK.flatten(1)
        ids = torch.where(valid, teacher.ids_TDK.flatten(1), 0)
        groups = group_ids(ids, valid, teacher.ids_TDK.size(1))
        logprobs = log_p.gather(1, ids)
        rest = 1 - torch.where(groups.first_TN, logprobs.exp(), 0).sum(1)
        rest = torch.where(log_p[:, 0].isnan(), torch.nan, rest)
        metrics = solve(kind, teacher, logprobs, rest.clamp_min(1e-30).log(), groups).metrics
        metrics |= {"unweighted_loss": loss.detach(), **extra}
        if with_entropy:
            metrics["entropy"] = -torch.where(log_p == -torch.inf, 0, log_p.exp() * log_p).sum(1)
    return call.weighted(loss), call.masked(metrics)


def gather(inp: Tensor, call: LossCall, ids_TN: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probs [T, N] and log-sum-exp [T]; 0 on rows of weight 0."""
    z = scaled_logits(inp, call)
    known = (ids_TN >= 0) & (ids_TN < call.shard.vocab_size)
    logprobs = torch.where(known, z.log_softmax(1).gather(1, torch.where(known, ids_TN, 0)), -torch.inf)
    return call.only_active(logprobs).to(call.dtype), call.only_active(z.logsumexp(1)).to(call.dtype)


def scaled_logits(inp: Tensor, call: LossCall) -> Tensor:
    """Return z / temperature over the true vocabulary, ``[T, V]`` float64; rows of weight 0 are 0, no gradient."""
    return call.only_active(inp.flatten(0, -2)[:, : call.shard.vocab_size].double() / call.temperature)


def topk_loss(log_p_TV: Tensor, kind: TopKLoss, teacher: TeacherRows) -> Tensor:
    """Return ``sum_d w_d loss_d`` of every row, ``[T]`` float64."""
    total = torch.where(log_p_TV[:, 0].isnan(), torch.nan, 0.0).to(log_p_TV)  # NaN in one log-prob is NaN in all
    for d in range(teacher.ids_TDK.size(1)):
        valid, weight = teacher.valid_TDK[:, d], teacher.weights_TD[:, d].double()
        ids = torch.where(valid, teacher.ids_TDK[:, d], 0)
        log_q = torch.where(valid, teacher.logprobs_TDK[:, d].double(), 0)
        log_p = torch.where(valid, log_p_TV.gather(1, ids), 0)
        loss = one_teacher(log_p, log_q, valid, student_tail(log_p_TV, ids, valid), kind)
        loss = capped(torch.where(teacher.broken_TD[:, d], torch.nan, loss), kind)
        total = total + torch.where(weight != 0, weight * loss, 0)
    return total


def student_tail(log_p_TV: Tensor, ids: Tensor, valid: Tensor) -> Tails:
    """Return the student's mass outside S and its logarithm, ``[T]``. Computed as 1 - P where S lists an id twice,
    which P counts twice; else from the log-probs outside, as 1 - P has no digits left below 1e-16."""
    listed = torch.zeros_like(log_p_TV).scatter_add(1, ids, valid.to(log_p_TV.dtype))
    is_twice = (listed > 1).any(1)
    rest = 1 - (listed * log_p_TV.exp()).sum(1)
    outside = torch.where(listed > 0, -torch.inf, log_p_TV)
    some = (outside > -torch.inf).any(1)  # a logsumexp of nothing would have no gradient
    log_tail = torch.where(some.unsqueeze(1), outside, 0).logsumexp(1)
    tail = torch.where(is_twice, rest, torch.where(some, log_tail.exp(), 0))
    return tail, torch.where(some & ~is_twice, log_tail, tail.clamp_min(TINY).log())


def one_teacher(log_p: Tensor, log_q: Tensor, valid: Tensor, student_tail: Tails, kind: TopKLoss) -> Tensor:
    """Return one teacher's loss from log-probs ``[T, K]`` on S; entries that are not valid count in the tails."""
    q_tail = (1 - _sum(log_q.exp(), valid)).clamp_min(0)
    if kind.logprob_min_clamp is not None:
        log_p = log_p.clamp_min(kind.logprob_min_clamp)
        log_q = log_q.clamp_min(kind.logprob_min_clamp)
    if kind.tail == "renormalize":
        log_p, log_q = _normalized(log_p, valid), _normalized(log_q, valid)
    beta = kind.teacher_share
    if beta == 0:
        return _forward(log_p, log_q, valid, student_tail, q_tail, kind)
    if beta == 1:
        return _reverse(log_p, log_q, valid, student_tail, q_tail, kind)
    loss = _sum(_jensen_shannon(log_p, log_q, beta), valid, kind.entry_max_clamp)
    if kind.tail == "bucket":
        loss = loss + _jensen_shannon(student_tail[1], q_tail.clamp_min(TINY).log(), beta)
    return loss


def _forward(
    log_p: Tensor, log_q: Tensor, valid: Tensor, student_tail: Tails, q_tail: Tensor, kind: TopKLoss
) -> Tensor:
    """Return KL(teacher || student) ``[T]``."""
    (p_tail, log_p_tail), p, q = student_tail, log_p.exp(), log_q.exp()
    extra = p - q if kind.tail == "generalized" else 0
    loss = _sum(q * (log_q - log_p) + extra, valid, kind.entry_max_clamp)
    if kind.tail != "bucket":
        return loss
    # Straight-through: the value is the tangent's, the gradient that of log p_tail.
    tangent = math.log(TAIL_FLOOR) + (p_tail - TAIL_FLOOR) / TAIL_FLOOR
    log_p_tail = log_p_tail + torch.where(p_tail < TAIL_FLOOR, tangent - log_p_tail, 0).detach()
    return loss + q_tail * (q_tail.clamp_min(TINY).log() - log_p_tail)


def _reverse(
    log_p: Tensor, log_q: Tensor, valid: Tensor, student_tail: Tails, q_tail: Tensor, kind: TopKLoss
) -> Tensor:
    """Return KL(student || teacher) ``[T]``."""
    (p_tail, log_p_tail), p, q = student_tail, log_p.exp(), log_q.exp()
    extra = q - p if kind.tail == "generalized" else 0
    loss = _sum(_expectation(log_p, log_p - log_q) + extra, valid, kind.entry_max_clamp)
    if kind.tail != "bucket":
        return loss
    return loss + p_tail * (log_p_tail - q_tail.clamp_min(TAIL_FLOOR).log())


def _jensen_shannon(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Return the Jensen-Shannon term of each outcome."""
    log_m = torch.logaddexp(math.log(beta) + log_q, math.log1p(-beta) + log_p)
    return beta * log_q.exp() * (log_q - log_m) + (1 - beta) * _expectation(log_p, log_p - log_m)


def _expectation(log_p: Tensor, x: Tensor) -> Tensor:
    """Return ``p x`` where p > 0, else 0."""
    some = log_p != -torch.inf
    return torch.where(some, log_p, 0).exp() * torch.where(some, x, 0) * some


def _sum(x: Tensor, valid: Tensor, limit: float | None = None) -> Tensor:
    """Return the sum over S of terms that are at most ``limit``."""
    return torch.where(valid, x, 0).clamp_max(math.inf if limit is None else limit).sum(-1)


def _normalized(log: Tensor, valid: Tensor) -> Tensor:
    """Return log-probs conditional on S; 0 outside, and where S is empty."""
    total = torch.where(valid, log, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.where(valid, log - torch.where(valid.any(-1, keepdim=True), total, 0), 0)


def capped(loss: Tensor, kind: TopKLoss) -> Tensor:
    """Apply the hard clamp or the soft cap."""
    if kind.loss_max_clamp is not None:
        return loss.clamp_max(kind.loss_max_clamp)
    if kind.loss_soft_cap is not None:
        c = kind.loss_soft_cap
        return torch.where(loss > c, c * (1 + (loss / c).clamp_min(1).log()), loss)
    return loss


def full_rows(
    inp: Tensor,
    teacher_TV: Tensor,
    call: LossCall,
    kind: FullLoss,
    target_T: Tensor | None,
    task: TaskTerm | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return weighted losses and metrics, ``[T]`` float64, of a divergence over the whole vocabulary."""
    log_p = scaled_logits(inp, call).log_softmax(1)
    log_q = scaled_logits(teacher_TV.detach(), call).log_softmax(1)
    if kind.loss == "jsd":
        value = _jensen_shannon(log_p, log_q, kind.beta).sum(1)
    else:
        first, second = (log_q, log_p) if kind.loss == "forward_kl" else (log_p, log_q)
        if kind.skew > 0:
            second = torch.logaddexp(math.log(kind.skew) + first, math.log1p(-kind.skew) + second)
        value = _expectation(first, first - second).sum(1)
    metrics: dict[str, Tensor] = {}
    if target_T is not None:
        own, theirs = (_of_targets(x, target_T, call) for x in (log_p, log_q))
        metrics |= {"student_logprobs": own.detach(), "teacher_logprobs": theirs}
        if task is not None:
            value, terms = _with_task(value, own, task)
            metrics |= terms
    return call.weighted(value), call.masked({"unweighted_loss": value.detach(), **metrics})


def _with_task(loss_T: Tensor, own_T: Tensor, task: TaskTerm) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the rows with the policy gradient of the targets, whose log-probs are ``own_T``, and its metrics."""
    pull, weight = task.pull(own_T)
    return loss_T + pull * (1 + own_T - own_T.detach()), dict(zip(TASK_METRICS, (pull, weight), strict=True))


def _of_targets(logprobs_TV: Tensor, target_T: Tensor, call: LossCall) -> Tensor:
    """Return the log-probs of the targets ``[T]``, -inf for ids outside the true vocabulary."""
    known = (target_T >= 0) & (target_T < call.shard.vocab_size)
    found = logprobs_TV.gather(1, torch.where(known, target_T, 0).unsqueeze(1)).squeeze(1)
    return torch.where(known, found, -torch.inf)

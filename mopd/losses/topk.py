"""Top-k distillation as one autograd function over vocab-parallel logits.

Forward: statistics (one pass over the logits), one all-reduce, loss and coefficients on [T, D, K].
Backward: the gradient in one pass; no collective.

Shape legend: T rows, D teachers, K ids of a teacher, N = D * K.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mopd.losses.chunked import FarTail, Selection, collect, write_gradient
from mopd.losses.divergences import Outcomes, Terms, cap, divergence, outcomes
from mopd.losses.occurrences import Groups, group_ids
from mopd.losses.vocab_parallel import VocabShard

METRICS = ("unweighted_loss", "teacher_mass", "student_mass", "clamped", "clamped_entries", "tail_floored")


@dataclass(frozen=True)
class Objective:
    """Which loss, with which stabilisers."""

    loss: str
    tail: str
    beta: float
    temperature: float
    logprob_min_clamp: float | None
    loss_max_clamp: float | None
    loss_soft_cap: float | None


@dataclass(frozen=True)
class TeacherRows:
    """The teachers' side, rows flattened."""

    ids_TDK: Tensor
    logprobs_TDK: Tensor
    weights_TD: Tensor
    valid_TDK: Tensor
    """Entries of S: id in the vocabulary, log-prob above -inf, row and teacher weight not 0."""
    broken_TD: Tensor
    """The list holds NaN or +inf and counts, so that the row has no loss."""
    target_T: Tensor | None


@dataclass(frozen=True)
class Solution:
    """What the maths on [T, D, K] hands to the streaming passes. Gradients are those of the unweighted row loss."""

    loss_T: Tensor
    entry_TN: Tensor
    dense_T: Tensor
    """-G, summed over teachers."""
    far_T: Tensor | None
    """What tails of student below ``SMALLEST`` add to that, as the factor of p_j over the mass outside all ids."""
    metrics: dict[str, Tensor]


def solve(
    objective: Objective, teacher: TeacherRows, logprobs_TN: Tensor, log_tail_T: Tensor, groups: Groups
) -> Solution:
    """Losses of all teachers of a row and their joint gradient; both NaN where student or teacher are not finite.

    ``log_tail_T`` is the mass outside every teacher's ids; ``groups`` says which teachers share an id.
    """
    ids, valid, weights = teacher.ids_TDK, teacher.valid_TDK, teacher.weights_TD
    first = groups.first_TN
    p_first = torch.where(first, logprobs_TN, -torch.inf).exp()
    surplus = groups.counts_TND(p_first.dtype) - 1  # -1: another teacher's id, part of this teacher's tail
    tail_p = log_tail_T.exp().unsqueeze(1) - torch.where(first.unsqueeze(2), p_first.unsqueeze(2) * surplus, 0).sum(1)
    log_tails = None
    if objective.tail == "bucket" and (objective.loss == "forward_kl" or objective.beta == 0):
        log_tails = _log_tails(log_tail_T, torch.where(first, logprobs_TN, -torch.inf), surplus)
    o = outcomes(logprobs_TN.view_as(ids), teacher.logprobs_TDK, valid, tail_p, log_tails, objective.logprob_min_clamp)
    terms, at_ids, total = divergence(o, objective.loss, objective.tail, objective.beta)
    undefined_T = log_tail_T.isnan()  # NaN or +inf among the student's logits, or all of them -inf
    broken = teacher.broken_TD | undefined_T.unsqueeze(1)
    value, factor, capped = cap(
        torch.where(broken, torch.nan, terms.value), objective.loss_max_clamp, objective.loss_soft_cap
    )
    scale = torch.where(broken, torch.nan, weights if factor is None else weights * factor)
    total = scale * total
    entry = groups.sum_equal((at_ids * scale.unsqueeze(-1)).flatten(1))
    entry = entry + o.p.flatten(1) * (surplus * total.unsqueeze(1)).sum(2)
    far_T = None
    if terms.far is not None and log_tails is not None:
        pull = torch.where(terms.far, scale * o.tail_q * o.mass_p, 0)
        far_T = -(pull * _share(log_tail_T.unsqueeze(1), log_tails)).sum(1)
        theirs = _share(logprobs_TN.unsqueeze(2), log_tails.unsqueeze(1)) * pull.unsqueeze(1)
        entry = entry - torch.where((surplus < 0) & valid.flatten(1).unsqueeze(2), theirs, 0).sum(2)
    loss = torch.where(weights != 0, weights * value, 0).sum(1)
    loss = torch.where(undefined_T, torch.nan, loss)
    return Solution(loss, entry, -total.sum(1), far_T, _metrics(teacher, o, terms, capped, loss))


def _log_tails(log_tail_T: Tensor, first_logprobs_TN: Tensor, surplus_TND: Tensor) -> Tensor:
    """Log of the student's mass outside each teacher's ids [T, D], from logarithms: right where fp32 has no such
    numbers. An id that a teacher lists twice is taken off once."""
    if surplus_TND.size(2) == 1:
        return log_tail_T.unsqueeze(1)
    others = torch.where(surplus_TND < 0, first_logprobs_TN.unsqueeze(2), -torch.inf).logsumexp(1)
    return torch.logaddexp(log_tail_T.unsqueeze(1), others)


def _share(log_part: Tensor, log_whole: Tensor) -> Tensor:
    """part / whole, 0 of nothing."""
    return torch.where(log_part == -torch.inf, 0, torch.exp(log_part - log_whole))


def _metrics(teacher: TeacherRows, o: Outcomes, terms: Terms, capped: Tensor | None, loss: Tensor) -> dict[str, Tensor]:
    """Row metrics; with several teachers masses are weighted means, marks hold if they hold for any teacher."""
    used = teacher.weights_TD != 0
    share = teacher.weights_TD.abs() / teacher.weights_TD.abs().sum(1, keepdim=True).clamp_min(1e-30)
    held = o.valid & ~o.moving
    marked = held.any(-1) if capped is None else held.any(-1) | (capped & used)
    floored = torch.zeros_like(used) if terms.floored is None else terms.floored & used
    entries = teacher.valid_TDK.flatten(1).sum(1).clamp_min(1)
    return {
        "unweighted_loss": loss,
        "teacher_mass": (o.mass_q * share).sum(1),
        "student_mass": (o.mass_p * share).sum(1),
        "clamped": marked.any(1).to(loss.dtype),
        "clamped_entries": held.flatten(1).sum(1) / entries.to(loss.dtype),
        "tail_floored": floored.any(1).to(loss.dtype),
    }


class TopKDistill(torch.autograd.Function):
    """``apply(inp, objective, teacher, weight_T, active_T, shard, overwrite)`` -> loss rows, then the metrics."""

    @staticmethod
    def forward(
        ctx: Any,
        inp: Tensor,
        objective: Objective,
        teacher: TeacherRows,
        weight_T: Tensor | None,
        active_T: Tensor | None,
        shard: VocabShard,
        overwrite: bool,
    ) -> tuple[Tensor, ...]:
        valid_TN = teacher.valid_TDK.flatten(1)
        groups = group_ids(teacher.ids_TDK.flatten(1), valid_TN, teacher.ids_TDK.size(1))
        selection = _select(teacher, groups.first_TN, shard)
        stats, local_T = collect(inp, selection, shard, objective.temperature, active_T)
        n = valid_TN.size(1)
        solution = solve(objective, teacher, stats.logprobs_TN[:, :n], stats.log_tail_T, groups)
        metrics = [solution.metrics[name] for name in METRICS]
        if teacher.target_T is not None:
            known = (teacher.target_T >= 0) & (teacher.target_T < shard.vocab_size)
            metrics.append(torch.where(known, stats.logprobs_TN[:, n], -torch.inf))
        loss = solution.loss_T.clone() if weight_T is None else solution.loss_T * weight_T
        loss, *metrics = (only(active_T, x) for x in (loss, *metrics))
        factor = torch.ones_like(loss) if weight_T is None else weight_T
        dense = None
        if objective.tail != "renormalize" or objective.logprob_min_clamp is not None:
            dense = solution.dense_T * local_T
        far_lse = None if solution.far_T is None else stats.tail_lse_T
        column, owned = selection.column_TN[:, :n], selection.owned_TN[:, :n] & valid_TN
        ctx.save_for_backward(inp, solution.entry_TN, dense, column, owned, factor, active_T, solution.far_T, far_lse)
        ctx.shard, ctx.temperature, ctx.overwrite, ctx.spent = shard, objective.temperature, overwrite, False
        ctx.mark_non_differentiable(*metrics)
        return (loss, *metrics)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_backward(ctx)
        inp, entry, dense, column, owned, factor, active_T, far, far_lse = ctx.saved_tensors
        upstream = grad_loss * factor / ctx.temperature
        out = inp if ctx.overwrite else torch.empty_like(inp)
        write_gradient(
            inp,
            out,
            entry_TN=entry * upstream.unsqueeze(1),
            write_TN=owned,
            column_TN=column,
            dense_T=None if dense is None else only(active_T, dense * upstream),
            far=None if far is None else FarTail(only(active_T, far * upstream), far_lse),
            shard=ctx.shard,
            temperature=ctx.temperature,
            active_T=active_T,
        )
        if ctx.overwrite:
            torch.autograd.graph.increment_version(inp)
        return (out, None, None, None, None, None, None)


def _select(teacher: TeacherRows, first: Tensor, shard: VocabShard) -> Selection:
    """Ids to gather: the teachers', then the target (which stays part of the tail unless a teacher lists it)."""
    ids = teacher.ids_TDK.flatten(1)
    if teacher.target_T is not None:
        ids = torch.cat([ids, teacher.target_T.unsqueeze(1)], 1)
        first = torch.cat([first, torch.zeros_like(first[:, :1])], 1)
    column, owned = shard.localize(ids)
    return Selection(column, owned, first)


def only(active_T: Tensor | None, per_row: Tensor) -> Tensor:
    """0 on rows that are not active."""
    return per_row if active_T is None else torch.where(active_T, per_row, 0)


def refuse_second_backward(ctx: Any) -> None:
    """With ``overwrite_input`` the logits are gone after the first backward."""
    if ctx.overwrite and ctx.spent:
        raise RuntimeError("overwrite_input=True: the first backward has overwritten the logits with their gradient")
    ctx.spent = True

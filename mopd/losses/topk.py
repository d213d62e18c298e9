"""One loss and one gradient from several teachers' ids of a row: what the layers compute on [T, D, K].

``divergences`` has the losses of one teacher; here they are weighted, capped and joined where teachers share an id.

Shape legend: T rows, D teachers, K ids of a teacher, N = D * K.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mopd.losses import checks
from mopd.losses.call import LossCall
from mopd.losses.divergences import Outcomes, Terms, cap, divergence, outcomes

METRICS = ("unweighted_loss", "teacher_mass", "student_mass", "clamped", "clamped_entries", "tail_floored")


@dataclass(frozen=True)
class TopKLoss:
    """Choice of the loss and its stabilisers."""

    loss: str
    tail: str
    beta: float
    logprob_min_clamp: float | None = None
    loss_max_clamp: float | None = None
    loss_soft_cap: float | None = None
    entry_max_clamp: float | None = None

    @property
    def teacher_share(self) -> float:
        """Teacher's weight in the mixture: forward and reverse KL are the ends of the Jensen-Shannon divergence."""
        return {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": self.beta}[self.loss]


@dataclass(frozen=True)
class TeacherRows:
    """The teachers' inputs, rows flattened."""

    ids_TDK: Tensor
    logprobs_TDK: Tensor
    weights_TD: Tensor
    valid_TDK: Tensor
    """Entries of S: id in the vocabulary, log-prob above -inf, row and teacher weight not 0."""
    broken_TD: Tensor
    """Whether the list holds NaN or +inf and counts, so that the row has no loss."""
    target_T: Tensor | None

    @property
    def is_target_TN(self) -> Tensor:
        """Marks the entries of S that are the sampled token."""
        assert self.target_T is not None
        return self.valid_TDK.flatten(1) & (self.ids_TDK.flatten(1) == self.target_T.unsqueeze(1))


def teacher_rows(
    call: LossCall, ids: Tensor, logprobs: Tensor, weights: Tensor | None, target: Tensor | None
) -> TeacherRows:
    """Flatten the teachers' inputs and mark the entries of S. Raise ValueError if values are checked and wrong."""
    several = ids.dim() == len(call.rows) + 2
    ids_TDK, logprobs_TDK = call.flat(ids.detach()).long(), call.flat(logprobs.detach()).to(call.dtype)
    if not several:
        ids_TDK, logprobs_TDK = ids_TDK.unsqueeze(1), logprobs_TDK.unsqueeze(1)
    weights_TD = logprobs_TDK.new_ones(ids_TDK.shape[:2])
    if weights is not None:
        weights_TD = call.flat(weights.detach()).to(call.dtype)
    live = (weights_TD != 0).unsqueeze(-1)
    if call.active_T is not None:
        live = live & call.active_T.view(-1, 1, 1)
    target_T = None if target is None else call.ids("target", target).long()
    if call.check_values:
        checks.check_teacher_values(ids_TDK, logprobs_TDK, live.expand_as(ids_TDK), call.shard.vocab_size)
        if target_T is not None:
            checks.check_targets(target_T, None, call.active_T, call.shard.vocab_size)
    valid = live & (ids_TDK >= 0) & (ids_TDK < call.shard.vocab_size) & (logprobs_TDK != -torch.inf)
    broken = (live & (logprobs_TDK.isnan() | (logprobs_TDK == torch.inf))).any(-1)
    return TeacherRows(ids_TDK, logprobs_TDK, weights_TD, valid, broken, target_T)


@dataclass(frozen=True)
class IdGroups:
    """Groups of a row's entries with the same id: across teachers always possible, within one teacher tolerated.

    Entries that are not valid stand alone.
    """

    group_TN: Tensor
    """Number of the row's first entry with this entry's id."""
    valid_TN: Tensor
    teachers: int

    @property
    def first_TN(self) -> Tensor:
        """Marks one valid entry per id."""
        numbers = torch.arange(self.group_TN.size(1), device=self.group_TN.device)
        return (self.group_TN == numbers) & self.valid_TN

    def sum_by_teacher(self, values_TN: Tensor) -> list[Tensor]:
        """Return, per teacher and for each of the N entries, the sum of the teacher's values over entries of one id."""
        sums = []
        parts = zip(values_TN.chunk(self.teachers, 1), self.group_TN.chunk(self.teachers, 1), strict=True)
        for values, group in parts:
            sums.append(torch.zeros_like(values_TN).scatter_add_(1, group, values).gather(1, self.group_TN))
        return sums

    def sum_equal(self, values_TN: Tensor) -> Tensor:
        """Return for each entry the sum over all entries of its id; teacher by teacher, so that the order is fixed."""
        total, *others = self.sum_by_teacher(values_TN)
        for part in others:
            total = total + part
        return total

    def counts_TND(self, dtype: torch.dtype) -> Tensor:
        """Return how often each teacher lists the entry's id."""
        return torch.stack(self.sum_by_teacher(self.valid_TN.to(dtype)), dim=2)


def group_ids(ids_TN: Tensor, valid_TN: Tensor, teachers: int) -> IdGroups:
    """Group equal ids by sorting each row."""
    numbers = torch.arange(ids_TN.size(1), device=ids_TN.device).expand_as(ids_TN)
    # Entries that are not valid get ids of their own, all negative, so that each is a group by itself.
    ordered, order = torch.where(valid_TN, ids_TN, -1 - numbers).sort(dim=1, stable=True)
    starts = torch.ones_like(valid_TN)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    start = torch.where(starts, numbers, 0).cummax(1).values
    group = torch.empty_like(order).scatter_(1, order, order.gather(1, start))
    return IdGroups(group, valid_TN, teachers)


@dataclass(frozen=True)
class Solution:
    """Result of the maths on [T, D, K] for the streaming passes. Gradients are those of the unweighted row loss."""

    loss_T: Tensor
    entry_TN: Tensor
    dense_T: Tensor
    """-G, summed over teachers: the factor of p_j outside S."""
    far_T: Tensor | None
    """Addition to that from student tails below ``SMALLEST``: the factor of p_j over the mass outside all ids."""
    metrics: dict[str, Tensor]


def solve(kind: TopKLoss, teacher: TeacherRows, logprobs_TN: Tensor, log_tail_T: Tensor, groups: IdGroups) -> Solution:
    """Return losses of all teachers of a row and their joint gradient; both NaN where student or teacher are not
    finite.

    ``log_tail_T`` is the log of the mass outside every teacher's ids; ``groups`` says which teachers share an id.
    """
    ids, valid, weights = teacher.ids_TDK, teacher.valid_TDK, teacher.weights_TD
    first = groups.first_TN
    p_first = torch.where(first, logprobs_TN, -torch.inf).exp()
    surplus = groups.counts_TND(p_first.dtype) - 1  # -1: another teacher's id, part of this teacher's tail
    tail_p = log_tail_T.exp().unsqueeze(1) - torch.where(first.unsqueeze(2), p_first.unsqueeze(2) * surplus, 0).sum(1)
    log_tails = None
    if kind.tail == "bucket" and kind.teacher_share == 0:
        log_tails = _log_tails(log_tail_T, torch.where(first, logprobs_TN, -torch.inf), surplus)
    o = outcomes(logprobs_TN.view_as(ids), teacher.logprobs_TDK, valid, tail_p, log_tails, kind.logprob_min_clamp)
    terms, at_ids, total = divergence(o, kind.tail, kind.teacher_share, kind.entry_max_clamp)
    undefined_T = log_tail_T.isnan()  # NaN or +inf among the student's logits, or all of them -inf
    broken = teacher.broken_TD | undefined_T.unsqueeze(1)
    value, factor, capped = cap(torch.where(broken, torch.nan, terms.value), kind.loss_max_clamp, kind.loss_soft_cap)
    scale = torch.where(broken, torch.nan, weights if factor is None else weights * factor)
    total = scale * total
    # Teachers that share an id add up their gradients at it. An id that another teacher lists lies in this teacher's
    # tail (surplus -1), where the gradient is -G p.
    entry = groups.sum_equal((at_ids * scale.unsqueeze(-1)).flatten(1))
    entry = entry + o.p.flatten(1) * (surplus * total.unsqueeze(1)).sum(2)
    far_T = None
    if terms.far is not None and log_tails is not None:
        # Tails without digits in fp32: each one's pull is shared out over its ids by ratios, from log-probs.
        pull = torch.where(terms.far, scale * o.tail_q * o.mass_p, 0)
        far_T = -(pull * _share(log_tail_T.unsqueeze(1), log_tails)).sum(1)
        theirs = _share(logprobs_TN.unsqueeze(2), log_tails.unsqueeze(1)) * pull.unsqueeze(1)
        entry = entry - torch.where((surplus < 0) & valid.flatten(1).unsqueeze(2), theirs, 0).sum(2)
    loss = torch.where(weights != 0, weights * value, 0).sum(1)
    loss = torch.where(undefined_T, torch.nan, loss)
    return Solution(loss, entry, -total.sum(1), far_T, _metrics(teacher, o, terms, capped, loss))


def add_pull(
    solution: Solution,
    pull_T: Tensor,
    teacher: TeacherRows,
    logprobs_TN: Tensor,
    target_logprobs_T: Tensor,
    log_tail_T: Tensor,
) -> Solution:
    """Return the solution with a loss more: ``pull_T`` in value and as the gradient at log p_y. Its entries [T, N + 1]
    end with the sampled token's own, equal to the teachers' where they list it."""
    hit, pull = teacher.is_target_TN, pull_T.unsqueeze(1)
    entry = solution.entry_TN + pull * (
        hit.to(pull.dtype) - torch.where(teacher.valid_TDK.flatten(1), logprobs_TN.exp(), 0)
    )
    dense = solution.dense_T - pull_T
    alone = dense * target_logprobs_T.exp() + pull_T
    if solution.far_T is not None:
        alone = alone + solution.far_T * _share(target_logprobs_T, log_tail_T)
    listed = entry.gather(1, hit.to(torch.uint8).argmax(1, keepdim=True)).squeeze(1)
    own = torch.where(hit.any(1), listed, alone)
    metrics = {**solution.metrics, "unweighted_loss": solution.loss_T + pull_T}
    return replace(
        solution,
        loss_T=solution.loss_T + pull_T,
        entry_TN=torch.cat([entry, own.unsqueeze(1)], 1),
        dense_T=dense,
        metrics=metrics,
    )


def _log_tails(log_tail_T: Tensor, first_logprobs_TN: Tensor, surplus_TND: Tensor) -> Tensor:
    """Return the log of the student's mass outside each teacher's ids [T, D], computed from logarithms: right also
    where fp32 cannot hold the mass. An id that a teacher lists twice is taken off once."""
    if surplus_TND.size(2) == 1:
        return log_tail_T.unsqueeze(1)
    others = torch.where(surplus_TND < 0, first_logprobs_TN.unsqueeze(2), -torch.inf).logsumexp(1)
    return torch.logaddexp(log_tail_T.unsqueeze(1), others)


def _share(log_part: Tensor, log_whole: Tensor) -> Tensor:
    """Return part / whole, 0 if the part is nothing."""
    return torch.where(log_part == -torch.inf, 0, torch.exp(log_part - log_whole))


def _metrics(teacher: TeacherRows, o: Outcomes, terms: Terms, capped: Tensor | None, loss: Tensor) -> dict[str, Tensor]:
    """Return row metrics; with several teachers masses are weighted means, marks hold if they hold for any teacher."""
    used = teacher.weights_TD != 0
    share = teacher.weights_TD.abs() / teacher.weights_TD.abs().sum(1, keepdim=True).clamp_min(1e-30)
    held = o.valid & ~o.moving if terms.over is None else terms.over | (o.valid & ~o.moving)
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

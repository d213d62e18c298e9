"""Full-vocabulary divergences of two vocab-parallel logits tensors: streaming passes and the autograd function.

Forward: one pass over both logits leaves few numbers a row on each rank, one all-gather joins them. The forms with a
mixture take a second pass and a second all-gather, because the log of a mixture needs both log-sum-exps. Backward: one
pass, no collective. The gradient of a row is

    dz_j = (upstream / temperature) p_j (phi_j - sum_i p_i phi_i),   phi_j = d loss / d p_j

A policy gradient of the sampled token y, with the pull c = -w A, adds c log p_y to the loss. That makes p_j (phi_j -
sum_i p_i phi_i - c), and c more at y.

Shape legend: T rows, V columns of this rank, R rows of a block, C columns that are true ids, G ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mopd.losses.call import LossCall, VocabShard
from mopd.losses.chunked.blocks import Block, blocks
from mopd.losses.sampled import TASK_METRICS, TaskTerm

BUFFERS = 8
"""Tensors of a block's size that live at once, at most: log-probs of both sides, their exponentials, the mixture."""
PEAK, SUM, TEACHER_PEAK, TEACHER_SUM, CROSS = range(5)
"""Numbers of a row and rank: of either side the largest logit and the sum of exp(logit - largest); of the side that the
divergence averages over, the sum of that exp times the difference of the two exponents."""


@dataclass(frozen=True)
class FullLoss:
    """Choice of a full-vocabulary divergence between teacher q and student p."""

    loss: str
    """forward_kl, reverse_kl or jsd."""
    beta: float = 0.5
    """Teacher's weight in the mixture of ``jsd``, inside (0, 1)."""
    skew: float = 0.0
    """Weight of the averaged distribution in the mixture that it is compared with: KL(q || skew q + (1 - skew) p) for
    forward_kl, KL(p || skew p + (1 - skew) q) for reverse_kl."""

    @property
    def is_mixed(self) -> bool:
        """Whether a mixture of both distributions appears."""
        return self.loss == "jsd" or self.skew > 0

    @property
    def is_constant(self) -> bool:
        """Whether ``sum_i p_i phi_i`` is -1 on every row: the plain forward KL."""
        return self.loss == "forward_kl" and not self.is_mixed

    @property
    def teacher_share(self) -> float:
        """Teacher's weight in the mixture."""
        if self.loss == "jsd":
            return self.beta
        return self.skew if self.loss == "forward_kl" else 1 - self.skew


@dataclass(frozen=True)
class FullStats:
    """What is known of each row after the collectives, the same on all ranks but ``column``; every field is ``[T]``.

    A log-sum-exp is ``peak + log_sum``, kept apart because a large peak would round the small part away.
    """

    peak: Tensor
    log_sum: Tensor
    teacher_peak: Tensor
    teacher_log_sum: Tensor
    value: Tensor
    """The divergence."""
    mean_phi: Tensor
    """``sum_i p_i phi_i``, and the pull of a policy gradient."""
    pull: Tensor | None = None
    """The pull by itself, where the loss has a policy gradient of the sampled token."""
    column: Tensor | None = None
    """Column of the sampled token; -1 where another rank has it, or the row has no weight."""


@dataclass(frozen=True)
class FullPasses:
    """The passes over the logits, as a layer has them. Each takes logits of the student of any shape, and the teacher's
    ``[T, V]``."""

    first: Callable[[Tensor, Tensor, FullLoss, LossCall], Tensor]
    """Return this rank's numbers ``[T, 5]``; those of rows of weight 0 mean nothing."""
    second: Callable[[Tensor, Tensor, FullLoss, FullStats, LossCall], Tensor]
    """Return this rank's part of the divergence and of ``sum_i p_i phi_i``, ``[T, 2]``."""
    gradient: Callable[[Tensor, Tensor, Tensor, FullLoss, FullStats, Tensor, LossCall], None]
    """Write ``upstream`` times the gradient of the rows' loss by the scaled logits to the second tensor, which may be
    the first; exactly 0 on rows of weight 0 and in columns of padding."""


class Pair:
    """Reads the logits of both sides, block by block, into scratch buffers in the accumulation dtype."""

    def __init__(self, inp: Tensor, teacher_TV: Tensor, call: LossCall) -> None:
        self._inp, self._teacher, self._call = inp, teacher_TV, call
        self._buffers: list[Tensor] = []

    def read(self, block: Block, peak_R: Tensor | None = None, teacher_peak_R: Tensor | None = None) -> list[Tensor]:
        """Return ``(z - peak) / temperature`` of student and teacher ``[R, C]`` and a buffer ``[R, C]``, then the two
        peaks ``[R]``, already divided by the temperature; peaks that are not given are the largest logits."""
        n, scale = self._call.shard.num_columns, 1 / self._call.temperature
        sides = block.read(self._inp)[:, :n], block.rows_of(self._teacher)[:, :n]
        if not self._buffers or self._buffers[0].size(0) < sides[0].size(0):
            make = self._inp.new_empty
            self._buffers = [make(sides[0].shape, dtype=self._call.dtype) for _ in range(3)]
        own = [buffer[: sides[0].size(0)] for buffer in self._buffers]
        peaks = []
        for side, buffer, peak in zip(sides, own[:2], (peak_R, teacher_peak_R), strict=True):
            buffer.copy_(side)
            if scale != 1:
                buffer.mul_(scale)
            peak = buffer.amax(1) if peak is None else peak
            buffer.sub_(peak.unsqueeze(1))
            peaks.append(peak)
        return [*own, *peaks]


def collect(
    inp: Tensor, teacher_TV: Tensor, kind: FullLoss, target_T: Tensor | None, call: LossCall, passes: FullPasses
) -> tuple[FullStats, dict[str, Tensor]]:
    """Run the passes of forward and the collectives. Return the rows' numbers, and log-probs of the targets."""
    stats_TS = passes.first(inp, teacher_TV, kind, call)
    if target_T is not None:
        stats_TS = torch.cat([stats_TS, _target_logits(inp, teacher_TV, target_T, call)], 1)
    parts = gather(stats_TS, call.shard)
    stats = merge(parts, kind)
    metrics = {}
    if target_T is not None:
        known = (target_T >= 0) & (target_T < call.shard.vocab_size)
        own, theirs = (torch.where(known, x, -torch.inf) for x in parts[:, :, 5:].sum(0).unbind(1))
        metrics["student_logprobs"] = (own - stats.peak) - stats.log_sum
        metrics["teacher_logprobs"] = (theirs - stats.teacher_peak) - stats.teacher_log_sum
    if kind.is_mixed:
        sums = gather(passes.second(inp, teacher_TV, kind, stats, call), call.shard).sum(0)
        stats = FullStats(stats.peak, stats.log_sum, stats.teacher_peak, stats.teacher_log_sum, sums[:, 0], sums[:, 1])
    return stats, metrics


def gather(own: Tensor, shard: VocabShard) -> Tensor:
    """Return the numbers ``[T, N]`` of all ranks as ``[G, T, N]``: the collective."""
    if shard.world_size == 1:
        return own.unsqueeze(0)
    parts = own.new_empty(shard.world_size * own.size(0), own.size(1))
    dist.all_gather_into_tensor(parts, own.contiguous(), group=shard.group)
    return parts.view(shard.world_size, *own.shape)


def merge(parts_GTS: Tensor, kind: FullLoss) -> FullStats:
    """Join the numbers of several parts of the vocabulary."""
    peak, teacher_peak = parts_GTS[..., PEAK].amax(0), parts_GTS[..., TEACHER_PEAK].amax(0)
    shift, teacher_shift = parts_GTS[..., PEAK] - peak, parts_GTS[..., TEACHER_PEAK] - teacher_peak
    sums, teacher_sums = parts_GTS[..., SUM] * shift.exp(), parts_GTS[..., TEACHER_SUM] * teacher_shift.exp()
    log_sum, teacher_log_sum = sums.sum(0).log(), teacher_sums.sum(0).log()
    if kind.is_mixed:
        value = mean_phi = torch.zeros_like(peak)
    elif kind.loss == "forward_kl":
        cross = _joined_cross(parts_GTS, teacher_shift, teacher_shift - shift, parts_GTS[..., TEACHER_SUM])
        value = cross / teacher_sums.sum(0) - teacher_log_sum + log_sum
        mean_phi = torch.full_like(value, -1.0)
    else:
        cross = _joined_cross(parts_GTS, shift, shift - teacher_shift, parts_GTS[..., SUM])
        value = cross / sums.sum(0) - log_sum + teacher_log_sum
        mean_phi = value
    return FullStats(peak, log_sum, teacher_peak, teacher_log_sum, value, mean_phi)


def _joined_cross(parts_GTS: Tensor, shift_GT: Tensor, moved_GT: Tensor, sums_GT: Tensor) -> Tensor:
    """Return the sum of exp times difference over all parts ``[T]``, each part moved to the joint peaks."""
    cross = shift_GT.exp() * (parts_GTS[..., CROSS] + sums_GT * moved_GT)
    # A shard of padding alone has peaks of -inf and nothing to add.
    return torch.where(sums_GT == 0, 0, cross).sum(0)


def _first_pass(inp: Tensor, teacher_TV: Tensor, kind: FullLoss, call: LossCall) -> Tensor:
    pair = Pair(inp, teacher_TV, call)
    stats_TS = inp.new_zeros(inp.shape[:-1].numel(), 5, dtype=call.dtype)
    if call.shard.num_columns == 0:
        stats_TS[:, [PEAK, TEACHER_PEAK]] = -torch.inf
        return stats_TS
    for block in blocks(inp, call.active_T, BUFFERS):
        if block.empty:
            continue
        own, theirs, buffer, peak, teacher_peak = pair.read(block)
        cross = None
        if not kind.is_mixed:
            first, second = (theirs, own) if kind.loss == "forward_kl" else (own, theirs)
            torch.sub(first, second, out=buffer)
        own_sum, their_sum = own.exp_().sum(1), theirs.exp_().sum(1)
        if not kind.is_mixed:
            cross = buffer.mul_(first).sum(1)
        numbers = [peak, own_sum, teacher_peak, their_sum, torch.zeros_like(peak) if cross is None else cross]
        block.put_rows(stats_TS, torch.stack(numbers, 1))
    return stats_TS


def _second_pass(inp: Tensor, teacher_TV: Tensor, kind: FullLoss, stats: FullStats, call: LossCall) -> Tensor:
    pair = Pair(inp, teacher_TV, call)
    sums_T2 = inp.new_zeros(inp.shape[:-1].numel(), 2, dtype=call.dtype)
    if call.shard.num_columns == 0:
        return sums_T2
    for block in blocks(inp, call.active_T, BUFFERS):
        if block.empty:
            continue
        log_p, log_q, buffer = _log_probs(pair, block, stats)
        log_mixture_(buffer, log_p, log_q, kind)
        p, q = log_p.exp(), log_q.exp()
        ratio, teacher_ratio = log_p.sub_(buffer), log_q.sub_(buffer)  # logs of p / mixture and q / mixture
        if kind.loss == "jsd":
            student_part = (1 - kind.beta) * p.mul_(ratio).sum(1)
            numbers = [kind.beta * q.mul_(teacher_ratio).sum(1) + student_part, student_part]
        elif kind.loss == "forward_kl":
            value = q.mul_(teacher_ratio).sum(1)
            numbers = [value, (kind.skew - 1) * p.mul_(teacher_ratio.exp_()).sum(1)]
        else:
            value = torch.mul(p, ratio, out=q).sum(1)
            numbers = [value, value - kind.skew * p.mul_(ratio.exp_()).sum(1)]
        block.put_rows(sums_T2, torch.stack(numbers, 1))
    return sums_T2


def _log_probs(pair: Pair, block: Block, stats: FullStats) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs of student and teacher ``[R, C]`` and a buffer of that size."""
    own, theirs, buffer, *_ = pair.read(block, block.rows_of(stats.peak), block.rows_of(stats.teacher_peak))
    own.sub_(block.rows_of(stats.log_sum).unsqueeze(1))
    theirs.sub_(block.rows_of(stats.teacher_log_sum).unsqueeze(1))
    return own, theirs, buffer


def log_mixture_(out: Tensor, log_p: Tensor, log_q: Tensor, kind: FullLoss) -> None:
    """Write the log of the mixture of ``kind`` into ``out``. The larger term stands outside of the logarithm."""
    share = kind.teacher_share
    torch.logaddexp(log_q + math.log(share), log_p + math.log1p(-share), out=out)


def _target_logits(inp: Tensor, teacher_TV: Tensor, target_T: Tensor, call: LossCall) -> Tensor:
    """Return the targets' logits of student and teacher over the temperature ``[T, 2]``, 0 where another rank owns
    them."""
    column, owned = call.shard.localize(target_T.unsqueeze(1))
    both = torch.cat([x.gather(1, column).to(call.dtype) for x in (inp.flatten(0, -2), teacher_TV)], 1)
    return torch.where(owned, both / call.temperature, 0)


def _write_gradient(
    inp: Tensor, out: Tensor, teacher_TV: Tensor, kind: FullLoss, stats: FullStats, upstream_T: Tensor, call: LossCall
) -> None:
    pair, n = Pair(inp, teacher_TV, call), call.shard.num_columns
    for block in blocks(inp, call.active_T, BUFFERS):
        target = block.of(out)
        if block.empty or n == 0:
            target.zero_()
            continue
        log_p, log_q, buffer = _log_probs(pair, block, stats)
        upstream = block.rows_of(upstream_T).unsqueeze(1)
        mean_phi = None if stats.pull is None and kind.is_constant else block.rows_of(stats.mean_phi).unsqueeze(1)
        gradient = logits_gradient_(buffer, log_p, log_q, mean_phi, kind)
        if stats.pull is not None and stats.column is not None:
            pull, column = (block.rows_of(x).unsqueeze(1) for x in (stats.pull, stats.column))
            gradient.scatter_add_(1, column.clamp_min(0), torch.where(column >= 0, pull, 0))
        gradient.mul_(upstream)
        if call.weight_T is not None:
            gradient.masked_fill_(upstream == 0, 0)  # what such a row holds may not be finite
        if block.pick is not None:
            target.zero_()
            target[:, :n].index_copy_(0, block.pick, gradient.to(target.dtype))
        else:
            target[:, :n].copy_(gradient)
            target[:, n:].zero_()


def logits_gradient_(buffer: Tensor, log_p: Tensor, log_q: Tensor, mean_phi: Tensor | None, kind: FullLoss) -> Tensor:
    """Return ``p (phi - mean_phi)``, the gradient of rows by their scaled logits; overwrites all but ``mean_phi``,
    which may be ``None`` where it is -1 on every row."""
    if kind.is_constant:  # phi is -q / p, which needs no quotient
        p = log_p.exp_() if mean_phi is None else log_p.exp_().mul_(-mean_phi)
        return p.sub_(log_q.exp_())
    assert mean_phi is not None
    if not kind.is_mixed:
        phi = torch.sub(log_p, log_q, out=buffer)
    else:
        log_mixture_(buffer, log_p, log_q, kind)
        if kind.loss == "jsd":
            phi = torch.sub(log_p, buffer, out=buffer).mul_(1 - kind.beta)
        elif kind.loss == "forward_kl":
            phi = torch.sub(log_q, buffer, out=buffer).exp_().mul_(kind.skew - 1)
        else:
            phi = torch.sub(log_p, buffer, out=buffer)
            phi.sub_(torch.exp(phi, out=log_q), alpha=kind.skew)
    return phi.sub_(mean_phi).mul_(log_p.exp_())


CHUNKED = FullPasses(_first_pass, _second_pass, _write_gradient)


class FullDistill(torch.autograd.Function):
    """``apply(inp, teacher_TV, call, kind, target_T, task, passes)`` -> weighted losses ``[T]``, losses ``[T]``, with
    targets the log-probs of student and teacher ``[T]``, and with a task its term and weight ``[T]``. The teacher's
    logits get no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        inp: Tensor,
        teacher_TV: Tensor,
        call: LossCall,
        kind: FullLoss,
        target_T: Tensor | None,
        task: TaskTerm | None,
        passes: FullPasses,
    ) -> tuple[Tensor, ...]:
        stats, metrics = collect(inp, teacher_TV, kind, target_T, call, passes)
        if task is not None:
            assert target_T is not None
            pull, weight = task.pull(metrics["student_logprobs"])
            metrics |= dict(zip(TASK_METRICS, (pull, weight), strict=True))
            column, owned = call.shard.localize(target_T)
            owned = owned if call.active_T is None else owned & call.active_T
            value, mean_phi = stats.value + pull, stats.mean_phi + pull
            stats = replace(stats, value=value, mean_phi=mean_phi, pull=pull, column=torch.where(owned, column, -1))
        loss = call.weighted(stats.value.clone())
        extra = [call.only_active(x) for x in (stats.value, *metrics.values())]
        ctx.save_for_backward(inp, teacher_TV, *vars(stats).values())
        ctx.call, ctx.kind, ctx.passes, ctx.spent = call, kind, passes, False
        ctx.mark_non_differentiable(*extra)
        return (loss, *extra)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        call: LossCall = ctx.call
        call.refuse_second_backward(ctx)
        inp, teacher_TV, *numbers = ctx.saved_tensors
        out = inp if call.overwrite_input else torch.empty_like(inp)
        upstream_T = call.weighted(grad_loss / call.temperature)
        ctx.passes.gradient(inp, out, teacher_TV, ctx.kind, FullStats(*numbers), upstream_T, call)
        if out is inp:
            torch.autograd.graph.increment_version(inp)
        return out, None, None, None, None, None, None

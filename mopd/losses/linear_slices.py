"""Top-k distillation from an LM head, a slice of the vocabulary at a time, recomputed in backward.

Each slice plays the part that a rank plays in tensor parallelism: it contributes a log-sum-exp of its own columns and
the selected logits that it owns. They are joined here and then over the ranks, with the one collective of
``vocab_parallel``. Backward computes the slice's logits again, overwrites them with their gradient, and adds that to
the hidden gradient, which is summed in the accumulation type; each row of the weight gradient is written once.

Shape legend: N rows that are computed, V columns of this rank, C columns of a slice, D teachers, K ids of a teacher,
M = D * K ids (plus the target), J slices, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mopd.losses.chunked import FarTail, Selection, accumulation_dtype, collect, write_gradient
from mopd.losses.diagnostics import entropy_rows
from mopd.losses.divergences import SMALLEST
from mopd.losses.linear_head import Head, gather_rows, main_grad, mark_added, matmul_into, return_rows
from mopd.losses.occurrences import group_ids
from mopd.losses.topk import METRICS, Objective, TeacherRows, only, solve
from mopd.losses.vocab_parallel import LogProbs, VocabShard, exchange


@dataclass(frozen=True)
class Cut:
    """How the rows and columns of a head are worked on."""

    head: Head
    index_N: Tensor | None
    shard: VocabShard
    columns: int
    """Columns of a slice."""
    slices: int
    """Slices of the widest rank."""

    def parts(self, weight: Tensor) -> Iterator[Slice]:
        """This rank's slices that hold a true id."""
        shard, width = self.shard, weight.size(0)
        for low in range(0, min(width, shard.num_columns), self.columns):
            high = min(low + self.columns, width)
            num_columns = min(high, shard.num_columns) - low
            own = replace(shard, start=shard.start + low, num_columns=num_columns, rank=0, world_size=1, group=None)
            yield Slice(low, high, own)


@dataclass(frozen=True)
class SlicedJob:
    """One call of the chunked layer; per-row tensors hold the computed rows only."""

    cut: Cut
    objective: Objective
    teacher: TeacherRows
    weight_N: Tensor | None
    active_N: Tensor | None
    with_entropy: bool


@dataclass(frozen=True)
class Slice:
    """Columns ``low`` to ``high`` of the rank's weight, as a shard of its own without other ranks."""

    low: int
    high: int
    shard: VocabShard

    def logits(self, rows_NH: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
        """``[N, C]`` in the buffer's memory."""
        num_rows, width = rows_NH.size(0), self.high - self.low
        out = buffer[: num_rows * width].view(num_rows, width)
        return torch.mm(rows_NH, weight[self.low : self.high].t(), out=out)


class SlicedTopKDistill(torch.autograd.Function):
    """``apply(hidden, weight, job)`` -> loss rows ``[N]``, then the metrics of ``topk.METRICS`` (and the target's)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, job: SlicedJob) -> tuple[Tensor, ...]:
        teacher = job.teacher
        valid_NM = teacher.valid_TDK.flatten(1)
        groups = group_ids(teacher.ids_TDK.flatten(1), valid_NM, teacher.ids_TDK.size(1))
        ids_NM, first_NM = teacher.ids_TDK.flatten(1), groups.first_TN
        if teacher.target_T is not None:  # stays part of the tail unless a teacher lists it
            ids_NM = torch.cat([ids_NM, teacher.target_T.unsqueeze(1)], 1)
            first_NM = torch.cat([first_NM, torch.zeros_like(first_NM[:, :1])], 1)
        rows_NH = gather_rows(hidden, job.cut.head, job.cut.index_N)
        stats, local_JN, entropy_N = _statistics(rows_NH, weight, ids_NM, first_NM, job)
        m = valid_NM.size(1)
        solution = solve(job.objective, teacher, stats.logprobs_TN[:, :m], stats.log_tail_T, groups)
        metrics = [solution.metrics[name] for name in METRICS]
        if teacher.target_T is not None:
            known = (teacher.target_T >= 0) & (teacher.target_T < job.cut.shard.vocab_size)
            metrics.append(torch.where(known, stats.logprobs_TN[:, m], -torch.inf))
        metrics += [] if entropy_N is None else [entropy_N]
        factor = torch.ones_like(solution.loss_T) if job.weight_N is None else job.weight_N
        loss, *metrics = (only(job.active_N, x) for x in (solution.loss_T * factor, *metrics))
        far = (None, None) if solution.far_T is None else (solution.far_T, stats.tail_lse_T)
        ctx.save_for_backward(hidden, weight, solution.entry_TN, solution.dense_T, local_JN, factor, *far)
        ctx.job = job
        remember(ctx, weight, job.cut)
        ctx.mark_non_differentiable(*metrics)
        return (loss, *metrics)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        job: SlicedJob = ctx.job
        hidden, weight, entry_NM, dense_N, local_JN, factor_N, far_N, far_lse_N = ctx.saved_tensors
        upstream_N = grad_loss * factor_N / job.objective.temperature
        entry_NM, dense_N = entry_NM * upstream_N.unsqueeze(1), only(job.active_N, dense_N * upstream_N)
        far = None if far_N is None else FarTail(only(job.active_N, far_N * upstream_N), far_lse_N)
        ids_NM, valid_NM = job.teacher.ids_TDK.flatten(1), job.teacher.valid_TDK.flatten(1)

        def overwrite(logits_NC: Tensor, part: Slice, number: int) -> None:
            column, owned = part.shard.localize(ids_NM)
            write_gradient(
                logits_NC,
                logits_NC,
                entry_TN=entry_NM,
                write_TN=owned & valid_NM,
                column_TN=column,
                dense_T=dense_N * local_JN[number],
                far=far,
                shard=part.shard,
                temperature=job.objective.temperature,
                active_T=job.active_N,
            )

        return (*multiply(ctx, hidden, weight, overwrite), None)


def remember(ctx: Any, weight: Tensor, cut: Cut) -> None:
    """What ``multiply`` will ask for."""
    ctx.cut, ctx.weight = cut, weight
    ctx.main_grad = main_grad(weight, cut.head) if ctx.needs_input_grad[1] else None


def multiply(
    ctx: Any, hidden: Tensor, weight: Tensor, overwrite: Callable[[Tensor, Slice, int], None]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of hidden states and weight. ``overwrite`` turns the logits of a slice into their gradient."""
    cut: Cut = ctx.cut
    rows_NH = gather_rows(hidden, cut.head, cut.index_N)
    grad_rows = grad_weight = None
    if ctx.needs_input_grad[0]:
        grad_rows = rows_NH.new_zeros(rows_NH.shape, dtype=accumulation_dtype(hidden))
    if ctx.needs_input_grad[1] and ctx.main_grad is None:
        grad_weight = torch.zeros_like(weight)
    buffer = rows_NH.new_empty(rows_NH.size(0) * cut.columns)
    for number, part in enumerate(cut.parts(weight)):
        grad_NC = part.logits(rows_NH, weight, buffer)
        overwrite(grad_NC, part, number)
        if grad_rows is not None:
            matmul_into(grad_rows, grad_NC, weight[part.low : part.high], accumulate=True)
        if grad_weight is not None:
            matmul_into(grad_weight[part.low : part.high], grad_NC.t(), rows_NH, accumulate=False)
        elif ctx.main_grad is not None:
            matmul_into(ctx.main_grad[part.low : part.high], grad_NC.t(), rows_NH, accumulate=True)
    if ctx.main_grad is not None:
        grad_weight = mark_added(ctx.weight, cut.head)
    grad_hidden = None
    if grad_rows is not None:
        grad_hidden = return_rows(grad_rows, hidden, cut.head, cut.index_N, hidden.dtype)
    return grad_hidden, grad_weight


def _statistics(
    rows_NH: Tensor, weight: Tensor, ids_NM: Tensor, first_NM: Tensor, job: SlicedJob
) -> tuple[LogProbs, Tensor, Tensor | None]:
    """Log-probs over the whole vocabulary; ``[J, N]``, what the softmax of a slice's row must be multiplied with to be
    the probability; and the entropy if asked for."""
    temperature, dtype = job.objective.temperature, accumulation_dtype(rows_NH)
    num_rows = rows_NH.size(0)
    buffer = rows_NH.new_empty(num_rows * job.cut.columns)
    selected_NM = rows_NH.new_zeros(ids_NM.shape, dtype=dtype)
    tail_N = rows_NH.new_full((num_rows,), -torch.inf, dtype=dtype)
    parts: list[tuple[LogProbs, Tensor]] = []
    entropies = []
    for part in job.cut.parts(weight):
        logits = part.logits(rows_NH, weight, buffer)
        column, owned = part.shard.localize(ids_NM)
        stats, local_N = collect(logits, Selection(column, owned, first_NM & owned), part.shard, temperature, None)
        selected_NM += torch.where(owned, logits.gather(1, column).to(dtype) / temperature, 0)
        own_tail_N = stats.shift_T + (stats.log_sum_T + stats.log_tail_T)
        far = (stats.log_tail_T < math.log(SMALLEST)) | (stats.shift_T == -torch.inf)  # few digits, or all masked
        tail_N = torch.logaddexp(tail_N, torch.where(far, stats.tail_lse_T, own_tail_N))
        parts.append((stats, local_N))
        if job.with_entropy:
            entropies.append(entropy_rows(logits, part.shard, temperature, None))
    joined = exchange(tail_N, selected_NM, first_NM, job.cut.shard)
    local_JN = rows_NH.new_empty(len(parts), num_rows, dtype=dtype)
    entropy_N = rows_NH.new_zeros(num_rows, dtype=dtype) if job.with_entropy else None
    for j, (stats, local_N) in enumerate(parts):
        log_share = (stats.shift_T - joined.shift_T) + (stats.log_sum_T - joined.log_sum_T)
        share = torch.where(stats.shift_T == -torch.inf, 0, torch.exp(log_share))
        torch.mul(share, local_N, out=local_JN[j])
        if entropy_N is not None:
            entropy_N += torch.where(share == 0, 0, share * (entropies[j] - log_share))
    if entropy_N is not None and job.cut.shard.world_size > 1:
        dist.all_reduce(entropy_N, group=job.cut.shard.group)
    return joined, local_JN, entropy_N

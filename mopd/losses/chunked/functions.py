"""The autograd functions of the chunked layer, over vocab-parallel logits.

Forward: statistics (one pass over the logits), one all-reduce, loss and coefficients on [T, D, K].
Backward: the gradient in one pass; no collective.

Shape legend: T rows, D teachers, K ids of a teacher, N = D * K (or the ids of a row that are gathered).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mopd.losses.call import LossCall, VocabShard
from mopd.losses.chunked.diagnostics import entropy_rows
from mopd.losses.chunked.passes import FarTail, Selection, collect, write_gradient
from mopd.losses.sampled import TASK_METRICS, TaskTerm
from mopd.losses.topk import METRICS, IdGroups, TeacherRows, TopKLoss, add_pull, group_ids, solve


def topk_rows(
    inp: Tensor, call: LossCall, kind: TopKLoss, teacher: TeacherRows, task: TaskTerm | None, with_entropy: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return weighted losses [T] and metrics [T]; the entropy costs a pass of its own."""
    loss, *values = TopKDistill.apply(inp, call, kind, teacher, task)
    names = [*METRICS, *(["student_logprobs"] if teacher.target_T is not None else []), *(TASK_METRICS if task else [])]
    metrics = dict(zip(names, values, strict=True))
    if with_entropy:
        metrics["entropy"] = entropy_rows(inp.detach(), call)
    return loss, metrics


class TopKDistill(torch.autograd.Function):
    """``apply(inp, call, kind, teacher, task)`` -> loss rows, then the metrics."""

    @staticmethod
    def forward(
        ctx: Any, inp: Tensor, call: LossCall, kind: TopKLoss, teacher: TeacherRows, task: TaskTerm | None
    ) -> tuple[Tensor, ...]:
        valid_TN = teacher.valid_TDK.flatten(1)
        groups = group_ids(teacher.ids_TDK.flatten(1), valid_TN, teacher.ids_TDK.size(1))
        selection = select_ids(teacher, groups.first_TN, call.shard)
        stats, local_T = collect(inp, selection, call)
        n = valid_TN.size(1)
        solution = solve(kind, teacher, stats.logprobs_TN[:, :n], stats.log_tail_T, groups)
        written, extra = valid_TN, []
        if teacher.target_T is not None:
            known = (teacher.target_T >= 0) & (teacher.target_T < call.shard.vocab_size)
            extra.append(torch.where(known, stats.logprobs_TN[:, n], -torch.inf))
        if task is not None:
            pull_T, weight_T = task.pull(extra[0])
            extra += [pull_T, weight_T]
            solution = add_pull(solution, pull_T, teacher, stats.logprobs_TN[:, :n], extra[0], stats.log_tail_T)
            known = known if call.active_T is None else known & call.active_T
            written, n = torch.cat([valid_TN, known.unsqueeze(1)], 1), n + 1
        metrics = [solution.metrics[name] for name in METRICS] + extra
        loss = solution.loss_T.clone() if call.weight_T is None else solution.loss_T * call.weight_T
        loss, *metrics = (call.only_active(x) for x in (loss, *metrics))
        factor = torch.ones_like(loss) if call.weight_T is None else call.weight_T
        dense = None
        # Renormalised and unclamped, the gradient outside S is exactly 0: backward then needs no softmax.
        if kind.tail != "renormalize" or kind.logprob_min_clamp is not None or task is not None:
            dense = solution.dense_T * local_T
        far_lse = None if solution.far_T is None else stats.tail_lse_T
        column, owned = selection.column_TN[:, :n], selection.owned_TN[:, :n] & written
        ctx.save_for_backward(inp, solution.entry_TN, dense, column, owned, factor, solution.far_T, far_lse)
        ctx.call, ctx.spent = call, False
        ctx.mark_non_differentiable(*metrics)
        return (loss, *metrics)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        return saved_gradient(ctx, grad_loss), None, None, None, None


def saved_gradient(ctx: Any, grad_loss: Tensor) -> Tensor:
    """Return the gradient of the input that a forward pass over teachers' ids has saved: entry [T, N], dense [T] or
    ``None``, column and owned [T, N], factor [T], far and its log-sum-exp [T] or ``None``."""
    call: LossCall = ctx.call
    call.refuse_second_backward(ctx)
    inp, entry, dense, column, owned, factor, far, far_lse = ctx.saved_tensors
    upstream = grad_loss * factor / call.temperature
    return gradient_of(
        inp,
        call,
        entry_TN=entry * upstream.unsqueeze(1),
        write_TN=owned,
        column_TN=column,
        dense_T=None if dense is None else call.only_active(dense * upstream),
        far=None if far is None else FarTail(call.only_active(far * upstream), far_lse),
    )


def select_ids(teacher: TeacherRows, first: Tensor, shard: VocabShard) -> Selection:
    """Return the ids to gather: the teachers', then the target (part of the tail unless a teacher lists it)."""
    ids = teacher.ids_TDK.flatten(1)
    if teacher.target_T is not None:
        ids = torch.cat([ids, teacher.target_T.unsqueeze(1)], 1)
        first = torch.cat([first, torch.zeros_like(first[:, :1])], 1)
    column, owned = shard.localize(ids)
    return Selection(column, owned, first)


class GatherLogProbs(torch.autograd.Function):
    """``apply(inp, call, ids_TN)`` -> log-probs [T, N], log-sum-exp [T]."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, call: LossCall, ids_TN: Tensor) -> tuple[Tensor, Tensor]:
        known = (ids_TN >= 0) & (ids_TN < call.shard.vocab_size)
        groups = group_ids(ids_TN, known, 1)
        column, owned = call.shard.localize(ids_TN)
        stats, local_T = collect(inp, Selection(column, owned, groups.first_TN), call)
        logprobs = call.only_active(torch.where(known, stats.logprobs_TN, -torch.inf))
        if call.active_T is not None:
            known = known & call.active_T.unsqueeze(1)
        ctx.save_for_backward(inp, logprobs, local_T, groups.group_TN, known, column, owned)
        ctx.call, ctx.spent = call, False
        return logprobs, call.only_active(stats.lse_T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TN: Tensor, grad_lse_T: Tensor) -> tuple[Tensor | None, ...]:
        call: LossCall = ctx.call
        call.refuse_second_backward(ctx)
        inp, logprobs, local_T, group_TN, known, column, owned = ctx.saved_tensors
        grad = torch.where(known, grad_TN, 0) / call.temperature
        total = grad.sum(1) - grad_lse_T / call.temperature
        gradient = gradient_of(
            inp,
            call,
            entry_TN=IdGroups(group_TN, known, 1).sum_equal(grad) - logprobs.exp() * total.unsqueeze(1),
            write_TN=owned & known,
            column_TN=column,
            dense_T=call.only_active(-total * local_T),
        )
        return gradient, None, None


def gradient_of(inp: Tensor, call: LossCall, **parts: Any) -> Tensor:
    """Run ``write_gradient``, over the logits if asked to; autograd is then told that they changed."""
    out = inp if call.overwrite_input else torch.empty_like(inp)
    write_gradient(inp, out, call=call, **parts)
    if out is inp:
        torch.autograd.graph.increment_version(inp)
    return out

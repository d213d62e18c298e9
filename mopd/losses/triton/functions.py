"""The autograd functions of the Triton layer, and the launches of its kernels. Nothing here waits for the device.

They save the logits by reference and a few numbers for each id. Shape legend: T rows, V columns of this rank, D
teachers, K ids of a teacher, N = D * K (or the ids of a row that are gathered), P parts of the vocabulary (ranks times
splits).
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from mopd.losses import divergences
from mopd.losses.call import LossCall, VocabShard
from mopd.losses.sampled import TASK_METRICS, TaskTerm
from mopd.losses.topk import METRICS, TopKLoss, teacher_rows
from mopd.losses.triton import coefficients, formulas, table
from mopd.losses.triton.ids import fixup_kernel, gather_gradient_kernel, logprobs_kernel, select_kernel
from mopd.losses.triton.launches import Logits, dense, layout, neighbours, new_marks, power_of_two, small_warps, stats

TAILS = {name: getattr(formulas, name.upper()).value for name in divergences.TAILS}
LOG2_E = math.log2(math.e)
LONGEST_RANKED = 64
"""Padded number of ids of a row up to which all pairs are compared; longer lists use a sorting network."""


@dataclass(frozen=True)
class TeacherLists:
    """The ids of each row as they were passed, rows flattened, contiguous; the kernels find out which are valid."""

    ids_TN: Tensor
    """int32 or int64."""
    k: int
    """Number of ids of one teacher."""
    logprobs_TN: Tensor | None = None
    """fp32 or float64; None if ids are only gathered."""
    weights_TD: Tensor | None = None
    target_T: Tensor | None = None


def teacher_lists(
    call: LossCall, ids: Tensor, logprobs: Tensor, weights: Tensor | None, target: Tensor | None
) -> TeacherLists:
    """Flatten the teachers' inputs. Raise ValueError if the call checks values and finds wrong ones."""
    if call.check_values:
        teacher_rows(call, ids, logprobs, weights, target)
    return TeacherLists(
        call.flat(ids.detach()).flatten(1).contiguous(),
        ids.size(-1),
        call.flat(logprobs.detach()).flatten(1).contiguous(),
        None if weights is None else call.flat(weights.detach()).contiguous(),
        None if target is None else call.ids("target", target).contiguous(),
    )


def topk_rows(
    inp: Tensor, call: LossCall, kind: TopKLoss, teacher: TeacherLists, task: TaskTerm | None, with_entropy: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return weighted losses [T] and metrics [T]."""
    loss, values = TritonTopK.apply(inp, call, kind, teacher, task, with_entropy)
    extra = ["student_logprobs"] * (teacher.target_T is not None) + [*TASK_METRICS] * (task is not None)
    names = [*METRICS, *extra] + ["entropy"] * with_entropy
    return loss, dict(zip(names, values.unbind(0), strict=True))


class TritonTopK(torch.autograd.Function):
    """``apply(inp, call, kind, teacher, task, with_entropy)`` -> loss [T], metrics [M, T]."""

    @staticmethod
    def forward(
        ctx: Any,
        inp: Tensor,
        call: LossCall,
        kind: TopKLoss,
        teacher: TeacherLists,
        task: TaskTerm | None,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        rows, n = teacher.ids_TN.shape
        new = inp.new_empty
        with on_device(inp):
            gathered = collect(inp, call, teacher, with_entropy)
            loss = new(rows, dtype=torch.float32)
            extra = (teacher.target_T is not None) + len(TASK_METRICS) * (task is not None) + with_entropy
            metrics = new(len(METRICS) + extra, rows, dtype=torch.float32)
            entry, row_data = new(rows, n, dtype=torch.float32), new(2 + (task is not None), rows, dtype=torch.float32)
            runs = new(rows, dtype=torch.int32)
            _solve(call, kind, teacher, task, with_entropy, gathered, (loss, metrics, entry, row_data, runs))
        target = None if task is None else teacher.target_T
        ctx.save_for_backward(inp, gathered.sorted_ids, entry, row_data, runs, target)
        ctx.call, ctx.spent = call, False
        ctx.mark_non_differentiable(metrics)
        ctx.set_materialize_grads(False)
        return loss, metrics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad_loss is None:
            return (None,) * 6
        ctx.call.refuse_second_backward(ctx)
        inp, sorted_ids, entry, row_data, runs, target = ctx.saved_tensors
        return (_gradient(ctx.call, inp, sorted_ids, entry, row_data, runs, grad_loss, target), *[None] * 5)


def _solve(
    call: LossCall,
    kind: TopKLoss,
    teacher: TeacherLists,
    task: TaskTerm | None,
    entropy: bool,
    gathered: Gathered,
    out: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Launch ``loss_kernel`` once. JSD with beta 0 or 1 is the forward or reverse KL."""
    rows, n = teacher.ids_TN.shape
    if rows == 0:
        return
    beta = kind.teacher_share
    loss = {0.0: formulas.FORWARD.value, 1.0: formulas.REVERSE.value}.get(beta, formulas.JSD.value)
    mixes = 0 < beta < 1
    clamp, hard, soft = kind.logprob_min_clamp, kind.loss_max_clamp, kind.loss_soft_cap
    entry = kind.entry_max_clamp
    limit, cap = 0.0, coefficients.NO_CAP.value
    if hard is not None:
        limit, cap = hard, coefficients.HARD.value
    elif soft is not None:
        limit, cap = soft, coefficients.SOFT.value
    advantage, rollout, low, high, above = (None, None, 0.0, math.inf, 0.0) if task is None else task.for_kernel
    temperature = call.temperature
    padded, teachers = power_of_two(n), power_of_two(n // teacher.k)
    coefficients.loss_kernel[(rows,)](
        gathered.pay, gathered.sorted_ids, gathered.order, teacher.logprobs_TN, teacher.weights_TD, call.weight_T,
        teacher.target_T, advantage, rollout, low, high, above, *out,
        rows, call.shard.vocab_size, gathered.parts, gathered.pay.size(1), gathered.begin,
        scale_of(temperature), 1.0 / temperature,
        0.0 if clamp is None else clamp, 1.0 if clamp is None else math.exp(clamp), limit,
        beta, 1.0 - beta, math.log(beta) if mixes else 0.0, math.log1p(-beta) if mixes else 0.0,
        0.0 if entry is None else entry,
        N=n, K=teacher.k, N_PAD=padded, D_PAD=teachers, PARTS_PAD=power_of_two(gathered.parts),
        LOSS=loss, TAIL=TAILS[kind.tail], CLAMP=clamp is not None, CAP=cap, ENTROPY=entropy,
        LIMIT=entry is not None,
        num_warps=small_warps(padded * teachers),
    )  # fmt: skip


class TritonGather(torch.autograd.Function):
    """``apply(inp, call, ids_TN)`` -> log-probs [T, N], log-sum-exp [T]."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, call: LossCall, ids_TN: Tensor) -> tuple[Tensor, Tensor]:
        rows, n = ids_TN.shape
        logprobs = inp.new_empty(rows, n, dtype=torch.float32)
        lse = inp.new_empty(rows, dtype=torch.float32)
        row_data, runs = inp.new_empty(2, rows, dtype=torch.float32), inp.new_empty(rows, dtype=torch.int32)
        temperature = call.temperature
        with on_device(inp):
            g = collect(inp, call, TeacherLists(ids_TN, n))
            padded = power_of_two(n)
            if rows:
                logprobs_kernel[(rows,)](
                    g.pay, g.sorted_ids, g.order, call.weight_T, logprobs, lse, row_data, runs,
                    rows, g.parts, g.pay.size(1), g.begin, scale_of(temperature), 1.0 / temperature,
                    N=n, N_PAD=padded, PARTS_PAD=power_of_two(g.parts), num_warps=small_warps(padded),
                )  # fmt: skip
        ctx.save_for_backward(inp, g.sorted_ids, g.order, logprobs, row_data, runs)
        ctx.call, ctx.spent = call, False
        ctx.set_materialize_grads(False)
        return logprobs, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TN: Tensor | None, grad_lse_T: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_TN is None and grad_lse_T is None:
            return (None,) * 3
        ctx.call.refuse_second_backward(ctx)
        inp, sorted_ids, order, logprobs, row_data, runs = ctx.saved_tensors
        rows, n = logprobs.shape
        entry, data = torch.empty_like(logprobs), torch.empty_like(row_data)
        strides = (0, 0) if grad_TN is None else grad_TN.stride()
        with on_device(inp):
            padded = power_of_two(n)
            if rows:
                gather_gradient_kernel[(rows,)](
                    sorted_ids, order, logprobs, row_data, grad_TN, *strides,
                    grad_lse_T, 0 if grad_lse_T is None else grad_lse_T.stride(0),
                    entry, data, rows, 1.0 / ctx.call.temperature,
                    N=n, N_PAD=padded, num_warps=small_warps(padded),
                )  # fmt: skip
        return _gradient(ctx.call, inp, sorted_ids, entry, data, runs, None), None, None


def _gradient(
    call: LossCall,
    inp: Tensor,
    sorted_ids: Tensor,
    entry_TN: Tensor,
    row_data: Tensor,
    runs_T: Tensor,
    grad_T: Tensor | None,
    target_T: Tensor | None = None,
) -> Tensor:
    """Return the gradient of every row: the dense part, then the entries of the ids over it, and of ``target_T``.

    ``entry_TN``, ``row_data`` [2, T] (3 with ``target_T``) and ``runs_T`` are as ``loss_kernel`` makes them; ``grad_T``
    fp32 of any stride multiplies each row, None stands for 1. Written over the logits if asked to; autograd is then
    told that they changed.
    """
    out = inp if call.overwrite_input else torch.empty_like(inp)
    rows, n = entry_TN.shape
    if rows:
        shard, o = call.shard, layout(out)
        with on_device(inp):
            dense(logits_of(inp, call), out, row_data, grad_T, entry_for(inp, shard, rows).dense)
            padded = power_of_two(n)
            fixup_kernel[(rows,)](
                o.base(out), sorted_ids, entry_TN, runs_T, target_T, None if target_T is None else row_data[2],
                grad_T, 0 if grad_T is None else grad_T.stride(0),
                *o.address, shard.start, shard.num_columns,
                N=n, N_PAD=padded, UNIT=o.unit, num_warps=small_warps(padded),
            )  # fmt: skip
    if out is inp:
        torch.autograd.graph.increment_version(inp)
    return out


def on_device(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Make the device of ``x`` the current one, on which Triton launches."""
    return torch.cuda.device_of(x) if x.is_cuda else contextlib.nullcontext()


@dataclass(frozen=True)
class Gathered:
    """Results of the forward pass after the collective."""

    sorted_ids: Tensor
    """int32 [T, N + 1], valid ids first, ``NO_ID`` behind."""
    order: Tensor
    """int32 [T, N]: the unsorted place of each sorted id."""
    pay: Tensor
    """fp32 [T, pay_width]: peaks [P], sums [P], with entropy moments [P], raw logits [N] in sorted order, target."""
    parts: int
    begin: int
    """Column of the first raw logit."""


def logits_of(inp: Tensor, call: LossCall) -> Logits:
    """Return the logits of a call as the kernels see them."""
    return Logits(inp, layout(inp), call.shard, scale_of(call.temperature))


def scale_of(temperature: float) -> float:
    """Return the scale such that exp(x / temperature) = exp2(x * scale)."""
    return LOG2_E / temperature


def entry_for(inp: Tensor, shard: VocabShard, num_rows: int) -> table.Entry:
    """Return launch parameters, equal on all ranks of the group since they follow from the mean shard width."""
    mean_width = -(-shard.vocab_size // shard.world_size)
    name = table.device_name(inp.device)
    return table.shipped(mean_width, inp.dtype, power_of_two(num_rows), name)


def collect(inp: Tensor, call: LossCall, lists: TeacherLists, entropy: bool = False) -> Gathered:
    """Sort the ids, pass once over the logits, and join the ranks with one SUM all-reduce."""
    z, shard = logits_of(inp, call), call.shard
    rows, n = lists.ids_TN.shape
    entry = entry_for(inp, shard, rows)
    parts = shard.world_size * entry.splits
    begin = (3 if entropy else 2) * parts
    pay = inp.new_empty(rows, begin + n + (lists.target_T is not None), dtype=torch.float32)
    sorted_ids = inp.new_empty(rows, n + 1, dtype=torch.int32)
    order = inp.new_empty(rows, n, dtype=torch.int32)
    gathered = Gathered(sorted_ids, order, pay, parts, begin)
    if rows:
        marks = new_marks(z, entry.stats, entry.splits)
        _select(z, call, lists, gathered, marks)
        neighbours(z, sorted_ids, pay, marks, entropy, entry.splits)
        stats(z, marks, call.weight_T, pay, entropy, entry.stats, entry.splits)
    if shard.world_size > 1:
        dist.all_reduce(pay, group=shard.group)
    return gathered


def _select(z: Logits, call: LossCall, lists: TeacherLists, out: Gathered, marks: Tensor) -> None:
    """Launch ``select_kernel``, several rows a program if the lists are short."""
    at, shard, (rows, n) = z.layout, call.shard, lists.ids_TN.shape
    padded = max(2, power_of_two(n))
    by_rank = padded <= LONGEST_RANKED
    at_once = max(1, min(16, (4096 // padded**2) if by_rank else (512 // padded)))
    elements = at_once * padded * (padded if by_rank else 1)
    select_kernel[(triton.cdiv(rows, at_once),)](
        at.base(z.x), lists.ids_TN, lists.logprobs_TN, lists.weights_TD, call.weight_T, lists.target_T,
        out.sorted_ids, out.order, out.pay, marks,
        rows, *at.address, shard.start, shard.num_columns, shard.vocab_size, out.pay.size(1), out.begin, marks.size(1),
        N=n, K=lists.k, N_PAD=padded, UNIT=at.unit, ROWS=at_once, BY_RANK=by_rank,
        num_warps=min(8, max(1, elements // (2048 if by_rank else 256))),
    )  # fmt: skip

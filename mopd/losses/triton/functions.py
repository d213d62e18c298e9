"""The autograd functions of the Triton layer. They save the logits by reference and a few numbers for each id.

Shape legend: T rows, D teachers, K ids of a teacher, N = D * K.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mopd.losses.topk import METRICS, Objective, refuse_second_backward
from mopd.losses.triton import coefficients, formulas, launch
from mopd.losses.triton.gathering import gather_gradient_kernel, logprobs_kernel
from mopd.losses.vocab_parallel import VocabShard

TAILS = {
    "bucket": formulas.BUCKET.value,
    "generalized": formulas.GENERALIZED.value,
    "renormalize": formulas.RENORMALIZE.value,
    "none": formulas.NONE.value,
}


@dataclass(frozen=True)
class TeacherLists:
    """The teachers' side as it was passed, rows flattened, all contiguous; what is valid is found by the kernels."""

    ids_TN: Tensor
    """int32 or int64."""
    logprobs_TN: Tensor
    """fp32 or float64."""
    weights_TD: Tensor | None
    k: int
    target_T: Tensor | None


class TritonTopK(torch.autograd.Function):
    """``apply(inp, objective, teacher, weight_T, shard, overwrite, entropy)`` -> loss [T], metrics [M, T]."""

    @staticmethod
    def forward(
        ctx: Any,
        inp: Tensor,
        objective: Objective,
        teacher: TeacherLists,
        weight_T: Tensor | None,
        shard: VocabShard,
        overwrite: bool,
        entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        rows, n = teacher.ids_TN.shape
        with launch.on_device(inp):
            gathered = launch.collect(
                inp,
                teacher.ids_TN,
                shard,
                objective.temperature,
                k=teacher.k,
                teacher_logprobs_TN=teacher.logprobs_TN,
                teacher_weights_TD=teacher.weights_TD,
                weight_T=weight_T,
                target_T=teacher.target_T,
                entropy=entropy,
            )
            new = inp.new_empty
            loss = new(rows, dtype=torch.float32)
            metrics = new(len(METRICS) + (teacher.target_T is not None) + entropy, rows, dtype=torch.float32)
            entry, row_data = new(rows, n, dtype=torch.float32), new(2, rows, dtype=torch.float32)
            runs = new(rows, dtype=torch.int32)
            solve(objective, teacher, weight_T, shard, entropy, gathered, (loss, metrics, entry, row_data, runs))
        ctx.save_for_backward(inp, gathered.sorted_ids, entry, row_data, runs)
        ctx.shard, ctx.temperature, ctx.overwrite, ctx.spent = shard, objective.temperature, overwrite, False
        ctx.mark_non_differentiable(metrics)
        ctx.set_materialize_grads(False)
        return loss, metrics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad_loss is None:
            return (None,) * 7
        refuse_second_backward(ctx)
        inp, sorted_ids, entry, row_data, runs = ctx.saved_tensors
        return (_gradient(ctx, inp, sorted_ids, entry, row_data, runs, grad_loss), *[None] * 6)


def solve(
    objective: Objective,
    teacher: TeacherLists,
    weight_T: Tensor | None,
    shard: VocabShard,
    entropy: bool,
    gathered: launch.Gathered,
    out: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
) -> None:
    """One launch of ``loss_kernel``. JSD with beta 0 or 1 is the forward or reverse KL."""
    rows, n = teacher.ids_TN.shape
    if rows == 0:
        return
    beta = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": objective.beta}[objective.loss]
    loss = {0.0: formulas.FORWARD.value, 1.0: formulas.REVERSE.value}.get(beta, formulas.JSD.value)
    mixes = 0 < beta < 1
    clamp, hard, soft = objective.logprob_min_clamp, objective.loss_max_clamp, objective.loss_soft_cap
    limit, cap = 0.0, coefficients.NO_CAP.value
    if hard is not None:
        limit, cap = hard, coefficients.HARD.value
    elif soft is not None:
        limit, cap = soft, coefficients.SOFT.value
    padded, teachers = launch.power_of_two(n), launch.power_of_two(n // teacher.k)
    coefficients.loss_kernel[(rows,)](
        gathered.pay, gathered.sorted_ids, gathered.order, teacher.logprobs_TN, teacher.weights_TD, weight_T,
        teacher.target_T, *out, rows, shard.vocab_size, gathered.parts, gathered.pay.size(1), gathered.begin,
        launch.scale_of(objective.temperature), 1.0 / objective.temperature,
        0.0 if clamp is None else clamp, 1.0 if clamp is None else math.exp(clamp), limit,
        beta, 1.0 - beta, math.log(beta) if mixes else 0.0, math.log1p(-beta) if mixes else 0.0,
        N=n, K=teacher.k, N_PAD=padded, D_PAD=teachers, PARTS_PAD=launch.power_of_two(gathered.parts),
        LOSS=loss, TAIL=TAILS[objective.tail], CLAMP=clamp is not None, CAP=cap, ENTROPY=entropy,
        num_warps=launch.small_warps(padded * teachers),
    )  # fmt: skip


class TritonGather(torch.autograd.Function):
    """``apply(inp, ids_TN, weight_T, shard, temperature, overwrite)`` -> log-probs [T, N], log-sum-exp [T]."""

    @staticmethod
    def forward(
        ctx: Any,
        inp: Tensor,
        ids_TN: Tensor,
        weight_T: Tensor | None,
        shard: VocabShard,
        temperature: float,
        overwrite: bool,
    ) -> tuple[Tensor, Tensor]:
        rows, n = ids_TN.shape
        logprobs = inp.new_empty(rows, n, dtype=torch.float32)
        lse = inp.new_empty(rows, dtype=torch.float32)
        row_data, runs = inp.new_empty(2, rows, dtype=torch.float32), inp.new_empty(rows, dtype=torch.int32)
        with launch.on_device(inp):
            g = launch.collect(inp, ids_TN, shard, temperature, k=n, weight_T=weight_T)
            padded = launch.power_of_two(n)
            if rows:
                logprobs_kernel[(rows,)](
                    g.pay, g.sorted_ids, g.order, weight_T, logprobs, lse, row_data, runs,
                    rows, g.parts, g.pay.size(1), g.begin, launch.scale_of(temperature), 1.0 / temperature,
                    N=n, N_PAD=padded, PARTS_PAD=launch.power_of_two(g.parts), num_warps=launch.small_warps(padded),
                )  # fmt: skip
        ctx.save_for_backward(inp, g.sorted_ids, g.order, logprobs, row_data, runs)
        ctx.shard, ctx.temperature, ctx.overwrite, ctx.spent = shard, temperature, overwrite, False
        ctx.set_materialize_grads(False)
        return logprobs, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TN: Tensor | None, grad_lse_T: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_TN is None and grad_lse_T is None:
            return (None,) * 6
        refuse_second_backward(ctx)
        inp, sorted_ids, order, logprobs, row_data, runs = ctx.saved_tensors
        rows, n = logprobs.shape
        entry, data = torch.empty_like(logprobs), torch.empty_like(row_data)
        strides = (0, 0) if grad_TN is None else grad_TN.stride()
        with launch.on_device(inp):
            padded = launch.power_of_two(n)
            if rows:
                gather_gradient_kernel[(rows,)](
                    sorted_ids, order, logprobs, row_data, grad_TN, *strides,
                    grad_lse_T, 0 if grad_lse_T is None else grad_lse_T.stride(0),
                    entry, data, rows, 1.0 / ctx.temperature,
                    N=n, N_PAD=padded, num_warps=launch.small_warps(padded),
                )  # fmt: skip
        return (_gradient(ctx, inp, sorted_ids, entry, data, runs, None), *[None] * 5)


def _gradient(
    ctx: Any, inp: Tensor, sorted_ids: Tensor, entry: Tensor, row_data: Tensor, runs: Tensor, grad_T: Tensor | None
) -> Tensor:
    """Writes the gradient, over the logits if so asked; autograd then knows that they changed."""
    out = inp if ctx.overwrite else torch.empty_like(inp)
    with launch.on_device(inp):
        launch.write_gradient(
            inp,
            out,
            sorted_ids=sorted_ids,
            entry_TN=entry,
            row_data=row_data,
            runs_T=runs,
            grad_T=grad_T,
            shard=ctx.shard,
            temperature=ctx.temperature,
        )
    if ctx.overwrite:
        torch.autograd.graph.increment_version(inp)
    return out

"""``linear_slices`` by the kernels of the Triton layer: slices take the cells of a rank in the one collective.

Shape legend: N rows that are computed, J slices, P parts of the vocabulary (ranks times slices times splits), M ids of
a row, C columns of a slice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mopd.losses.call import Call
from mopd.losses.layers import teacher_rows
from mopd.losses.linear_head import gather_rows
from mopd.losses.linear_slices import Cut, Slice, multiply, remember
from mopd.losses.topk import METRICS, Objective
from mopd.losses.triton import functions, launch


@dataclass(frozen=True)
class TritonJob:
    """One call; per-row tensors hold the computed rows only."""

    cut: Cut
    objective: Objective
    teacher: functions.TeacherLists
    weight_N: Tensor | None
    with_entropy: bool


def teacher_lists(
    call: Call, ids: Tensor, logprobs: Tensor, weights: Tensor | None, target: Tensor | None
) -> functions.TeacherLists:
    """The teachers' side as the kernels take it. Raises ValueError under ``check_values``."""
    if call.check_values:
        teacher_rows(call, ids, logprobs, weights, target)
    return functions.TeacherLists(
        ids.detach().flatten(1).contiguous(),
        logprobs.detach().flatten(1).contiguous(),
        None if weights is None else weights.detach().contiguous(),
        ids.size(-1),
        None if target is None else target.contiguous(),
    )


class TritonSlicedTopK(torch.autograd.Function):
    """``apply(hidden, weight, job)`` -> loss ``[N]``, metrics ``[names, N]``."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, job: TritonJob) -> tuple[Tensor, Tensor]:
        cut, teacher = job.cut, job.teacher
        rows_NH = gather_rows(hidden, cut.head, cut.index_N)
        num_rows, num_ids = teacher.ids_TN.shape
        num_metrics = len(METRICS) + (teacher.target_T is not None) + job.with_entropy
        with launch.on_device(rows_NH):
            gathered = _collect(rows_NH, weight, job)
            loss, metrics, entry, row_data = (
                rows_NH.new_empty(shape, dtype=torch.float32)
                for shape in ((num_rows,), (num_metrics, num_rows), (num_rows, num_ids), (2, num_rows))
            )
            runs = rows_NH.new_empty(num_rows, dtype=torch.int32)
            out = (loss, metrics, entry, row_data, runs)
            functions.solve(job.objective, teacher, job.weight_N, cut.shard, job.with_entropy, gathered, out)
        ctx.save_for_backward(hidden, weight, gathered.sorted_ids, entry, row_data, runs)
        ctx.temperature = job.objective.temperature
        remember(ctx, weight, cut)
        ctx.mark_non_differentiable(metrics)
        return loss, metrics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, sorted_ids, entry, row_data, runs = ctx.saved_tensors

        def overwrite(logits_NC: Tensor, part: Slice, number: int) -> None:
            launch.write_gradient(
                logits_NC,
                logits_NC,
                sorted_ids=sorted_ids,
                entry_TN=entry,
                row_data=row_data,
                runs_T=runs,
                grad_T=grad_loss,
                shard=part.shard,
                temperature=ctx.temperature,
            )

        with launch.on_device(hidden):
            return (*multiply(ctx, hidden, weight, overwrite), None)


def _collect(rows_NH: Tensor, weight: Tensor, job: TritonJob) -> launch.Gathered:
    """The payload of all slices of all ranks. Cells that no slice fills hold no mass."""
    cut, teacher = job.cut, job.teacher
    buffer = rows_NH.new_empty(rows_NH.size(0) * cut.columns)
    found: list[launch.Gathered] = []
    nothing = Slice(0, 1, replace(cut.shard, num_columns=0, rank=0, world_size=1, group=None))
    for part in list(cut.parts(weight)) or [nothing]:
        found.append(
            launch.collect(
                part.logits(rows_NH, weight, buffer),
                teacher.ids_TN,
                part.shard,
                job.objective.temperature,
                k=teacher.k,
                teacher_logprobs_TN=teacher.logprobs_TN,
                teacher_weights_TD=teacher.weights_TD,
                weight_T=job.weight_N,
                target_T=teacher.target_T,
                entropy=job.with_entropy,
            )
        )
    splits = found[0].parts
    own, kinds = cut.slices * splits, 3 if job.with_entropy else 2
    parts = cut.shard.world_size * own
    pay = rows_NH.new_zeros(rows_NH.size(0), kinds * parts + found[0].pay.size(1) - found[0].begin, dtype=torch.float32)
    for kind in range(kinds):
        mine = pay[:, kind * parts + cut.shard.rank * own :][:, :own]
        if kind == 0:
            mine.fill_(-torch.inf)
        for j, g in enumerate(found):
            mine[:, j * splits : (j + 1) * splits] = g.pay[:, kind * splits : (kind + 1) * splits]
    for g in found:  # an id lies in one slice, the others hold 0
        pay[:, kinds * parts :] += g.pay[:, g.begin :]
    if cut.shard.world_size > 1:
        dist.all_reduce(pay, group=cut.shard.group)
    return launch.Gathered(found[0].sorted_ids, found[0].order, pay, parts, kinds * parts)

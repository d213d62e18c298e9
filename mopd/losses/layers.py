"""From a checked call to the layers that compute it.

Shape legend: T rows, D teachers, K ids of a teacher.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mopd.losses import checks
from mopd.losses.call import Call
from mopd.losses.diagnostics import entropy_rows
from mopd.losses.occurrences import group_ids
from mopd.losses.reference import topk_loss
from mopd.losses.topk import METRICS, Objective, TeacherRows, TopKDistill, solve


def teacher_rows(
    call: Call, ids: Tensor, logprobs: Tensor, weights: Tensor | None, target: Tensor | None
) -> TeacherRows:
    """Flattens the teachers' side and marks the entries of S."""
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


def triton_topk(
    objective: Objective,
    call: Call,
    ids: Tensor,
    logprobs: Tensor,
    weights: Tensor | None,
    target: Tensor | None,
    with_entropy: bool,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of the Triton layer, whose kernels find the entries of S themselves."""
    from mopd.losses.triton.functions import TeacherLists, TritonTopK

    if call.check_values:
        teacher_rows(call, ids, logprobs, weights, target)
    k = ids.size(-1)
    lists = TeacherLists(
        call.flat(ids.detach()).flatten(1).contiguous(),
        call.flat(logprobs.detach()).flatten(1).contiguous(),
        None if weights is None else call.flat(weights.detach()).contiguous(),
        k,
        None if target is None else call.ids("target", target).contiguous(),
    )
    loss, values = TritonTopK.apply(call.inp, objective, lists, call.weight_T, call.shard, call.overwrite, with_entropy)
    names = (*METRICS, *(("student_logprobs",) if target is not None else ()), *(("entropy",) if with_entropy else ()))
    return loss, dict(zip(names, values.unbind(0), strict=True))


def chunked_topk(
    call: Call, objective: Objective, teacher: TeacherRows, with_entropy: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of the chunked layer; the entropy costs it a pass of its own."""
    loss, *values = TopKDistill.apply(
        call.inp, objective, teacher, call.weight_T, call.active_T, call.shard, call.overwrite
    )
    metrics = dict(zip(METRICS, values[: len(METRICS)], strict=True))
    if teacher.target_T is not None:
        metrics["student_logprobs"] = values[-1]
    if with_entropy:
        metrics["entropy"] = entropy_rows(call.inp.detach(), call.shard, objective.temperature, call.active_T)
    return loss, metrics


def reference_topk(
    call: Call, objective: Objective, teacher: TeacherRows, with_entropy: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of the reference layer; the metrics come from the closed forms on its log-probs."""
    log_p = call.reference_logits().log_softmax(1)
    loss = topk_loss(log_p, objective, teacher)
    with torch.no_grad():
        valid = teacher.valid_TDK.flatten(1)
        ids = torch.where(valid, teacher.ids_TDK.flatten(1), 0)
        groups = group_ids(ids, valid, teacher.ids_TDK.size(1))
        logprobs = log_p.gather(1, ids)
        rest = 1 - torch.where(groups.first_TN, logprobs.exp(), 0).sum(1)
        rest = torch.where(log_p[:, 0].isnan(), torch.nan, rest)
        metrics = solve(objective, teacher, logprobs, rest.clamp_min(1e-30).log(), groups).metrics
        metrics["unweighted_loss"] = loss.detach()
        if teacher.target_T is not None:
            known = (teacher.target_T >= 0) & (teacher.target_T < call.shard.vocab_size)
            target = torch.where(known, teacher.target_T, 0).unsqueeze(1)
            metrics["student_logprobs"] = torch.where(known, log_p.gather(1, target).squeeze(1), -torch.inf)
        if with_entropy:
            metrics["entropy"] = -torch.where(log_p == -torch.inf, 0, log_p.exp() * log_p).sum(1)
    return call.weighted(loss), call.masked(metrics)

"""The public functions, in TransformerEngine's naming and Megatron-Core's layouts, without importing either.

Formulas: ``docs/losses.md``. Arguments that all of them share:

- ``inp``: student logits of this rank's vocabulary shard, ``[T, V/tp]``, ``[S, B, V/tp]`` or ``[B, S, V/tp]``, any
  strides; bf16, fp16, fp32 (float64 for tests). The leading dims are the *rows*; every other argument has them too.
- ``temperature``: divides the logits; the teacher's log-probs must have been made with the same one.
- ``loss_weight``: float ``[rows]``, multiplies each row's loss (``aggregation.token_weights`` makes it). Rows of weight
  0 have loss 0 and a gradient of exactly 0; their ids and log-probs may hold anything.
- ``dist_process_group``: the tensor-parallel group, None for a single rank. Loss and gradient are those of the joined
  logits.
- ``vocab_range``: ``(start, end)`` ids of this rank's columns; None means equal shards in rank order.
- ``true_vocab_size``: columns from this id on are padding: probability 0, gradient 0.
- ``reduce_loss``: True returns the *sum* of the (weighted) row losses: denominators belong into ``loss_weight``.
- ``overwrite_input``: backward writes the gradient over ``inp`` (contiguous only); a second backward then raises
  RuntimeError.
- ``backend``: ``triton`` (CUDA kernels; no float64 logits), ``chunked`` (any device, bounded memory), ``reference``
  (float64 autograd, single rank), ``auto``: triton on CUDA where it is installed and fits, else chunked.
- ``check_values``: also checks numbers (id range, NaN, mass above 1 + 1e-4); waits for the device.

Row losses and metrics are fp32 (float64 for float64 logits); gradients have the dtype of ``inp``, rounded once. Metrics
are detached. Wrong shapes, dtypes or option values raise ValueError.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import TYPE_CHECKING, Literal, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.losses import checks, reference
from mopd.losses.call import LossCall, accumulation_dtype, resolve_shard
from mopd.losses.chunked import functions as chunked
from mopd.losses.chunked.diagnostics import LARGEST_EXACT_ID, entropy_and_overlap
from mopd.losses.sampled import (
    Surrogate,
    TaskTerm,
    check_correction,
    check_estimator,
    check_task,
    correction_weight,
    kl_baseline,
    policy_gradient,
    sampled_kl,
    tail_advantage,
)
from mopd.losses.topk import TeacherRows, TopKLoss, teacher_rows

if TYPE_CHECKING:
    from typing_extensions import Unpack

Backend = Literal["auto", "reference", "chunked", "triton"]
Metrics = dict[str, Tensor]
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Shared(TypedDict, total=False):
    """Arguments that all functions with a gradient share; the module docstring explains them."""

    temperature: float
    loss_weight: Tensor | None
    dist_process_group: dist.ProcessGroup | None
    vocab_range: tuple[int, int] | None
    true_vocab_size: int | None
    overwrite_input: bool
    backend: Backend
    check_values: bool


def parallel_topk_distill(
    inp: Tensor,
    teacher_ids: Tensor,
    teacher_logprobs: Tensor,
    *,
    loss: str = "forward_kl",
    tail: str = "bucket",
    beta: float = 0.5,
    logprob_min_clamp: float | None = None,
    loss_max_clamp: float | None = None,
    loss_soft_cap: float | None = None,
    entry_max_clamp: float | None = None,
    teacher_weights: Tensor | None = None,
    target: Tensor | None = None,
    target_logprobs: Tensor | None = None,
    task_advantage: Tensor | None = None,
    task_reward_weight: float = 0.0,
    rollout_logprobs: Tensor | None = None,
    correction: tuple[str, float, float] | None = None,
    with_entropy: bool = False,
    reduce_loss: bool = False,
    **shared: Unpack[Shared],
) -> tuple[Tensor, Metrics]:
    """Compute the divergence between teacher and student on some ids (the set S) of each row: the teacher's top k, the
    student's, or any others that do not depend on the sampled token.

    Args:
        inp: student logits; see the module docstring, as for all arguments not named here.
        teacher_ids: int32 or int64 ``[rows, K]``, or ``[rows, D, K]`` for D teachers per row, whose losses are added up
            with ``teacher_weights``. Ids >= ``true_vocab_size`` count in the teacher's tail.
        teacher_logprobs: fp32 or float64, same shape: log-probs over the teacher's whole vocabulary. Entries of -inf
            leave S.
        loss: ``forward_kl`` = KL(teacher || student), ``reverse_kl`` = KL(student || teacher), or ``jsd``.
        tail: ``bucket`` (all other ids are one outcome), ``generalized`` (unnormalised KL), ``renormalize``
            (conditional on S), ``none`` (truncated sum), or for ``reverse_kl`` ``sampled``: the bucket, and a policy
            gradient of sampled tokens outside S (``tail_advantage``), which costs a pass and a collective more.
        beta: teacher's weight in the mixture of ``jsd``; 0 is forward and 1 reverse KL.
        logprob_min_clamp: floor of both log-probs in the terms of S; a term whose student log-prob is at the floor has
            gradient 0. The tail's own term keeps the unclamped masses.
        loss_max_clamp: per teacher, min(loss, c), gradient 0 above c.
        loss_soft_cap: per teacher, c (1 + log(loss / c)) above c, gradient times c / loss.
        entry_max_clamp: largest term of an id of S; a term above has this value and gradient 0. The tail's own term
            is not held.
        teacher_weights: fp32 ``[rows, D]``, required for D > 1; a teacher of weight 0 is ignored on that row.
        target: int64 ``[rows]``, the sampled token; adds its log-prob to the metrics at no extra pass.
        target_logprobs: fp32 ``[rows]``, the one teacher's log-prob of ``target``; needed by ``tail: sampled`` alone.
        task_advantage: fp32 ``[rows]``; needed, with ``target``, if ``task_reward_weight`` is not 0: the policy
            gradient of weight x advantage joins each row's loss after caps, in the same pass.
        rollout_logprobs: fp32 ``[rows]``, the sampler's log-probs of ``target``; needed by ``correction``.
        correction: ``("tis" | "icepop" | "gate", low, high)`` of that term, see ``mopd.losses.sampled``.
        with_entropy: adds the student's entropy to the metrics; no extra pass in the Triton layer.

    Returns:
        loss ``[rows]`` (or the sum) and metrics ``[rows]``: ``unweighted_loss``; ``teacher_mass`` and ``student_mass``
        on S; ``clamped`` 1 where a clamp or cap takes effect; ``clamped_entries``, the share of S whose student
        log-prob is at the floor, or whose term is held; ``tail_floored`` 1 where a tail is below 1e-6;
        ``student_logprobs`` with ``target``; ``task_loss`` and ``correction_weight`` with ``task_advantage``;
        ``tail_loss``, the policy gradient's term of ``tail: sampled``, and ``outside``, 1 where the sampled token is
        not in S; ``entropy`` in nats.
    """
    call = open_call(inp, **shared)
    checks.check_choice(loss, tail, beta)
    checks.check_caps(logprob_min_clamp, loss_max_clamp, loss_soft_cap, entry_max_clamp)
    checks.check_teacher(call.rows, teacher_ids, teacher_logprobs, teacher_weights, call.shard.vocab_size)
    summed = "bucket" if tail == "sampled" else tail
    kind = TopKLoss(loss, summed, beta, logprob_min_clamp, loss_max_clamp, loss_soft_cap, entry_max_clamp)
    given = (teacher_ids, teacher_logprobs, teacher_weights, target)
    task = open_task(call, target, task_advantage, task_reward_weight, rollout_logprobs, correction)
    outside_T = None
    if tail == "sampled":
        checks.check_sampled_tail(loss, target, target_logprobs, teacher_ids.dim() - len(call.rows))
        own_T, outside_T = _tail_of(inp, call, teacher_rows(call, *given), target_logprobs)
        task = TaskTerm(
            own_T if task is None else own_T + task.advantage_T, _rollout_rows(call, rollout_logprobs), correction
        )
    per_row = teacher_ids.shape[len(call.rows) :]
    if call.on_triton(per_row.numel(), per_row[:-1].numel()):
        from mopd.losses.triton import functions as triton

        row_loss, metrics = triton.topk_rows(inp, call, kind, triton.teacher_lists(call, *given), task, with_entropy)
    else:
        layer = reference if call.layer == "reference" else chunked
        row_loss, metrics = layer.topk_rows(inp, call, kind, teacher_rows(call, *given), task, with_entropy)
    if outside_T is not None:
        tail_loss = -metrics["correction_weight"] * own_T
        more = {"outside": outside_T, "tail_loss": tail_loss, "task_loss": metrics["task_loss"] - tail_loss}
        metrics |= call.masked(more)
    return call.finish(row_loss, metrics, reduce_loss)


def open_task(
    call: LossCall,
    target: Tensor | None,
    advantage: Tensor | None,
    weight: float,
    rollout_logprobs: Tensor | None,
    correction: tuple[str, float, float] | None,
) -> TaskTerm | None:
    """Check the arguments of a divergence's policy gradient and join them; ``None`` without an advantage."""
    check_task(advantage is not None, weight, target is not None)
    check_correction(correction, rollout=rollout_logprobs is not None)
    if advantage is None:
        return None
    scaled = call.only_active(weight * call.number("task_advantage", advantage))
    return TaskTerm(scaled, _rollout_rows(call, rollout_logprobs), correction)


def parallel_gather_logprobs(
    inp: Tensor,
    ids: Tensor,
    **shared: Unpack[Shared],
) -> tuple[Tensor, Tensor]:
    """Return the log-probs of ``ids`` (int32 or int64 ``[rows, K]``), differentiable: the primitive of the sampled
    losses.

    ``loss_weight`` serves as a mask here: rows of weight 0 return 0 and get no gradient; others are not scaled.

    Returns:
        log-probs ``[rows, K]`` (-inf for ids outside the true vocabulary), log-sum-exp of the scaled logits ``[rows]``.
    """
    call = open_call(inp, **shared)
    checks.check_columns("ids", ids, call.rows, "int")
    if ids.dim() != len(call.rows) + 1:
        raise ValueError(f"ids is {list(ids.shape)}: inp has rows {list(call.rows)}, pass {list(call.rows)} + [K]")
    flat = call.flat(ids)
    if call.check_values:
        active = None if call.active_T is None else call.active_T.unsqueeze(1).expand_as(flat)
        checks.check_targets(flat, None, active, call.shard.vocab_size)
    logprobs, lse = _gather(inp, call, flat)
    return logprobs.view(ids.shape), lse.view(call.rows)


def parallel_sampled_kl(
    inp: Tensor,
    target: Tensor,
    teacher_logprobs: Tensor,
    estimator: str,
    *,
    rollout_logprobs: Tensor | None = None,
    correction: tuple[str, float, float] | None = None,
    loss_max_clamp: float | None = None,
    reduce_loss: bool = False,
    **shared: Unpack[Shared],
) -> tuple[Tensor, Metrics]:
    """Compute a KL estimator from the sampled token; Delta = student - teacher log-prob of ``target``.

    Args:
        target: int64 ``[rows]``, tokens sampled from the student at this temperature.
        teacher_logprobs: fp32 ``[rows]``, the teacher's log-prob of ``target``.
        estimator: ``k2`` (gradient of the reverse KL), ``k3`` (gradient of the *forward* KL, although its value
            estimates the reverse KL), or ``k3_reverse`` (k3's value with k2's gradient). ``k1`` raises ValueError: the
            expectation of its gradient is 0.
        rollout_logprobs: fp32 ``[rows]``, the sampler's log-probs; needed by ``correction``.
        correction: ``("tis" | "icepop" | "gate", low, high)``, see ``mopd.losses.sampled``; None: weight 1.
        loss_max_clamp: min(loss, c), gradient 0 above c; before the correction's weight.

    Returns:
        loss ``[rows]`` (or the sum) and metrics ``[rows]``: ``unweighted_loss``, ``student_logprobs``, ``k1`` (Delta),
        ``clamped``, ``correction_weight``.
    """
    check_estimator(estimator)
    check_correction(correction, rollout=rollout_logprobs is not None)
    checks.check_caps(None, loss_max_clamp, None)
    call = open_call(inp, **shared)
    logprobs, teacher = _sampled_rows(inp, call, target, teacher_logprobs)
    delta = logprobs - teacher
    clamped = torch.zeros_like(delta, dtype=torch.bool)
    if loss_max_clamp is not None:
        clamped = sampled_kl(delta.detach(), estimator) > loss_max_clamp
    value = sampled_kl(torch.where(clamped, 0, delta), estimator)  # backward would make NaN of infinity x 0
    value = value if loss_max_clamp is None else torch.where(clamped, loss_max_clamp, value)
    current = logprobs.detach()
    weight = correction_weight(correction, current, current, _rollout_rows(call, rollout_logprobs))
    value = value if correction is None else weight * value
    metrics = {
        "unweighted_loss": value,
        "student_logprobs": logprobs,
        "k1": delta,
        "clamped": clamped,
        "correction_weight": weight,
    }
    return call.finish(call.weighted(value), call.masked(metrics), reduce_loss)


def parallel_policy_gradient(
    inp: Tensor,
    target: Tensor,
    teacher_logprobs: Tensor,
    *,
    baseline: Tensor | None = None,
    topk_ids: Tensor | None = None,
    topk_logprobs: Tensor | None = None,
    topk_weights: Tensor | None = None,
    task_advantage: Tensor | None = None,
    task_reward_weight: float = 0.0,
    old_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    dual_clip: float | None = None,
    correction: tuple[str, float, float] | None = None,
    reduce_loss: bool = False,
    **shared: Unpack[Shared],
) -> tuple[Tensor, Metrics]:
    """Compute the policy-gradient loss with the detached advantage A = -(student - teacher log-prob) - baseline +
    weight x task advantage. The expected gradient is the same with every baseline, its variance is not.

    Args:
        target: int64 ``[rows]``, the sampled tokens.
        teacher_logprobs: fp32 ``[rows]``, the teacher's log-prob of ``target``.
        baseline: fp32 ``[rows]``, what is subtracted; it must not depend on ``target``. None: 0.
        topk_ids: int32 or int64 ``[rows, K]`` or ``[rows, D, K]``, ids of the teachers' largest probabilities: the
            expected advantage over them and a bucket for the rest is the baseline (``kl_baseline``), in the same pass.
        topk_logprobs: fp32, same shape, the teachers' log-probs of ``topk_ids``.
        topk_weights: fp32 ``[rows, D]``, required for D > 1; those that made ``teacher_logprobs``.
        task_advantage: fp32 ``[rows]``; needed if ``task_reward_weight`` is not 0.
        old_logprobs: fp32 ``[rows]``, p_old of the PPO ratio; None means the student's own of this pass (ratio 1).
        rollout_logprobs: fp32 ``[rows]``, the sampler's log-probs; needed by ``correction``.
        clip_ratio_low: PPO clips rho to at least 1 - low,
        clip_ratio_high: and to at most 1 + high.
        dual_clip: c > 1 bounds the loss by c |A| where A < 0; None means no bound.
        correction: ``("tis" | "icepop" | "gate", low, high)``, see ``mopd.losses.sampled``; None: weight 1.

    Returns:
        loss ``[rows]`` (or the sum) and metrics ``[rows]``: ``unweighted_loss``, ``student_logprobs``, ``k1`` (Delta),
        ``ratio``, ``clip_fraction`` (0/1), ``correction_weight``, ``advantage``, ``baseline``.
    """
    if baseline is not None and topk_ids is not None:
        raise ValueError("baseline and topk_ids are both given: each is a baseline, pass one")
    check_task(task_advantage is not None, task_reward_weight, True)
    surrogate = Surrogate(clip_ratio_low, clip_ratio_high, dual_clip, correction)
    surrogate.check(old=old_logprobs is not None, rollout=rollout_logprobs is not None)
    call = open_call(inp, **shared)
    if topk_ids is None or topk_logprobs is None:
        logprobs, teacher = _sampled_rows(inp, call, target, teacher_logprobs)
        subtracted = torch.zeros_like(teacher) if baseline is None else call.number("baseline", baseline)
    else:
        checks.check_teacher(call.rows, topk_ids, topk_logprobs, topk_weights, call.shard.vocab_size)
        lists = teacher_rows(call, topk_ids, topk_logprobs, topk_weights, None)
        both, teacher = _sampled_rows(inp, call, target, teacher_logprobs, beside=lists.ids_TDK.flatten(1))
        logprobs, own = both[:, 0], both[:, 1:].detach()
        subtracted = kl_baseline(own.view_as(lists.ids_TDK), lists)
    delta = (logprobs - teacher).detach()
    total_advantage = -delta - subtracted
    if task_advantage is not None:
        total_advantage = total_advantage + task_reward_weight * call.number("task_advantage", task_advantage)
    old = None if old_logprobs is None else call.logprobs("old_logprobs", old_logprobs, sampled=True)
    rollout = _rollout_rows(call, rollout_logprobs)
    value, metrics = policy_gradient(logprobs, total_advantage, surrogate, old, rollout)
    metrics |= {"unweighted_loss": value, "student_logprobs": logprobs, "k1": delta, "baseline": subtracted}
    return call.finish(call.weighted(value), call.masked(metrics), reduce_loss)


@torch.no_grad()
def parallel_entropy_and_topk_overlap(
    inp: Tensor,
    teacher_ids: Tensor,
    *,
    temperature: float = 1.0,
    loss_weight: Tensor | None = None,
    dist_process_group: dist.ProcessGroup | None = None,
    vocab_range: tuple[int, int] | None = None,
    true_vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute diagnostics without gradient; one pass over the logits plus a top-k, one collective.

    Args:
        teacher_ids: int32 or int64 ``[rows, K]``.
        loss_weight: serves as a mask; rows of weight 0 return 0.

    Returns:
        entropy of the student in nats ``[rows]``, and overlap ``[rows]``: the share of the teacher's ids (those in the
        vocabulary) among the student's K most probable.
    """
    call = open_call(inp, temperature, loss_weight, dist_process_group, vocab_range, true_vocab_size, backend="chunked")
    checks.check_columns("teacher_ids", teacher_ids, call.rows, "int")
    if teacher_ids.dim() != len(call.rows) + 1 or teacher_ids.size(-1) > call.shard.vocab_size:
        raise ValueError(
            f"teacher_ids is {list(teacher_ids.shape)}: pass {list(call.rows)} + [K] with K <= {call.shard.vocab_size}"
        )
    if call.shard.vocab_size > LARGEST_EXACT_ID:
        raise ValueError(f"true_vocab_size is {call.shard.vocab_size}: ids above {LARGEST_EXACT_ID} do not fit")
    ids = call.flat(teacher_ids).long()
    entropy, overlap = entropy_and_overlap(inp, ids, call)
    return entropy.view(call.rows), overlap.view(call.rows)


@torch.no_grad()
def _tail_of(
    inp: Tensor, call: LossCall, teacher: TeacherRows, target_logprobs: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the advantage of ``tail: sampled`` [T], and 1 where the sampled token is outside S [T]; a pass of its own
    over the logits."""
    assert teacher.target_T is not None and target_logprobs is not None
    ids = torch.cat([teacher.target_T.unsqueeze(1), torch.where(teacher.valid_TDK, teacher.ids_TDK, 0).flatten(1)], 1)
    logprobs, _ = _gather(inp.detach(), call, ids)
    outside = ~teacher.is_target_TN.any(1)
    advantage = tail_advantage(
        logprobs[:, 0], logprobs[:, 1:], call.logprobs("target_logprobs", target_logprobs), teacher
    )
    return call.only_active(torch.where(outside, advantage, 0)), outside.to(call.dtype)


def _gather(inp: Tensor, call: LossCall, ids_TN: Tensor) -> tuple[Tensor, Tensor]:
    """Return differentiable log-probs ``[T, N]`` and log-sum-exp ``[T]``; 0 on rows of weight 0."""
    if call.on_triton(ids_TN.size(1)):
        from mopd.losses.triton.functions import TritonGather

        logprobs, lse = TritonGather.apply(inp, call, ids_TN.contiguous())
    elif call.layer == "reference":
        logprobs, lse = reference.gather(inp, call, ids_TN.long())
    else:
        logprobs, lse = chunked.GatherLogProbs.apply(inp, call, ids_TN.long())
    return logprobs, lse


def _sampled_rows(
    inp: Tensor, call: LossCall, target: Tensor, teacher_logprobs: Tensor, *, beside: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the sampled tokens' log-probs: the student's, differentiable, [T], or [T, 1 + N] with those of ids
    ``beside`` [T, N] after them; and the teacher's [T]."""
    ids = call.ids("target", target)
    teacher = call.logprobs("teacher_logprobs", teacher_logprobs)
    if call.check_values:
        checks.check_targets(ids, teacher, call.active_T, call.shard.vocab_size)
    if beside is None:
        return _gather(inp, call, ids.unsqueeze(1))[0].squeeze(1), teacher
    return _gather(inp, call, torch.cat([ids.unsqueeze(1).to(beside.dtype), beside], 1))[0], teacher


def _rollout_rows(call: LossCall, rollout_logprobs: Tensor | None) -> Tensor | None:
    return None if rollout_logprobs is None else call.logprobs("rollout_logprobs", rollout_logprobs, sampled=True)


def open_call(
    inp: Tensor,
    temperature: float = 1.0,
    loss_weight: Tensor | None = None,
    dist_process_group: dist.ProcessGroup | None = None,
    vocab_range: tuple[int, int] | None = None,
    true_vocab_size: int | None = None,
    overwrite_input: bool = False,
    backend: str = "auto",
    check_values: bool = False,
) -> LossCall:
    """Check the arguments that all functions share. Raise ValueError."""
    world_size = 1 if dist_process_group is None else dist.get_world_size(dist_process_group)
    checks.check_logits(inp, temperature, backend, overwrite_input, world_size)
    rows, dtype = tuple(inp.shape[:-1]), accumulation_dtype(inp)
    shard = resolve_shard(inp.size(-1), dist_process_group, vocab_range, true_vocab_size)
    layer, weight = resolve_layer(backend, inp), None
    if loss_weight is not None:
        checks.check_rows("loss_weight", loss_weight, rows, "float")
        weight = loss_weight.detach().flatten().to(dtype)
    return LossCall(rows, shard, layer, dtype, weight, temperature, backend, overwrite_input, check_values)


def resolve_layer(backend: str, inp: Tensor) -> str:
    """Return the layer that serves a call: ``auto`` becomes triton for CUDA logits that it can take, else chunked.

    Raise ValueError if ``triton`` is asked for by name and cannot serve the call.
    """
    if backend == "auto":
        return "triton" if inp.is_cuda and inp.dtype in TRITON_DTYPES and _has_triton() else "chunked"
    if backend != "triton":
        return backend
    if not _has_triton():
        raise ValueError("backend is 'triton' and triton is not installed: install it or set 'chunked'")
    if inp.dtype not in TRITON_DTYPES:
        raise ValueError(
            f"backend is 'triton' and inp is {inp.dtype}: pass bfloat16, float16 or float32, or set 'chunked'"
        )
    if not inp.is_cuda:
        from mopd.losses.triton.streaming import INTERPRETED

        if not INTERPRETED:
            raise ValueError(
                f"backend is 'triton' and inp is on {inp.device}: set 'chunked', "
                "or TRITON_INTERPRET=1 before the program starts"
            )
    return backend


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None

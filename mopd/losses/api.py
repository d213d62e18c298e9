"""The public functions: TransformerEngine's naming and Megatron-Core's layouts, without importing either.

Formulas: ``docs/losses.md``. What all of them share:

``inp``
    student logits of this rank's vocabulary shard, ``[T, V/tp]``, ``[S, B, V/tp]`` or ``[B, S, V/tp]``, any strides;
    bf16, fp16, fp32 (float64 for tests). The leading dims are the *rows*; every other argument has them too.
``temperature``
    divides the logits; the teacher's log-probs must have been made with the same one.
``loss_weight``
    float ``[rows]``, multiplies each row's loss (``aggregation.token_weights`` makes it). Rows of weight 0 have loss 0
    and a gradient of exactly 0; what their ids and log-probs hold does not matter.
``dist_process_group``
    the tensor-parallel group, None for a single rank. Loss and gradient are those of the joined logits.
``vocab_range``
    ``(start, end)`` ids of this rank's columns; None means equal shards in rank order.
``true_vocab_size``
    columns from this id on are padding: probability 0, gradient 0.
``reduce_loss``
    True returns the *sum* of the (weighted) row losses: denominators belong into ``loss_weight``.
``overwrite_input``
    backward writes the gradient over ``inp`` (contiguous only); a second backward then raises RuntimeError.
``is_cg_capturable``
    promises a CUDA graph can capture the call; excludes ``check_values``.
``backend``
    ``triton`` (CUDA kernels; no float64 logits), ``chunked`` (any device, bounded memory), ``reference`` (float64
    autograd, single rank), ``auto``: triton on CUDA where it is installed and fits, else chunked.
``check_values``
    also checks numbers (id range, NaN, mass above 1 + 1e-4); waits for the device.

Row losses and metrics are fp32 (float64 for float64 logits); gradients have the dtype of ``inp``, rounded once. Metrics
are detached. Wrong shapes, dtypes or option values raise ValueError.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.losses import checks
from mopd.losses.call import Call, open_call
from mopd.losses.diagnostics import LARGEST_EXACT_ID, entropy_and_overlap
from mopd.losses.layers import chunked_topk, reference_topk, teacher_rows, triton_topk
from mopd.losses.policy_gradient import Surrogate, policy_gradient
from mopd.losses.sampled import check_estimator, sampled_kl
from mopd.losses.topk import Objective

Backend = Literal["auto", "reference", "chunked", "triton"]
Metrics = dict[str, Tensor]


def parallel_topk_distill(
    inp: Tensor,
    teacher_ids: Tensor,
    teacher_logprobs: Tensor,
    *,
    loss: str = "forward_kl",
    tail: str = "bucket",
    beta: float = 0.5,
    temperature: float = 1.0,
    logprob_min_clamp: float | None = None,
    loss_max_clamp: float | None = None,
    loss_soft_cap: float | None = None,
    loss_weight: Tensor | None = None,
    teacher_weights: Tensor | None = None,
    target: Tensor | None = None,
    with_entropy: bool = False,
    reduce_loss: bool = False,
    dist_process_group: dist.ProcessGroup | None = None,
    vocab_range: tuple[int, int] | None = None,
    true_vocab_size: int | None = None,
    overwrite_input: bool = False,
    is_cg_capturable: bool = False,
    backend: Backend = "auto",
    check_values: bool = False,
) -> tuple[Tensor, Metrics]:
    """Divergence between teacher and student on the teacher's top-k ids of each row.

    Args:
        inp: see the module docstring, as for all arguments not named here.
        teacher_ids: int32 or int64 ``[rows, K]``, or ``[rows, D, K]`` for D teachers per row, whose losses are added
            up with ``teacher_weights``. Ids >= ``true_vocab_size`` count in the teacher's tail.
        teacher_logprobs: fp32 or float64, same shape: log-probs over the teacher's whole vocabulary. Entries of -inf
            leave S.
        loss: ``forward_kl`` = KL(teacher || student), ``reverse_kl`` = KL(student || teacher), or ``jsd``.
        tail: ``bucket`` (all other ids are one outcome), ``generalized`` (unnormalised KL), ``renormalize``
            (conditional on S) or ``none`` (truncated sum).
        beta: teacher's weight in the mixture of ``jsd``; 0 is forward and 1 reverse KL.
        logprob_min_clamp: floor of both log-probs in the terms of S; gradient of those terms is 0 where it holds the
            student. The tail's own term keeps the unclamped masses.
        loss_max_clamp: per teacher, min(loss, c), gradient 0 above c.
        loss_soft_cap: per teacher, c (1 + log(loss / c)) above c, gradient times c / loss.
        teacher_weights: fp32 ``[rows, D]``, required for D > 1; a teacher of weight 0 is ignored on that row.
        target: int64 ``[rows]``, the sampled token; adds its log-prob to the metrics at no extra pass.
        with_entropy: adds the student's entropy to the metrics; no extra pass in the Triton layer.

    Returns:
        loss ``[rows]`` (or the sum) and metrics ``[rows]``: ``unweighted_loss``; ``teacher_mass`` and
        ``student_mass`` on S; ``clamped`` 1 where a clamp or cap bites; ``clamped_entries``, the share of S whose
        student log-prob is held; ``tail_floored`` 1 where a tail is below 1e-6; ``student_logprobs`` with ``target``;
        ``entropy`` in nats.
    """
    call = open_call(
        inp,
        temperature=temperature,
        loss_weight=loss_weight,
        dist_process_group=dist_process_group,
        vocab_range=vocab_range,
        true_vocab_size=true_vocab_size,
        overwrite_input=overwrite_input,
        is_cg_capturable=is_cg_capturable,
        backend=backend,
        check_values=check_values,
    )
    checks.check_choice(loss, tail, beta)
    checks.check_caps(logprob_min_clamp, loss_max_clamp, loss_soft_cap)
    checks.check_teacher(call.rows, teacher_ids, teacher_logprobs, teacher_weights, call.shard.vocab_size)
    objective = Objective(loss, tail, beta, temperature, logprob_min_clamp, loss_max_clamp, loss_soft_cap)
    teacher_side = (call, teacher_ids, teacher_logprobs, teacher_weights, target)
    per_row = teacher_ids.shape[len(call.rows) :]
    if call.on_triton(per_row.numel(), per_row[:-1].numel()):
        row_loss, metrics = triton_topk(objective, *teacher_side, with_entropy)
    elif call.reference:
        row_loss, metrics = reference_topk(call, objective, teacher_rows(*teacher_side), with_entropy)
    else:
        row_loss, metrics = chunked_topk(call, objective, teacher_rows(*teacher_side), with_entropy)
    return call.finish(row_loss, metrics, reduce_loss)


def parallel_gather_logprobs(
    inp: Tensor,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    loss_weight: Tensor | None = None,
    dist_process_group: dist.ProcessGroup | None = None,
    vocab_range: tuple[int, int] | None = None,
    true_vocab_size: int | None = None,
    overwrite_input: bool = False,
    is_cg_capturable: bool = False,
    backend: Backend = "auto",
    check_values: bool = False,
) -> tuple[Tensor, Tensor]:
    """The primitive: log-probs of ``ids`` (int32 or int64 ``[rows, K]``), differentiable.

    ``loss_weight`` serves as a mask here: rows of weight 0 return 0 and get no gradient; others are not scaled.

    Returns:
        log-probs ``[rows, K]`` (-inf for ids outside the true vocabulary), log-sum-exp of the scaled logits ``[rows]``.
    """
    call = open_call(
        inp,
        temperature=temperature,
        loss_weight=loss_weight,
        dist_process_group=dist_process_group,
        vocab_range=vocab_range,
        true_vocab_size=true_vocab_size,
        overwrite_input=overwrite_input,
        is_cg_capturable=is_cg_capturable,
        backend=backend,
        check_values=check_values,
    )
    checks.check_columns("ids", ids, call.rows, "int")
    if ids.dim() != len(call.rows) + 1:
        raise ValueError(f"ids is {list(ids.shape)}: inp has rows {list(call.rows)}, pass {list(call.rows)} + [K]")
    flat = call.flat(ids)
    if check_values:
        active = None if call.active_T is None else call.active_T.unsqueeze(1).expand_as(flat)
        checks.check_targets(flat, None, active, call.shard.vocab_size)
    logprobs, lse = call.gather(flat)
    return logprobs.view(ids.shape), lse.view(call.rows)


def parallel_sampled_kl(
    inp: Tensor,
    target: Tensor,
    teacher_logprobs: Tensor,
    estimator: str,
    *,
    temperature: float = 1.0,
    loss_max_clamp: float | None = None,
    loss_weight: Tensor | None = None,
    reduce_loss: bool = False,
    dist_process_group: dist.ProcessGroup | None = None,
    vocab_range: tuple[int, int] | None = None,
    true_vocab_size: int | None = None,
    overwrite_input: bool = False,
    is_cg_capturable: bool = False,
    backend: Backend = "auto",
    check_values: bool = False,
) -> tuple[Tensor, Metrics]:
    """KL estimator from the sampled token; Delta = student - teacher log-prob of ``target``.

    Args:
        target: int64 ``[rows]``, tokens sampled from the student at this temperature.
        teacher_logprobs: fp32 ``[rows]``, the teacher's log-prob of ``target``.
        estimator: ``k2`` (gradient of the reverse KL), ``k3`` (gradient of the *forward* KL, although its value
            estimates the reverse KL), or ``k3_reverse`` (k3's value with k2's gradient). ``k1`` raises ValueError: the
            expectation of its gradient is 0.
        loss_max_clamp: min(loss, c), gradient 0 above c.

    Returns:
        loss ``[rows]`` (or the sum) and metrics ``[rows]``: ``unweighted_loss``, ``student_logprobs``, ``k1`` (Delta),
        ``clamped``.
    """
    check_estimator(estimator)
    checks.check_caps(None, loss_max_clamp, None)
    call = open_call(
        inp,
        temperature=temperature,
        loss_weight=loss_weight,
        dist_process_group=dist_process_group,
        vocab_range=vocab_range,
        true_vocab_size=true_vocab_size,
        overwrite_input=overwrite_input,
        is_cg_capturable=is_cg_capturable,
        backend=backend,
        check_values=check_values,
    )
    logprobs, teacher = _sampled_rows(call, target, teacher_logprobs)
    delta = logprobs - teacher
    clamped = torch.zeros_like(delta, dtype=torch.bool)
    if loss_max_clamp is not None:
        clamped = sampled_kl(delta.detach(), estimator) > loss_max_clamp
    value = sampled_kl(torch.where(clamped, 0, delta), estimator)  # autograd would make NaN of an infinity times 0
    value = value if loss_max_clamp is None else torch.where(clamped, loss_max_clamp, value)
    metrics = {
        "unweighted_loss": value,
        "student_logprobs": logprobs,
        "k1": delta,
        "clamped": clamped,
    }
    return call.finish(call.weighted(value), call.masked(metrics), reduce_loss)


def parallel_policy_gradient(
    inp: Tensor,
    target: Tensor,
    teacher_logprobs: Tensor,
    *,
    task_advantage: Tensor | None = None,
    task_reward_weight: float = 0.0,
    old_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    dual_clip: float | None = None,
    correction: tuple[str, float, float] | None = None,
    advantage: str = "k1",
    temperature: float = 1.0,
    loss_weight: Tensor | None = None,
    reduce_loss: bool = False,
    dist_process_group: dist.ProcessGroup | None = None,
    vocab_range: tuple[int, int] | None = None,
    true_vocab_size: int | None = None,
    overwrite_input: bool = False,
    is_cg_capturable: bool = False,
    backend: Backend = "auto",
    check_values: bool = False,
) -> tuple[Tensor, Metrics]:
    """Policy gradient with the detached advantage A = -(student - teacher log-prob) + weight x task advantage.

    Args:
        target: int64 ``[rows]``, the sampled tokens.
        teacher_logprobs: fp32 ``[rows]``, the teacher's log-prob of ``target``.
        task_advantage: fp32 ``[rows]``; needed where ``task_reward_weight`` is not 0.
        old_logprobs: fp32 ``[rows]``, p_old of the PPO ratio; None means the student's own of this pass (ratio 1).
        rollout_logprobs: fp32 ``[rows]``, the sampler's log-probs; needed by ``correction``.
        clip_ratio_low, clip_ratio_high: PPO clips rho to [1 - low, 1 + high].
        dual_clip: c > 1 bounds the loss by c |A| where A < 0; None means no bound.
        correction: ``("tis" | "icepop" | "gate", low, high)``, see ``mopd.losses.policy_gradient``; None: weight 1.
        advantage: only ``k1``; k2 and k3 raise ValueError, they do not give the gradient of the reverse KL.

    Returns:
        loss ``[rows]`` (or the sum) and metrics ``[rows]``: ``unweighted_loss``, ``student_logprobs``, ``k1`` (Delta),
        ``ratio``, ``clip_fraction`` (0/1), ``correction_weight``, ``advantage``.
    """
    _check_advantage(advantage, task_advantage, task_reward_weight)
    surrogate = Surrogate(clip_ratio_low, clip_ratio_high, dual_clip, correction)
    surrogate.check(old=old_logprobs is not None, rollout=rollout_logprobs is not None)
    call = open_call(
        inp,
        temperature=temperature,
        loss_weight=loss_weight,
        dist_process_group=dist_process_group,
        vocab_range=vocab_range,
        true_vocab_size=true_vocab_size,
        overwrite_input=overwrite_input,
        is_cg_capturable=is_cg_capturable,
        backend=backend,
        check_values=check_values,
    )
    logprobs, teacher = _sampled_rows(call, target, teacher_logprobs)
    delta = (logprobs - teacher).detach()
    total_advantage = -delta
    if task_advantage is not None:
        total_advantage = total_advantage + task_reward_weight * call.number("task_advantage", task_advantage)
    old = None if old_logprobs is None else call.logprobs("old_logprobs", old_logprobs, sampled=True)
    rollout = None if rollout_logprobs is None else call.logprobs("rollout_logprobs", rollout_logprobs, sampled=True)
    value, metrics = policy_gradient(logprobs, total_advantage, surrogate, old, rollout)
    metrics |= {"unweighted_loss": value, "student_logprobs": logprobs, "k1": delta}
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
    """Diagnostics without gradient; one pass over the logits plus a top-k, one collective.

    Args:
        teacher_ids: int32 or int64 ``[rows, K]``.
        loss_weight: serves as a mask; rows of weight 0 return 0.

    Returns:
        entropy of the student in nats ``[rows]``, and overlap ``[rows]``: the share of the teacher's ids (those in the
        vocabulary) among the student's K most probable.
    """
    call = open_call(
        inp,
        temperature=temperature,
        loss_weight=loss_weight,
        dist_process_group=dist_process_group,
        vocab_range=vocab_range,
        true_vocab_size=true_vocab_size,
        overwrite_input=False,
        is_cg_capturable=False,
        backend="chunked",
        check_values=False,
    )
    checks.check_columns("teacher_ids", teacher_ids, call.rows, "int")
    if teacher_ids.dim() != len(call.rows) + 1 or teacher_ids.size(-1) > call.shard.vocab_size:
        raise ValueError(
            f"teacher_ids is {list(teacher_ids.shape)}: pass {list(call.rows)} + [K] with K <= {call.shard.vocab_size}"
        )
    if call.shard.vocab_size > LARGEST_EXACT_ID:
        raise ValueError(f"true_vocab_size is {call.shard.vocab_size}: ids above {LARGEST_EXACT_ID} do not fit")
    ids = call.flat(teacher_ids).long()
    entropy, overlap = entropy_and_overlap(inp, ids, call.shard, temperature, call.active_T)
    return entropy.view(call.rows), overlap.view(call.rows)


def fused_vocab_parallel_topk_kl(
    logits: Tensor, ids: Tensor, logprobs: Tensor, tp_group: dist.ProcessGroup | None
) -> Tensor:
    """Megatron-Core's calling style: forward KL with the tail bucket, row losses only."""
    return parallel_topk_distill(logits, ids, logprobs, dist_process_group=tp_group)[0]


def _sampled_rows(call: Call, target: Tensor, teacher_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of the sampled tokens: the student's, differentiable, and the teacher's."""
    ids = call.ids("target", target)
    teacher = call.logprobs("teacher_logprobs", teacher_logprobs)
    if call.check_values:
        checks.check_targets(ids, teacher, call.active_T, call.shard.vocab_size)
    return call.gather(ids.unsqueeze(1))[0].squeeze(1), teacher


def _check_advantage(advantage: str, task_advantage: Tensor | None, task_reward_weight: float) -> None:
    if advantage != "k1":
        raise ValueError(
            f"advantage is {advantage!r}: only k1 is unbiased (E[k3 grad log p] = grad reverse KL - grad forward KL, "
            "almost no signal; k2 fails likewise); set k1"
        )
    if (task_advantage is None) != (task_reward_weight == 0):
        given = "is missing" if task_advantage is None else "is given"
        raise ValueError(f"task_advantage {given} and task_reward_weight is {task_reward_weight}: set both or neither")

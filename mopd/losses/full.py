"""Divergences over the whole vocabulary, for a teacher whose logits can be formed beside the student's.

``parallel_full_distill`` takes the logits of both, ``linear_full_distill`` the hidden states and LM heads of both, of
which the teacher's own head and the states before it are all that is needed of the teacher. The arguments that other
losses share are explained in ``mopd.losses.api``.

Shape legend: T rows of the whole batch, N rows that are computed, R rows of a chunk, H hidden sizes (of student and
teacher), V columns of this rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from mopd.losses import checks, reference
from mopd.losses.api import Metrics, Shared, open_call, open_task
from mopd.losses.call import accumulation_dtype
from mopd.losses.chunked.full import CHUNKED, FullDistill, FullLoss
from mopd.losses.linear.head import LinearHead, Rows, check_factors, matmul_into
from mopd.losses.linear.loss import linear_loss
from mopd.losses.sampled import TASK_METRICS

if TYPE_CHECKING:
    from typing_extensions import Unpack


def parallel_full_distill(
    inp: Tensor,
    teacher_logits: Tensor,
    *,
    loss: str = "forward_kl",
    beta: float = 0.5,
    skew: float = 0.0,
    target: Tensor | None = None,
    task_advantage: Tensor | None = None,
    task_reward_weight: float = 0.0,
    rollout_logprobs: Tensor | None = None,
    correction: tuple[str, float, float] | None = None,
    reduce_loss: bool = False,
    **shared: Unpack[Shared],
) -> tuple[Tensor, Metrics]:
    """Compute the divergence between teacher and student over the whole vocabulary.

    One all-gather of 5 numbers a row (7 with ``target``), for ``jsd`` and skewed forms one more of 2.

    Args:
        inp: student logits; see ``mopd.losses.api``, as for all arguments not named here.
        teacher_logits: the same shape, any float dtype: the teacher's logits of the same ids. The temperature divides
            them too; they get no gradient.
        loss: ``forward_kl`` = KL(teacher || student), ``reverse_kl`` = KL(student || teacher), or ``jsd``.
        beta: teacher's weight in the mixture of ``jsd``; 0 is forward and 1 reverse KL.
        skew: with q the teacher and p the student, ``forward_kl`` becomes KL(q || skew q + (1 - skew) p) and
            ``reverse_kl`` KL(p || skew p + (1 - skew) q); 0 is the plain form.
        target: int64 ``[rows]``, the sampled token; adds both log-probs of it to the metrics.
        task_advantage: fp32 ``[rows]``; the policy gradient of weight x advantage of ``target`` joins each row's loss
            in the same passes, as in ``parallel_topk_distill``.
        task_reward_weight: that weight; not 0 with ``task_advantage``, else 0.
        rollout_logprobs: fp32 ``[rows]``, the sampler's log-probs of ``target``; needed by ``correction``.
        correction: ``("tis" | "icepop" | "gate", low, high)`` of that term, see ``mopd.losses.sampled``.

    Returns:
        loss ``[rows]`` (or the sum) and metrics ``[rows]``: ``unweighted_loss``; with ``target`` ``student_logprobs``
        and ``teacher_logprobs``; with ``task_advantage`` ``task_loss`` and ``correction_weight``.
    """
    checks.check_full(loss, beta, skew)
    call = open_call(inp, **shared)
    if teacher_logits.shape != inp.shape or not teacher_logits.is_floating_point():
        raise ValueError(
            f"teacher_logits is {teacher_logits.dtype} {list(teacher_logits.shape)}: "
            f"pass float logits of the same ids, {list(inp.shape)}"
        )
    target_T = None if target is None else call.ids("target", target).long()
    if target_T is not None and call.check_values:
        checks.check_targets(target_T, None, call.active_T, call.shard.vocab_size)
    teacher_TV = call.flat(teacher_logits.detach())
    if loss == "jsd" and beta in (0, 1):
        loss = "reverse_kl" if beta else "forward_kl"
    kind = FullLoss(loss, beta, skew)
    task = open_task(call, target, task_advantage, task_reward_weight, rollout_logprobs, correction)
    if call.layer == "reference":
        return call.finish(*reference.full_rows(inp, teacher_TV, call, kind, target_T, task), reduce_loss)
    passes = CHUNKED
    if call.layer == "triton":
        from mopd.losses.triton.full import TRITON as passes
    row_loss, *extra = FullDistill.apply(inp, teacher_TV, call, kind, target_T, task, passes)
    names = ["unweighted_loss", *(() if target is None else ("student_logprobs", "teacher_logprobs"))]
    names += TASK_METRICS if task else ()
    return call.finish(row_loss, dict(zip(names, extra, strict=True)), reduce_loss)


def linear_full_distill(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    memory_budget: int,
    head: LinearHead | None = None,
    loss: str = "forward_kl",
    beta: float = 0.5,
    skew: float = 0.0,
    target: Tensor | None = None,
    task_advantage: Tensor | None = None,
    task_reward_weight: float = 0.0,
    rollout_logprobs: Tensor | None = None,
    correction: tuple[str, float, float] | None = None,
    **shared: Unpack[Shared],
) -> tuple[Tensor, Metrics]:
    """Return the sum of ``parallel_full_distill`` over the rows of two LM heads without bias, of which only a few rows
    of logits exist at a time, and its metrics ``[rows]``. Backward must start here, with gradient 1.

    Nothing is computed twice: four matrix products, the student's three and one of the teacher's. The gradients of
    ``hidden`` and ``weight`` are those of ``linear_loss``: summed over ranks, and in ``weight.main_grad`` if that
    exists. Several teachers are several calls, each with the ``row_index`` of its own rows.

    Args:
        hidden: ``[T, H]`` or ``[S, B, H]`` of the student (``[S/tp, B, H]`` under sequence parallelism).
        weight: ``[V/tp, H]``, this rank's rows of the student's head.
        teacher_hidden: ``[T, H]`` or ``[S, B, H]`` of the teacher, all rows on every rank: what its head takes, after
            the final norm.
        teacher_weight: ``[V/tp, H]``, the rows of the teacher's head for the same ids, one dtype with its hidden
            states. Its logits are formed in fp32 and never rounded to less.
        memory_budget: bytes that logits of both sides, and what ``LinearHead.rows_within`` counts, may take.
        head: the tensor-parallel group and the rows to compute; None means one rank and all rows. The group must not be
            in ``shared``.

    Raises:
        ValueError: shapes or dtypes that make no logits, heads of different vocabularies, or a budget that not even
            one row keeps.
    """
    head = LinearHead() if head is None else head
    checks.check_full(loss, beta, skew)
    _check_teacher(hidden, weight, teacher_hidden, teacher_weight, head)
    if "dist_process_group" in shared:
        raise ValueError("dist_process_group is given: pass it as the group of head")
    wide = accumulation_dtype(teacher_weight)
    at_once = head.rows_within(memory_budget, hidden, weight, weight.size(0) * wide.itemsize)
    states = teacher_hidden.detach().flatten(0, -2)
    options: dict[str, Any] = {**shared, "loss": loss, "beta": beta, "skew": skew, "dist_process_group": head.group}
    options |= {"task_reward_weight": task_reward_weight, "correction": correction}
    numbers = {
        "loss_weight": options.pop("loss_weight", None),
        "target": target,
        "task_advantage": task_advantage,
        "rollout_logprobs": rollout_logprobs,
    }
    flat = {name: x.flatten() for name, x in numbers.items() if x is not None}
    overwrite = options.pop("overwrite_input", True) and options.get("backend") != "reference"
    buffer = teacher_weight.new_empty(min(at_once, head.num_rows(hidden)), weight.size(0), dtype=wide)

    def row_loss(logits: Tensor, rows: Rows) -> tuple[Tensor, Metrics]:
        part = rows.of(states)
        teacher_logits = buffer[: part.size(0)]
        matmul_into(teacher_logits, part, teacher_weight.detach().t(), accumulate=False)
        own: dict[str, Any] = {name: rows.of(x) for name, x in flat.items()}
        own["overwrite_input"] = overwrite and logits.requires_grad
        return parallel_full_distill(logits, teacher_logits, **own, **options)

    return linear_loss(hidden, weight, row_loss, head, at_once)


def _check_teacher(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, head: LinearHead
) -> None:
    """Raise ValueError if the teacher's factors make no logits of the student's rows and ids."""
    check_factors(hidden, weight)
    check_factors(teacher_hidden, teacher_weight)
    if teacher_weight.size(0) != weight.size(0):
        raise ValueError(
            f"teacher_weight has {teacher_weight.size(0)} rows and weight {weight.size(0)}: "
            "cut both heads to the same ids, padding included"
        )
    rows = head.row_shape(hidden)
    if teacher_hidden.shape[:-1].numel() != rows.numel():
        raise ValueError(
            f"teacher_hidden is {list(teacher_hidden.shape)} and hidden has rows {list(rows)}: pass one state a row"
        )

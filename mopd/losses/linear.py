"""``linear_topk_distill``: LM head and top-k loss in one, for memory. Formulas: ``docs/losses.md``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.losses import checks
from mopd.losses.api import Backend, Metrics, parallel_topk_distill
from mopd.losses.call import open_call
from mopd.losses.layers import teacher_rows
from mopd.losses.linear_chunks import linear_loss, materialized, spread
from mopd.losses.linear_head import Head, Rows, row_shape
from mopd.losses.linear_plan import Plan, head_plan
from mopd.losses.linear_slices import Cut, SlicedJob, SlicedTopKDistill
from mopd.losses.rows import SYNCHRONOUS_DEVICES
from mopd.losses.topk import METRICS, Objective
from mopd.losses.vocab_parallel import resolve_shard

Strategy = Literal["auto", "materialize", "token_chunks", "vocab_slices"]


def linear_topk_distill(
    hidden: Tensor,
    weight: Tensor,
    teacher_ids: Tensor,
    teacher_logprobs: Tensor,
    *,
    memory_budget: int,
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
    is_cg_capturable: bool = False,
    backend: Backend = "auto",
    check_values: bool = False,
    strategy: Strategy = "auto",
    row_index: Tensor | None = None,
    sequence_parallel: bool = False,
    gradient_accumulation_fusion: bool = False,
    dummy_weight_grad: bool = False,
    unit_upstream: bool = False,
) -> tuple[Tensor, Metrics]:
    """``parallel_topk_distill`` on ``hidden @ weight.T`` without holding more than ``memory_budget`` bytes of logits.

    Loss, gradients and metrics are those of the materialised logits. What is not named here is as there.

    Args:
        hidden: ``[T, H]`` or ``[S, B, H]``; with ``sequence_parallel`` this rank's share ``[S/tp, B, H]``.
        weight: ``[V/tp, H]``, same dtype; a head without bias.
        memory_budget: bytes of logits and gradient buffers that may live besides inputs, results, ``[T, K]`` numbers
            and a few megabytes of scratch; equal on all ranks. See ``mopd.losses.linear_plan``.
        reduce_loss: True allows the fastest of the frugal strategies, which forms gradients in forward; it hands them
            out to one backward only.
        vocab_range: None (equal shards) spares a small collective and its wait for the device.
        strategy: ``materialize``, ``token_chunks``, ``vocab_slices``, or ``auto``, the fastest that keeps the budget.
        row_index: int64 ``[N]``, N >= 1, ascending: the flat numbers of the rows to compute; all others count as rows
            of weight 0 and cost nothing. On the CPU the rows of weight 0 are left out without it.
        sequence_parallel: gather ``hidden`` inside, reduce-scatter its gradient.
        gradient_accumulation_fusion: add the weight gradient to ``weight.main_grad`` (any float dtype) and set
            ``weight.grad_added_to_main_grad``; autograd gets none.
        dummy_weight_grad: hand autograd zeros in that case, which Megatron's DDP needs under ``overlap_grad_reduce``.
        unit_upstream: promises that nothing scales the reduced loss before backward; then ``token_chunks`` adds to
            ``main_grad`` in forward and holds no weight gradient of its own. A broken promise raises RuntimeError on
            the CPU; on a device, where looking would wait for it, it makes the norms of the gradients NaN.

    Raises:
        ValueError: shapes, dtypes, option values, or a budget that no strategy can keep.
    """
    head = Head(dist_process_group, sequence_parallel, gradient_accumulation_fusion, dummy_weight_grad)
    rows = _checked_rows(hidden, weight, head)
    objective = Objective(loss, tail, beta, temperature, logprob_min_clamp, loss_max_clamp, loss_soft_cap)
    shared = _Shared(
        dist_process_group, vocab_range, true_vocab_size, is_cg_capturable, backend, check_values, with_entropy
    )
    data = _flat(rows, loss_weight=loss_weight, teacher_weights=teacher_weights, target=target)
    data |= _flat_teacher(rows, weight, shared, teacher_ids, teacher_logprobs, teacher_weights)
    index_N = _computed_rows(rows, loss_weight, row_index)
    plan = head_plan(
        hidden,
        weight,
        head,
        memory_budget=memory_budget,
        num_rows=torch.Size(rows).numel() if index_N is None else index_N.numel(),
        strategy=strategy,
        scalar=reduce_loss,
        sliceable=backend != "reference",
        unit_upstream=unit_upstream,
        equal_shards=vocab_range is None,
    )
    if plan.strategy == "vocab_slices":
        losses, metrics = _sliced(hidden, weight, head, index_N, plan, data, objective, shared)
        return (losses.sum() if reduce_loss else losses), metrics
    run = partial(_row_loss, data, objective, shared)
    if reduce_loss:
        return linear_loss(hidden, weight, run, plan=plan, head=head, index_N=index_N, unit_upstream=unit_upstream)
    return materialized(hidden, weight, run, head=head, index_N=index_N)


@dataclass(frozen=True)
class _Shared:
    """Options of every function of this package, passed on as they are."""

    dist_process_group: dist.ProcessGroup | None
    vocab_range: tuple[int, int] | None
    true_vocab_size: int | None
    is_cg_capturable: bool
    backend: Backend
    check_values: bool
    with_entropy: bool


def _row_loss(
    data: dict[str, Tensor], objective: Objective, shared: _Shared, logits: Tensor, rows: Rows
) -> tuple[Tensor, Metrics]:
    """The loss of some rows, from their logits."""
    own: dict[str, Any] = {name: rows.of(value) for name, value in data.items()}
    overwrite = logits.requires_grad and shared.backend != "reference"
    return parallel_topk_distill(logits, **own, **vars(objective), **vars(shared), overwrite_input=overwrite)


def _sliced(
    hidden: Tensor,
    weight: Tensor,
    head: Head,
    index_N: Tensor | None,
    plan: Plan,
    data: dict[str, Tensor],
    objective: Objective,
    shared: _Shared,
) -> tuple[Tensor, Metrics]:
    """Row losses and metrics ``[rows]`` by vocabulary slices."""
    total = torch.Size(row_shape(hidden, head)).numel()
    num_rows = total if index_N is None else index_N.numel()
    own = {name: Rows(index_N, 0, num_rows).of(value) for name, value in data.items()}
    checks.check_choice(objective.loss, objective.tail, objective.beta)
    checks.check_caps(objective.logprob_min_clamp, objective.loss_max_clamp, objective.loss_soft_cap)
    absent = weight.new_empty(()).expand(num_rows, weight.size(0))  # logits in shape and type only
    call = open_call(
        absent,
        temperature=objective.temperature,
        loss_weight=own.get("loss_weight"),
        overwrite_input=False,
        dist_process_group=shared.dist_process_group,
        vocab_range=shared.vocab_range,
        true_vocab_size=shared.true_vocab_size,
        is_cg_capturable=shared.is_cg_capturable,
        backend=shared.backend,
        check_values=shared.check_values,
    )
    cut = Cut(head, index_N, call.shard, plan.columns, plan.slices)
    teacher = (call, own["teacher_ids"], own["teacher_logprobs"], own.get("teacher_weights"), own.get("target"))
    per_row = own["teacher_ids"].shape[1:]
    if call.on_triton(per_row.numel(), per_row[:-1].numel()):
        from mopd.losses.linear_slices_triton import TritonJob, TritonSlicedTopK, teacher_lists

        lists = teacher_lists(*teacher)
        job = TritonJob(cut, objective, lists, call.weight_T, shared.with_entropy)
        losses, values = TritonSlicedTopK.apply(hidden, weight, job)
    else:
        sliced = SlicedJob(cut, objective, teacher_rows(*teacher), call.weight_T, call.active_T, shared.with_entropy)
        losses, *values = SlicedTopKDistill.apply(hidden, weight, sliced)
    names = [*METRICS] + ["student_logprobs"] * ("target" in own) + ["entropy"] * shared.with_entropy
    metrics = {name: spread(value, hidden, head, index_N) for name, value in zip(names, values, strict=True)}
    return spread(losses, hidden, head, index_N), metrics


def _checked_rows(hidden: Tensor, weight: Tensor, head: Head) -> tuple[int, ...]:
    """Rows of the logits."""
    good = hidden.dim() in (2, 3) and weight.dim() == 2 and hidden.size(-1) == weight.size(-1) and weight.numel() > 0
    if not good or hidden.dtype != weight.dtype or hidden.dtype not in checks.FLOATS:
        raise ValueError(
            f"hidden is {hidden.dtype} {list(hidden.shape)} and weight {weight.dtype} {list(weight.shape)}: "
            "pass float hidden [T, H] or [S, B, H] and weight [V/tp, H] of one dtype"
        )
    if head.sequence_parallel and head.group is None:
        raise ValueError("sequence_parallel is True but dist_process_group None: pass the tensor-parallel group")
    return row_shape(hidden, head)


def _flat(rows: tuple[int, ...], **per_row: Tensor | None) -> dict[str, Tensor]:
    """The arguments that were given, ``[rows, ...]`` as ``[T, ...]``."""
    flat = {}
    for name, value in per_row.items():
        if value is not None:
            if name in ("loss_weight", "target"):
                checks.check_rows(name, value, rows, "int" if name == "target" else "float")
            flat[name] = value.flatten(0, len(rows) - 1)
    return flat


def _flat_teacher(
    rows: tuple[int, ...], weight: Tensor, shared: _Shared, ids: Tensor, logprobs: Tensor, weights: Tensor | None
) -> dict[str, Tensor]:
    """The teachers' lists, checked, as ``[T, ...]``."""
    shard = resolve_shard(weight.size(0), shared.dist_process_group, shared.vocab_range, shared.true_vocab_size)
    checks.check_teacher(rows, ids, logprobs, weights, shard.vocab_size)
    return _flat(rows, teacher_ids=ids, teacher_logprobs=logprobs)


def _computed_rows(rows: tuple[int, ...], loss_weight: Tensor | None, row_index: Tensor | None) -> Tensor | None:
    """Numbers of the rows to compute, None for all."""
    if row_index is not None:
        if row_index.dtype != torch.int64 or row_index.dim() != 1 or row_index.numel() == 0:
            raise ValueError(
                f"row_index is {row_index.dtype} {list(row_index.shape)}: pass int64 [N] with at least one row"
            )
        return row_index
    if loss_weight is None or loss_weight.device.type not in SYNCHRONOUS_DEVICES:
        return None
    return choose_rows(loss_weight != 0)


def choose_rows(marks: Tensor) -> Tensor | None:
    """``row_index`` of the marked rows (bool ``[rows]``), None where all are. Waits for the device.

    Where none is, the first row stands in (its weight is 0): no kernel has to cope with an empty tensor.
    """
    index = marks.flatten().nonzero().flatten()
    if index.numel() == marks.numel():
        return None
    return index if index.numel() else index.new_zeros(1)

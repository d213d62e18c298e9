"""The LM head with a top-k loss behind it, as the student runs it, for tests that need no recipe."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.losses import LinearHead, choose_rows, linear_loss, parallel_topk_distill
from mopd.losses.linear.head import Rows


def linear_topk(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    logq: Tensor,
    *,
    rows_at_once: int | None = None,
    memory_budget: int | None = None,
    group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    row_index: Tensor | None = None,
    loss_weight: Tensor | None = None,
    teacher_weights: Tensor | None = None,
    target: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum of the losses and metrics ``[rows]``. All rows at once unless ``rows_at_once`` or a budget says otherwise;
    rows of weight 0 are left out."""
    given = {"teacher_ids": ids, "teacher_logprobs": logq, "loss_weight": loss_weight}
    given |= {"teacher_weights": teacher_weights, "target": target}
    data = {name: x.flatten(0, hidden.dim() - 2) for name, x in given.items() if x is not None}
    if row_index is None and loss_weight is not None:
        row_index = choose_rows(loss_weight != 0)
    head = LinearHead(group, sequence_parallel, row_index)
    if memory_budget is not None:
        rows_at_once = head.rows_within(memory_budget, hidden, weight)

    def row_loss(logits: Tensor, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        own: dict[str, Any] = {name: rows.of(x) for name, x in data.items()}
        overwrite = logits.requires_grad and options.get("backend") != "reference"
        return parallel_topk_distill(logits, **own, dist_process_group=group, overwrite_input=overwrite, **options)

    return linear_loss(hidden, weight, row_loss, head, head.num_rows(hidden) if rows_at_once is None else rows_at_once)


def with_main_grad(weight: Tensor, value: float = 0.0, dtype: torch.dtype | None = None) -> torch.nn.Parameter:
    """A copy of ``weight`` with a buffer for its gradient, as Megatron's DistributedDataParallel makes it."""
    parameter = torch.nn.Parameter(weight.detach().clone())
    parameter.main_grad = torch.full_like(parameter, value, dtype=dtype or weight.dtype)  # type: ignore[attr-defined]
    parameter.main_grad.requires_grad_(False)  # type: ignore[attr-defined]
    parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    return parameter

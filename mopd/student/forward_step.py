"""One pass of Megatron's pipeline schedule over this rank's micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from mopd.student.batch import MicroBatch
from mopd.student.model.gpt import HeadHook

HookFor = Callable[[MicroBatch], HeadHook]
"""What the last stage does with the LM head of one micro-batch."""


def run_schedule(
    model: DistributedDataParallel,
    micro_batches: Iterator[MicroBatch],
    num_micro_batches: int,
    hook_for: HookFor,
    *,
    forward_only: bool,
    has_experts: bool,
) -> None:
    """Forward (and backward) through all pipeline stages; gradients are summed over micro-batches and ranks.

    With gradients the hook returns a scalar, this rank's share of the loss to be minimised; forward only, any tensor
    (results leave through the hook). Collective over all trainer ranks, which bring equally many micro-batches, of any
    shapes: stages announce them to each other.
    """

    def forward_step(batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        batch = next(batches)
        options = {"padding_mask": batch.padding_mask} if has_experts else {}
        output = model(
            input_ids=batch.tokens,
            position_ids=batch.position_ids,
            attention_mask=batch.attention_mask,
            labels=hook_for(batch),
            **options,
        )
        return output, _as_sum

    schedule = get_forward_backward_func()
    schedule(
        forward_step_func=forward_step,
        data_iterator=micro_batches,
        model=[model],
        num_microbatches=num_micro_batches,
        seq_length=1,  # unread: variable_seq_lengths
        micro_batch_size=1,
        forward_only=forward_only,
    )


def _as_sum(loss: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The (loss, token count, report) triple of a sum: ``calculate_per_token_loss`` leaves it undivided. The schedule
    may overwrite ``loss``, so nothing is reported from here."""
    return loss, torch.zeros((), dtype=torch.int, device=loss.device), {}

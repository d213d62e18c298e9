"""Micro-batches through Megatron's pipeline schedules: no pipeline, 1F1B, and interleaved (several chunks a stage)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from torch import Tensor

from mopd.student.batch import MicroBatch
from mopd.student.model.gpt import HeadHook
from mopd.student.parallel import schedule_groups

HookFor = Callable[[MicroBatch], HeadHook]
"""Function that returns what the last stage does with the LM head of a micro-batch."""


Shape = tuple[int, int, int]
"""Shape of hidden states on one rank: rows of a sequence or pack, sequences, channels."""


class Neighbours(P2PCommunicator):
    """Communication of a pipeline stage with the previous and the next one.

    Interleaved, each batch of messages goes to and from both neighbours. With two stages both neighbours are one rank,
    and messages between two ranks pair in the order in which they are posted. Megatron posts those to and from the
    previous stage first on both sides, so that what is sent forward would arrive as what is sent back (its own trainer
    refuses two stages without ``overlap_p2p_comm``). With the sends swapped, they pair.

    Hidden states and their gradients arrive in an order and in shapes that every rank knows from the plan. Megatron
    would send the shapes first, and wait for the device each time; interleaved, with as many micro-batches as stages,
    one stage would wait for a shape that its neighbour sends after it has a tensor of that stage's.
    """

    def __init__(self, group: dist.ProcessGroup, config: Any, shapes: Sequence[Shape], *, num_chunks: int) -> None:
        """``shapes``: of the micro-batches' hidden states; ``num_chunks``: of every stage."""
        super().__init__(group, config)
        self._is_interleaved = num_chunks > 1
        table = get_schedule_table(len(shapes), num_chunks, config.microbatch_group_size_per_vp_stage)
        rank, last = group.rank(), group.size() - 1
        # The first stage gets nothing for its first chunk, on the way back the last one nothing for its last: the way
        # back takes the chunks the other way round, and the micro-batches as they came.
        coming = [shapes[number] for number, chunk in table if chunk > 0]
        self._from_previous = iter(coming if rank == 0 else [shapes[number] for number, _ in table])
        self._from_next = iter(coming if rank == last else [shapes[number] for number, _ in table])

    def _communicate(self, *, tensor_send_next: Any, tensor_send_prev: Any, **rest: Any) -> Any:
        """Swap the two sends if both neighbours are the same rank."""
        if self._is_interleaved and self.pp_group.size() == 2:
            tensor_send_next, tensor_send_prev = tensor_send_prev, tensor_send_next
        return super()._communicate(tensor_send_next=tensor_send_next, tensor_send_prev=tensor_send_prev, **rest)

    def _communicate_shapes(self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: Any, recv_next: Any) -> Any:
        """Return the shapes of what comes from the previous and the next stage."""
        return next(self._from_previous) if recv_prev else None, next(self._from_next) if recv_next else None


def run_schedule(
    chunks: Sequence[DistributedDataParallel],
    micro_batches: Iterator[MicroBatch],
    shapes: Sequence[Shape],
    hook_for: HookFor,
    *,
    forward_only: bool,
    has_experts: bool,
) -> None:
    """Run forward (and backward) through all pipeline stages; gradients are summed over micro-batches and ranks.

    With gradients the hook returns a scalar, this rank's share of the loss to be minimised; forward only, any tensor
    (results leave through the hook). Collective over all trainer ranks, which bring equally many micro-batches; their
    hidden states have these ``shapes``. With several chunks that number is a multiple of the number of stages.
    """

    def forward_step(batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        batch = next(batches)
        options: dict[str, Any] = {"padding_mask": batch.padding_mask} if has_experts else {}
        if has_experts and batch.packed is not None:
            options["samples"] = batch.rows.samples, len(batch.rows.domains)
        if batch.routes is not None:
            options["routes"] = batch.routes, batch.rows.domains[batch.rows.samples]
        if batch.images is not None:
            options["images"] = batch.images
        # ``labels`` carries the hook: ``GPTModel.forward`` hands it unread to ``StudentModel._postprocess``.
        output = model(
            input_ids=batch.tokens,
            position_ids=batch.position_ids,
            packed=batch.packed,
            labels=hook_for(batch),
            **options,
        )
        return output, _as_sum

    options: dict[str, Any] = {"data_iterator": micro_batches}
    if len(chunks) > 1:
        # Each chunk iterates over all micro-batches; tee builds one once and drops it after its last chunk.
        options["data_iterator"] = list(itertools.tee(micro_batches, len(chunks)))
    config, groups = chunks[0].module.config, schedule_groups()
    if groups.pp.size() > 1:
        # Megatron takes a communicator of the caller's only together with all the groups that it would look up.
        options |= {
            "p2p_communicator": Neighbours(groups.pp, config, shapes, num_chunks=len(chunks)),
            "pg_collection": groups,
        }
    get_forward_backward_func()(
        forward_step_func=forward_step,
        model=list(chunks),
        num_microbatches=len(shapes),
        seq_length=1,  # unread: variable_seq_lengths
        micro_batch_size=1,
        forward_only=forward_only,
        **options,
    )


def _as_sum(loss: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return Megatron's triple (loss, token count, report) for a sum: ``calculate_per_token_loss`` leaves it undivided.
    The schedule may overwrite ``loss``, so nothing is reported from here."""
    return loss, torch.zeros((), dtype=torch.int, device=loss.device), {}

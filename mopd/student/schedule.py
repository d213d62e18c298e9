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

    Not interleaved, micro-batches and their gradients arrive in order, in shapes that every rank knows from the plan.
    Megatron would send the shapes first, and wait for the device each time.
    """

    def __init__(self, group: dist.ProcessGroup, config: Any, shapes: Sequence[Shape], *, is_interleaved: bool) -> None:
        super().__init__(group, config)
        self._is_interleaved = is_interleaved
        self._from_previous, self._from_next = iter(shapes), iter(shapes)

    def _communicate(self, *, tensor_send_next: Any, tensor_send_prev: Any, **rest: Any) -> Any:
        """Swap the two sends if both neighbours are the same rank."""
        if self._is_interleaved and self.pp_group.size() == 2:
            tensor_send_next, tensor_send_prev = tensor_send_prev, tensor_send_next
        return super()._communicate(tensor_send_next=tensor_send_next, tensor_send_prev=tensor_send_prev, **rest)

    def _communicate_shapes(self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: Any, recv_next: Any) -> Any:
        """Return the shapes of what comes from the previous and the next stage, without waiting for the own shapes to
        be received.

        With as many micro-batches as stages, one stage sends and then receives where its neighbour does both at once.
        If that neighbour waited for its shape to be received, it would not yet receive the tensor that the first one
        sends. Over NCCL, which buffers so few bytes, Megatron's own method does not wait.
        """
        if not self._is_interleaved:
            return next(self._from_previous) if recv_prev else None, next(self._from_next) if recv_next else None
        if torch.cuda.is_available():
            return super()._communicate_shapes(tensor_send_next, tensor_send_prev, recv_prev, recv_next)
        self._sent: list[tuple[Tensor, Any]] = []  # kept alive until they are sent
        coming: list[tuple[int, Tensor, Any]] = []
        found = [[0, 0, 0], [0, 0, 0]]
        # Nothing waits until both directions are under way.
        for number, (tensor, wanted, rank) in enumerate(
            ((tensor_send_prev, recv_prev, self.prev_rank), (tensor_send_next, recv_next, self.next_rank))
        ):
            if tensor is not None:
                shape = torch.tensor(tensor.shape)
                self._sent.append((shape, dist.isend(shape, rank, group=self.pp_group)))
            if wanted:
                shape = torch.empty(3, dtype=torch.int64)
                coming.append((number, shape, dist.irecv(shape, rank, group=self.pp_group)))
        for number, shape, work in coming:
            work.wait()
            found[number] = shape.tolist()
        return found


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
            "p2p_communicator": Neighbours(groups.pp, config, shapes, is_interleaved=len(chunks) > 1),
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

"""Which way of running the LM head keeps a memory budget.

    materialize   all logits at once; backward overwrites them with their gradient. The fastest.
    token_chunks  a few rows at a time, gradients formed in forward. Same products; needs a scalar loss, and a place
                  for the weight gradient: ``main_grad``, or a buffer of its own until backward knows the scale.
    vocab_slices  a few columns at a time, once in forward and again in backward: a third more products, any upstream.

Counted is what lives besides inputs, results, ``[T, K]`` numbers and the few megabytes of scratch of the logits passes.

Shape legend: N rows that are computed, H hidden size, V columns of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.losses.chunked import accumulation_dtype
from mopd.losses.linear_head import Head, row_shape, sum_dtype

STRATEGIES = ("auto", "materialize", "token_chunks", "vocab_slices")
FEWEST_ROWS = 512
"""Shorter chunks make ``token_chunks`` slower than ``vocab_slices``: a chunk of r rows reads and writes the fp32 weight
gradient once (8 V H bytes) for 2 r V H operations. With 790 TFLOP/s and 3 TB/s (H100) the two take equally long at
r = 1053, and at half of it the delay equals what recomputing the logits costs."""


@dataclass(frozen=True)
class Plan:
    """A strategy with the size of its pieces."""

    strategy: str
    rows: int
    """Rows of a chunk."""
    columns: int
    """Columns of a slice."""
    slices: int
    """Slices of the widest rank."""
    bytes: int
    """What it holds, as counted above."""


@dataclass(frozen=True)
class Sizes:
    """Counts, and the bytes of the parts that a strategy holds."""

    rows: int
    columns: int
    row: int
    """One row of logits."""
    column: int
    """One column of logits."""
    beside_chunks: int
    """What token_chunks holds besides its logits."""
    beside_slices: int
    """What vocab_slices holds besides its logits."""


def head_plan(
    hidden: Tensor,
    weight: Tensor,
    head: Head,
    *,
    memory_budget: int,
    num_rows: int,
    strategy: str,
    scalar: bool,
    sliceable: bool,
    unit_upstream: bool,
    equal_shards: bool,
) -> Plan:
    """The plan for ``num_rows`` computed rows, the same on all ranks of the head.

    Where shards may differ the ranks agree on the widest, which waits for the device. Raises as ``make_plan``.
    """
    width = weight.size(0)
    if not equal_shards and head.world_size > 1:
        widest = torch.tensor([width], device=weight.device)
        dist.all_reduce(widest, op=dist.ReduceOp.MAX, group=head.group)
        width = int(widest)
    with_grad = torch.is_grad_enabled()
    grads = (with_grad and hidden.requires_grad, with_grad and weight.requires_grad)
    counted = sizes(hidden, weight, head, num_rows=num_rows, width=width, grads=grads, unit_upstream=unit_upstream)
    return make_plan(counted, memory_budget, strategy, scalar=scalar, sliceable=sliceable)


def sizes(
    hidden: Tensor,
    weight: Tensor,
    head: Head,
    *,
    num_rows: int,
    width: int,
    grads: tuple[bool, bool],
    unit_upstream: bool,
) -> Sizes:
    """Sizes for ``num_rows`` computed rows and ``width`` columns.

    ``grads``: whether hidden states and weight need gradients; ``unit_upstream``: those formed in forward are final.
    """
    size, wide = weight.element_size(), accumulation_dtype(weight).itemsize
    hidden_size, total = hidden.size(-1), torch.Size(row_shape(hidden, head)).numel()
    row = hidden_size * num_rows
    inputs = (row if num_rows < total else 0) * size + (hidden_size * total * size if head.splits_sequence else 0)
    spread = hidden_size * total if head.splits_sequence and num_rows < total else 0
    summed = sum_dtype(weight, head).itemsize if unit_upstream else wide
    is_result = summed == size and num_rows == total and not head.splits_sequence
    chunk_grads = (0 if is_result else (row + spread) * summed) if grads[0] else 0
    if grads[1] and not (unit_upstream and head.gradient_accumulation_fusion):
        chunk_grads += width * hidden_size * wide
    slice_grads = (row + spread) * wide if grads[0] else 0
    return Sizes(num_rows, width, width * size, num_rows * size, inputs + chunk_grads, inputs + slice_grads)


def make_plan(s: Sizes, memory_budget: int, strategy: str, *, scalar: bool, sliceable: bool) -> Plan:
    """Chooses, or fits the pieces of the strategy that is asked for.

    ``scalar``: the loss is one number, so that its gradient may be formed in forward. ``sliceable``: the loss can be
    computed from slices of the vocabulary.

    Raises:
        ValueError: unknown strategy, one that cannot run this loss, or a budget that nothing can keep, with the least
            that can be.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy is {strategy!r}: choose one of {', '.join(STRATEGIES)}")
    if strategy == "token_chunks" and not scalar:
        raise ValueError("strategy 'token_chunks' forms gradients in forward and needs reduce_loss=True: set it")
    if strategy == "vocab_slices" and not sliceable:
        raise ValueError("strategy 'vocab_slices' serves top-k losses only: set 'token_chunks'")
    whole = s.rows * s.row
    if strategy == "materialize" or (strategy == "auto" and whole <= memory_budget):
        return Plan("materialize", s.rows, s.columns, 1, whole)
    chunks = _fit(s.rows, s.row, s.beside_chunks, memory_budget)
    slices = _fit(s.columns, s.column, s.beside_slices, memory_budget)
    if strategy == "auto":
        slow = chunks < min(FEWEST_ROWS, s.rows)
        use_slices = sliceable and slices > 0 and (not scalar or slow)
        strategy = "vocab_slices" if use_slices or not scalar else "token_chunks"
    if strategy == "token_chunks" and chunks:
        return Plan(strategy, chunks, s.columns, 1, s.beside_chunks + chunks * s.row)
    if strategy == "vocab_slices" and slices and sliceable:
        return Plan(strategy, s.rows, slices, -(-s.columns // slices), s.beside_slices + slices * s.column)
    raise ValueError(_too_small(s, memory_budget, scalar=scalar, sliceable=sliceable))


def _fit(count: int, size: int, fixed: int, memory_budget: int) -> int:
    """How many pieces of ``size`` bytes fit beside ``fixed`` bytes, at most ``count``."""
    return max(0, min(count, (memory_budget - fixed) // max(1, size)))


def _too_small(s: Sizes, memory_budget: int, *, scalar: bool, sliceable: bool) -> str:
    """The message for a budget that cannot be kept."""
    needs = {"materialize": s.rows * s.row}
    if scalar:
        needs["token_chunks"] = s.beside_chunks + s.row
    if sliceable:
        needs["vocab_slices"] = s.beside_slices + s.column
    least = ", ".join(f"{name} {size}" for name, size in needs.items())
    return (
        f"memory_budget is {memory_budget} bytes, too little for {s.rows} rows of {s.columns} columns: "
        f"set at least {min(needs.values())} (bytes needed: {least}) or pass fewer rows"
    )

"""Which sample is computed in which micro-batch on which data-parallel rank. Integers only; no torch.

The cost of a micro-batch is what its padded rectangle costs: samples x longest sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from mopd.types import MicroBatchPlan, SampleMeta, UserError

MicroBatch = tuple[SampleMeta, ...]


def pack(
    samples: Sequence[SampleMeta], *, dp_size: int, max_tokens: int, micro_batch_size: int | None = None
) -> MicroBatchPlan:
    """Plan one optimizer step; the same samples give the same plan in whatever order they come.

    With ``micro_batch_size`` every micro-batch holds that many samples, or as evenly fewer as the rank count asks.
    Otherwise samples of similar length share a micro-batch of at most ``max_tokens`` padded tokens, in as few
    micro-batches as this finds, and the ranks' loads are balanced. No micro-batch is ever empty. ``UserError`` for a
    sample above ``max_tokens``, fewer samples than ranks, or micro-batches that cannot be shared out evenly.
    """
    ordered = sorted(samples, key=lambda sample: sample.sample_id)
    if len(ordered) < dp_size:
        raise UserError(
            f"a step has {len(ordered)} samples for {dp_size} data-parallel ranks: raise schedule.prompts_per_step or "
            "lower student.parallel.data_parallel_size"
        )
    if micro_batch_size is None:
        micro_batches = _even_out(_fill(ordered, max_tokens), dp_size)
    else:
        micro_batches = _cut(ordered, micro_batch_size, dp_size)
    return MicroBatchPlan(
        micro_batches=_share_out(micro_batches, dp_size),
        num_loss_tokens=sum(sample.num_loss_tokens for sample in ordered),
        num_samples=len(ordered),
    )


def _fill(ordered: Sequence[SampleMeta], max_tokens: int) -> list[MicroBatch]:
    """Fill one micro-batch after another from long samples to short: a micro-batch's first sample is its longest."""
    open_batches: list[list[SampleMeta]] = []
    for sample in sorted(ordered, key=lambda s: (-s.length, s.sample_id)):
        if sample.length > max_tokens:
            raise UserError(
                f"sample {sample.sample_id} of domain {sample.domain!r} has {sample.length} tokens, above "
                f"student.max_tokens_per_micro_batch {max_tokens}: raise it or lower rollout.max_response_length"
            )
        if not open_batches or (len(open_batches[-1]) + 1) * open_batches[-1][0].length > max_tokens:
            open_batches.append([])
        open_batches[-1].append(sample)
    return [tuple(batch) for batch in open_batches]


def _even_out(micro_batches: list[MicroBatch], dp_size: int) -> list[MicroBatch]:
    """Halve the costliest micro-batches until their number is a multiple of ``dp_size``."""
    result = list(micro_batches)
    while len(result) % dp_size:
        divisible = [i for i, batch in enumerate(result) if len(batch) > 1]
        if not divisible:
            raise UserError(
                f"{len(result)} samples fill a micro-batch each and cannot be shared evenly by {dp_size} data-parallel "
                "ranks: make schedule.prompts_per_step x rollout.samples_per_prompt a multiple of "
                "student.parallel.data_parallel_size or raise student.max_tokens_per_micro_batch"
            )
        costliest = max(divisible, key=lambda i: (_cost(result[i]), -i))
        batch = result[costliest]
        half = (len(batch) + 1) // 2
        result[costliest : costliest + 1] = [batch[:half], batch[half:]]
    return result


def _cut(ordered: Sequence[SampleMeta], micro_batch_size: int, dp_size: int) -> list[MicroBatch]:
    """Micro-batches of ``micro_batch_size`` in order of the ids, or smaller ones whose sizes differ by one at most."""
    num = -(-len(ordered) // micro_batch_size)
    num = -(-num // dp_size) * dp_size
    if num > len(ordered):
        raise UserError(
            f"{len(ordered)} samples in micro-batches of student.micro_batch_size {micro_batch_size} cannot be shared "
            f"evenly by {dp_size} data-parallel ranks: make schedule.prompts_per_step x rollout.samples_per_prompt a "
            "multiple of student.parallel.data_parallel_size"
        )
    bounds = [len(ordered) * i // num for i in range(num + 1)]
    return [tuple(ordered[low:high]) for low, high in itertools.pairwise(bounds)]


def _share_out(micro_batches: Sequence[MicroBatch], dp_size: int) -> tuple[tuple[MicroBatch, ...], ...]:
    """Costliest first, each to the least loaded rank that still has room; all ranks get the same number."""
    room = len(micro_batches) // dp_size
    ranks: list[list[MicroBatch]] = [[] for _ in range(dp_size)]
    loads = [0] * dp_size
    for batch in sorted(micro_batches, key=lambda b: (-_cost(b), b[0].sample_id)):
        rank = min((r for r in range(dp_size) if len(ranks[r]) < room), key=lambda r: (loads[r], r))
        ranks[rank].append(batch)
        loads[rank] += _cost(batch)
    return tuple(tuple(rank) for rank in ranks)


def _cost(batch: MicroBatch) -> int:
    """Padded tokens."""
    return len(batch) * max(sample.length for sample in batch)

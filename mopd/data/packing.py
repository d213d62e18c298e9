"""Assignment of samples to micro-batches and data-parallel ranks. Integers and costs; no torch.

A micro-batch is a pack of sequences, one after another, or a rectangle of right-padded ones. The unit of its cost is
what a token costs outside attention:

    cost of a sequence of L tokens    L + c L^2       c: operations of causal attention / (L x those of the weights)
    cost of a micro-batch             the sum over its sequences, those of a rectangle as long as its longest
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace

from mopd.base.types import MicroBatchPlan, SampleMeta, UserError
from mopd.config.student import StudentConfig
from mopd.conversion.models.dims import ModelDims

MicroBatch = tuple[SampleMeta, ...]
Place = tuple[int, int]
"""A data-parallel rank and the number of one of its packs."""

SIZES_PER_OCTAVE = 16
"""Number of sizes between a power of two and the next that packs are padded to on a GPU: padding is at most 1/16."""
FP8_MULTIPLE = 16
"""Multiple that the rows of a matrix product in fp8 must be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingRules:
    """Limits, padding and cost of a micro-batch."""

    is_packed: bool
    """Whether sequences stand one after another; else they are right-padded side by side."""
    max_tokens: int
    """Largest number of tokens of a micro-batch, padding of its sequences included."""
    micro_batch_size: int | None
    """Fixed number of samples in a micro-batch, in place of ``max_tokens``."""
    square_cost: float
    """c: cost of the square of a sequence's length, relative to that of its length."""
    sequence_multiple: int = 1
    """Multiple that each sequence is padded to, in tokens."""
    total_multiple: int = 1
    """Multiple that a pack is padded to, in tokens."""
    count_multiple: int = 1
    """Multiple of a rank's number of micro-batches: Megatron's schedule of virtual stages takes them in groups."""
    sizes_per_octave: int | None = None
    """Number of pack sizes between two powers of two; None: packs are padded no further than the layout needs."""

    def sequence(self, length: int) -> int:
        """Return the tokens of a sequence with its padding."""
        return _up(length, self.sequence_multiple)

    def pack_size(self, tokens: int) -> int:
        """Return the tokens of a pack with its padding, from ``tokens``, the sum of its padded sequences."""
        size = _up(tokens, self.total_multiple)
        if self.sizes_per_octave is None:
            return size
        step = max(1, (1 << (size.bit_length() - 1)) // self.sizes_per_octave)
        # Padding to the next size stops at ``max_tokens``.
        return max(size, _up(min(_up(size, step), self.max_tokens), self.total_multiple))

    def num_tokens(self, batch: Sequence[SampleMeta]) -> int:
        """Return the tokens that are computed for ``batch``, padding included."""
        lengths = [self.sequence(sample.length) for sample in batch]
        return self.pack_size(sum(lengths)) if self.is_packed else len(batch) * max(lengths)

    def cost(self, batch: Sequence[SampleMeta]) -> float:
        """Return the cost of a micro-batch, without the padding of a pack as a whole."""
        lengths = [self.sequence(sample.length) for sample in batch]
        if not self.is_packed:
            return len(batch) * self.sequence_cost(max(lengths))
        return math.fsum(self.sequence_cost(length) for length in lengths)

    def sequence_cost(self, tokens: int) -> float:
        """Return the cost of a sequence of ``tokens``, padding included."""
        return tokens + self.square_cost * tokens**2


def packing_rules(student: StudentConfig, dims: ModelDims, *, on_gpu: bool) -> PackingRules:
    """Return the rules of a recipe's student on its layout. On a CPU, where no graph is captured and padding costs its
    full time, packs are padded no further than the layout needs."""
    parallel, stages = student.parallel, student.parallel.pipeline_model_parallel_size
    rows = parallel.context_parallel_size * (parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1)
    if student.megatron_overrides.get("fp8"):
        rows *= FP8_MULTIPLE
    # Context parallelism cuts a sequence into 2 chunks a rank (``student/attention.py``), which must be equally long.
    chunks = 1 if parallel.context_parallel_size == 1 else 2 * parallel.context_parallel_size
    both = math.lcm(rows, chunks)
    return PackingRules(
        is_packed=student.packing,
        max_tokens=student.max_tokens_per_micro_batch,
        micro_batch_size=student.micro_batch_size,
        square_cost=square_cost(dims),
        sequence_multiple=chunks if student.packing else both,
        total_multiple=both if student.packing else 1,
        count_multiple=stages if parallel.virtual_pipeline_model_parallel_size > 1 else 1,
        sizes_per_octave=SIZES_PER_OCTAVE if on_gpu and student.packing else None,
    )


def square_cost(dims: ModelDims) -> float:
    """Return c of a model: attention's 4 operations per channel, query and visible key (half of the keys) against 2 per
    weight and token."""
    hidden = dims.hidden_size
    if dims.mla is None:
        queries = dims.num_attention_heads * dims.head_dim
        channels, projections = float(queries), hidden * 2 * (queries + dims.num_query_groups * dims.head_dim)
    else:
        mla, heads = dims.mla, dims.num_attention_heads
        keys = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        channels = heads * (keys + mla.v_head_dim) / 2
        asked = hidden * heads * keys if mla.q_lora_rank is None else mla.q_lora_rank * (hidden + heads * keys)
        compressed = hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim)
        read = heads * (mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim) + hidden * mla.v_head_dim)
        projections = asked + compressed + read
    met = [_mlp_width(dims, layer) for layer in range(dims.num_layers)]
    attending, delta = dims.num_attention_layers, dims.delta
    linear = 0 if delta is None else hidden * (delta.in_rows + delta.value_rows) * sum(delta.layers)
    return channels * attending / (projections * attending + linear + 3 * hidden * sum(met))


def _mlp_width(dims: ModelDims, layer: int) -> int:
    """Return the rows of the gated MLPs that a token passes in a layer; with experts, the chosen and the shared."""
    if dims.moe is None or not dims.moe.layers[layer]:
        return dims.ffn_hidden_size
    return dims.moe.shared_ffn_hidden_size + dims.moe.experts_per_token * dims.moe.ffn_hidden_size


def pack(samples: Sequence[SampleMeta], rules: PackingRules, *, dp_size: int) -> MicroBatchPlan:
    """Plan one optimizer step; the same samples give the same plan in whatever order they come.

    Every rank gets the same number of micro-batches, as few as this finds, none of them empty, and about the same cost;
    the costliest of a rank comes first. With ``micro_batch_size`` every micro-batch holds that many samples, or as
    evenly fewer as the rank count asks. Raise ``UserError`` for a sample above ``max_tokens``, fewer samples than
    ranks, or micro-batches that cannot be shared out evenly.
    """
    # Sorted first, and every tie below is broken by id: the plan must not depend on the order of arrival.
    ordered = sorted(samples, key=lambda sample: sample.sample_id)
    if len(ordered) < dp_size * rules.count_multiple:
        groups, key = "", "data_parallel_size"
        if rules.count_multiple > 1:
            groups = f", each of which needs {rules.count_multiple} micro-batches at least for virtual pipeline stages"
            key = "pipeline_model_parallel_size"
        raise UserError(
            f"a step has {len(ordered)} samples for {dp_size} data-parallel ranks{groups}: raise "
            f"schedule.prompts_per_step or lower student.parallel.{key}"
        )
    if rules.micro_batch_size is not None:
        ranks = _share_out(_cut(ordered, rules, rules.micro_batch_size, dp_size), rules, dp_size)
    else:
        _check_lengths(ordered, rules)
        if rules.is_packed:
            ranks = _packs(ordered, rules, dp_size)
        else:
            ranks = _share_out(_even_out(_fill(ordered, rules), rules, dp_size), rules, dp_size)
    return MicroBatchPlan(
        micro_batches=ranks, num_loss_tokens=sum(sample.num_loss_tokens for sample in ordered), num_samples=len(ordered)
    )


def plan_metrics(plan: MicroBatchPlan, rules: PackingRules) -> dict[str, float]:
    """Return a plan's waste: padding among all tokens that are computed, and the busiest rank's cost over the mean."""
    computed = sum(rules.num_tokens(batch) for rank in plan.micro_batches for batch in rank)
    real = sum(sample.length for rank in plan.micro_batches for batch in rank for sample in batch)
    costs = [math.fsum(rules.cost(batch) for batch in rank) for rank in plan.micro_batches]
    return {
        "packing/padding_share": 1 - real / computed,
        "packing/cost_max_over_mean": max(costs) * len(costs) / math.fsum(costs),
    }


def _check_lengths(ordered: Sequence[SampleMeta], rules: PackingRules) -> None:
    """Raise ``UserError`` for a sample that fits into no micro-batch."""
    for sample in ordered:
        padded = rules.sequence(sample.length)
        if padded > rules.max_tokens:
            more = "" if padded == sample.length else f" ({padded} as its layout pads it)"
            raise UserError(
                f"sample {sample.sample_id} of domain {sample.domain!r} has {sample.length} tokens{more}, above "
                f"student.max_tokens_per_micro_batch {rules.max_tokens}: raise it or lower rollout.max_response_length"
            )


def _packs(ordered: Sequence[SampleMeta], rules: PackingRules, dp_size: int) -> tuple[tuple[MicroBatch, ...], ...]:
    """Return the packs of each rank, the costliest first, so that ranks do about the same at the same time; in each the
    longest sequences first, so that equally long ones are neighbours and share a kernel."""
    by_length = sorted(ordered, key=lambda sample: (-sample.length, sample.sample_id))
    per_rank, places = _fewest_packs([rules.sequence(sample.length) for sample in by_length], rules, dp_size)
    ranks: list[list[list[SampleMeta]]] = [[[] for _ in range(per_rank)] for _ in range(dp_size)]
    for sample, (rank, number) in zip(by_length, places, strict=True):
        ranks[rank][number].append(sample)
    for packs in ranks:
        packs.sort(key=lambda batch: (-rules.cost(batch), batch[0].sample_id))
    return tuple(tuple(map(tuple, packs)) for packs in ranks)


def _fewest_packs(sizes: Sequence[int], rules: PackingRules, dp_size: int) -> tuple[int, list[Place]]:
    """Return the number of packs of a rank and the places of sequences of ``sizes`` tokens, the longest first, for as
    few packs as a bisection finds. Dealing is greedy, so that once in a while more packs than suffice do not suffice
    and the bisection misses a smaller number; counts above 256 are found to within 1/256."""
    step, most = rules.count_multiple, len(sizes) // (dp_size * rules.count_multiple)
    # No pack holds two sequences above half of it.
    fewest = max(-(-sum(sizes) // rules.max_tokens), sum(2 * size > rules.max_tokens for size in sizes))
    groups = max(1, -(-fewest // (dp_size * step)))
    too_few, stride = groups - 1, 1
    while True:
        if groups > most:
            raise _uneven(len(sizes), rules, dp_size)
        places = _dealt(sizes, rules, dp_size, groups * step)
        if len(places) == len(sizes):
            break
        too_few = groups
        # Estimate: the sequences that found no room need packs as full as these. Mostly enough, seldom far too many.
        likely = -(-groups * len(sizes) // len(places))
        groups = max(groups + 1, min(most, max(groups + stride, likely)))
        stride *= 2
    while groups - too_few > 1 + groups // 256:
        middle = (too_few + groups) // 2
        tried = _dealt(sizes, rules, dp_size, middle * step)
        if len(tried) == len(sizes):
            groups, places = middle, tried
        else:
            too_few = middle
    return groups * step, places


def _dealt(sizes: Sequence[int], rules: PackingRules, dp_size: int, per_rank: int) -> list[Place]:
    """Deal out sequences, longest processing time first: each goes to the rank with the least cost that has room, there
    to the pack with the least; the last ones fill packs that are still empty. Stop at a sequence that finds no room.

    Sequences come in descending ``sizes``, so a pack with room for one has room for all that follow.
    """
    with_room = [[(0.0, number, 0) for number in range(per_rank)] for _ in range(dp_size)]
    """Heap of each rank's packs that have room: cost, number, tokens."""
    too_full: list[list[tuple[int, int, float]]] = [[] for _ in range(dp_size)]
    """Heap of its other packs: tokens, number, cost."""
    ranks = [(0.0, rank) for rank in range(dp_size)]
    """Heap of ranks where some pack may have room: cost, rank."""
    without_room: list[tuple[int, int, float]] = []
    """Heap of the other ranks: tokens of the emptiest pack, rank, cost."""
    places: list[Place] = []
    num_empty = dp_size * per_rank
    for size in sizes:
        # With as many sequences left as empty packs, only empty packs (0 tokens) are open: none may stay empty.
        most = 0 if len(sizes) - len(places) <= num_empty else rules.max_tokens - size
        # Sequences get shorter: ranks and packs that had no room may have some now.
        while without_room and without_room[0][0] <= most:
            _, rank, load = heappop(without_room)
            heappush(ranks, (load, rank))
        while ranks:
            load, rank = ranks[0]
            open_packs, full = with_room[rank], too_full[rank]
            while full and full[0][0] <= most:
                tokens, number, cost = heappop(full)
                heappush(open_packs, (cost, number, tokens))
            if open_packs and open_packs[0][2] <= most:
                break
            heappop(ranks)
            if full:
                heappush(without_room, (full[0][0], rank, load))
        else:
            break
        cost, number, tokens = open_packs[0]
        places.append((rank, number))
        num_empty -= not tokens
        tokens, own = tokens + size, rules.sequence_cost(size)
        heapreplace(ranks, (load + own, rank))
        # With room for another of this size the pack stays open; else it waits for shorter sequences.
        if tokens <= most:
            heapreplace(open_packs, (cost + own, number, tokens))
        else:
            heappop(open_packs)
            heappush(full, (tokens, number, cost + own))
    return places


def _fill(ordered: Sequence[SampleMeta], rules: PackingRules) -> list[MicroBatch]:
    """Fill one rectangle after another, from long samples to short: a micro-batch's first sample is its longest."""
    open_batches: list[list[SampleMeta]] = []
    longest = 0
    for sample in sorted(ordered, key=lambda s: (-s.length, s.sample_id)):
        if not open_batches or (len(open_batches[-1]) + 1) * longest > rules.max_tokens:
            open_batches.append([])
            longest = rules.sequence(sample.length)
        open_batches[-1].append(sample)
    return [tuple(batch) for batch in open_batches]


def _even_out(micro_batches: list[MicroBatch], rules: PackingRules, dp_size: int) -> list[MicroBatch]:
    """Halve the costliest micro-batches until every rank gets as many as it may."""

    def entry(batch: MicroBatch) -> tuple[bool, float, int, int, MicroBatch]:
        return len(batch) == 1, -rules.cost(batch), -batch[0].length, batch[0].sample_id, batch

    heap = list(map(entry, micro_batches))
    heapify(heap)
    while len(heap) % (dp_size * rules.count_multiple):
        is_single, *_, batch = heap[0]
        if is_single:
            raise _uneven(len(heap), rules, dp_size)
        # Longest first: the rectangle of the second half is narrower.
        half = (len(batch) + 1) // 2
        heapreplace(heap, entry(batch[:half]))
        heappush(heap, entry(batch[half:]))
    return [batch for *_, batch in heap]


def _uneven(num_samples: int, rules: PackingRules, dp_size: int) -> UserError:
    """Return the error for samples that cannot be shared out."""
    return UserError(
        f"{num_samples} samples fill a micro-batch each and cannot be shared evenly by {_sharing(rules, dp_size)} or "
        "raise student.max_tokens_per_micro_batch"
    )


def _sharing(rules: PackingRules, dp_size: int) -> str:
    """Return the part of a message that says who shares micro-batches, and how many samples a step may have."""
    groups, times = "", ""
    if rules.count_multiple > 1:
        groups = f" in groups of {rules.count_multiple} (virtual pipeline stages)"
        times = " x student.parallel.pipeline_model_parallel_size"
    return (
        f"{dp_size} data-parallel ranks{groups}: make schedule.prompts_per_step x rollout.samples_per_prompt a "
        f"multiple of student.parallel.data_parallel_size{times}"
    )


def _cut(ordered: Sequence[SampleMeta], rules: PackingRules, micro_batch_size: int, dp_size: int) -> list[MicroBatch]:
    """Cut samples, in order of their ids, into micro-batches of ``micro_batch_size`` or evenly smaller ones."""
    num = _up(-(-len(ordered) // micro_batch_size), dp_size * rules.count_multiple)
    if num > len(ordered):
        raise UserError(
            f"{len(ordered)} samples in micro-batches of student.micro_batch_size {micro_batch_size} cannot be shared "
            f"evenly by {_sharing(rules, dp_size)}"
        )
    bounds = [len(ordered) * i // num for i in range(num + 1)]
    return [tuple(ordered[low:high]) for low, high in itertools.pairwise(bounds)]


def _share_out(
    micro_batches: Sequence[MicroBatch], rules: PackingRules, dp_size: int
) -> tuple[tuple[MicroBatch, ...], ...]:
    """Give each micro-batch, the costliest first, to the least loaded rank with room; all get the same number."""
    ranks: list[list[MicroBatch]] = [[] for _ in range(dp_size)]
    loads = [(0.0, rank) for rank in range(dp_size)]
    for batch in sorted(micro_batches, key=lambda b: (-rules.cost(b), b[0].sample_id)):
        load, rank = loads[0]
        ranks[rank].append(batch)
        if len(ranks[rank]) * dp_size < len(micro_batches):
            heapreplace(loads, (load + rules.cost(batch), rank))
        else:
            heappop(loads)
    return tuple(tuple(rank) for rank in ranks)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

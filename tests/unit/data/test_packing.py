"""Packing: nothing lost, nothing over budget, the same number of micro-batches on every rank, balanced."""

from __future__ import annotations

import random

import pytest

from mopd.data.packing import pack
from mopd.types import MicroBatchPlan, SampleMeta, UserError


def samples(*lengths: int) -> list[SampleMeta]:
    return [
        SampleMeta(
            sample_id=100 + i,
            domain="math",
            weight_version=0,
            prompt_length=1,
            response_length=length - 1,
            num_loss_tokens=length - 1,
        )
        for i, length in enumerate(lengths)
    ]


def costs(plan: MicroBatchPlan) -> list[list[int]]:
    return [[len(mb) * max(s.length for s in mb) for mb in rank] for rank in plan.micro_batches]


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batch_size", [None, 1, 2, 5])
def test_random_batches_keep_every_promise(dp_size: int, micro_batch_size: int | None) -> None:
    chance = random.Random(dp_size)
    for _ in range(50):
        batch = samples(*(chance.randint(2, 60) for _ in range(dp_size * chance.randint(1, 20))))
        plan = pack(batch, dp_size=dp_size, max_tokens=100, micro_batch_size=micro_batch_size)
        assert plan.sample_ids == tuple(s.sample_id for s in batch)
        assert plan.num_samples == len(batch) and plan.num_loss_tokens == sum(s.length - 1 for s in batch)
        assert len(plan.micro_batches) == dp_size
        assert len({len(rank) for rank in plan.micro_batches}) == 1
        sizes = [len(mb) for rank in plan.micro_batches for mb in rank]
        assert min(sizes) >= 1
        if micro_batch_size is None:
            assert max(cost for rank in costs(plan) for cost in rank) <= 100
        else:
            assert max(sizes) <= micro_batch_size
        chance.shuffle(batch)
        assert pack(batch, dp_size=dp_size, max_tokens=100, micro_batch_size=micro_batch_size) == plan


def test_similar_lengths_share_a_micro_batch() -> None:
    plan = pack(samples(50, 10, 50, 10, 10, 10, 10), dp_size=1, max_tokens=100)
    assert sorted(costs(plan)[0]) == [50, 100]
    assert len(pack(samples(*[10] * 96), dp_size=1, max_tokens=16384).micro_batches[0]) == 1


def test_ranks_are_balanced() -> None:
    plan = pack(samples(*[100] * 2, *[50] * 4, *[25] * 8), dp_size=2, max_tokens=100)
    loads = [sum(rank) for rank in costs(plan)]
    assert abs(loads[0] - loads[1]) <= 50
    plan = pack(samples(90, 80, 10, 20), dp_size=2, max_tokens=100, micro_batch_size=1)
    assert [sum(rank) for rank in costs(plan)] == [100, 100]
    plan = pack(samples(90, 10, 10, 10), dp_size=2, max_tokens=100)  # one micro-batch is halved to make two per rank
    assert len({len(rank) for rank in plan.micro_batches}) == 1


def test_fixed_size_without_remainder_gives_that_size() -> None:
    plan = pack(samples(*range(2, 18)), dp_size=2, max_tokens=1, micro_batch_size=4)
    assert [[len(mb) for mb in rank] for rank in plan.micro_batches] == [[4, 4], [4, 4]]


def test_what_cannot_be_packed_names_its_key() -> None:
    with pytest.raises(UserError, match=r"sample 101 .* 30 tokens, above student.max_tokens_per_micro_batch 20"):
        pack(samples(5, 30), dp_size=1, max_tokens=20)
    with pytest.raises(UserError, match=r"1 samples for 2 data-parallel ranks: raise schedule.prompts_per_step"):
        pack(samples(5), dp_size=2, max_tokens=20)
    with pytest.raises(UserError, match=r"3 samples fill a micro-batch each .* student.max_tokens_per_micro_batch"):
        pack(samples(15, 15, 15), dp_size=2, max_tokens=20)
    with pytest.raises(UserError, match=r"3 samples in micro-batches of student.micro_batch_size 1"):
        pack(samples(5, 5, 5), dp_size=2, max_tokens=20, micro_batch_size=1)

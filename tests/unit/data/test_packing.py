"""Packing: nothing lost, nothing over budget, the same number of micro-batches on every rank, balanced."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from mopd.base.types import SampleMeta, UserError
from mopd.config.student import ParallelConfig, StudentConfig
from mopd.conversion.models.dims import MlaDims, ModelDims, MoeDims
from mopd.data.packing import PackingRules, pack, packing_rules, plan_metrics, square_cost
from mopd.planning.memory.shards import active
from tests.fixtures.samples import meta_of

PACKS = PackingRules(is_packed=True, max_tokens=100, micro_batch_size=None, square_cost=0.01)
RECTANGLES = replace(PACKS, is_packed=False)
FORMS = {
    "packs": PACKS,
    "packs of even sequences": replace(PACKS, sequence_multiple=4, total_multiple=12),
    "rectangles": RECTANGLES,
}
QWEN3 = ModelDims(
    family="qwen3", num_layers=28, hidden_size=1024, ffn_hidden_size=3072, num_attention_heads=16, num_query_groups=8,
    head_dim=128, vocab_size=151936, max_positions=40960, rotary_base=1e6, norm_epsilon=1e-6, tied_embeddings=True,
    qk_norm=True, qkv_bias=False,
)  # fmt: skip
LATENT = replace(
    QWEN3,
    family="deepseek_v3",
    num_query_groups=16,
    mla=MlaDims(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
    moe=MoeDims(
        num_experts=8, experts_per_token=2, ffn_hidden_size=512, shared_ffn_hidden_size=512,
        layers=(False,) * 3 + (True,) * 25, normalized=True,
    ),
)  # fmt: skip


def samples(*lengths: int) -> list[SampleMeta]:
    return [meta_of(100 + i, response=length - 1) for i, length in enumerate(lengths)]


def rectangle(batch: Sequence[SampleMeta]) -> int:
    return len(batch) * max(sample.length for sample in batch)


@pytest.mark.parametrize(("dp_size", "group"), [(1, 1), (2, 1), (3, 1), (4, 1), (2, 3)])
@pytest.mark.parametrize("micro_batch_size", [None, 1, 2, 5])
@pytest.mark.parametrize("form", FORMS)
def test_random_batches_keep_every_promise(dp_size: int, group: int, micro_batch_size: int | None, form: str) -> None:
    """Also those of virtual stages, which take micro-batches in groups: where each rank's samples are a multiple of the
    group there always is a way."""
    chance = random.Random(dp_size)
    rules = replace(FORMS[form], micro_batch_size=micro_batch_size, count_multiple=group)
    for _ in range(25):
        batch = samples(*(chance.randint(2, 60) for _ in range(dp_size * group * chance.randint(1, 20))))
        plan = pack(batch, rules, dp_size=dp_size)
        assert plan.sample_ids == tuple(s.sample_id for s in batch)
        assert plan.num_samples == len(batch) and plan.num_loss_tokens == sum(s.length - 1 for s in batch)
        assert len(plan.micro_batches) == dp_size
        assert len({len(rank) for rank in plan.micro_batches}) == 1 and len(plan.micro_batches[0]) % group == 0
        packed = [mb for rank in plan.micro_batches for mb in rank]
        assert min(map(len, packed)) >= 1
        if micro_batch_size is not None:
            assert max(map(len, packed)) <= micro_batch_size
        elif rules.is_packed:
            size = rules.sequence_multiple
            assert max(sum(-(-s.length // size) * size for s in mb) for mb in packed) <= 100
        else:
            assert max(map(rectangle, packed)) <= 100
        chance.shuffle(batch)
        assert pack(batch, rules, dp_size=dp_size) == plan


def draw_lengths(seed: int, num_samples: int) -> Iterator[list[int]]:
    """Lengths that fill a budget of 100 tokens in every way: alone, in twos and threes, by dozens, or all mixed."""
    chance = random.Random(seed)
    for low, high in ((50, 100), (25, 50), (30, 60), (2, 5), (2, 100), (40, 40)):
        yield [chance.randint(low, high) for _ in range(num_samples)]
    yield [min(100, max(2, round(chance.lognormvariate(2, 1.5)))) for _ in range(num_samples)]


def packs_of_a_rank(lengths: Sequence[int], dp_size: int) -> int | None:
    """The least number of packs that suffices, by trying all of them, and looking at all packs for each sample."""
    ordered = sorted(lengths, reverse=True)
    for per_rank in range(1, len(lengths) // dp_size + 1):
        packs = {(rank, number): [0, 0.0] for rank in range(dp_size) for number in range(per_rank)}
        loads = [0.0] * dp_size
        for place, length in enumerate(ordered):
            empty = [key for key, (tokens, _) in packs.items() if not tokens]
            room = [key for key, (tokens, _) in packs.items() if tokens + length <= 100]
            chosen = empty if len(ordered) - place <= len(empty) else room
            if not chosen:
                break
            best = min(chosen, key=lambda key: (loads[key[0]], key[0], packs[key][1], key[1]))
            cost = length + 0.01 * length**2
            packs[best] = [packs[best][0] + length, packs[best][1] + cost]
            loads[best[0]] += cost
        else:
            return per_rank
    return None


@pytest.mark.parametrize("dp_size", [1, 2, 5])
def test_no_fewer_packs_would_do(dp_size: int) -> None:
    for seed in range(12):
        for lengths in draw_lengths(seed, 5 * (seed + 2)):
            try:
                found = len(pack(samples(*lengths), PACKS, dp_size=dp_size).micro_batches[0])
            except UserError:
                found = None
            assert found == packs_of_a_rank(lengths, dp_size), lengths


def count_operations(work: Callable[..., object], *args: Any, **kwargs: Any) -> int:
    """Count the bytecode instructions of Python that a call takes."""
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        work(*args, **kwargs)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("max_tokens", [100, 100_000])
@pytest.mark.parametrize("samples_per_rank", [16, 512])
@pytest.mark.parametrize("form", FORMS)
def test_work_grows_with_the_samples_and_little_more(form: str, samples_per_rank: int, max_tokens: int) -> None:
    """Eight times as many samples, also on as many times the ranks, take at most sixteen times the instructions, those
    of all kinds of lengths together."""
    rules = replace(FORMS[form], max_tokens=max_tokens)
    few, many = (
        sum(
            count_operations(pack, samples(*lengths), rules, dp_size=-(-number // samples_per_rank))
            for lengths in draw_lengths(0, number)
        )
        for number in (64, 512)
    )
    assert many <= 16 * few


def test_a_pack_is_filled_whatever_the_lengths_and_a_rectangle_with_similar_ones() -> None:
    mixed = samples(50, 10, 50, 10, 10, 10, 10, 50)
    packed = pack(mixed, PACKS, dp_size=1).micro_batches[0]
    assert sorted(sum(s.length for s in mb) for mb in packed) == [100, 100]
    assert sorted(map(rectangle, pack(mixed[:-1], RECTANGLES, dp_size=1).micro_batches[0])) == [50, 100]
    for rules in (PACKS, RECTANGLES):
        assert len(pack(samples(*[10] * 96), replace(rules, max_tokens=16384), dp_size=1).micro_batches[0]) == 1


@pytest.mark.parametrize("seed", [4, 5, 6, 7, 11, 13])
@pytest.mark.parametrize("max_tokens", [4096, 16384])
def test_ranks_are_balanced_where_lengths_dealt_in_turn_are_not(seed: int, max_tokens: int) -> None:
    """32 log-normal lengths from 64 to 4,096 on four ranks: the busiest has at most 1.05 of the mean cost."""
    chance = random.Random(seed)
    lengths = [min(4096, max(64, round(chance.lognormvariate(math.log(400), 1)))) for _ in range(32)]
    c = square_cost(replace(QWEN3, hidden_size=2048, ffn_hidden_size=6144))  # Qwen3-1.7B
    dealt = [sum(length + c * length**2 for length in sorted(lengths, reverse=True)[rank::4]) for rank in range(4)]
    assert 4 * max(dealt) / sum(dealt) > 1.3
    rules = replace(PACKS, max_tokens=max_tokens, square_cost=c)
    plan = pack(samples(*lengths), rules, dp_size=4)
    costs = [sum(s.length + c * s.length**2 for mb in rank for s in mb) for rank in plan.micro_batches]
    assert 4 * max(costs) / sum(costs) <= 1.05
    assert plan_metrics(plan, rules)["packing/cost_max_over_mean"] == pytest.approx(4 * max(costs) / sum(costs))


def test_long_sequences_cost_more_than_their_tokens() -> None:
    """Ten sequences of 10 are as many tokens as two of 50, and a fifth of their squares."""
    mixed = samples(50, 50, *[10] * 10, 2, 2)
    linear, square = (pack(mixed, replace(PACKS, square_cost=c), dp_size=2).micro_batches for c in (0.0, 1.0))
    assert sorted(sum(s.length for mb in rank for s in mb) for rank in linear) == [102, 102]
    assert all(len([s for mb in rank for s in mb if s.length == 50]) == 1 for rank in square)
    plan = pack(samples(80, 80, 20, 20, 20, 20), replace(RECTANGLES, square_cost=1.0), dp_size=2)
    assert plan_metrics(plan, replace(RECTANGLES, square_cost=1.0))["packing/cost_max_over_mean"] == 1


def test_rectangles_are_balanced() -> None:
    plan = pack(samples(*[100] * 2, *[50] * 4, *[25] * 8), RECTANGLES, dp_size=2)
    assert plan_metrics(plan, RECTANGLES)["packing/cost_max_over_mean"] < 1.2
    plan = pack(samples(*range(2, 18)), replace(PACKS, max_tokens=1, micro_batch_size=4), dp_size=2)
    assert [[len(mb) for mb in rank] for rank in plan.micro_batches] == [[4, 4], [4, 4]]
    plan = pack(samples(90, 80, 10, 20), replace(RECTANGLES, micro_batch_size=1), dp_size=2)
    assert [[s.length for mb in rank for s in mb] for rank in plan.micro_batches] == [[90, 10], [80, 20]]
    plan = pack(samples(90, 10, 10, 10), RECTANGLES, dp_size=2)  # one micro-batch is halved to make two per rank
    assert len({len(rank) for rank in plan.micro_batches}) == 1


def test_padding_is_counted() -> None:
    plan = pack(samples(50, 30, 20), RECTANGLES, dp_size=1)
    assert plan_metrics(plan, RECTANGLES)["packing/padding_share"] == pytest.approx(1 - 100 / 120)  # 2 x 50, 1 x 20
    assert plan_metrics(pack(samples(50, 30, 20), PACKS, dp_size=1), PACKS)["packing/padding_share"] == 0
    aligned = replace(PACKS, sequence_multiple=4, total_multiple=16)  # 52, and 32 + 20: each up to 64
    metrics = plan_metrics(pack(samples(50, 30, 20), aligned, dp_size=1), aligned)
    assert metrics["packing/padding_share"] == pytest.approx(1 - 100 / 128)


def test_packs_have_a_small_set_of_sizes() -> None:
    rules = replace(PACKS, max_tokens=16_000, sizes_per_octave=16, total_multiple=24)
    sizes = {rules.pack_size(tokens) for tokens in range(4096, 16_001)}
    assert len(sizes) <= 2 * 16 + 1 and all(size % 24 == 0 for size in sizes)
    assert all(tokens <= rules.pack_size(tokens) <= tokens * 17 / 16 + 48 for tokens in range(64, 16_001, 7))
    assert rules.pack_size(15_999) == max(sizes) == 16_008  # the budget, as the layout needs it
    assert rules.pack_size(20_000) == 20_016 >= 20_000  # of a fixed number of samples


def test_what_cannot_be_packed_names_its_key() -> None:
    for rules in (replace(PACKS, max_tokens=20), replace(RECTANGLES, max_tokens=20)):
        with pytest.raises(UserError, match=r"sample 101 .* 30 tokens, above student.max_tokens_per_micro_batch 20"):
            pack(samples(5, 30), rules, dp_size=1)
        with pytest.raises(UserError, match=r"has 17 tokens \(32 as its layout pads it\), above"):
            pack(samples(17), replace(rules, sequence_multiple=32), dp_size=1)
        with pytest.raises(UserError, match=r"1 samples for 2 data-parallel ranks: raise schedule.prompts_per_step"):
            pack(samples(5), rules, dp_size=2)
        with pytest.raises(UserError, match=r"3 samples fill a micro-batch each .* student.max_tokens_per_micro_batch"):
            pack(samples(15, 15, 15), rules, dp_size=2)
        with pytest.raises(UserError, match=r"3 samples in micro-batches of student.micro_batch_size 1"):
            pack(samples(5, 5, 5), replace(rules, micro_batch_size=1), dp_size=2)


@pytest.mark.parametrize("micro_batch_size", [None, 1])
@pytest.mark.parametrize("form", FORMS)
def test_virtual_stages_need_whole_groups(form: str, micro_batch_size: int | None) -> None:
    rules = replace(FORMS[form], micro_batch_size=micro_batch_size, count_multiple=3)
    with pytest.raises(UserError, match=r"5 samples for 2 data-parallel ranks, each of which needs 3 micro-batches"):
        pack(samples(*[9] * 5), rules, dp_size=2)
    with pytest.raises(UserError, match=r"in groups of 3 \(virtual pipeline stages\): .* x student.parallel.pipeline_"):
        pack(samples(*[50] * 7), replace(rules, max_tokens=60), dp_size=2)


@pytest.mark.parametrize("dims", [QWEN3, LATENT], ids=["qwen3", "latent attention and experts"])
def test_square_cost_is_attention_over_weights(dims: ModelDims) -> None:
    """Against the weights that the planner counts, norms and routers among them."""
    heads = 16
    channels = heads * 128 if dims.mla is None else heads * (128 + 64 + 128) / 2
    assert square_cost(dims) == pytest.approx(28 * channels / active(dims), rel=0.01)


def test_rules_follow_the_layout() -> None:
    parallel = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
    student = StudentConfig(model="unused", parallel=parallel, packing=True)
    rules = packing_rules(student, QWEN3, on_gpu=False)
    assert (rules.sequence_multiple, rules.total_multiple, rules.sizes_per_octave) == (1, 2, None)
    assert packing_rules(student, QWEN3, on_gpu=True).sizes_per_octave == 16
    contexts = replace(student, parallel=replace(parallel, context_parallel_size=2, tensor_model_parallel_size=4))
    rules = packing_rules(contexts, QWEN3, on_gpu=False)
    assert (rules.sequence_multiple, rules.total_multiple) == (4, 8)
    assert packing_rules(replace(contexts, packing=False), QWEN3, on_gpu=False).sequence_multiple == 8
    fp8 = replace(student, megatron_overrides={"fp8": "hybrid"})
    assert packing_rules(fp8, QWEN3, on_gpu=False).total_multiple == 32
    rules = packing_rules(replace(student, packing=False), QWEN3, on_gpu=True)
    assert (rules.sequence_multiple, rules.total_multiple, rules.sizes_per_octave) == (2, 1, None)
    assert rules.count_multiple == 1
    virtual = ParallelConfig(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=7)
    assert packing_rules(replace(student, parallel=virtual), QWEN3, on_gpu=False).count_multiple == 4
    plain = packing_rules(StudentConfig(model="unused"), QWEN3, on_gpu=False)
    assert (plain.sequence_multiple, plain.total_multiple) == (1, 1)

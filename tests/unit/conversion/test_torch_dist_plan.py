"""The cut of a distributed checkpoint: every element once, each layout's ranks, virtual and uneven stages, extra
states."""

from __future__ import annotations

from math import prod

import pytest
import torch

from mopd.base.types import UserError
from mopd.config.student import ParallelConfig
from mopd.conversion.models.dims import ModelDims
from mopd.conversion.models.families import all_params
from mopd.conversion.models.reading import dims_from_config, read_dims
from mopd.conversion.torch_dist.plan import TargetLayout, extra_state_keys, files, padded_shape, pieces, sharded_key
from mopd.planning.memory.shards import shard
from tests.fixtures.tiny_models import FAMILIES, make_hf_model
from tests.unit.conversion.test_dims import DEEPSEEK_V3, PATH

LAYOUTS = {
    "plain": TargetLayout(),
    "tp": TargetLayout(tensor_model_parallel_size=2, expert_tensor_parallel_size=2),
    "pp": TargetLayout(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
    "uneven": TargetLayout(pipeline_model_parallel_size=2, num_layers_in_last_pipeline_stage=1),
    "ep": TargetLayout(tensor_model_parallel_size=2, expert_model_parallel_size=4),
}


@pytest.fixture(scope="module")
def dims(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelDims]:
    folder = tmp_path_factory.mktemp("dims")
    return {
        family: read_dims(make_hf_model(folder / family, family, num_layers=4, vocab_size=61)) for family in FAMILIES
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_element_lies_in_one_piece(dims: dict[str, ModelDims], family: str, layout: str):
    target = LAYOUTS[layout]
    if dims[family].moe is None and target.expert_model_parallel_size > 1:
        return
    target.check(dims[family])
    counts: dict[str, torch.Tensor] = {}
    for row in all_params(dims[family]):
        place = sharded_key(row, dims[family])
        counts.setdefault(
            place.key, torch.zeros((*place.stacked, *padded_shape(row, dims[family], target)), dtype=torch.uint8)
        )
    for piece in pieces(dims[family], target):
        assert 0 <= piece.owner < target.stage_size * target.pipeline_model_parallel_size
        box = tuple(slice(first, first + size) for first, size in zip(piece.offsets, piece.box, strict=True))
        counts[piece.place.key][box] += 1
    assert all(bool((count == 1).all()) for count in counts.values())


def test_owners_of_virtual_stages(dims: dict[str, ModelDims]):
    """4 layers, 2 stages of 2 chunks each: Megatron gives stage 0 layers 0 and 2, stage 1 layers 1 and 3."""
    owners = {piece.placed.layer: piece.owner for piece in pieces(dims["llama"], LAYOUTS["pp"])}
    assert {layer: owners[layer] for layer in range(4)} == {0: 0, 1: 1, 2: 0, 3: 1}
    assert owners[None] == 1, "the final norm, which comes last, is on the last stage"


def test_deepseek_v3_on_two_stages():
    """61 layers: 31 and 30, its experts on 8 ranks of each; what a stage holds is what a plan counts."""
    dims = dims_from_config(DEEPSEEK_V3, PATH)
    with pytest.raises(UserError, match="--pipeline-model-parallel-size 2 does not divide the model's 61 layers"):
        TargetLayout(pipeline_model_parallel_size=2).check(dims)
    target = TargetLayout(
        pipeline_model_parallel_size=2, num_layers_in_last_pipeline_stage=30, expert_model_parallel_size=8
    )
    target.check(dims)
    layers, numbers = [set[int](), set[int]()], [0, 0]
    for piece in pieces(dims, target):
        stage = piece.owner // 8
        numbers[stage] += prod(piece.sizes)
        layers[stage] |= set() if piece.placed.layer is None else {piece.placed.layer}
    assert layers == [set(range(31)), set(range(31, 61))]
    parallel = ParallelConfig(
        pipeline_model_parallel_size=2, num_layers_in_last_pipeline_stage=30, data_parallel_size=8,
        expert_model_parallel_size=8,
    )  # fmt: skip
    planned = [shard(dims, parallel, stage) for stage in (0, 1)]
    assert numbers == [own.dense + 8 * own.experts + own.constants for own in planned]


def test_owners_of_experts(dims: dict[str, ModelDims]):
    """TP2 with experts over 4 ranks, one rank an expert: a stage has 4 ranks, two hold attention."""
    owners: dict[int | None, set[int]] = {}
    for piece in pieces(dims["mixtral"], LAYOUTS["ep"]):
        owners.setdefault(piece.placed.expert, set()).add(piece.owner)
    assert owners == {None: {0, 1}, 0: {0}, 1: {1}, 2: {2}, 3: {3}}


def test_files_fill_and_keep_order(dims: dict[str, ModelDims]):
    cut = list(pieces(dims["qwen3"], LAYOUTS["tp"]))
    itemsize = {piece.place.key: 4 for piece in cut}
    contents = files(cut, itemsize, 20_000)
    assert len(contents) > 4
    for name, content in contents.items():
        assert {f"__{piece.owner}" for piece in content} == {name.rsplit("_", 1)[0]}
        assert len(content) == 1 or sum(prod(piece.sizes) * 4 for piece in content) <= 20_000
    assert [p for content in contents.values() for p in content] == sorted(cut, key=lambda piece: piece.owner)


def test_extra_states(dims: dict[str, ModelDims]):
    places = [sharded_key(row, dims["qwen3"]) for row in all_params(dims["qwen3"])]
    keys = extra_state_keys(places)
    assert "decoder.layers.self_attention.linear_qkv._extra_state/shard_2_4" in keys
    assert "decoder.layers.self_attention.core_attention._extra_state/shard_0_4" in keys
    assert "decoder.final_layernorm._extra_state/shard_0_1" in keys
    assert len(keys) == len(set(keys)) == 7 * 4 + 1  # with the norms of queries and keys

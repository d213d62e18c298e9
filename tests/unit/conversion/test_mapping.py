"""Merges and splits, against layouts written out by hand from Megatron's definition."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mopd.conversion.hf.reader import HfReader
from mopd.conversion.models import families
from mopd.conversion.models.dims import ModelDims
from mopd.conversion.models.mapping import load_shard, merge_qkv, split_qkv, split_shards, split_whole, whole_shape
from mopd.conversion.models.reading import read_dims
from tests.fixtures.tiny_models import make_hf_model

DIMS = ModelDims(
    family="qwen2", num_layers=2, hidden_size=3, ffn_hidden_size=4, num_attention_heads=4, num_query_groups=2,
    head_dim=2, vocab_size=5, max_positions=16, rotary_base=1e4, norm_epsilon=1e-6, tied_embeddings=False,
    qk_norm=False, qkv_bias=True,
)  # fmt: skip


@pytest.fixture
def checkpoint() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in families.hf_tensors(DIMS).items()}


def load(checkpoint: dict[str, Tensor], placed: families.Placed, rank: int, size: int, rows: int = 0) -> Tensor:
    def read_slice(name: str, dim: int, start: int, stop: int) -> Tensor:
        return checkpoint[name].narrow(dim, start, stop - start)

    return load_shard(placed, read_slice, DIMS, rank=rank, size=size, rows=rows)


def row(name: str) -> families.Placed:
    return next(placed for placed in families.all_params(DIMS) if name in placed.megatron)


def test_qkv_rows_go_group_by_group():
    """Two groups of two query heads with two channels: q0 q1 k0 v0, then q2 q3 k1 v1."""
    q, k, v = torch.arange(8), torch.arange(10, 14), torch.arange(20, 24)
    assert merge_qkv([q, k, v], DIMS).tolist() == [0, 1, 2, 3, 10, 11, 20, 21, 4, 5, 6, 7, 12, 13, 22, 23]


def test_qkv_shard_holds_whole_groups(checkpoint: dict[str, Tensor]):
    prefix = "model.layers.1.self_attn."
    shard = load(checkpoint, row("decoder.layers.1.self_attention.linear_qkv.weight"), rank=1, size=2)
    q, k, v = (checkpoint[f"{prefix}{part}_proj.weight"] for part in "qkv")
    assert torch.equal(shard, torch.cat([q[4:8], k[2:4], v[2:4]]))


def test_vocabulary_is_padded_with_zeros(checkpoint: dict[str, Tensor]):
    """Five rows over three ranks of three rows: rank 1 has one row of padding, rank 2 nothing else."""
    placed, table = row("output_layer.weight"), checkpoint["lm_head.weight"]
    shards = [load(checkpoint, placed, rank, 3, rows=3) for rank in range(3)]
    assert torch.equal(shards[0], table[:3])
    assert torch.equal(shards[1][:2], table[3:])
    assert not shards[1][2:].any() and not shards[2].any()
    assert torch.equal(split_shards(placed, shards, DIMS)[0], table)


def test_padded_vocabulary_must_hold_the_true_one(checkpoint: dict[str, Tensor]):
    with pytest.raises(ValueError, match="vocabulary of 5"):
        load(checkpoint, row("output_layer.weight"), rank=0, size=2, rows=2)


def test_qkv_shards_of_a_shared_group_are_cut_across_its_heads(checkpoint: dict[str, Tensor]):
    """Four ranks share two groups: rank 2 has the two query heads of the second group, rank 3 its key and value."""
    q, k, v = (checkpoint[f"model.layers.1.self_attn.{part}_proj.bias"] for part in "qkv")
    placed = row("decoder.layers.1.self_attention.linear_qkv.bias")
    assert torch.equal(load(checkpoint, placed, rank=2, size=4), q[4:8])
    assert torch.equal(load(checkpoint, placed, rank=3, size=4), torch.cat([k[2:4], v[2:4]]))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_split_undoes_load_for_every_row(checkpoint: dict[str, Tensor], size: int):
    seen = set()
    for placed in families.all_params(DIMS):
        shards = [load(checkpoint, placed, rank, size, rows=8 // size) for rank in range(size)]
        tensors = split_shards(placed, shards, DIMS)
        for name, tensor in zip(placed.hf_names, tensors, strict=True):
            assert torch.equal(tensor, checkpoint[name]), name
            assert tensor.is_contiguous()
            seen.add(name)
        exported, model = ({t.untyped_storage().data_ptr() for t in group} for group in (tensors, shards))
        assert len(exported) == len(tensors) and not exported & model, "an exported tensor shares its memory"
    assert seen == set(checkpoint)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "phi3"])
def test_split_undoes_load_with_experts(family: str, tmp_path: Path):
    """Over two ranks, and whole; also where one tensor on disk holds all that merges."""
    folder = make_hf_model(tmp_path, family, vocab_size=61)
    dims, reader = read_dims(folder), HfReader(folder)
    seen = set()
    for placed in families.all_params(dims):
        tensors = [reader.read(name) for name in placed.hf_names]
        shards = [load_shard(placed, reader.read_slice, dims, rank=rank, size=2, rows=31) for rank in range(2)]
        whole = load_shard(placed, reader.read_slice, dims, rank=0, size=1, rows=61)
        assert tuple(whole.shape) == whole_shape(placed)
        for again in (split_shards(placed, shards, dims), split_whole(placed, whole, dims)):
            assert all(torch.equal(old, new) for old, new in zip(tensors, again, strict=True)), placed.hf_names
        seen.update(placed.hf_names)
    assert seen == reader.names


def test_parts_of_a_single_group_have_memory_of_their_own():
    """With one key/value head q, k and v are contiguous pieces of one tensor; exported as views they would alias."""
    dims = dataclasses.replace(DIMS, num_query_groups=1)
    parts = [torch.randn(8, 3), torch.randn(2, 3), torch.randn(2, 3)]
    split = split_qkv(merge_qkv(parts, dims), dims)
    assert all(torch.equal(part, again) for part, again in zip(parts, split, strict=True))
    assert len({part.untyped_storage().data_ptr() for part in split}) == 3

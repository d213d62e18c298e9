"""A model's tensors in parts, and their digests."""

from __future__ import annotations

import json

import pytest
import torch

from mopd.weights.parts import Segment, TensorMeta, cut_parts, digest, from_json, to_json
from tests.unit.weights.members import BUCKET, LARGE, metas_of

SHAPES = {"norm": (5,), "large": (3, 701), "a": (7, 3), "empty": (0, 4), "b": (1,), "q": (16, 64), "end": (9,)}


def test_small_neighbours_of_one_sender_share_a_bucket_and_large_ones_are_cut() -> None:
    weights = {name: torch.randn(shape) for name, shape in SHAPES.items()} | {"steps": torch.tensor(7)}
    metas = metas_of(weights, (0, 0, 0, 0, 1, 1, 1, 1))
    parts = cut_parts(metas, BUCKET, LARGE)
    names = [part.meta.name if isinstance(part, Segment) else [meta.name for meta in part.metas] for part in parts]
    assert names == [["norm"], "large", "large", "large", ["a", "empty"], ["b"], "q", ["end", "steps"]]
    assert [part.sender for part in parts] == [0] * 5 + [1] * 3
    assert all(part.num_bytes <= BUCKET for part in parts)
    large = [part for part in parts if isinstance(part, Segment) and part.meta.name == "large"]
    assert torch.equal(torch.cat([part.of(weights["large"]) for part in large]), weights["large"].view(-1))
    assert [part.is_last for part in large] == [False, False, True]


def test_a_bucket_smaller_than_a_value_carries_one() -> None:
    metas = [TensorMeta("a", torch.float64, (3,)), TensorMeta("b", torch.float64, (2,))]
    assert [part.num_bytes for part in cut_parts(metas, 1, 1)] == [8] * 5


def test_metas_come_back_from_json_and_others_are_refused_in_one_line() -> None:
    metas = metas_of({name: torch.zeros(shape) for name, shape in SHAPES.items()}, (0, 3, 1, 1, 0, 2, 2))
    rows = json.loads(to_json(metas))
    assert from_json(rows) == metas
    for row in (["a", "float32", [2]], ["a", "float32", [2], -1], ["a", "float32", [2], True], ["a", "tensor", [], 0],
                ["a", "float32", [-2], 0], [1, "float32", [2], 0], {}, None):  # fmt: skip
        with pytest.raises(ValueError, match=r"^(a tensor|weight 'a') [^\n]+$"):
            from_json([*rows, row])


def test_digests_see_bits_places_and_lengths() -> None:
    data = torch.arange(4_000_003, dtype=torch.int64).view(torch.uint8)[: 8 * 4_000_000 + 5].clone()
    first = int(digest(data))
    for place in (0, 8 * 2**18 + 3, len(data) - 1):
        for bit in (1, 128):
            data[place] ^= bit
            assert int(digest(data)) != first, (place, bit)
            data[place] ^= bit
    words = data[:-5].view(torch.int64)
    words[[5, 3_000_000]] = words[[3_000_000, 5]]
    assert int(digest(data)) != first
    assert int(digest(torch.zeros(8, dtype=torch.uint8))) != int(digest(torch.zeros(16, dtype=torch.uint8))) != 0
    odd = torch.cat([torch.zeros(3, dtype=torch.uint8), data])[3:]
    assert int(digest(odd)) == int(digest(data))

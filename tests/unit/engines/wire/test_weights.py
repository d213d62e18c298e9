"""Weights cut into messages and put together again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import _TYPES
from torch import Tensor

from mopd.base.types import NonFiniteError
from mopd.engines.wire.messages import MAX_CHUNK_BYTES, MAX_HEAD_BYTES, WireError, decode, encode
from mopd.engines.wire.weights import MIN_PART_BYTES, StagedWeights, WeightJoin, WeightPart, stage_updates
from mopd.weights.carrying import PART_BYTES, Staging, staged_order
from mopd.weights.parts import TensorMeta, digest
from tests.fixtures.updates import join, unpacked

DTYPES = sorted({*_TYPES.values(), torch.float8_e8m0fnu}, key=str)
"""Those that safetensors knows, and the scales of small floats."""


def weights() -> dict[str, Tensor]:
    """Every kind of dtype that travels, scalars, empty tensors, views, and one tensor larger than a part."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(300, 200, generator=generator)
    return {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": matrix.t(),
        "bfloat16": matrix[:7].bfloat16(),
        "int8": torch.arange(-5, 5, dtype=torch.int8),
        "large": torch.randn(5000, generator=generator),
        "last": matrix[3],
    }


@pytest.mark.parametrize(("part_bytes", "least"), [(997, 200), (MIN_PART_BYTES, 17), (PART_BYTES, 1)])
def test_cut_and_put_together(part_bytes: int, least: int) -> None:
    staged = stage_updates(weights().items(), 1, bucket_bytes=part_bytes)
    assert len(staged.bodies) >= least
    assert max(len(decode(body, WeightPart).data) for body in staged.bodies) <= part_bytes
    back = dict(unpacked(staged))
    assert list(back) == list(weights())
    for name, tensor in weights().items():
        assert back[name].dtype == tensor.dtype and back[name].shape == tensor.shape
        assert torch.equal(back[name].float(), tensor.float())


def test_what_is_staged_is_memory_of_its_own() -> None:
    """A stream may reuse its tensor as soon as it is asked for the next one."""

    def stream() -> Iterator[tuple[str, Tensor]]:
        buffer = torch.zeros(4)
        for number in range(3):
            buffer.fill_(number)
            yield f"w{number}", buffer

    staged = stage_updates(stream(), 1)
    assert [tensor.tolist() for _, tensor in unpacked(staged)] == [[0] * 4, [1] * 4, [2] * 4]


def test_bodies_stay_within_the_limit() -> None:
    """64 MiB, frame and head included."""
    staged = stage_updates({"large": torch.zeros(2**24 + 99)}.items(), 1)
    assert len(staged.bodies) == 2 and max(map(len, staged.bodies)) <= MAX_CHUNK_BYTES
    assert PART_BYTES + MAX_HEAD_BYTES < MAX_CHUNK_BYTES


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_of_a_checkpoint_travels(dtype: torch.dtype) -> None:
    """In a bucket and in segments, bit for bit; NaN is seen in every float."""
    sizes = {"small": 5, "large": MIN_PART_BYTES + 3}
    given = {name: torch.ones(size).to(dtype) for name, size in sizes.items()}
    staged = stage_updates(given.items(), 1, bucket_bytes=MIN_PART_BYTES)
    for name, tensor in unpacked(staged):
        assert tensor.dtype == dtype and torch.equal(tensor.view(torch.uint8), given[name].view(torch.uint8))
    if dtype.is_floating_point:
        for name, size in sizes.items():
            broken = torch.full((size,), float("nan")).to(dtype)
            with pytest.raises(NonFiniteError, match=f"weight '{name}' .* infinite in {str(dtype)[6:]}"):
                stage_updates((given | {name: broken}).items(), 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_never_staged(value: float) -> None:
    broken = weights()["large"]
    broken[-1] = value
    with pytest.raises(NonFiniteError, match=r"weight 'large' .* NaN or infinite in float32"):
        stage_updates((weights() | {"large": broken}).items(), 1)


def changed(staged: StagedWeights, index: int, /, **fields: Any) -> StagedWeights:
    """Another message in the place of one."""
    bodies = [*staged.bodies]
    bodies[index] = encode(replace(decode(bodies[index], WeightPart), **fields))
    return replace(staged, bodies=tuple(bodies))


@pytest.mark.parametrize(
    ("index", "fields", "problem"),
    [
        (1, {"index": 0}, "part 0 came when 1 of"),
        (1, {"index": 2}, "part 2 came when 1 of"),
        (0, {"index": -1}, "part -1 came when 0 of"),
        (0, {"data": np.zeros(3, dtype=np.uint8)}, "part 0 has 3 bytes, "),
        (2, {"digest": 5}, "part 2 of .* changed on its way"),
    ],
)
def test_a_wrong_part(index: int, fields: dict[str, Any], problem: str) -> None:
    staged = changed(stage_updates(weights().items(), 1, bucket_bytes=997), index, **fields)
    with pytest.raises(ValueError, match=problem):
        list(unpacked(staged))


def test_more_parts_than_there_are() -> None:
    staging = Staging(staged_order(), [TensorMeta("w", torch.float32, (4,))])
    data = torch.zeros(16, dtype=torch.uint8)
    staging.add(0, int(digest(data)), data)
    assert staging.is_complete
    with pytest.raises(ValueError, match="part 1 came when 1 of 1 was due"):
        staging.add(1, 1, torch.zeros(16, dtype=torch.uint8))
    staging.close()


@pytest.mark.parametrize("part_bytes", [0, -1, MIN_PART_BYTES - 1, PART_BYTES + 1])
def test_parts_of_an_impossible_size(part_bytes: int) -> None:
    """A server lists them all before the first one comes."""
    message = join(replace(stage_updates([], 1), group_id="g", bucket_bytes=part_bytes))
    with pytest.raises(WireError, match="bucket_bytes is"):
        decode(encode(message), WeightJoin)

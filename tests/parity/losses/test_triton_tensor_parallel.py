"""On the Triton layer loss and gradient do not depend on how the vocabulary is split.

Invariant: with 1, 2 and 4 gloo ranks every function returns, on every rank and bit for bit the same, the loss and
metrics of the float64 single rank to fp32 rounding, and the joined gradients are the single rank's. Rows whose ids all
lie off a shard, shards without any mass, padded columns, teachers that share ids, a row of weight 0; equal shards, then
unequal ones. Without a GPU in Triton's interpreter. Not exercised: NCCL.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.parity.losses.test_tensor_parallel import assert_edges
from tests.parity.losses.tp_ranks import PADDED_VOCAB, VOCAB, spawn
from tests.parity.losses.triton_ranks import EVENLY, cases, problem, run_rank

pytestmark = [pytest.mark.multirank, pytest.mark.slow]


@pytest.fixture(scope="module")
def exact() -> dict[str, Tensor]:
    """The chunked layer in float64 on a single rank."""
    data = problem()
    return cases(data["z"].double(), data, "chunked", {})


def assert_equal_to(exact: dict[str, Tensor], parts: list[dict[str, Tensor]], prefix: str) -> None:
    for name, expected in exact.items():
        if name.endswith("/gradient"):
            actual = torch.cat([part[prefix + name] for part in parts], -1)
            assert actual.shape[-1] == PADDED_VOCAB
            assert torch.count_nonzero(actual[..., VOCAB:]) == 0, name
            assert torch.count_nonzero(actual[0, 2]) == 0 and torch.count_nonzero(actual) > 0, name
        else:
            actual = parts[0][prefix + name]
            assert all(torch.equal(part[prefix + name], actual) for part in parts), name
        torch.testing.assert_close(
            actual.double(), expected, rtol=5e-6, atol=3e-6, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_single_rank(exact: dict[str, Tensor]) -> None:
    data = problem()
    assert all(bool(value.isfinite().all()) for name, value in exact.items() if name != "gather/logprobs")
    assert_equal_to(exact, [cases(data["z"], data, "triton", {})], "")


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks(exact: dict[str, Tensor], tmp_path: Path, world_size: int) -> None:
    parts = spawn(run_rank, world_size, tmp_path)
    assert_equal_to(exact, parts, "uneven/")
    assert_equal_to({name: value for name, value in exact.items() if name.startswith(EVENLY)}, parts, "even/")
    assert_edges(parts)

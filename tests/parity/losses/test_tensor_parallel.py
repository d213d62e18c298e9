"""Loss and gradient do not depend on how the vocabulary is split.

Invariant: with 2 and 4 gloo ranks every function returns the loss and metrics of the single rank on every rank, bit for
bit the same on all of them, and the joined gradients are the single rank's (a known failure elsewhere: gradients TP
times too large). The batch holds rows whose ids all lie off a shard, shards without any mass, padded columns, several
teachers, and a row of weight 0; shards are equal, then unequal. Not exercised: CUDA and NCCL.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.parity.losses.tp_ranks import (
    PADDED_VOCAB,
    VOCAB,
    borders,
    cases,
    edge_cases,
    edge_problem,
    problem,
    run_rank,
    spawn,
)

pytestmark = [pytest.mark.multirank, pytest.mark.slow]


@pytest.fixture(scope="module")
def single() -> dict[str, Tensor]:
    data = problem()
    return cases(data["z"], data, {})


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    return spawn(run_rank, request.param, tmp_path_factory.mktemp(f"tp{request.param}"))


@pytest.mark.parametrize("split", ["even", "uneven"])
def test_results_equal_the_single_rank(ranks: list[dict[str, Tensor]], single: dict[str, Tensor], split: str) -> None:
    for name, expected in single.items():
        if name.endswith("/gradient"):
            actual = torch.cat([rank[f"{split}/{name}"] for rank in ranks], -1)
            assert actual.shape[-1] == PADDED_VOCAB
            assert torch.count_nonzero(actual[..., VOCAB:]) == 0, name
        else:
            actual = ranks[0][f"{split}/{name}"]
            for rank in ranks[1:]:
                assert torch.equal(rank[f"{split}/{name}"], actual), name
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("split", ["even", "uneven"])
def test_rows_at_the_edge(ranks: list[dict[str, Tensor]], split: str) -> None:
    assert_edges([{name.removeprefix(f"{split}/"): value for name, value in rank.items()} for rank in ranks])


def assert_edges(parts: list[dict[str, Tensor]]) -> None:
    """A row that is not finite on one shard has a loss of NaN on all ranks, the others have float64's."""
    data = edge_problem()
    exact = edge_cases(data["z"].double(), data, {"backend": "reference"})
    assert bool((exact["edge/('forward_kl', 'bucket')/gradient"][4, 60:VOCAB] < -1e-4).all())  # the tail is pulled
    for name, expected in exact.items():
        if name.endswith("/gradient"):
            actual = torch.cat([part[name] for part in parts], -1)[[0, 3, 4]]
            expected = expected[[0, 3, 4]]
        else:
            actual = parts[0][name]
            assert all(torch.equal(part[name].nan_to_num(-7), actual.nan_to_num(-7)) for part in parts), name
            assert actual.isnan().tolist() == [False, True, True, False, False], name
        torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-5, atol=1e-6, equal_nan=True, msg=name)


def test_problem_is_worth_testing(single: dict[str, Tensor]) -> None:
    """Losses are finite, gradients are not all 0, and the row of weight 0 has none."""
    for name, value in single.items():
        assert bool(torch.isfinite(value).all()), name
        if name.endswith("/gradient"):
            assert torch.count_nonzero(value) > 0, name
            assert torch.count_nonzero(value[1, 2]) == 0, name
    for world_size in (2, 4):
        assert borders(world_size, even=False)[-1] == PADDED_VOCAB

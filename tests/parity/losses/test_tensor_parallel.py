"""Loss and gradient do not depend on how the vocabulary is split.

Invariant: with 2 and 4 gloo ranks every function returns the loss and metrics of the single rank on every rank, bit for
bit the same on all of them, and the joined gradients are the single rank's (a known failure elsewhere: gradients TP
times too large). The batch holds rows whose ids all lie off a shard, shards without any mass, padded columns, several
teachers that share ids, and a row of weight 0; shards are equal, then unequal. The Triton layer, on 1 and 4 ranks,
is held to the float64 single rank in fewer cases; without a GPU it runs in Triton's interpreter. Not exercised: NCCL.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.parity.losses.tp_ranks import (
    EVENLY_ON_TRITON,
    ON_TRITON,
    PADDED_VOCAB,
    VOCAB,
    borders,
    cases,
    edge_cases,
    edge_problem,
    problem,
    run_rank,
    small_problem,
    spawn,
)

pytestmark = [pytest.mark.multirank, pytest.mark.slow]
Parts = list[dict[str, Tensor]]
"""The results of all ranks."""


@pytest.fixture(scope="module")
def single() -> dict[str, Tensor]:
    data = problem()
    return cases(data["z"], data, {})


@pytest.fixture(scope="module")
def exact() -> dict[str, Tensor]:
    """The chunked layer in float64 on a single rank, for the Triton layer."""
    data = small_problem()
    return cases(data["z"].double(), data, {"backend": "chunked"}, ON_TRITON)


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Parts:
    return spawn(run_rank, request.param, tmp_path_factory.mktemp(f"tp{request.param}"))


def assert_equal_to(expected: dict[str, Tensor], parts: Parts, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """All ranks have the expected losses and metrics, and their gradients are its parts."""
    for name, value in expected.items():
        if name.endswith("/gradient"):
            actual = torch.cat([part[name] for part in parts], -1)
            assert actual.shape[-1] == PADDED_VOCAB
            assert torch.count_nonzero(actual[..., VOCAB:]) == 0, name
        else:
            actual = parts[0][name]
            assert all(torch.equal(part[name], actual) for part in parts), name
        torch.testing.assert_close(
            actual.to(value.dtype), value, rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}"
        )


def of_split(parts: Parts, split: str) -> Parts:
    return [{name.removeprefix(f"{split}/"): value for name, value in part.items()} for part in parts]


@pytest.mark.parametrize("split", ["even", "uneven"])
def test_results_equal_the_single_rank(ranks: Parts, single: dict[str, Tensor], split: str) -> None:
    assert_equal_to(single, of_split(ranks, split))


@pytest.mark.parametrize("split", ["even", "uneven"])
def test_rows_at_the_edge(ranks: Parts, split: str) -> None:
    assert_edges(of_split(ranks, split))


def test_triton_on_a_single_rank(exact: dict[str, Tensor]) -> None:
    data = small_problem()
    found = cases(data["z"], data, {"backend": "triton"}, ON_TRITON)
    assert_equal_to(exact, [found], rtol=5e-6, atol=3e-6)
    for name, value in found.items():
        assert not name.endswith("/gradient") or torch.count_nonzero(value[0, 2]) == 0 < torch.count_nonzero(value)


def test_triton_on_ranks(exact: dict[str, Tensor], tmp_path: Path) -> None:
    parts = spawn(functools.partial(run_rank, on_triton=True), 4, tmp_path)
    assert_equal_to(exact, of_split(parts, "uneven"), rtol=5e-6, atol=3e-6)
    evenly = {name: value for name, value in exact.items() if name.startswith(EVENLY_ON_TRITON)}
    assert_equal_to(evenly, of_split(parts, "even"), rtol=5e-6, atol=3e-6)
    assert_edges(of_split(parts, "uneven"))


def assert_edges(parts: Parts) -> None:
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

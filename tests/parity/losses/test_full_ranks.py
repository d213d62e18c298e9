"""Full-vocabulary divergences are those of a single rank however vocabulary and sequence are split.

Invariant: with 2 and 4 gloo ranks, all rows at once or a few, every rank has the loss and metrics of the joined logits,
the hidden gradient in full (or this rank's share of the sequence) and the gradient of its own rows of the head, in
float64 to 1e-9 and by the Triton layer in fp32 to 1e-5. The last of four ranks holds padding alone. Not exercised: CUDA
and NCCL.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.parity.losses.full_ranks import BUDGETS, CASES, ON_TRITON, run_rank
from tests.parity.losses.test_full import assert_equal, expected
from tests.parity.losses.tp_ranks import spawn

pytestmark = [pytest.mark.multirank, pytest.mark.slow]

Results = list[dict[str, dict[str, Tensor]]]


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return spawn(run_rank, request.param, tmp_path_factory.mktemp(f"full{request.param}"))


@pytest.mark.parametrize("layout", ["tp", "sp"])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("form", CASES)
def test_equals_the_definition(ranks: Results, form: str, budget: str, layout: str) -> None:
    results = [rank[f"{form}/{budget}/{layout}"] for rank in ranks]
    joined = dict(results[0])
    for name, value in joined.items():
        for other in results[1:]:
            # A collective's result is one and the same; the hidden gradient is its sum, or a share of it.
            assert name == "grad/weight" or layout == "sp" or torch.equal(other[name], value), name
            assert name.startswith("grad/") or torch.equal(other[name], value), name
    joined["grad/weight"] = torch.cat([result["grad/weight"] for result in results])
    if layout == "sp":
        joined["grad/hidden"] = torch.cat([result["grad/hidden"] for result in results])
    assert_equal(joined, expected(form), 1e-9)


@pytest.mark.parametrize("form", ON_TRITON)
def test_triton_layer(ranks: Results, form: str) -> None:
    results = [rank[f"{form}/all/triton"] for rank in ranks]
    joined = {**results[0], "grad/weight": torch.cat([result["grad/weight"] for result in results])}
    assert_equal(joined, expected(form), 1e-5)


@pytest.mark.parametrize("form", CASES)
def test_collectives(ranks: Results, form: str) -> None:
    """One all-gather, two where the logarithm of a mixture must wait for both log-sum-exps; two of the numbers are the
    target's."""
    numbers = [7] if form.removesuffix("+task") in ("forward_kl", "reverse_kl") else [7, 2]
    assert all(rank[f"{form}/gathered"].tolist() == numbers for rank in ranks)  # type: ignore[attr-defined]

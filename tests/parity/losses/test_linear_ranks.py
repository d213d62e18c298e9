"""The fused head gives the single rank's loss and gradients however vocabulary and sequence are split.

Invariant: with 2 and 4 gloo ranks, and all rows at once or a few, every rank has the loss and metrics of the joined
logits, the hidden gradient in full (or this rank's share of the sequence) and the weight gradient of this rank's rows;
the weight gradient from autograd or in ``main_grad``; the chunked layer in float64 and the Triton layer in fp32. Not
exercised: CUDA and NCCL.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mopd.losses import parallel_topk_distill
from tests.parity.losses.linear_ranks import AT_ONCE, VOCAB, problem, run_rank
from tests.parity.losses.tp_ranks import spawn

pytestmark = [pytest.mark.multirank, pytest.mark.slow]

Results = list[dict[str, dict[str, Tensor]]]
KINDS = ("tp", "tp/main_grad", "sp", "sp/main_grad", "triton")


@pytest.fixture(scope="module")
def single() -> dict[str, Tensor]:
    """All logits at once, under plain autograd."""
    data = problem()
    hidden, weight = (data[name].clone().requires_grad_() for name in ("hidden", "weight"))
    loss, metrics = parallel_topk_distill(
        hidden @ weight.t(),
        data["ids"],
        data["logq"],
        loss_weight=data["loss_weight"],
        target=data["target"],
        true_vocab_size=VOCAB,
        temperature=1.2,
        with_entropy=True,
        reduce_loss=True,
        backend="reference",
    )
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    result = {f"metric/{name}": value for name, value in metrics.items()}
    return result | {"loss": loss.detach(), "grad/hidden": hidden.grad, "grad/weight": weight.grad}


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return spawn(run_rank, request.param, tmp_path_factory.mktemp(f"linear{request.param}"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at_once", AT_ONCE)
def test_equals_the_single_rank(ranks: Results, single: dict[str, Tensor], at_once: int | None, kind: str) -> None:
    results = [rank[f"{at_once}/{kind}"] for rank in ranks]
    close = {"rtol": 1e-5, "atol": 1e-6} if kind == "triton" else {"rtol": 1e-9, "atol": 1e-11}
    joined = {name: value for name, value in results[0].items() if not name.startswith("grad/")}
    for name, value in joined.items():
        for other in results[1:]:
            assert torch.equal(other[name], value), name
    joined["grad/weight"] = torch.cat([result["grad/weight"] for result in results])
    if kind.startswith("sp"):
        joined["grad/hidden"] = torch.cat([result["grad/hidden"] for result in results])
    else:
        for result in results:
            torch.testing.assert_close(result["grad/hidden"].double(), single["grad/hidden"], **close)
        joined["grad/hidden"] = results[0]["grad/hidden"]
    assert joined.keys() == single.keys()
    for name, expected in single.items():
        actual = joined[name].double()
        torch.testing.assert_close(actual, expected, msg=lambda m, name=name: f"{name}: {m}", **close)


def test_problem_is_worth_testing(single: dict[str, Tensor]) -> None:
    """Gradients are finite, not all 0, and 0 on rows without weight and on padded columns."""
    grad = single["grad/hidden"]
    assert bool(torch.isfinite(grad).all()) and torch.count_nonzero(grad[1:]) > 0
    assert torch.count_nonzero(grad[0]) == 0 and torch.count_nonzero(grad[5, 1]) == 0
    assert torch.count_nonzero(single["grad/weight"][VOCAB:]) == 0

"""A loss of a user's file equals the built-in loss that it copies, at every layout: a step's loss, metrics and gradient
norm, bit for bit on one rank and to 1e-6 elsewhere. Not exercised: CUDA."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fixtures.tiny_models import make_hf_model
from tests.parity.student.harness import run_ranks

pytestmark = [pytest.mark.multirank, pytest.mark.slow, pytest.mark.timeout(1800)]

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"tp": 1, "pp": 1, "dp": 1, "sp": False},
    "dp2": {"tp": 1, "pp": 1, "dp": 2, "sp": False},
    "cp2": {"tp": 1, "cp": 2, "pp": 1, "dp": 1, "sp": False},
    "tp2_sp": {"tp": 2, "pp": 1, "dp": 1, "sp": True},
    "padded": {"tp": 2, "pp": 1, "dp": 1, "sp": False, "packing": False},
    "tp2_pp2": {"tp": 2, "pp": 2, "dp": 1, "sp": False},
}
PAIRS = {"custom": "plain_tail", "custom_k2": "plain_k2"}
"""Custom losses and what they copy (``ranks.LOSSES``)."""


def steps_of(results: dict[str, Any], case: str) -> list[dict[str, float]]:
    """A case's steps without the metrics that one of both does not have."""
    alone = ("clamped", "tail_floored", "custom_", "student_mass")
    return [{n: v for n, v in step.items() if not n.startswith(alone)} for step in results[case]["steps"]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("custom")
    model = str(make_hf_model(folder / "model", "qwen3"))
    found: dict[str, Any] = {}
    for num_ranks in (1, 2, 4):
        sizes = {name: one["tp"] * one.get("cp", 1) * one["pp"] * one["dp"] for name, one in LAYOUTS.items()}
        layouts = {name: one for name, one in LAYOUTS.items() if sizes[name] == num_ranks}
        cases = {
            f"{name}/{loss}": {**layout, "loss": loss, "steps": 2}
            for name, layout in layouts.items()
            for loss in (*PAIRS, *PAIRS.values())
        }
        found |= run_ranks(num_ranks, {"model": model, "cases": cases}, folder / str(num_ranks))
    return found


def test_bit_for_bit_on_one_rank(results: dict[str, Any]) -> None:
    assert steps_of(results, "one/custom") == steps_of(results, "one/plain_tail")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", PAIRS)
def test_equal_at_every_layout(results: dict[str, Any], layout: str, loss: str) -> None:
    for step, wanted in zip(
        steps_of(results, f"{layout}/{loss}"), steps_of(results, f"{layout}/{PAIRS[loss]}"), strict=True
    ):
        assert step == pytest.approx(wanted, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", PAIRS)
def test_no_layout_changes_it(results: dict[str, Any], layout: str, loss: str) -> None:
    """Its own metrics among the others."""
    step, wanted = (results[f"{name}/{loss}"]["steps"][0] for name in (layout, "one"))
    assert any(name.startswith("custom_") for name in wanted) == (loss == "custom_k2")
    assert step == pytest.approx(wanted, rel=1e-5, abs=1e-6)

"""After an update every engine says what the student says, whatever way its weights took."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.servers import engine_file, serve_process
from tests.parity.student import weight_cases
from tests.parity.student.harness import run_ranks
from tests.parity.student.sending import NUM_VERSIONS, NUM_WAYS
from tests.parity.student.weight_cases import DTYPES, FAMILIES, FEW

ATOL = 1e-4
"""Nats, of log-probs in fp32."""
COARSE_ATOL, COARSE_MEAN = 0.2, 0.06
"""Where one side computes in bf16, of one token and of all in the mean: the weights' own equality is what counts."""
IS_WHOLE = os.environ.get("MOPD_WEIGHTS") == "all"
ON_VLLM = (
    [(family, workers) for family in FAMILIES for workers in (1, 2) if family not in ("latent", "stacked")]
    if IS_WHOLE
    else []
)


def check(found: dict[str, Any], *, atol: float = ATOL) -> None:
    assert found["is_student"], "an engine of this process does not hold the student's weights"
    assert found["is_same"], "one way's update is not the other's, bit by bit"
    assert found["apart"] < atol
    assert len(found["moved"]) == NUM_VERSIONS - 1
    assert min(found["moved"]) > 100 * found["apart"] or atol > ATOL


@pytest.mark.parametrize("name", [f"{family}/{layout}" for family, layout in FEW])
def test_after_every_update(two_ranks: dict[str, Any], name: str) -> None:
    check(two_ranks[f"sends/{name}"])


@pytest.mark.parametrize("name", DTYPES)
def test_between_dtypes(two_ranks: dict[str, Any], name: str) -> None:
    found = two_ranks[f"sends/{name}"]
    check(found, atol=COARSE_ATOL)
    assert found["mean_apart"] < COARSE_MEAN


def test_with_a_frozen_tower(two_ranks: dict[str, Any]) -> None:
    """Which travels over a group once."""
    found = two_ranks["sends/tower"]
    assert found["is_student"]
    first, second = [0, 0], [found["num_constants"]] * 2
    assert found["num_skipped"] == [first, second] * 2 + [first, first, second, first] + [first, second] * 2
    assert found["num_constants"] > 10


@pytest.fixture
def models(tmp_path: Path) -> dict[str, str]:
    return weight_cases.make_models(tmp_path)


@contextlib.contextmanager
def vllm_server(model: str, folder: Path, workers: int, **engine: Any) -> Iterator[str]:
    from tests.integration.test_server_vllm import CFG

    file = folder / "rollout.json"
    cfg = dataclasses.replace(CFG, tensor_parallel_size=workers, **engine)
    engine_file(Path(model), "rollout", engine=cfg, startup_timeout_s=240.0).write(file)
    with serve_process(file) as child:
        yield child.wait_ready()["url"]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("family", "workers"), ON_VLLM)
def test_on_vllm(models: dict[str, str], tmp_path: Path, family: str, workers: int) -> None:
    """``make weights``: each family at each layout, to vLLM at tensor parallel 1 and 2."""
    with vllm_server(models[family], tmp_path, workers) as url:
        cases = {
            layout: weight_cases.case_of(models[family], layout, urls=[url], first=NUM_WAYS * NUM_VERSIONS * number)
            for number, layout in enumerate(weight_cases.layouts_of(family))
        }
        found = run_ranks(2, {"model": models[family], "cases": cases}, tmp_path / "ranks", timeout_s=850)
    for layout, one in found.items():
        print(f"{family} {layout} TP{workers}: {one['apart']:.1e}")
        check(one)


@pytest.mark.slow
@pytest.mark.skipif(not IS_WHOLE, reason="make weights")
def test_on_torch_at_every_layout(models: dict[str, str], tmp_path: Path) -> None:
    cases = {
        f"{family}/{layout}": weight_cases.case_of(models[family], layout)
        for family in FAMILIES
        for layout in weight_cases.layouts_of(family)
    }
    found = run_ranks(2, {"model": models["tied"], "cases": cases}, tmp_path / "ranks", timeout_s=850)
    for name, one in found.items():
        print(f"{name}: {one['apart']:.1e}")
        check(one)

"""The average of the student's weights that its ranks keep for a teacher (``refresh: {ema: …}``).

Invariant: after 50 steps at TP2 x DP2 it is the plain moving average of the whole model's weights, which is kept beside
it in float64; a student that is loaded from a checkpoint in the middle has it bit for bit, then and after the same
steps, and one of another layout has it bit for bit when it is loaded. In bfloat16 the average still keeps fp32 numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parity.student.harness import run_ranks

pytestmark = [pytest.mark.multirank, pytest.mark.slow]

Results = dict[str, Any]
EMA: Results = {"ema": 0.9, "lengths": [(2, 3), (1, 5), (4, 2), (3, 3)]}
TP2_DP2: Results = {"tp": 2, "pp": 1, "dp": 2, "sp": False, "bucket_size": 3000, "overlap": True, **EMA}
PP2_DP2: Results = {"tp": 1, "pp": 2, "dp": 2, "sp": False, **EMA}


@pytest.fixture(scope="module")
def four(hf_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("averages")
    half, rest = {"steps": 25}, {"steps_after": 25}
    cases = {
        "save": {**TP2_DP2, **half, **rest, "save": str(folder / "saved")},
        "load": {**TP2_DP2, **rest, "load": str(folder / "saved")},
        "load/pp2": {**PP2_DP2, "load": str(folder / "saved")},
        "save/bf16": {**TP2_DP2, "dtype": "bfloat16", "steps": 4, "steps_after": 2, "save": str(folder / "bf16")},
        "load/bf16": {**TP2_DP2, "dtype": "bfloat16", "steps_after": 2, "load": str(folder / "bf16")},
    }
    return run_ranks(4, {"model": str(hf_model), "cases": cases}, folder / "job")


def test_it_is_the_plain_average(four: Results) -> None:
    assert four["save"]["average"]["error"] < 1e-6
    assert four["save"]["average"]["from_weights"] > 1e-3  # it lags behind


@pytest.mark.parametrize("case", ["load", "load/bf16"])
def test_a_resumed_student_has_it_bit_for_bit(four: Results, case: str) -> None:
    saved, loaded = four[case.replace("load", "save")], four[case]
    assert loaded["loaded_average"]["hash"] == saved["saved_average"]["hash"] != saved["average"]["hash"]
    assert loaded["average"]["hash"] == saved["average"]["hash"] and loaded["hash"] == saved["hash"]
    assert loaded["steps_after"] == saved["steps_after"]


def test_another_layout_has_it_too(four: Results) -> None:
    assert four["load/pp2"]["loaded_average"]["hash"] == four["save"]["saved_average"]["hash"]


def test_it_is_kept_finer_than_a_bfloat16_weight(four: Results) -> None:
    """It comes out rounded once."""
    assert four["save/bf16"]["average"]["error"] < 2**-8
    assert four["save/bf16"]["average"]["from_weights"] > 0

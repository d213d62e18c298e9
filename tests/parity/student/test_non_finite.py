"""A NaN loss or an infinite gradient norm stops the step on every rank before a weight changes, with names."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.multirank, pytest.mark.slow]


@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2"])
def test_names_the_sample_and_keeps_the_weights(two_ranks: dict[str, Any], layout: str) -> None:
    poison = two_ranks[f"poison/{layout}"]["poison"]
    assert "loss is not finite at step 1" in poison["loss"]
    assert "samples 805;" in poison["loss"]
    assert "gradient norm is" in poison["grad_norm"]
    assert "900, 901" in poison["grad_norm"] or "domain 'code' samples 9" in poison["grad_norm"]
    assert poison["is_unchanged"]

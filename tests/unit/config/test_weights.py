"""Where the student's weights cannot take the way that a recipe asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from mopd.config.auto import settle
from mopd.config.load import load_recipe
from mopd.hardware import Hardware
from mopd.types import UserError
from tests.fixtures.recipe import RECIPE

WAY = "weight_sync={type: collective}"


def test_engines_elsewhere_are_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    for placement in ("{type: in_process}", "{type: external, urls: ['http://a:1']}"):
        with pytest.raises(UserError, match=r"weight_sync.type is 'collective', but rollout.placement.type is"):
            load_recipe(tmp_path / "recipe.yaml", [WAY, f"rollout.placement={placement}"])


def test_cuda_is_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    recipe = load_recipe(tmp_path / "recipe.yaml", [WAY, "rollout.placement={type: local}"]).recipe
    assert settle(recipe, Hardware(), num_ranks=1).recipe.weight_sync == recipe.weight_sync
    with pytest.raises(ValueError, match=r"use CUDA: set weight_sync.type: http"):
        settle(recipe, Hardware(gpu_memory_bytes=(2**36,), torch_cuda="13.0"), num_ranks=1)

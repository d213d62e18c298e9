"""Where the student's weights cannot take the way that a recipe asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from mopd.base.hardware import Hardware
from mopd.base.types import UserError
from mopd.config.load import load_recipe
from mopd.config.machine.auto import settle
from tests.fixtures.recipe import RECIPE

WAY = "weight_sync={type: collective}"


def test_engines_elsewhere_are_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    for placement in ("{type: in_process}", "{type: external, urls: ['http://a:1']}"):
        with pytest.raises(UserError, match=r"weight_sync.type is 'collective', but rollout.placement.type is"):
            load_recipe(tmp_path / "recipe.yaml", [WAY, f"rollout.placement={placement}"])
        with pytest.raises(UserError, match=r"weight_sync.type is 'ipc', but rollout.placement.type is"):
            load_recipe(tmp_path / "recipe.yaml", ["weight_sync={type: ipc}", f"rollout.placement={placement}"])


def test_ipc_on_cuda_takes_one_gpu(tmp_path: Path) -> None:
    """An engine sees its own GPU alone."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    keys = ["weight_sync={type: ipc}", "teachers.math.placement={type: local}"]
    gpus = Hardware(gpu_memory_bytes=(2**36,) * 4, torch_cuda="13.0")
    for shares, ranks in (("", 1), (", share_gpus_with: student", 2)):
        settings = [
            f"rollout.placement={{type: local{shares}}}",
            f"student.parallel.tensor_model_parallel_size={ranks}",
        ]
        recipe = load_recipe(tmp_path / "recipe.yaml", [*keys, *settings]).recipe
        with pytest.raises(ValueError, match=rf"for a student of 1 rank \(this one has {ranks}\)"):
            settle(recipe, gpus, num_ranks=ranks)
    settings = ["rollout.placement={type: local, share_gpus_with: student}"]
    recipe = load_recipe(tmp_path / "recipe.yaml", [*keys, *settings]).recipe
    assert settle(recipe, gpus, num_ranks=1).recipe.weight_sync == recipe.weight_sync


CPU, GPUS = Hardware(), Hardware(gpu_memory_bytes=(2**36,) * 4, torch_cuda="13.0")
LOCAL = "rollout.placement={type: local}"
SHARED = "rollout.placement={type: local, share_gpus_with: student}"
TEACHERS = "teachers.math.placement={type: local}"
STALE = "schedule.max_staleness=1"


@pytest.mark.parametrize(
    ("overrides", "hardware", "told"),
    [
        ([], CPU, "rollout.placement.type in_process: the engine is given them directly"),
        ([LOCAL], CPU, "collective (no GPU, and engines on the student's machine)"),
        ([LOCAL], GPUS, "http (CUDA, where no other way has been measured)"),
        (
            ["rollout.placement={type: local, share_gpus_with: student}", TEACHERS],
            CPU,
            "ipc (rollout.placement.share_g",
        ),
        (
            [LOCAL, STALE, "rollout.on_new_weights=finish"],
            CPU,
            "http (schedule.max_staleness 1: student and engines go on while they travel)",
        ),
        ([LOCAL, STALE], CPU, "collective (no GPU, and engines on the student's"),
        (["rollout.placement={type: ray}"], CPU, "http (rollout.placement.type ray: engines of other machines)"),
        ([LOCAL, "weight_sync={type: http}"], CPU, "http"),
    ],
)
def test_auto_is_what_the_placement_allows(tmp_path: Path, overrides: list[str], hardware: Hardware, told: str) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    loaded = load_recipe(tmp_path / "recipe.yaml", overrides)
    made = settle(loaded.recipe, hardware, num_ranks=1)
    found = loaded.settled(made.recipe, made.reasons)
    assert found.weights_way.startswith(told)
    assert settle(found.recipe, hardware, num_ranks=1).recipe == found.recipe

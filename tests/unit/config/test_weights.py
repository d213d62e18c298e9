"""Where the student's weights cannot take the way that a recipe asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from mopd.base.hardware import Hardware
from mopd.base.types import UserError
from mopd.config.load import load_recipe
from mopd.config.machine.auto import settle
from mopd.config.weights import CollectiveConfig
from tests.fixtures.recipe import RECIPE

ELSEWHERE = ("{type: external, urls: ['http://a:1']}", "{type: ray}", "{type: registered}")


def test_engines_in_this_process_and_ipc_from_elsewhere_are_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    for way, placements in (("collective", ["{type: in_process}"]), ("ipc", ["{type: in_process}", *ELSEWHERE])):
        for placement in placements:
            keys = [f"weight_sync={{type: {way}}}", f"rollout.placement={placement}"]
            with pytest.raises(UserError, match=rf"weight_sync.type is '{way}', but rollout.placement.type is"):
                load_recipe(tmp_path / "recipe.yaml", keys)


@pytest.mark.parametrize("placement", ["{type: local}", *ELSEWHERE])
def test_collective_reaches_engines_anywhere(tmp_path: Path, placement: str) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    way = load_recipe(
        tmp_path / "recipe.yaml",
        ["weight_sync={type: collective, interface: ib0, or_http: true}", f"rollout.placement={placement}"],
    ).recipe.weight_sync
    assert way == CollectiveConfig(type="collective", interface="ib0", or_http=True)


@pytest.mark.parametrize("name", ["", "eth0 ", "a/b", "eth0:1", "x" * 16, "\u00e9th", "a\nb"])
def test_what_is_no_interface_is_one_line(name: str) -> None:
    with pytest.raises(ValueError, match=r"^interface is .*: set it to a network interface's name") as caught:
        CollectiveConfig(type="collective", interface=name)
    assert "\n" not in str(caught.value)


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


GLOO, NCCL = (f"collective (straight into the engines' memory, over {by})" for by in ("gloo", "NCCL"))
TWO_RANKS = "student.parallel.tensor_model_parallel_size=2"


@pytest.mark.parametrize(
    ("overrides", "hardware", "told"),
    [
        ([], CPU, "rollout.placement.type in_process: the engine is given them directly"),
        ([LOCAL], CPU, GLOO),
        ([LOCAL], GPUS, NCCL),
        *(([f"rollout.placement={placement}"], CPU, GLOO) for placement in ELSEWHERE),
        *(([f"rollout.placement={placement}"], GPUS, NCCL) for placement in ELSEWHERE[:1] + ELSEWHERE[2:]),
        (["rollout.placement={type: ray, num_gpus: 1}"], GPUS, NCCL),
        ([SHARED, TEACHERS], CPU, "ipc (rollout.placement.share_gpus_with: nothing is kept"),
        ([SHARED, TEACHERS], GPUS, "ipc (rollout.placement.share_gpus_with: nothing is kept"),
        ([SHARED, TEACHERS, TWO_RANKS], GPUS, "http (rollout.placement.share_gpus_with: NCCL refuses two processes"),
        (
            [LOCAL, STALE, "rollout.on_new_weights=finish"],
            CPU,
            "http (schedule.max_staleness 1: student and engines go on while they travel)",
        ),
        ([LOCAL, STALE], CPU, GLOO),
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
    way = found.recipe.weight_sync
    assert not isinstance(way, CollectiveConfig) or way.or_http

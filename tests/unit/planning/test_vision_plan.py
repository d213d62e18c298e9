"""Plan of a vision tower: its weights, its operations, and what fewer layers beside it save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

from mopd.cli.main import main
from mopd.config.student import Freeze, ParallelConfig, StudentConfig, VisionConfig
from mopd.conversion.hf.pretrained import build_tower
from mopd.conversion.models.frozen import constant_names
from mopd.conversion.models.reading import read_dims
from mopd.planning.memory.activations import tower_bytes
from mopd.planning.memory.shards import BYTES, shard, tensor_bytes, update_bytes
from mopd.planning.vision import plan_tower
from mopd.student.vision import make_tower
from tests.fixtures.vision import VISION_FAMILIES, make_vision_model
from tests.unit.conversion.test_vision_dims import QWEN2_5_VL_7B

ROOT = Path(__file__).parents[3]
RECIPES = Path(__file__).parent / "recipes"
RECIPE = str(RECIPES / "one_node.yaml")
FREEZES: tuple[Freeze, ...] = ("tower", "tower_and_merger", "none")
PIPELINE = (
    "student.parallel.tensor_model_parallel_size=1", "student.parallel.sequence_parallel=false",
    "student.parallel.pipeline_model_parallel_size=2", "student.parallel.data_parallel_size=2",
)  # fmt: skip


@pytest.fixture(scope="module", params=VISION_FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("model"), request.param)


def test_operations_are_those_of_the_tower(folder: Path) -> None:
    """One image of 8 x 12 patches, whole windows, against a count of what transformers' tower calls. Biases and norms,
    which the plan counts as it counts all weights, are below 2 % even of these."""
    tower: Any = build_tower(folder, torch.float32)
    tower.set_attn_implementation("eager")  # whose products are counted
    dims = read_dims(folder)
    assert dims.vision is not None
    height, width = 8, 12
    numbers = dims.vision.in_channels * dims.vision.temporal_patch_size * dims.vision.patch_size**2
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        tower(torch.randn(height * width, numbers), grid_thw=torch.tensor([[1, height, width]]))
    tokens = height * width // dims.vision.spatial_merge_size**2
    plan = plan_tower(StudentConfig(model=str(folder)), dims, tokens)
    assert plan is not None
    assert plan.weights == sum(parameter.numel() for parameter in tower.parameters())
    assert plan.flops_per_token * tokens == pytest.approx(counter.get_total_flops(), rel=0.02)


@pytest.mark.parametrize("freeze", FREEZES)
def test_what_is_frozen_has_weights_alone(folder: Path, freeze: Freeze) -> None:
    tower: Any = build_tower(folder, torch.float32)
    merging = [p.numel() for name, p in tower.named_parameters() if "merger" in name]
    whole = sum(parameter.numel() for parameter in tower.parameters())
    trained = {"tower": sum(merging), "tower_and_merger": 0, "none": whole}[freeze]
    parallel = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    student = StudentConfig(model=str(folder), dtype="float32", parallel=parallel, vision=VisionConfig(freeze=freeze))
    dims = read_dims(folder)
    first, last = (tensor_bytes(shard(dims, parallel, stage), student) for stage in (0, 1))
    text_on_first = shard(dims, parallel, 0).dense
    assert first["weights"] == 4 * (text_on_first + whole)
    assert first["gradients"] == 4 * (text_on_first + trained)
    assert last["weights"] == last["gradients"] == 4 * shard(dims, parallel, 1).dense
    constants = constant_names(dims, student)
    sent = sum(t.nbytes for name, t in load_file(folder / "model.safetensors").items() if name not in constants)
    assert update_bytes(dims, student) == sent


def kept_bytes(tower: Any, patches: torch.Tensor, grid: torch.Tensor) -> int:
    """Return the bytes that autograd keeps of a forward pass, each piece of memory once, weights left out."""
    seen = {parameter.untyped_storage().data_ptr(): 0 for parameter in tower.parameters()}
    kept = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        seen.setdefault(storage.data_ptr(), storage.nbytes())
        kept.append(tensor)  # so that no other gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        tower(patches, grid_thw=grid)
    return sum(seen.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_are_what_a_trained_tower_keeps(folder: Path, dtype: str) -> None:
    """One image of 16 x 24 patches, whole windows. Angles, sums of norms and the like, which the plan leaves out, are
    below 5 % of so narrow a tower."""
    dims = read_dims(folder)
    assert dims.vision is not None
    numbers = dims.vision.in_channels * dims.vision.temporal_patch_size * dims.vision.patch_size**2
    patches, grid = torch.randn(16 * 24, numbers), torch.tensor([[1, 16, 24]])
    kept: dict[str, int] = {}
    for freeze in FREEZES:
        student = StudentConfig(model=str(folder), dtype=dtype, vision=VisionConfig(freeze=freeze))
        kept[freeze] = kept_bytes(make_tower(student, getattr(torch, dtype)).train(), patches, grid)
        assert tower_bytes(dims, student, 16 * 24 / 4) == pytest.approx(kept[freeze], rel=0.05), freeze
    student = StudentConfig(model=str(folder), dtype=dtype, recompute="full", vision=VisionConfig(freeze="none"))
    again = kept_bytes(make_tower(student, getattr(torch, dtype)).train(), patches, grid)
    assert dims.vision.depth == 2
    one_block = (kept["none"] - again) / 2 + 16 * 24 * dims.vision.hidden_size * BYTES[dtype]  # with its input
    assert tower_bytes(dims, student, 16 * 24 / 4) == pytest.approx(again + one_block, rel=0.05)
    assert kept["tower_and_merger"] == 0 < kept["tower"] < again < kept["none"]


def plan(tmp_path: Path, *arguments: str) -> int:
    model = tmp_path / "Qwen2.5-VL-7B"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(QWEN2_5_VL_7B))
    configs = str(ROOT / "recipes" / "models")
    return main(["plan", RECIPE, "--gpu", "h200", "--configs", configs, *arguments, f"student.model={model}"])


def test_fewer_layers_beside_a_tower_save_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def step(*arguments: str) -> dict[str, Any]:
        assert plan(tmp_path, "--json", *PIPELINE, *arguments) == 0
        read: dict[str, Any] = json.loads(capsys.readouterr().out)
        return read

    images = ("--prompt-length", "900", "--image-length", "800", "student.vision.freeze=none")
    even, uneven = step(*images), step(*images, "student.parallel.num_layers_in_first_pipeline_stage=13")
    blind = step("--prompt-length", "900")
    assert even["vision_tower"]["weights"] == even["vision_tower"]["trained"] == 676_550_144
    times = [one["times"]["trainer"] for one in (blind, even, uneven)]
    assert "vision_tower" not in times[0] and times[1]["vision_tower"] > times[2].get("vision_tower", 0.0)
    busy = [
        sum(parts[key] for key in ("forward_backward", "vision_tower", "bubble") if key in parts) for parts in times
    ]
    assert busy[0] < busy[2] < busy[1]
    assert uneven["ranks"][0]["parts"]["weights"] < even["ranks"][0]["parts"]["weights"]
    assert uneven["ranks"][1]["parts"]["weights"] > even["ranks"][1]["parts"]["weights"]
    kept = [[rank["parts"]["activations"] for rank in one["ranks"]] for one in (blind, even)]
    assert kept[0][0] < kept[1][0] and kept[0][1] == kept[1][1]


def test_what_is_told_and_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(tmp_path, *PIPELINE) == 0
    assert "vision tower: 676.6 M weights, 44.57 M of them trained" in capsys.readouterr().out
    for arguments, problem in (
        (("--image-length", "513"), "--image-length is 513: set 0 to the 512 tokens of a prompt"),
        (("--image-length", "-1"), "--image-length is -1"),
        (("student.parallel.num_layers_in_first_pipeline_stage=28",), "leaves 0 of the model's 28 layers"),
    ):
        assert plan(tmp_path, *PIPELINE, *arguments) == 2
        assert problem in capsys.readouterr().err
    blind = ["plan", RECIPE, "--gpu", "h100", "--configs", str(ROOT / "recipes/models"), "--image-length", "9"]
    assert main(blind) == 2
    assert "--image-length: the student sees no images" in capsys.readouterr().err

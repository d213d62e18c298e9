"""``mopd convert verify`` sees each classic mistake of a converter, between formats, in tensors and in logits.

The tensors alone would hide a mistake that a conversion and its inverse share, so for every mistake that leaves a
loadable model the logits must differ too: those of the distributed checkpoint are Megatron's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mopd.cli.main import main
from mopd.conversion.jobs import streaming
from mopd.conversion.torch_dist.plan import TargetLayout
from tests.fixtures.tiny_models import make_hf_model, make_tokenizer
from tests.fixtures.vision import VISION_FAMILIES, make_vision_model
from tests.unit.conversion.conftest import no_rank  # noqa: F401
from tests.unit.conversion.jobs import run_job

EXPERT = "model.layers.1.mlp.experts.{}.{}_proj.weight"
ATTENTION = "model.layers.0.self_attn.{}_proj.weight"
Weights = dict[str, Tensor]


def verify(one: Path, other: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["convert", "verify", str(one), str(other), "--json", *options])
    report = json.loads(capsys.readouterr().out)
    assert code == (0 if report["same"] else 1)
    return code, report


def spoiled(source: Path, change: Callable[[Weights], object], **config: Any) -> Path:
    """A copy of a Hugging Face folder with other weights or config."""
    target = shutil.copytree(source, source.parent / "spoiled", dirs_exist_ok=True)
    weights = {name: tensor.clone() for name, tensor in load_file(source / "model.safetensors").items()}
    change(weights)
    contiguous = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(contiguous, target / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**settings, **config}))
    return target


def swap(weights: Weights, one: str, other: str) -> None:
    weights[one], weights[other] = weights[other], weights[one]


def swap_experts(weights: Weights) -> None:
    for part in ("gate", "up", "down"):
        swap(weights, EXPERT.format(0, part), EXPERT.format(2, part))


def swap_q_and_k_rows(weights: Weights) -> None:
    """The first head of q and of k change places."""
    q, k = weights[ATTENTION.format("q")], weights[ATTENTION.format("k")]
    head = q[:32].clone()
    q[:32], k[:32] = k[:32], head


def transpose(weights: Weights) -> None:
    name = EXPERT.format(1, "up")  # square in this model
    weights[name] = weights[name].T


MISTAKES = {
    "two experts swapped": (swap_experts, {EXPERT.format(n, part) for n in (0, 2) for part in ("gate", "up", "down")}),
    "q and k rows swapped": (swap_q_and_k_rows, {ATTENTION.format("q"), ATTENTION.format("k")}),
    "a transposed weight": (transpose, {EXPERT.format(1, "up")}),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = make_hf_model(tmp_path / "model", "qwen3_moe", vocab_size=61, moe_intermediate_size=64)
    make_tokenizer(folder)
    return folder


def to_megatron(folder: Path) -> Path:
    target = folder.parent / f"{folder.name}-megatron"
    run_job(streaming.hf_to_megatron(folder, target, TargetLayout(tensor_model_parallel_size=2)))
    return target


def test_sound_conversions_are_the_same(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    megatron = to_megatron(model)
    run_job(streaming.megatron_to_hf(megatron, tmp_path / "back"))
    for one, other in ((model, megatron), (model, tmp_path / "back")):
        code, report = verify(one, other, capsys, "--text", "abc 123")
        assert code == 0 and report["differences"] == [] and report["tensors"] == 3 + 2 * (9 + 3 * 4) - 1
        assert report["probe_tokens"] == 7 and report["largest_logit_difference"] <= 1e-4


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_that_load(model: Path, mistake: str, capsys: pytest.CaptureFixture[str]):
    change, names = MISTAKES[mistake]
    code, report = verify(model, to_megatron(spoiled(model, change)), capsys)
    found = {entry["name"]: entry["problem"] for entry in report["differences"]}
    assert code == 1
    assert found.pop("logits").startswith("differ by") and report["largest_logit_difference"] > 1e-2
    assert found == dict.fromkeys(names, "other values")


def test_wrong_rope_base(model: Path, capsys: pytest.CaptureFixture[str]):
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    code, report = verify(model, to_megatron(spoiled(model, lambda weights: None, rope_parameters=rope)), capsys)
    found = {entry["name"]: entry["problem"] for entry in report["differences"]}
    assert code == 1 and found.keys() == {"config: rotary_base", "logits"}
    assert found["config: rotary_base"] == "10000.0 and 500000.0"


def test_dropped_layer(model: Path, capsys: pytest.CaptureFixture[str]):
    """Dropped with the config, the folder is sound in itself; dropped from the weights alone, it is not."""
    short = spoiled(model, lambda weights: drop(weights, "model.layers.1."), num_hidden_layers=1)
    code, report = verify(model, to_megatron(short), capsys)
    found = {entry["name"]: entry["problem"] for entry in report["differences"]}
    assert code == 1 and found["config: num_layers"] == "2 and 1"
    assert "unreadable" in found["model.layers.1.input_layernorm.weight"]
    code, report = verify(model, spoiled(model, lambda weights: drop(weights, "model.layers.1.")), capsys)
    names = {entry["name"] for entry in report["differences"]}
    assert code == 1 and "largest_logit_difference" not in report
    assert all(name.startswith("model.layers.1.") for name in names) and len(names) == 1 + 1 + 1 + 1 + 2 + 1 + 2 * 4


def drop(weights: Weights, prefix: str) -> None:
    for name in [name for name in weights if name.startswith(prefix)]:
        del weights[name]


def test_missing_bias(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = make_hf_model(tmp_path / "model", "qwen2", vocab_size=61)
    bias = "model.layers.1.self_attn.k_proj.bias"
    code, report = verify(model, spoiled(model, lambda weights: drop(weights, bias)), capsys)
    (entry,) = report["differences"]
    assert code == 1 and f"tensor '{bias}' is missing" in entry["problem"]
    code, report = verify(model, to_megatron(spoiled(model, lambda weights: weights[bias].zero_())), capsys)
    assert code == 1 and {entry["name"] for entry in report["differences"]} == {bias, "logits"}


def test_extra_tensor_and_other_dtype(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    extra = spoiled(model, lambda weights: weights.update(stray=torch.ones(1)))
    code, report = verify(model, extra, capsys, "--no-logits")
    assert code == 1 and [entry["name"] for entry in report["differences"]] == ["stray"]
    run_job(streaming.hf_to_megatron(model, tmp_path / "bf16", TargetLayout(), dtype="bfloat16"))
    code, report = verify(model, tmp_path / "bf16", capsys, "--no-logits")
    problems = {entry["problem"] for entry in report["differences"]}
    assert code == 1 and problems == {"dtype float32 and bfloat16"}


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_a_tower_is_seen_in_logits(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The probe has an image: what its tower makes of it reaches the logits on both sides."""
    model = make_vision_model(tmp_path / "model", family)
    code, report = verify(model, to_megatron(model), capsys)
    assert code == 0 and report["differences"] == [] and report["largest_logit_difference"] <= 1e-4
    prefix = "model.visual" if family == "qwen3_vl" else "visual"
    name = f"{prefix}.blocks.0.attn.proj.bias"
    code, report = verify(model, to_megatron(spoiled(model, lambda weights: weights[name][0].add_(2))), capsys)
    assert code == 1 and {entry["name"] for entry in report["differences"]} == {name, "logits"}
    assert report["largest_logit_difference"] > 1e-2


def test_inspect(model: Path, capsys: pytest.CaptureFixture[str]):
    megatron = to_megatron(model)
    reports = []
    for folder in (model, megatron):
        capsys.readouterr()
        assert main(["convert", "inspect", str(folder), "--json", "--tensors"]) == 0
        reports.append(json.loads(capsys.readouterr().out))
        assert main(["convert", "inspect", str(folder)]) == 0
        assert "qwen3_moe" in capsys.readouterr().out
    hf, distributed = reports
    assert hf["model"] == distributed["model"] and hf["side_files"] == distributed["side_files"]
    weights = load_file(model / "model.safetensors")
    assert hf["parameters"] == sum(tensor.numel() for tensor in weights.values())
    assert distributed["parameters"] == hf["parameters"] + (256 - 61) * 64, "padded rows of the vocabulary"
    assert {entry["name"] for entry in hf["tensors"]} == set(weights)
    assert (hf["format"], distributed["format"]) == ("hugging face", "megatron torch_dist")

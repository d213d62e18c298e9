"""Merging, LoRA, vocabulary and head: against formulas written out here, through transformers where it can tell."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from mopd.base.types import UserError
from mopd.conversion.hf.reader import HfReader
from mopd.conversion.jobs import rewriting
from tests.fixtures.tiny_models import FP32_FORWARD_ATOL, make_hf_model, make_tokenizer
from tests.unit.conversion.jobs import run_job

Q = "model.layers.1.self_attn.q_proj"
DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A base and two others, bf16 and untied."""
    folder = tmp_path_factory.mktemp("models")
    made = []
    for seed, name in enumerate(("base", "math", "code")):
        path = make_hf_model(folder / name, "qwen3", seed, vocab_size=61, tie_word_embeddings=False)
        make_tokenizer(path)
        weights = {key: tensor.bfloat16() for key, tensor in load_file(path / "model.safetensors").items()}
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        made.append(path)
    return made


def tensors(folder: Path) -> dict[str, Tensor]:
    reader = HfReader(folder)
    return {name: reader.read(name).clone() for name in reader.names}


def refused(match: str, *arguments: Any, **options: Any) -> None:
    with pytest.raises(UserError, match=match):
        rewriting.merge(*arguments, **options)


@pytest.mark.parametrize("weights", [None, [0.25, 0.75]])
def test_average(models: list[Path], tmp_path: Path, weights: list[float] | None):
    run_job(rewriting.merge(models[1:], tmp_path / "out", weights=weights, max_file_bytes=30_000), ranks=2)
    one, other, result = tensors(models[1]), tensors(models[2]), tensors(tmp_path / "out")
    first, second = weights or [0.5, 0.5]
    for name, tensor in result.items():
        exact = first * one[name].double() + second * other[name].double()
        # One rounding to bf16 of a sum taken in fp32.
        assert tensor.dtype == torch.bfloat16
        torch.testing.assert_close(tensor.double(), exact, rtol=1.01 * 2**-8, atol=1e-9)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (models[1] / "tokenizer.json").read_bytes()


def test_task_arithmetic(models: list[Path], tmp_path: Path):
    base, *others = models
    run_job(rewriting.merge(others, tmp_path / "out", weights=[0.7, -0.4], base=base))
    start, one, other = (tensors(folder) for folder in models)
    for name, tensor in tensors(tmp_path / "out").items():
        origin = start[name].double()
        exact = origin + 0.7 * (one[name].double() - origin) - 0.4 * (other[name].double() - origin)
        torch.testing.assert_close(tensor.double(), exact, rtol=1.01 * 2**-8, atol=1e-6)


def test_merges_that_are_refused(models: list[Path], tmp_path: Path):
    _, one, other = models
    refused("sum to 1.2: an average needs 1", [one, other], tmp_path / "out", weights=[0.6, 0.6])
    refused("has 1 values for 2 models", [one, other], tmp_path / "out", weights=[1.0])
    refused("every one must be a finite number", [one, other], tmp_path / "out", weights=[math.nan, 1.0])
    deep = make_hf_model(tmp_path / "deep", "qwen3", num_layers=3, vocab_size=61, tie_word_embeddings=False)
    refused("another architecture than", [one, deep], tmp_path / "out")
    fp32 = make_hf_model(tmp_path / "fp32", "qwen3", vocab_size=61, tie_word_embeddings=False)
    refused("is torch.float32 .*, in .* torch.bfloat16", [one, fp32], tmp_path / "out")
    shuffled = shutil.copytree(one, tmp_path / "shuffled")
    make_tokenizer(shuffled, characters="zyx")
    refused("another vocabulary than", [one, shuffled], tmp_path / "out")


def write_adapter(folder: Path, changes: dict[str, Any] | None = None, **weights: Tensor) -> Path:
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "use_dora": False} | (changes or {})
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(
        {f"base_model.model.{name}": tensor for name, tensor in weights.items()}, folder / "adapter_model.safetensors"
    )
    return folder


def factors(rank: int = 4, scale: float = 0.1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = {f"{Q}.lora_A.weight": (rank, 64), f"{Q}.lora_B.weight": (128, rank)}
    shapes |= {f"{DOWN}.lora_A.weight": (rank, 96), f"{DOWN}.lora_B.weight": (64, rank)}
    return {name: torch.randn(shape, generator=generator) * scale for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("changes", "scales"),
    [
        ({}, (2.0, 2.0)),
        ({"use_rslora": True}, (4.0, 4.0)),
        ({"alpha_pattern": {"down_proj": 2}}, (2.0, 0.5)),
        ({"r": 16, "rank_pattern": {"self_attn.q_proj": 4, r".*0\.mlp\.down_proj": 4}}, (2.0, 2.0)),
        ({"alpha_pattern": {"proj": 100}}, (2.0, 2.0)),
    ],
)
def test_lora_computes_what_the_adapted_layer_would(
    tmp_path: Path, changes: dict[str, Any], scales: tuple[float, float]
):
    """``x W' = x W + s (x A) B``, with s from PEFT's documentation; the other weights stay as they are."""
    base = make_hf_model(tmp_path / "base", "qwen3", vocab_size=61)
    parts = factors()
    run_job(rewriting.merge_lora(base, write_adapter(tmp_path / "adapter", changes, **parts), tmp_path / "out"))
    before, after = tensors(base), tensors(tmp_path / "out")
    for module, scale in zip((Q, DOWN), scales, strict=True):
        down, up = parts[f"{module}.lora_A.weight"].double(), parts[f"{module}.lora_B.weight"].double()
        x = torch.randn(7, down.shape[1], dtype=torch.float64)
        expected = x @ before[f"{module}.weight"].double().T + scale * (x @ down.T @ up.T)
        torch.testing.assert_close(x @ after[f"{module}.weight"].double().T, expected, atol=1e-5, rtol=1e-5)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"{Q}.weight", f"{DOWN}.weight"}


def test_lora_replaces_saved_modules(tmp_path: Path):
    base = make_hf_model(tmp_path / "base", "qwen3", vocab_size=61, tie_word_embeddings=False)
    head = torch.randn(61, 64)
    adapter = write_adapter(tmp_path / "adapter", None, **{"lm_head.weight": head}, **factors())
    run_job(rewriting.merge_lora(base, adapter, tmp_path / "out"))
    assert torch.equal(tensors(tmp_path / "out")["lm_head.weight"], head)


@pytest.mark.parametrize(
    ("changes", "weights", "line"),
    [
        ({"peft_type": "IA3"}, {}, "peft_type is 'IA3': only LORA"),
        ({"use_dora": True}, {}, "use_dora is True, which is not supported: use a plain"),
        ({"bias": "all"}, {}, "bias is 'all'"),
        ({"init_lora_weights": "pissa"}, {}, "'pissa' changes the base"),
        ({"rank_pattern": {"(a+)+": 4}}, {}, "not a map from simple patterns"),
        ({"alpha_pattern": {"q_proj": "8"}}, {}, "lora_alpha is '8', no number"),
        ({"lora_alpha": None}, {}, "lora_alpha is None, no number"),
        ({}, {"model.layers.9.mlp.up_proj.weight": torch.ones(4, 64)}, "adapts .*9.*, which .* does not have"),
        ({}, {"model.norm.weight": torch.ones(63)}, r"has the weight \[63\], but .* is \[64\]"),
        ({}, {f"{Q}.lora_magnitude_vector": torch.ones(4)}, "is no weight, lora_A or lora_B"),
        ({}, {"model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(4, 64)}, "up_proj' has lora_A alone"),
        ({}, {f"{Q}.lora_A.weight": torch.ones(4, 63)}, "name the adapter's own base"),
        ({}, {f"{Q}.lora_A.weight": torch.ones(3, 64)}, "says rank 4"),
    ],
)
def test_adapters_that_are_refused(tmp_path: Path, changes: dict[str, Any], weights: dict[str, Tensor], line: str):
    base = make_hf_model(tmp_path / "base", "qwen3", vocab_size=61)
    adapter = write_adapter(tmp_path / "adapter", changes, **factors() | weights)
    with pytest.raises(UserError, match=line):
        rewriting.merge_lora(base, adapter, tmp_path / "out")


@pytest.mark.parametrize("tied", [True, False])
def test_padded_vocabulary_and_back(tmp_path: Path, tied: bool):
    source = make_hf_model(tmp_path / "source", "llama", vocab_size=61, tie_word_embeddings=tied)
    make_tokenizer(source)
    run_job(rewriting.pad(source, tmp_path / "padded", multiple=16))
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        old, new = (AutoModelForCausalLM.from_pretrained(path)(tokens).logits for path in (source, tmp_path / "padded"))
    assert new.shape[-1] == 64 and not new[..., 61:].any()
    # products of 61 and of 64 columns may add in another order
    torch.testing.assert_close(new[..., :61], old, rtol=0, atol=FP32_FORWARD_ATOL)
    before, padded = tensors(source), tensors(tmp_path / "padded")
    assert before.keys() == padded.keys()
    for name, tensor in before.items():
        rest = padded[name][len(tensor) :]
        assert torch.equal(padded[name][: len(tensor)], tensor) and not rest.any()
        assert len(rest) == (3 if len(tensor) == 61 else 0)
    run_job(rewriting.unpad(tmp_path / "padded", tmp_path / "back", vocab_size=61))
    after = tensors(tmp_path / "back")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "back"))
    assert old == new


def test_unpad_keeps_true_rows(tmp_path: Path):
    source = make_hf_model(tmp_path / "source", "llama", vocab_size=61)
    job = rewriting.unpad(source, tmp_path / "out", vocab_size=60)
    with pytest.raises(UserError, match="rows from 60 on are not zero"):
        run_job(job)
    job.discard()
    with pytest.raises(UserError, match="--vocab-size is 62: set 1 to 61"):
        rewriting.unpad(source, tmp_path / "out", vocab_size=62)


@pytest.mark.parametrize("tied", [True, False])
def test_head(tmp_path: Path, tied: bool):
    source = make_hf_model(tmp_path / "source", "llama", vocab_size=61, tie_word_embeddings=tied)
    run_job(rewriting.extract_head(source, tmp_path / "out"))
    model = AutoModelForCausalLM.from_pretrained(source)
    assert torch.equal(tensors(tmp_path / "out")["lm_head.weight"], model.get_output_embeddings().weight)
    assert tensors(tmp_path / "out").keys() == {"lm_head.weight"}

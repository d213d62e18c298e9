"""Checkpoints with a vision tower through every conversion, in both namings: bits, names and files come back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mopd.base.types import UserError
from mopd.cli.convert_verify import verify
from mopd.conversion.hf.manifest import compare_manifests, make_manifest
from mopd.conversion.hf.reader import open_model
from mopd.conversion.jobs import rewriting, streaming
from mopd.conversion.jobs.contents import describe
from mopd.conversion.torch_dist.plan import TargetLayout
from tests.fixtures.vision import VISION_FAMILIES, VISION_VOCAB_SIZE, make_vision_model
from tests.unit.conversion.jobs import run_job

WEIGHTS = "model.safetensors"
LAYOUT = TargetLayout(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
CASES = [(family, naming) for family in VISION_FAMILIES for naming in ("flat", "nested")]


def renamed(name: str, naming: str) -> str:
    kind, _, rest = name.replace("model.language_model.", "text.").replace("model.visual.", "visual.").partition(".")
    nested = {"visual": "model.visual.", "text": "model.language_model.", "model": "model.language_model."}
    flat = {"visual": "visual.", "text": "model.", "model": "model."}
    return (nested if naming == "nested" else flat).get(kind, f"{kind}.") + rest


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / WEIGHTS)


def renamed_folder(source: Path, target: Path, naming: str) -> Path:
    """A copy whose tensors are named otherwise."""
    shutil.copytree(source, target)
    tensors = {renamed(name, naming): tensor for name, tensor in weights(source).items()}
    save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
    return target


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """One model a family, untied, in both namings."""
    root = tmp_path_factory.mktemp("vision")
    made = {}
    for family in VISION_FAMILIES:
        source = make_vision_model(root / family, family, tie_word_embeddings=False)
        (source / "video_preprocessor_config.json").write_text("{}")
        made |= {(family, n): renamed_folder(source, root / f"{family}-{n}", n) for n in ("flat", "nested")}
    return made


@pytest.fixture
def flat(folders: dict[tuple[str, str], Path]) -> Path:
    return folders["qwen2_5_vl", "flat"]


def require_same(one: Path, other: Path) -> None:
    before, after = weights(one), weights(other)
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) and before[name].dtype == after[name].dtype for name in before)


@pytest.mark.parametrize("case", CASES)
def test_there_and_back(folders: dict[tuple[str, str], Path], case: tuple[str, str], tmp_path: Path):
    source = folders[case]
    run_job(streaming.hf_to_megatron(source, tmp_path / "cut", LAYOUT), ranks=2)
    run_job(streaming.reshard(tmp_path / "cut", tmp_path / "recut", TargetLayout()))
    for name in ("cut", "recut"):
        run_job(streaming.megatron_to_hf(tmp_path / name, tmp_path / f"{name}-hf"))
        require_same(source, tmp_path / f"{name}-hf")
    for path in source.iterdir():
        if path.name != WEIGHTS:
            assert (tmp_path / "recut-hf" / path.name).read_bytes() == path.read_bytes(), path.name
    report = describe(tmp_path / "recut", lists_tensors=True)
    embedding = next(tensor for name, tensor in weights(source).items() if name.endswith("embed_tokens.weight"))
    padding = (128 - embedding.size(0)) * embedding.size(1)
    tables = 1 if report["model"]["tied_embeddings"] else 2
    assert report["parameters"] == sum(tensor.numel() for tensor in weights(source).values()) + tables * padding
    assert report["unexpected"] == [] and report["model"]["vision"]["naming"] == case[1]
    tower = {row["name"]: row for row in report["tensors"] if row["name"].startswith("vision_model.")}
    expected = {name.split("visual.")[1] for name in weights(source) if "visual." in name}
    assert {name.removeprefix("vision_model.") for name in tower} == expected
    assert {row["chunks"] for row in tower.values()} == {1}, "whole, in the file of the first stage's first rank"


def test_namings_are_one_model(folders: dict[tuple[str, str], Path], tmp_path: Path):
    one, other = folders["qwen3_vl", "nested"], folders["qwen3_vl", "flat"]
    options = {"text": None, "tolerance": 0.0, "compares_logits": False, "allow_pickle": False}
    report = verify(one, other, **options)
    assert report["same"] and report["tensors"] == len(weights(one))
    changed = renamed_folder(one, tmp_path / "changed", "nested")
    tensors = weights(changed)
    tensors["model.visual.blocks.1.attn.qkv.bias"][3] += 1
    save_file(tensors, changed / WEIGHTS, metadata={"format": "pt"})
    (difference,) = verify(other, changed, **options)["differences"]
    assert difference == {"name": "visual.blocks.1.attn.qkv.bias", "problem": "other values"}
    tensors = weights(one)
    tensors["lm_head.weight"] *= 1.01
    save_file(tensors, changed / WEIGHTS, metadata={"format": "pt"})
    for tolerance, also in ((1e6, []), (1e-9, ["logits"])):
        report = verify(one, changed, **options | {"compares_logits": True, "tolerance": tolerance})
        assert report["largest_logit_difference"] > 1e-6
        assert [one["name"] for one in report["differences"]] == ["lm_head.weight", *also]


def test_one_naming_at_a_time(flat: Path, tmp_path: Path):
    """Names of both are no checkpoint of either."""
    mixed = renamed_folder(flat, tmp_path / "mixed", "flat")
    tensors = weights(mixed)
    tensors["model.visual.merger.ln_q.weight"] = tensors.pop("visual.merger.ln_q.weight")
    save_file(tensors, mixed / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"tensor 'model\.visual\..* is missing"):
        open_model(mixed)
    del tensors["model.visual.merger.ln_q.weight"]
    save_file(tensors, mixed / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"tensor 'visual\.merger\.ln_q\.weight' is missing"):
        streaming.hf_to_megatron(mixed, tmp_path / "out", LAYOUT)


def test_dtype_is_changed_in_all_of_the_config(folders: dict[tuple[str, str], Path], tmp_path: Path):
    source = renamed_folder(folders["qwen3_vl", "nested"], tmp_path / "source", "nested")
    config = json.loads((source / "config.json").read_text())
    config["text_config"]["dtype"] = "float32"
    (source / "config.json").write_text(json.dumps(config))
    run_job(streaming.hf_to_megatron(source, tmp_path / "cut", TargetLayout(), dtype="bfloat16"))
    run_job(streaming.megatron_to_hf(tmp_path / "cut", tmp_path / "back"))
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["dtype"] == config["text_config"]["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in weights(tmp_path / "back").values()} == {torch.bfloat16}


def test_an_adapter_names_modules_as_transformers_does(flat: Path, tmp_path: Path):
    """Its modules are nested whatever the base's file says; those of the tower may have factors as well."""
    (tmp_path / "adapter").mkdir()
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "bias": "none"}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    before, factors, generator = weights(flat), {}, torch.Generator().manual_seed(5)
    changed = {
        "model.layers.1.mlp.up_proj": "model.language_model.layers.1.mlp.up_proj",
        "visual.blocks.0.attn.proj": "model.visual.blocks.0.attn.proj",
    }
    for name, module in changed.items():
        out_size, in_size = before[f"{name}.weight"].shape
        factors |= {
            f"{module}.lora_A.weight": torch.randn(2, in_size, generator=generator) * 0.1,
            f"{module}.lora_B.weight": torch.randn(out_size, 2, generator=generator) * 0.1,
        }
    adapter = {f"base_model.model.{key}": tensor for key, tensor in factors.items()}
    save_file(adapter, tmp_path / "adapter" / "adapter_model.safetensors")
    run_job(rewriting.merge_lora(flat, tmp_path / "adapter", tmp_path / "out"))
    after = weights(tmp_path / "out")
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        exact = tensor.double()
        if module := changed.get(name.removesuffix(".weight")):
            exact += 3 * factors[f"{module}.lora_B.weight"].double() @ factors[f"{module}.lora_A.weight"].double()
        torch.testing.assert_close(after[name].double(), exact, rtol=1e-6, atol=1e-6)


def test_vocabulary_and_head(folders: dict[tuple[str, str], Path], tmp_path: Path):
    source = folders["qwen2_5_vl", "nested"]
    run_job(rewriting.pad(source, tmp_path / "padded", multiple=128))
    reader, dims = open_model(tmp_path / "padded")
    assert dims.vocab_size == 128
    assert reader.shape("lm_head.weight") == reader.shape("model.language_model.embed_tokens.weight") == (128, 128)
    run_job(rewriting.unpad(tmp_path / "padded", tmp_path / "trimmed", vocab_size=VISION_VOCAB_SIZE))
    require_same(source, tmp_path / "trimmed")
    with pytest.raises(UserError, match="'image_token_id'"):
        rewriting.unpad(source, tmp_path / "cut", vocab_size=VISION_VOCAB_SIZE - 2)
    run_job(rewriting.extract_head(source, tmp_path / "head"))
    assert weights(tmp_path / "head").keys() == {"lm_head.weight"}


def test_merges_combine_towers_and_refuse_other_names(folders: dict[tuple[str, str], Path], tmp_path: Path):
    one = folders["qwen3_vl", "nested"]
    other = make_vision_model(tmp_path / "other", "qwen3_vl", 1, tie_word_embeddings=False)
    run_job(rewriting.merge([one, other], tmp_path / "out"))
    a, b, mean = weights(one), weights(other), weights(tmp_path / "out")
    for name in ("model.visual.pos_embed.weight", "model.language_model.norm.weight"):
        torch.testing.assert_close(mean[name].double(), (a[name].double() + b[name].double()) / 2, rtol=1e-6, atol=1e-7)
    with pytest.raises(UserError, match="other names of tensors"):
        rewriting.merge([one, folders["qwen3_vl", "flat"]], tmp_path / "refused")


def test_manifests_know_the_image_processor(flat: Path, tmp_path: Path):
    before = make_manifest(flat, cache_file=None)
    copy = renamed_folder(flat, tmp_path / "copy", "flat")
    settings = json.loads((copy / "preprocessor_config.json").read_text())
    (copy / "preprocessor_config.json").write_text(json.dumps(settings | {"max_pixels": 56 * 56}))
    (difference,) = compare_manifests(before, make_manifest(copy, cache_file=None))
    assert difference.startswith("tokenizer_sha256 was")

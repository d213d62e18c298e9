"""Experts that a checkpoint keeps in one tensor a layer, in bfloat16 or MXFP4: read one by one, written together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from mopd.base.types import UserError
from mopd.config.student import ParallelConfig
from mopd.conversion.hf.reader import HfReader, open_model
from mopd.conversion.hf.stacked import from_mxfp4, restacked
from mopd.conversion.hf.writer import write_folder
from mopd.conversion.jobs.contents import describe
from mopd.conversion.jobs.rewriting import merge
from mopd.conversion.jobs.streaming import hf_to_megatron, megatron_to_hf
from mopd.conversion.models.dims import check_layout
from mopd.conversion.models.reading import read_dims
from mopd.conversion.torch_dist.plan import TargetLayout
from tests.fixtures.tiny_models import make_hf_model, make_tokenizer
from tests.unit.conversion.jobs import run_job

WEIGHTS = "model.safetensors"
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_hf_model(tmp_path_factory.mktemp("plain"), "gpt_oss", ffn_size=64, tie_word_embeddings=False)
    make_tokenizer(folder)
    save_file({name: t.bfloat16() for name, t in load_file(folder / WEIGHTS).items()}, folder / WEIGHTS)
    return folder


@pytest.fixture(scope="module")
def packed(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder as released ones are, and its weights as transformers reads them."""
    folder = tmp_path_factory.mktemp("packed")
    weights, generator = load_file(plain / WEIGHTS), torch.Generator().manual_seed(0)
    expected = dict(weights)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = weights.pop(name).shape
        blocks = torch.randint(256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(110, 130, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).contiguous()
    for path in plain.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    save_file(weights, folder / WEIGHTS)
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": MXFP4}))
    return folder, expected


def assert_equal(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    found = load_file(folder / WEIGHTS)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_mxfp4_is_read_as_transformers_reads_it() -> None:
    """All codes, and all scales whose numbers bfloat16 has."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 252, 16, 16)
    scales = torch.arange(1, 253, dtype=torch.uint8)[None, :, None].expand(1, 252, 16)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).transpose(1, 2)
    assert torch.equal(from_mxfp4(blocks, scales), expected)


def test_experts_are_views_of_the_stored_tensor(plain: Path) -> None:
    reader, dims = open_model(plain)
    name, stored = "model.layers.1.mlp.experts.gate_up_proj", load_file(plain / WEIGHTS)
    assert dims.moe is not None and dims.moe.num_experts == 4
    assert name in reader.stored_names and name not in reader.names
    assert torch.equal(reader.read(f"{name}.3.up"), stored[name][3, :, 1::2].T)
    assert torch.equal(reader.read(f"{name}_bias.2.gate"), stored[f"{name}_bias"][2, 0::2])
    down = "model.layers.1.mlp.experts.down_proj"
    assert torch.equal(reader.read_slice(f"{down}.1.down", 1, 8, 24), stored[down][1, 8:24].T)


@pytest.mark.parametrize("is_packed", [False, True])
def test_conversions_give_every_bit_back(
    plain: Path, packed: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, is_packed: bool
) -> None:
    """There and back for ranks that share experts; a packed folder comes back in bfloat16, and its config says so."""
    source, expected = packed if is_packed else (plain, load_file(plain / WEIGHTS))
    layout = TargetLayout(tensor_model_parallel_size=2, expert_model_parallel_size=2)
    run_job(hf_to_megatron(source, tmp_path / "megatron", layout))
    run_job(megatron_to_hf(tmp_path / "megatron", tmp_path / "back"))
    assert_equal(tmp_path / "back", expected)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "back"))
    assert before.pop("quantization_config", None) == (MXFP4 if is_packed else None)
    assert before == after


def test_a_merge_of_one_makes_a_packed_folder_plain(
    packed: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    run_job(merge([packed[0]], tmp_path / "out"))
    assert_equal(tmp_path / "out", packed[1])
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_a_stream_of_experts_is_written_together(packed: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    source, expected = packed
    reader = HfReader(source)
    write_folder(tmp_path / "out", ((name, reader.read(name)) for name in sorted(reader.names)), source=source)
    assert_equal(tmp_path / "out", expected)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_a_missing_expert_is_an_error() -> None:
    name = "model.layers.0.mlp.experts.down_proj.0.down"
    with pytest.raises(ValueError, match="some experts are missing"):
        list(restacked([(name, torch.zeros(4, 2))], 2))


def test_inspect_lists_what_is_stored(packed: tuple[Path, dict[str, torch.Tensor]]) -> None:
    report = describe(packed[0], lists_tensors=True)
    assert "model.layers.0.mlp.experts.down_proj_blocks" in {row["name"] for row in report["tensors"]}
    assert report["unexpected"] == [] and report["model"]["family"] == "gpt_oss"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"swiglu_limit": 1.0}, "'swiglu_limit': 1.0 is not supported, only 7.0 is"),
        ({"swiglu_alpha": 1.0}, "'swiglu_alpha': 1.0 is not supported"),
        ({"attention_bias": False}, "'attention_bias': False is not supported, only True is"),
        ({"layer_types": ["full_attention"]}, "'layer_types': names 1 layers, num_hidden_layers is 2"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "'quantization_config': quantised weights are not supported",
        ),
    ],
)
def test_what_cannot_be_carried_is_refused(
    plain: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    config = json.loads((plain / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=message):
        read_dims(tmp_path)


def test_ranks_that_share_an_expert_are_refused(plain: Path) -> None:
    parallel = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
    with pytest.raises(UserError, match="expert_tensor_parallel_size is 2 and the experts of model_type gpt_oss have"):
        check_layout(read_dims(plain), parallel)

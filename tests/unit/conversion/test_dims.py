"""A config.json becomes ``ModelDims``, or is refused with one line that names file and key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from mopd.conversion.dims import ModelDims, check_layout, dims_from_config, read_dims
from mopd.types import UserError

QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
LLAMA_2 = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
}
PATH = Path("model/config.json")


def test_published_qwen3_config():
    assert dims_from_config(QWEN3, PATH) == ModelDims(
        family="qwen3", num_layers=28, hidden_size=1024, ffn_hidden_size=3072, num_attention_heads=16,
        num_query_groups=8, head_dim=128, vocab_size=151936, max_positions=40960, rotary_base=1e6,
        norm_epsilon=1e-6, tied_embeddings=True, qk_norm=True, qkv_bias=False,
    )  # fmt: skip


def test_llama_2_config_without_optional_keys():
    dims = dims_from_config(LLAMA_2, PATH)
    assert (dims.num_query_groups, dims.head_dim, dims.rotary_base) == (32, 128, 10000.0)
    assert not (dims.tied_embeddings or dims.qk_norm or dims.qkv_bias)


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_config_that_transformers_writes(config_class: type, tmp_path: Path):
    config = config_class(
        hidden_size=96, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
        vocab_size=71, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        max_position_embeddings=77, tie_word_embeddings=True,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    dims = read_dims(tmp_path)
    assert dims.rotary_base == 5e5
    assert dims.family == config.model_type
    assert dims.head_dim == (128 if config.model_type == "qwen3" else 16)
    assert (dims.num_layers, dims.vocab_size, dims.max_positions, dims.tied_embeddings) == (3, 71, 77, True)
    assert dims.qkv_bias == (config.model_type == "qwen2")


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"model_type": "gemma"}, "model_type"),
        ({"model_type": None}, "model_type"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "architectures"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "auto_map"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.type"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "rope_parameters.rope_type"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters.full_attention"),
        ({"rope_parameters": {"rope_theta": 5e5}}, "rope_theta"),
        ({"rope_theta": None}, "rope_theta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window"),
        ({"use_sliding_window": None, "sliding_window": 4096}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"head_dim": None}, "head_dim"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_key_value_heads": None}, "num_key_value_heads"),
        ({"hidden_size": "1024"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
    ],
)
def test_what_cannot_be_carried_is_refused_by_name(change: dict[str, Any], key: str):
    with pytest.raises(UserError) as refusal:
        dims_from_config({**QWEN3, **change}, PATH)
    message = str(refusal.value)
    assert message.startswith(f"{PATH}: '{key}'")
    assert "\n" not in message


def test_unused_sliding_window_is_accepted():
    """Qwen2 configs name a window that ``use_sliding_window: false`` switches off."""
    assert dims_from_config({**QWEN3, "sliding_window": 32768}, PATH).num_layers == 28


@pytest.mark.parametrize("content", ["{", "[]", b"\xff\xfe"])
def test_unreadable_config(tmp_path: Path, content: str | bytes):
    path = tmp_path / "config.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=r"config\.json"):
        read_dims(tmp_path)


def test_missing_config_and_folder(tmp_path: Path):
    with pytest.raises(UserError, match=r"config\.json: missing"):
        read_dims(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        read_dims(tmp_path / "nothing")


def test_duplicate_key_in_config_is_refused(tmp_path: Path):
    text = json.dumps(LLAMA_2)
    (tmp_path / "config.json").write_text(text[:-1] + ', "vocab_size": 64000}')
    with pytest.raises(UserError, match="vocab_size"):
        read_dims(tmp_path)


@pytest.mark.parametrize(
    ("tp", "pp", "message"),
    [
        (16, 1, "tensor_model_parallel_size 16 does not divide the model's 8 key/value heads"),
        (3, 1, "tensor_model_parallel_size 3 does not divide"),
        (1, 3, "pipeline_model_parallel_size 3 does not divide the model's 28 layers"),
    ],
)
def test_layout_that_would_split_a_group_or_layer(tp: int, pp: int, message: str):
    dims = dims_from_config(QWEN3, PATH)
    check_layout(dims, tensor_model_parallel_size=8, pipeline_model_parallel_size=4)
    with pytest.raises(UserError, match=message):
        check_layout(dims, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)


@pytest.mark.parametrize(
    ("vocab_size", "tp", "multiple", "padded"),
    [(151936, 2, 128, 152064), (48, 2, 1, 48), (61, 2, 1, 62), (61, 4, 8, 64), (64, 4, 16, 64)],
)
def test_padded_vocabulary(vocab_size: int, tp: int, multiple: int, padded: int):
    dims = dims_from_config({**QWEN3, "vocab_size": vocab_size}, PATH)
    assert padded == dims.padded_vocab_size(tensor_model_parallel_size=tp, make_vocab_size_divisible_by=multiple)

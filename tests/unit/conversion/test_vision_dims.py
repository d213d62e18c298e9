"""Published configs with vision become ``ModelDims`` with the tensors of transformers' models, or are refused."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
import transformers

from mopd.base.types import UserError
from mopd.config.student import ParallelConfig
from mopd.conversion.models import families
from mopd.conversion.models.dims import VisionDims, check_layout
from mopd.conversion.models.reading import dims_from_config
from mopd.conversion.models.towers import with_naming
from tests.unit.conversion.test_dims import PATH, require_refusal

QWEN2_5_VL_3B: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
    "vision_token_id": 151654, "image_token_id": 151655, "video_token_id": 151656, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 128000,
    "max_window_layers": 70, "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.41.2", "use_cache": True, "use_sliding_window": False,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vocab_size": 151936,
    "vision_config": {
        "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
        "in_chans": 3, "out_hidden_size": 2048, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
        "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2,
    },
}  # fmt: skip
"""Of the published folders: text keys at the top."""
QWEN2_5_VL_7B = QWEN2_5_VL_3B | {
    "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "tie_word_embeddings": False, "vocab_size": 152064,
    "vision_config": QWEN2_5_VL_3B["vision_config"] | {"out_hidden_size": 3584},
}  # fmt: skip
QWEN3_VL_4B: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "image_token_id": 151655,
    "video_token_id": 151656, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
    "tie_word_embeddings": True, "transformers_version": "4.57.0.dev0",
    "text_config": {
        "model_type": "qwen3_vl_text", "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
        "dtype": "bfloat16", "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560,
        "initializer_range": 0.02, "intermediate_size": 9728, "max_position_embeddings": 262144,
        "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000, "tie_word_embeddings": True, "use_cache": True, "vocab_size": 151936,
    },
    "vision_config": {
        "model_type": "qwen3_vl", "deepstack_visual_indexes": [5, 11, 17], "depth": 24,
        "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1024, "in_channels": 3, "initializer_range": 0.02,
        "intermediate_size": 4096, "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 2560,
        "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
}  # fmt: skip
_TEXT_8B = {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False}
_TOWER_8B = {
    "deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_size": 1152, "intermediate_size": 4304,
    "out_hidden_size": 4096,
}  # fmt: skip
QWEN3_VL_8B = QWEN3_VL_4B | {
    "tie_word_embeddings": False,
    "text_config": QWEN3_VL_4B["text_config"] | _TEXT_8B,
    "vision_config": QWEN3_VL_4B["vision_config"] | _TOWER_8B,
}
SECTION, INTERLEAVED = (f"text_config.rope_scaling.mrope_{key}" for key in ("section", "interleaved"))
CLASSES = {"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}


def changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """With other values at dotted keys; a key whose value is ``...`` is left out."""
    config = copy.deepcopy(config)
    for dotted, value in changes.items():
        *sections, key = dotted.split(".")
        place = config
        for section in sections:
            place = place[section]
        if value is ...:
            del place[key]
        else:
            place[key] = value
    return config


@pytest.mark.parametrize(
    ("config", "num_weights"),
    [
        (QWEN2_5_VL_3B, 3_754_622_976),
        (QWEN2_5_VL_7B, 8_292_166_656),
        (QWEN3_VL_4B, 4_437_815_808),
        (QWEN3_VL_8B, 8_767_123_696),
    ],
)
def test_tensors_are_those_of_transformers(config: dict[str, Any], num_weights: int):
    """The numbers of weights are those that the models' pages tell."""
    name, dims = CLASSES[config["model_type"]], dims_from_config(config, PATH)
    parsed = getattr(transformers, f"{name}Config").from_dict(copy.deepcopy(config))
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForConditionalGeneration")(parsed)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert families.hf_tensors(with_naming(dims, "nested")) == expected
    assert sum(parameter.numel() for parameter in model.parameters()) == num_weights
    again = json.loads(parsed.to_json_string())  # the form that transformers 5 writes
    assert dims_from_config(again, PATH) == dims


def test_what_a_config_says():
    dims = dims_from_config(QWEN3_VL_4B, PATH)
    assert dims.vision == VisionDims(
        naming="nested", image_token_id=151655, video_token_id=151656, vision_start_token_id=151652,
        vision_end_token_id=151653, patch_size=16, temporal_patch_size=2, spatial_merge_size=2, in_channels=3, depth=24,
        hidden_size=1024, num_heads=16, intermediate_size=4096, out_hidden_size=2560, num_position_embeddings=2304,
        deepstack_layers=(5, 11, 17), mrope_section=(24, 20, 20), mrope_interleaved=True,
    )  # fmt: skip
    assert (dims.head_dim, dims.rotary_base, dims.tied_embeddings) == (128, 5e6, True)
    older = dims_from_config(QWEN2_5_VL_7B, PATH)
    assert older.vision is not None and older.vision.naming == "flat"
    assert (older.vision.window_size, older.vision.full_attention_blocks) == (112, (7, 15, 23, 31))
    assert (older.head_dim, older.qkv_bias, older.tied_embeddings) == (128, True, False)


def test_both_namings():
    dims = dims_from_config(QWEN2_5_VL_7B, PATH)
    flat, nested = (families.hf_tensors(with_naming(dims, naming)) for naming in ("flat", "nested"))
    assert list(flat.values()) == list(nested.values())
    pairs = dict(zip(flat, nested, strict=True))
    assert pairs["visual.blocks.31.attn.qkv.bias"] == "model.visual.blocks.31.attn.qkv.bias"
    assert pairs["model.layers.27.mlp.up_proj.weight"] == "model.language_model.layers.27.mlp.up_proj.weight"
    assert pairs["model.norm.weight"] == "model.language_model.norm.weight"
    assert pairs["lm_head.weight"] == "lm_head.weight"


@pytest.mark.parametrize(
    ("config", "changes", "key"),
    [
        (QWEN3_VL_4B, {"architectures": ["Qwen3VLModel"]}, "architectures"),
        (QWEN3_VL_4B, {"text_config": ...}, "text_config"),
        (QWEN3_VL_4B, {"text_config.model_type": "qwen3"}, "text_config.model_type"),
        (QWEN3_VL_4B, {"text_config.quantization_config": {"bits": 4}}, "text_config.quantization_config"),
        (QWEN3_VL_4B, {"text_config.attention_bias": True}, "text_config.attention_bias"),
        (QWEN3_VL_4B, {"text_config.rope_scaling": None}, "text_config.rope_scaling"),
        (QWEN3_VL_4B, {"text_config.rope_scaling.rope_type": "yarn"}, "text_config.rope_scaling.rope_type"),
        (QWEN3_VL_4B, {SECTION: ...}, SECTION),
        (QWEN3_VL_4B, {SECTION: [64]}, SECTION),
        (QWEN3_VL_4B, {SECTION: [24, 20, 21]}, SECTION),
        (QWEN3_VL_4B, {SECTION: [16, 24, 24]}, SECTION),
        (QWEN3_VL_4B, {INTERLEAVED: False}, INTERLEAVED),
        (QWEN3_VL_4B, {INTERLEAVED: ...}, INTERLEAVED),
        (QWEN3_VL_4B, {"text_config.tie_word_embeddings": False}, "text_config.tie_word_embeddings"),
        (QWEN3_VL_4B, {"tie_word_embeddings": ...}, "text_config.tie_word_embeddings"),
        (QWEN3_VL_4B, {"image_token_id": 151936}, "image_token_id"),
        (QWEN3_VL_4B, {"image_token_id": 151656}, "image_token_id"),
        (QWEN3_VL_4B, {"vision_end_token_id": None}, "vision_end_token_id"),
        (QWEN3_VL_4B, {"vision_config": ...}, "vision_config"),
        (QWEN3_VL_4B, {"vision_config.model_type": "siglip"}, "vision_config.model_type"),
        (QWEN3_VL_4B, {"vision_config.in_channels": 1}, "vision_config.in_channels"),
        (QWEN3_VL_4B, {"vision_config.patch_size": [16, 16]}, "vision_config.patch_size"),
        (QWEN3_VL_4B, {"vision_config.patch_size": 4096}, "vision_config.patch_size"),
        (QWEN3_VL_4B, {"vision_config.depth": 1001}, "vision_config.depth"),
        (QWEN3_VL_4B, {"vision_config.hidden_act": "silu"}, "vision_config.hidden_act"),
        (QWEN3_VL_4B, {"vision_config.num_heads": 15}, "vision_config.num_heads"),
        (QWEN3_VL_4B, {"vision_config.num_position_embeddings": 2303}, "vision_config.num_position_embeddings"),
        (QWEN3_VL_4B, {"vision_config.out_hidden_size": 2048}, "vision_config.out_hidden_size"),
        (QWEN3_VL_4B, {"vision_config.deepstack_visual_indexes": [5, 24]}, "vision_config.deepstack_visual_indexes"),
        (QWEN3_VL_4B, {"vision_config.deepstack_visual_indexes": [11, 5]}, "vision_config.deepstack_visual_indexes"),
        (QWEN2_5_VL_3B, {"vision_config.in_chans": 4}, "vision_config.in_chans"),
        (QWEN2_5_VL_3B, {"vision_config.window_size": 27}, "vision_config.window_size"),
        (QWEN2_5_VL_3B, {"vision_config.fullatt_block_indexes": [7, 7]}, "vision_config.fullatt_block_indexes"),
        (
            QWEN2_5_VL_3B, {"vision_config.rope_parameters": {"rope_type": "default"}},
            "vision_config.rope_parameters.rope_type",
        ),
        (QWEN2_5_VL_3B, {"rope_scaling.mrope_interleaved": True}, "rope_scaling.mrope_interleaved"),
        (QWEN2_5_VL_3B, {"rope_parameters": {"mrope_section": [24, 20, 20]}}, "rope_scaling"),
        (QWEN2_5_VL_3B, {"head_dim": 64}, "head_dim"),
        (QWEN2_5_VL_3B, {"use_sliding_window": True}, "use_sliding_window"),
    ],
)  # fmt: skip
def test_what_cannot_be_carried_is_refused_by_name(config: dict[str, Any], changes: dict[str, Any], key: str):
    dims_from_config(config, PATH)
    require_refusal(changed(config, changes), key)


def test_a_nested_tie_counts_where_transformers_takes_it():
    nested = dims_from_config(QWEN2_5_VL_3B, PATH)
    config = transformers.Qwen2_5_VLConfig.from_dict(copy.deepcopy(QWEN2_5_VL_3B))
    written = json.loads(config.to_json_string())
    del written["tie_word_embeddings"]
    written["text_config"]["tie_word_embeddings"] = True
    assert dims_from_config(written, PATH) == nested


@pytest.mark.parametrize(
    ("pp", "first", "message"),
    [
        (4, 5, "num_layers_in_first_pipeline_stage 5 leaves 31 of the model's 36 layers, which the other 3 stages"),
        (4, 34, "leaves 2 of the model's 36 layers"),
        (2, 2, "the first of 2 stages has 2 layers, and features of the vision tower are added after 3"),
        (18, None, "the first of 18 stages has 2 layers"),
        (5, None, "pipeline_model_parallel_size 5 does not divide the model's 36 layers"),
    ],
)
def test_layers_of_the_first_stage(pp: int, first: int | None, message: str):
    def check(pp: int, first: int | None) -> None:
        parallel = ParallelConfig(
            tensor_model_parallel_size=2, pipeline_model_parallel_size=pp, num_layers_in_first_pipeline_stage=first
        )
        check_layout(dims_from_config(QWEN3_VL_4B, PATH), parallel)

    check(4, 6)
    check(4, None)
    with pytest.raises(UserError, match=message):
        check(pp, first)

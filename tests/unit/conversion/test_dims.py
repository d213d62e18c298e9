"""A config.json becomes ``ModelDims``, or is refused with one line that names file and key."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from mopd.base.types import UserError
from mopd.conversion.models import families
from mopd.conversion.models.dims import Llama3Rope, MlaDims, ModelDims, MoeDims, WindowDims, YarnRope, layout_problem
from mopd.conversion.models.reading import dims_from_config, read_dims
from mopd.conversion.models.stages import Stages

QWEN3 = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
    "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-06, "rope_theta": 1000000,
    "rope_scaling": None, "sliding_window": None, "use_sliding_window": False, "max_window_layers": 28,
    "attention_bias": False, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_2 = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_act": "silu", "vocab_size": 32000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LLAMA_3 = LLAMA_2 | {"rope_theta": 500000.0, "rope_scaling": LLAMA_3_ROPE, "num_key_value_heads": 8}
MISTRAL = LLAMA_2 | {
    "model_type": "mistral", "architectures": ["MistralForCausalLM"], "num_key_value_heads": 8,
    "rope_theta": 1000000.0, "sliding_window": None,
}  # fmt: skip
MIXTRAL = MISTRAL | {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "intermediate_size": 14336,
    "num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02, "output_router_logits": False,
}  # fmt: skip
QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
YARN = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "hidden_act": "silu", "vocab_size": 129280,
    "max_position_embeddings": 163840, "rms_norm_eps": 1e-06, "rope_theta": 10000, "rope_scaling": YARN,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    "first_k_dense_replace": 3, "moe_layer_freq": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 1, "attention_bias": False,
    "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK_V2 = DEEPSEEK_V3 | {
    "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "auto_map": None, "q_lora_rank": None,
    "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
    "topk_method": "greedy",
}  # fmt: skip
SEED_OSS = LLAMA_2 | {
    "model_type": "seed_oss", "architectures": ["SeedOssForCausalLM"], "head_dim": 128, "num_key_value_heads": 8,
    "attention_bias": True, "attention_out_bias": False, "rope_theta": 1e7,
}  # fmt: skip
GLM_4_5 = DEEPSEEK_V3 | {
    "model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "auto_map": None, "head_dim": 128,
    "num_key_value_heads": 8, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5, "rope_theta": 1000000,
    "rope_scaling": None, "attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5,
}  # fmt: skip
PHI_4 = LLAMA_2 | {
    "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "num_key_value_heads": 10,
    "num_attention_heads": 40, "hidden_size": 5120, "original_max_position_embeddings": 16384, "rope_theta": 250000,
    "sliding_window": None,
}  # fmt: skip
KIMI_K2 = DEEPSEEK_V3 | {
    "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64, "n_group": 1, "topk_group": 1,
    "n_routed_experts": 384, "first_k_dense_replace": 1, "routed_scaling_factor": 2.827,
    "rope_scaling": YARN | {"factor": 32.0},
}  # fmt: skip
GEMMA_3_1B = {
    "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "hidden_size": 1152, "num_hidden_layers": 26,
    "intermediate_size": 6912, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "vocab_size": 262144, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": None,
    "sliding_window": 512, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256, "attention_bias": False,
    "final_logit_softcapping": None, "attn_logit_softcapping": None, "tie_word_embeddings": True,
}  # fmt: skip
GPT_OSS_20B = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "num_hidden_layers": 24,
    "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "hidden_act": "silu", "vocab_size": 201088, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05,
    "rope_theta": 150000, "sliding_window": 128, "attention_bias": True, "tie_word_embeddings": False,
    "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4, "swiglu_limit": 7.0,
    "initial_context_length": 4096, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "quantization_config": {
        "quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    },
}  # fmt: skip
MINIMAX_M2 = {
    "model_type": "minimax_m2", "architectures": ["MiniMaxM2ForCausalLM"], "hidden_size": 3072,
    "auto_map": {"AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM"}, "num_hidden_layers": 62,
    "intermediate_size": 1536, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
    "hidden_act": "silu", "vocab_size": 200064, "max_position_embeddings": 196608, "rms_norm_eps": 1e-06,
    "rope_theta": 5000000, "rotary_dim": 64, "num_local_experts": 256, "num_experts_per_tok": 8,
    "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer",
    "attn_type_list": [1] * 62, "shared_intermediate_size": 0, "use_mtp": True, "num_mtp_modules": 3,
    "mtp_transformer_layers": 1, "tie_word_embeddings": False,
}  # fmt: skip
OLMO_3_7B = {
    "model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32,
    "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "silu",
    "vocab_size": 100278, "max_position_embeddings": 65536, "rms_norm_eps": 1e-06, "rope_theta": 500000,
    "sliding_window": 4096, "attention_bias": False, "tie_word_embeddings": False,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
        "original_max_position_embeddings": 8192, "rope_type": "yarn",
    },
}  # fmt: skip
PATH = Path("model/config.json")


def test_published_qwen3_config():
    assert dims_from_config(QWEN3, PATH) == ModelDims(
        family="qwen3", num_layers=28, hidden_size=1024, ffn_hidden_size=3072, num_attention_heads=16,
        num_query_groups=8, head_dim=128, vocab_size=151936, max_positions=40960, rotary_base=1e6,
        norm_epsilon=1e-6, tied_embeddings=True, qk_norm=True, qkv_bias=False,
    )  # fmt: skip


def test_published_gpt_oss_config():
    dims = dims_from_config(GPT_OSS_20B, PATH)
    assert sum(math.prod(shape) for shape in families.hf_tensors(dims).values()) == 20_914_757_184
    assert [dims.window_of(layer) for layer in range(3)] == [128, None, 128]
    assert isinstance(dims.rope_scaling, YarnRope) and not dims.rope_scaling.is_truncated


def test_published_olmo_3_config():
    dims = dims_from_config(OLMO_3_7B, PATH)
    assert sum(math.prod(shape) for shape in families.hf_tensors(dims).values()) == 7_298_011_136
    assert dims.window == WindowDims(size=4096, layers=(True, True, True, False) * 8, rotary_base=5e5)
    assert dims_from_config({**OLMO_3_7B, "layer_types": None}, PATH) == dims
    assert dims.wide_qk_norm and not dims.qk_norm and dims.post_norms and not dims.pre_norms and dims.has_own_layers
    assert "does not divide the model's 8 key/value heads" in layout_problem(replace(dims, num_query_groups=8), tp=16)
    assert not layout_problem(dims, tp=16)


def test_published_minimax_m2_config():
    dims = dims_from_config(MINIMAX_M2, PATH)
    assert (dims.rotary_fraction, dims.wide_qk_norm, dims.num_mtp_layers) == (0.5, True, 3)
    assert dims.moe is not None and dims.moe.expert_bias and dims.moe.score_function == "sigmoid"
    assert dims.has_own_layers


def test_llama_2_config_without_optional_keys():
    dims = dims_from_config(LLAMA_2, PATH)
    assert (dims.num_query_groups, dims.head_dim, dims.rotary_base) == (32, 128, 10000.0)
    assert not (dims.tied_embeddings or dims.qk_norm or dims.qkv_bias)


def test_published_deepseek_v3_config():
    dims = dims_from_config(DEEPSEEK_V3, PATH)
    assert dims.mla == MlaDims(
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    assert dims.moe == MoeDims(
        num_experts=256, experts_per_token=8, ffn_hidden_size=2048, shared_ffn_hidden_size=2048,
        layers=(False,) * 3 + (True,) * 58, score_function="sigmoid", normalized=True, scaling_factor=2.5,
        num_groups=8, group_topk=4, expert_bias=True, router_fp32=True,
    )  # fmt: skip
    assert dims.rope_scaling == YarnRope(
        factor=40, original_max_positions=4096, beta_fast=32, beta_slow=1, mscale=1, mscale_all_dim=1
    )
    assert not dims.has_uniform_layers and dims.is_moe_layer(3) and not dims.is_moe_layer(2)


def test_published_configs_with_experts():
    lite = dims_from_config(DEEPSEEK_V2, PATH)
    assert lite.mla is not None and lite.mla.q_lora_rank is None
    assert lite.moe is not None and (lite.moe.score_function, lite.moe.normalized) == ("softmax", False)
    assert (lite.moe.shared_ffn_hidden_size, lite.moe.num_groups, lite.moe.expert_bias) == (4096, None, False)
    qwen = dims_from_config(QWEN3_MOE, PATH)
    assert qwen.moe is not None and (qwen.moe.num_experts, qwen.moe.ffn_hidden_size) == (128, 768)
    assert qwen.qk_norm and qwen.has_uniform_layers
    sparse = dims_from_config(QWEN3_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [1]}, PATH)
    assert sparse.moe is not None and sparse.moe.layers[:4] == (False, False, False, True)
    mixtral = dims_from_config(MIXTRAL, PATH)
    assert mixtral.moe is not None and (mixtral.moe.num_experts, mixtral.moe.ffn_hidden_size) == (8, 14336)


def test_published_configs_of_kin():
    """GLM's partial rotation holds unless the config says otherwise; Kimi K2 is DeepSeek-V3 by another name."""
    glm = dims_from_config({**GLM_4_5, "partial_rotary_factor": None}, PATH)
    assert (glm.rotary_fraction, glm.qk_norm, glm.qkv_bias, glm.mla) == (0.5, True, True, None)
    assert glm.moe is not None and glm.moe.expert_bias and glm.moe.layers[:4] == (False, False, False, True)
    phi = dims_from_config(PHI_4, PATH)
    assert (phi.head_dim, phi.rotary_fraction, phi.qkv_bias) == (128, 1.0, False)
    kimi = dims_from_config(KIMI_K2, PATH)
    assert kimi == replace(dims_from_config(KIMI_K2 | {"model_type": "deepseek_v3"}, PATH), family="kimi_k2")


def test_published_gemma_3_config():
    """Newer ones name the layers, and nest the ropes."""
    dims = dims_from_config(GEMMA_3_1B, PATH)
    assert dims.window == WindowDims(size=512, layers=((True,) * 5 + (False,)) * 4 + (True, True), rotary_base=1e4)
    assert (dims.rotary_base, dims.score_divisor, dims.activation) == (1e6, 256, "gelu_tanh")
    assert dims.zero_centered_norms and dims.post_norms and dims.scaled_embeddings and dims.qk_norm
    rope = {"rope_type": "default", "rope_theta": 10000}
    named = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(26)]
    newer = {key: value for key, value in GEMMA_3_1B.items() if not key.startswith("rope_")} | {"layer_types": named}
    newer["rope_parameters"] = {"sliding_attention": rope, "full_attention": rope | {"rope_theta": 1000000}}
    assert dims_from_config(newer, PATH) == dims


def test_ropes_that_megatron_expresses():
    assert dims_from_config(LLAMA_3, PATH).rope_scaling == Llama3Rope(factor=8.0)
    new_style = LLAMA_3 | {"rope_theta": None, "rope_scaling": None}
    new_style["rope_parameters"] = LLAMA_3_ROPE | {"rope_theta": 500000.0}
    assert dims_from_config(new_style, PATH) == dims_from_config(LLAMA_3, PATH)
    assert dims_from_config(MISTRAL, PATH).rope_scaling is None
    bare = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    rope = dims_from_config(DEEPSEEK_V3 | {"rope_scaling": bare}, PATH).rope_scaling
    assert rope == YarnRope(
        factor=4, original_max_positions=4096, beta_fast=32, beta_slow=1, mscale=1, mscale_all_dim=0
    )


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
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.original_max_position_embeddings"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_scaling.type"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 5e5}}, "rope_parameters.rope_type"),
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
    require_refusal({**QWEN3, **change}, key)


def require_refusal(config: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError) as refusal:
        dims_from_config(config, PATH)
    assert str(refusal.value).startswith(f"{PATH}: '{key}'") and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("config", "change", "key"),
    [
        (LLAMA_3, {"rope_scaling": LLAMA_3_ROPE | {"low_freq_factor": 4.0}}, "rope_scaling.low_freq_factor"),
        (LLAMA_3, {"rope_scaling": LLAMA_3_ROPE | {"beta_fast": 8.0}}, "rope_scaling.beta_fast"),
        (SEED_OSS, {"attention_out_bias": True}, "attention_out_bias"),
        (SEED_OSS, {"attention_bias": None}, "attention_bias"),
        (GLM_4_5, {"partial_rotary_factor": 0.51}, "partial_rotary_factor"),
        (GLM_4_5, {"rope_scaling": YARN}, "partial_rotary_factor"),
        (PHI_4, {"rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, "rope_scaling.type"),
        (PHI_4, {"sliding_window": 2047}, "sliding_window"),
        (GEMMA_3_1B, {"hidden_activation": "gelu"}, "hidden_act"),
        (GEMMA_3_1B, {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        (GEMMA_3_1B, {"layer_types": ["full_attention"]}, "layer_types"),
        (GEMMA_3_1B, {"sliding_window": None}, "sliding_window"),
        (GEMMA_3_1B, {"rope_local_base_freq": None}, "rope_local_base_freq"),
        (MINIMAX_M2, {"attn_type_list": [0] + [1] * 61}, "attn_type_list"),
        (MINIMAX_M2, {"qk_norm_type": "per_head"}, "qk_norm_type"),
        (MINIMAX_M2, {"use_routing_bias": False}, "use_routing_bias"),
        (MINIMAX_M2, {"rotary_dim": 49}, "partial_rotary_factor"),
        (OLMO_3_7B, {"rope_theta": 10000}, "rope_theta"),
        (OLMO_3_7B, {"rope_scaling": OLMO_3_7B["rope_scaling"] | {"truncate": False}}, "rope_scaling.truncate"),
        (OLMO_3_7B, {"rope_parameters": {"rope_type": "default", "rope_theta": 500000}}, "rope_parameters"),
        (LLAMA_3, {"rope_scaling": LLAMA_3_ROPE | {"factor": None}}, "rope_scaling.factor"),
        (LLAMA_3, {"rope_scaling": LLAMA_3_ROPE | {"type": "linear"}}, "rope_scaling.rope_type"),
        (LLAMA_3, {"rope_parameters": {"rope_type": "default"}}, "rope_scaling"),
        (MISTRAL, {"sliding_window": 4096}, "sliding_window"),
        (MIXTRAL, {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        (MIXTRAL, {"num_experts_per_tok": 1}, "num_experts_per_tok"),
        (MIXTRAL, {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        (QWEN3_MOE, {"mlp_only_layers": [28]}, "mlp_only_layers"),
        (QWEN3_MOE, {"decoder_sparse_step": 29}, "num_hidden_layers"),
        (QWEN3_MOE, {"norm_topk_prob": None}, "norm_topk_prob"),
        (DEEPSEEK_V3, {"auto_map": {"AutoModelForCausalLM": "modeling_other.X"}}, "auto_map"),
        (DEEPSEEK_V3, {"rms_norm_eps": 1e-5}, "rms_norm_eps"),
        (DEEPSEEK_V3, {"rope_interleave": False}, "rope_interleave"),
        (DEEPSEEK_V3, {"num_key_value_heads": 64}, "num_key_value_heads"),
        (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func"),
        (DEEPSEEK_V3, {"norm_topk_prob": False}, "norm_topk_prob"),
        (DEEPSEEK_V3, {"topk_group": 2}, "topk_group"),
        (DEEPSEEK_V3, {"n_group": 7}, "n_group"),
        (DEEPSEEK_V3, {"moe_layer_freq": 2}, "moe_layer_freq"),
        (DEEPSEEK_V3, {"first_k_dense_replace": 61}, "num_hidden_layers"),
        (DEEPSEEK_V3, {"first_k_dense_replace": -1}, "first_k_dense_replace"),
        (DEEPSEEK_V3, {"rope_scaling": LLAMA_3_ROPE}, "rope_scaling.rope_type"),
        (DEEPSEEK_V3, {"rope_scaling": YARN | {"attention_factor": 1.0}}, "rope_scaling.attention_factor"),
        (DEEPSEEK_V3, {"rope_scaling": YARN | {"mscale": None}}, "rope_scaling.mscale_all_dim"),
        (DEEPSEEK_V2, {"topk_method": "group_limited_greedy"}, "topk_method"),
        (DEEPSEEK_V2, {"norm_topk_prob": True}, "norm_topk_prob"),
    ],
)
def test_what_a_family_cannot_carry_is_refused_by_name(config: dict[str, Any], change: dict[str, Any], key: str):
    dims_from_config(config, PATH)
    require_refusal({**config, **change}, key)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "qwen3_moe_v2",
            r"the nearest name that is: 'qwen3_moe'\. docs/conversion\.md lists all families",
        ),
        ("gemma3", "its vision tower is not read; use a checkpoint of the language model, gemma3_text"),
        ("gemma4_text", "'gemma4_text' is not supported: its layers differ in head size"),
        ("llama4", "'llama4' is not supported: it attends in chunks"),
    ],
)
def test_an_unknown_family_is_told_the_nearest_or_the_reason(name: str, message: str):
    with pytest.raises(UserError, match=message):
        dims_from_config({**QWEN3, "model_type": name}, PATH)


def test_mistral_without_a_sliding_window_key_is_refused():
    """transformers then takes 4096."""
    config = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    with pytest.raises(UserError, match="'sliding_window': missing, which means 4096"):
        dims_from_config(config, PATH)


def test_unused_sliding_window_is_accepted():
    """Qwen2 configs name a window that ``use_sliding_window: false`` switches off."""
    assert dims_from_config({**QWEN3, "sliding_window": 32768}, PATH).num_layers == 28


def test_missing_config_and_folder(tmp_path: Path):
    with pytest.raises(UserError, match=r"config\.json: missing"):
        read_dims(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        read_dims(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("config", "degrees", "message"),
    [
        (QWEN3, {"tp": 32}, "tensor_model_parallel_size 32 does not divide the model's 16 attention heads"),
        (QWEN3, {"tp": 12}, "tensor_model_parallel_size 12 does not divide the model's 8 key/"),
        (QWEN3, {"tp": 3}, "tensor_model_parallel_size 3 does not divide"),
        (QWEN3, {"stages": Stages(pipeline_model_parallel_size=3)}, "3 does not divide the model's 28 layers"),
        (QWEN3_MOE, {"ep": 3}, "expert_model_parallel_size 3 does not .* 128 experts"),
        (QWEN3_MOE, {"etp": 5}, "expert_tensor_parallel_size 5 does not .* 768 columns"),
        (QWEN3, {"ep": 2}, "has no experts: set it to 1"),
        (QWEN3_MOE, {"tp": 2, "sp": False}, "has experts: set student.parallel.sequence_parallel: true"),
    ],
)
def test_layout_that_would_split_a_part_of_the_model(config: dict[str, Any], degrees: dict[str, Any], message: str):
    dims = dims_from_config(config, PATH)
    whole = {"ep": 64} if config is QWEN3_MOE else {"tp": 8}
    assert not layout_problem(dims, Stages(pipeline_model_parallel_size=4), **whole)
    assert re.search(message, layout_problem(dims, **degrees))


@pytest.mark.parametrize(
    ("vocab_size", "tp", "padded"),
    [(151936, 1, 151936), (151936, 8, 152576), (48, 1, 128), (61, 2, 256), (256, 2, 256)],
)
def test_padded_vocabulary(vocab_size: int, tp: int, padded: int):
    dims = dims_from_config({**QWEN3, "vocab_size": vocab_size}, PATH)
    assert padded == dims.padded_vocab_size(tp)

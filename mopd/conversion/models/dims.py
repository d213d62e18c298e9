"""What a Hugging Face ``config.json`` says about a model, as plain numbers. No torch in this module.

Only the published meaning of the format is read. A feature that the name tables and Megatron-Core cannot carry
(rope scaling, sliding window, quantised weights, extra biases, …) is refused by file and key, never dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mopd.conversion.models.config_keys import CONFIG_FILE, Keys, read_config
from mopd.conversion.models.experts import DEEPSEEK, read_mla, read_moe
from mopd.conversion.models.model_dims import MlaDims, ModelDims, MoeDims, check_layout
from mopd.conversion.models.rope import read_rope

__all__ = [
    "CONFIG_FILE",
    "MlaDims",
    "ModelDims",
    "MoeDims",
    "check_layout",
    "dims_from_config",
    "read_config",
    "read_dims",
]

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
"""``model_type`` -> the one architecture of it that is carried."""
MAX_LAYERS = 2_000
"""The deepest published models have some hundreds."""
_KV_HEADS_DEFAULT_TO_HEADS = ("llama", *DEEPSEEK)
_HEAD_DIM_DEFAULTS_TO_SHARE = ("llama", "mistral", "qwen2", "mixtral")


def read_dims(folder: Path) -> ModelDims:
    """``ModelDims`` of a Hugging Face folder (``rope_theta`` and transformers 5's ``rope_parameters`` both work).

    Raises:
        UserError: the config is unreadable, lacks a key, has a value of the wrong type, or asks for a feature that
            cannot be carried; the message names file and key.
    """
    return dims_from_config(read_config(folder), folder / CONFIG_FILE)


def dims_from_config(config: Mapping[str, Any], path: Path) -> ModelDims:
    """``ModelDims`` of a parsed config; ``path`` is only for messages. Raises as ``read_dims`` does."""
    keys = Keys(config, path)
    family = keys.one_of("model_type", tuple(ARCHITECTURES), "a model family with a name table")
    _refuse_unsupported(keys, family)
    heads = keys.count("num_attention_heads")
    mla = read_mla(keys, family)
    # Absent keys whose meaning the family's format defines; every other key is required.
    own_groups = family in _KV_HEADS_DEFAULT_TO_HEADS and keys.absent("num_key_value_heads")
    kv_heads = heads if own_groups else keys.count("num_key_value_heads")
    if heads % kv_heads:
        raise keys.error("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    if keys.count("num_hidden_layers") > MAX_LAYERS:
        raise keys.error("num_hidden_layers", f"{keys.count('num_hidden_layers')} is more than {MAX_LAYERS}, the limit")
    rotary_base, rope_scaling = read_rope(keys, family, is_latent=mla is not None)
    return ModelDims(
        family=family,
        num_layers=keys.count("num_hidden_layers"),
        hidden_size=keys.count("hidden_size"),
        ffn_hidden_size=keys.count("intermediate_size"),
        num_attention_heads=heads,
        num_query_groups=kv_heads,
        head_dim=_head_dim(keys, family, mla),
        vocab_size=keys.count("vocab_size"),
        max_positions=keys.count("max_position_embeddings"),
        rotary_base=rotary_base,
        norm_epsilon=keys.positive("rms_norm_eps"),
        tied_embeddings=not keys.absent("tie_word_embeddings") and keys.flag("tie_word_embeddings"),
        qk_norm=family in ("qwen3", "qwen3_moe"),
        qkv_bias=family == "qwen2",
        mla=mla,
        moe=read_moe(keys, family),
        rope_scaling=rope_scaling,
    )


def _head_dim(keys: Keys, family: str, mla: MlaDims | None) -> int:
    if mla is not None:
        return mla.qk_nope_head_dim + mla.qk_rope_head_dim
    if family in _HEAD_DIM_DEFAULTS_TO_SHARE and keys.absent("head_dim"):
        hidden, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
        if hidden % heads:
            message = f"{hidden} is no multiple of num_attention_heads {heads}, head_dim is absent"
            raise keys.error("hidden_size", message)
        head_dim = hidden // heads
    else:
        head_dim = keys.count("head_dim")
    if head_dim % 2:
        raise keys.error("head_dim", f"{head_dim} is odd, rotary embeddings need an even size")
    return head_dim


def _refuse_unsupported(keys: Keys, family: str) -> None:
    """Names the first feature of the config that the tables or Megatron-Core cannot carry."""
    for key in ("quantization_config", "compression_config"):
        if not keys.absent(key):
            raise keys.error(key, "quantised weights are not supported; use the unquantised checkpoint")
    if not keys.absent("architectures") and ARCHITECTURES[family] not in keys.container("architectures", list):
        found = keys.config["architectures"]
        raise keys.error("architectures", f"{found!r} is not supported; {ARCHITECTURES[family]} is")
    if not keys.absent("auto_map") and "AutoModelForCausalLM" in keys.container("auto_map", dict):
        _refuse_custom_code(keys, family)
    for key in ("attention_bias", "mlp_bias"):
        if not keys.absent(key) and keys.flag(key):
            raise keys.error(key, f"true is not supported for model_type {family}")
    keys.one_of("hidden_act", ("silu",), "a supported activation")
    _refuse_sliding_window(keys, family)


def _refuse_custom_code(keys: Keys, family: str) -> None:
    """DeepSeek's own checkpoints name the code that came before transformers had the architecture."""
    published = f"modeling_deepseek.{ARCHITECTURES[family]}" if family in DEEPSEEK else None
    if keys.config["auto_map"]["AutoModelForCausalLM"] != published:
        raise keys.error("auto_map", "custom modelling code is not supported; use a plain checkpoint")


def _refuse_sliding_window(keys: Keys, family: str) -> None:
    has_switch = not keys.absent("use_sliding_window")
    if has_switch and keys.flag("use_sliding_window"):
        raise keys.error("use_sliding_window", "true is not supported; only full attention is")
    if not has_switch and not keys.absent("sliding_window"):
        size = keys.config["sliding_window"]
        raise keys.error("sliding_window", f"{size!r} is not supported; only full attention is")
    if family == "mistral" and "sliding_window" not in keys.config:
        raise keys.error("sliding_window", "missing, which means 4096; set it to null if the model has full attention")
    if not keys.absent("layer_types"):
        other = sorted({str(kind) for kind in keys.container("layer_types", list)} - {"full_attention"})
        if other:
            raise keys.error("layer_types", f"{other} is not supported; only full_attention is")

"""Tables of the fields of Megatron's configuration that a recipe may override, and of the reasons against the others.

Allowed is what costs or saves memory and time and leaves the model and its gradient unchanged. All other fields of
Megatron-Core are refused, those of a new version included.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig

from mopd.base.types import UserError

Values = type[bool] | type[int] | tuple[str, ...] | list[str]
"""Type of an allowed field's value: true or false, a whole number from 1, one of some names, or a list of names."""

ALLOWED: dict[str, Values] = {
    "batch_p2p_comm": bool,
    "batch_p2p_sync": bool,
    "clone_scatter_output_in_embedding": bool,
    "deterministic_mode": bool,
    "disable_bf16_reduced_precision_matmul": bool,
    "distribute_saved_activations": bool,
    "recompute_granularity": ("selective", "full"),
    "recompute_method": ("uniform", "block"),
    "recompute_modules": ["core_attn", "mlp", "moe", "shared_experts", "layernorm", "mla_up_proj", "moe_act"],
    "recompute_num_layers": int,
}
"""Fields that are always allowed. They change memory, time and the rounding of single operations."""

_DISCARDING = {"layernorm", "mla_up_proj", "moe_act"}
"""``recompute_modules`` that Megatron recomputes with the help of TransformerEngine only."""

WITH_TRANSFORMER_ENGINE: dict[str, Values] = {
    "attention_backend": ("auto", "flash", "fused"),  # not "unfused", whose scores are a tensor [B, heads, S, S]
    "cpu_offloading": bool,
    "cpu_offloading_double_buffering": bool,
    "cpu_offloading_num_layers": int,
    "fine_grained_activation_offloading": bool,
    "first_last_layers_bf16": bool,
    "fp8": ("e4m3", "hybrid"),
    "fp8_recipe": ("tensorwise", "blockwise"),  # not "delayed": checkpoints hold no history of scales
    "min_offloaded_tensor_size": int,
    "moe_permute_fusion": bool,
    "moe_router_fusion": bool,
    "moe_shared_expert_overlap": bool,
    "num_layers_at_end_in_bf16": int,
    "num_layers_at_start_in_bf16": int,
    "offload_modules": [
        "attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act",
    ],
}  # fmt: skip
"""Fields that are allowed if TransformerEngine computes the layers."""

NEEDS: dict[str, str] = {
    "cpu_offloading": "cpu_offloading_num_layers",
    "cpu_offloading_double_buffering": "cpu_offloading",
    "cpu_offloading_num_layers": "cpu_offloading",
    "distribute_saved_activations": "recompute_granularity",
    "fine_grained_activation_offloading": "offload_modules",
    "first_last_layers_bf16": "fp8",
    "fp8_recipe": "fp8",
    "min_offloaded_tensor_size": "fine_grained_activation_offloading",
    "num_layers_at_end_in_bf16": "first_last_layers_bf16",
    "num_layers_at_start_in_bf16": "first_last_layers_bf16",
    "offload_modules": "fine_grained_activation_offloading",
    "recompute_method": "recompute_granularity",
    "recompute_modules": "recompute_granularity",
    "recompute_num_layers": "recompute_granularity",
}
"""Field -> the field without which Megatron silently ignores it."""

OWNED: dict[str, str] = {
    "student.model": """
        num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels layernorm_epsilon
        normalization gated_linear_unit activation_func add_bias_linear add_qkv_bias qk_layernorm multi_latent_attention
        q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type rotary_base rotary_scaling_factor
        original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim num_moe_experts moe_ffn_hidden_size
        moe_shared_expert_intermediate_size moe_layer_freq moe_router_topk moe_router_score_function
        moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk
        moe_router_enable_expert_bias moe_router_dtype mrope_section attention_output_gate moe_shared_expert_gate""",
    "student.parallel.tensor_model_parallel_size": "tensor_model_parallel_size",
    "student.parallel.pipeline_model_parallel_size": "pipeline_model_parallel_size",
    "student.parallel.virtual_pipeline_model_parallel_size": """
        virtual_pipeline_model_parallel_size microbatch_group_size_per_vp_stage""",
    "student.parallel.num_layers_in_first_pipeline_stage": "num_layers_in_first_pipeline_stage",
    "student.parallel.num_layers_in_last_pipeline_stage": "num_layers_in_last_pipeline_stage",
    "student.parallel.context_parallel_size": "context_parallel_size",
    "student.parallel.sequence_parallel": "sequence_parallel",
    "student.parallel.expert_model_parallel_size": "expert_model_parallel_size",
    "student.parallel.expert_tensor_parallel_size": "expert_tensor_parallel_size moe_extended_tp",
    "student.dtype": "params_dtype pipeline_dtype bf16 fp16 enable_autocast autocast_dtype fp32_residual_connection",
    "student.moe.moe_router_load_balancing_type": "moe_router_load_balancing_type",
    "student.moe.moe_aux_loss_coeff": "moe_aux_loss_coeff",
    "student.moe.moe_z_loss_coeff": "moe_z_loss_coeff",
    "student.moe.moe_router_bias_update_rate": "moe_router_bias_update_rate",
    "student.moe.moe_grouped_gemm": "moe_grouped_gemm moe_use_legacy_grouped_gemm",
    "rollout.replay_routes": "moe_enable_routing_replay",
    "student.transformer_impl": """
        transformer_impl masked_softmax_fusion bias_activation_fusion bias_dropout_fusion apply_rope_fusion
        use_te_activation_func""",
}
"""Recipe key -> fields that it decides."""

REFUSED: dict[str, str] = {
    "it makes another function of the same weights": """
        softmax_scale softmax_type apply_query_key_layer_scaling rotary_interleaved rotary_percent no_rope_freq
        window_size window_attn_skip_freq layernorm_zero_centered_gamma qk_l2_norm qk_clip qk_clip_alpha
        qk_clip_threshold apply_residual_connection_post_layernorm glu_linear_offset
        activation_func_clamp_value experimental_attention_variant dsa_indexer_n_heads dsa_indexer_head_dim
        dsa_indexer_topk dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss linear_attention_freq linear_conv_kernel_dim
        linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads is_hybrid_model
        mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path heterogeneous_block_specs
        hetereogenous_dist_checkpoint moe_latent_size moe_apply_probs_on_input""",
    "it sends tokens to other experts than the model's router, or to none": """
        moe_router_force_load_balancing moe_router_topk_limited_devices moe_expert_capacity_factor
        moe_pad_expert_input_to_capacity moe_token_drop_policy moe_token_dropping""",
    "the loss must be a function of weights and batch alone, without noise": """
        hidden_dropout attention_dropout moe_input_jitter_eps use_te_rng_tracker inference_rng_tracker""",
    "the weights come from student.model, nothing is drawn": """
        perform_initialization use_cpu_initialization init_method output_layer_init_method init_method_std
        embedding_init_method embedding_init_method_std init_model_with_meta_device""",
}
"""Reason -> fields that are refused for it, since they would make another model, another gradient or another step."""

_OTHERS = {
    OptimizerConfig: "student.optimizer (states in host memory: offload_fraction)",
    DistributedDataParallelConfig: "student.overlap and student.optimizer",
}
"""Megatron's other configurations -> the recipe sections that their values come from."""


def check_overrides(
    overrides: Mapping[str, Any], *, owned: Iterable[str] = (), has_transformer_engine: bool = False
) -> dict[str, Any]:
    """Return the overrides with enum names resolved.

    Args:
        overrides: ``student.megatron_overrides``.
        owned: fields that this recipe's other keys set, beside those that they always set.
        has_transformer_engine: the layers are TransformerEngine's.

    Raises:
        UserError: an unknown field (with the nearest name), one that is not for recipes, or a value that is none of the
            field's.
    """
    taken = set(owned)
    checked: dict[str, Any] = {}
    for name, value in overrides.items():
        key = f"student.megatron_overrides.{name}"
        values = ALLOWED.get(name) or WITH_TRANSFORMER_ENGINE.get(name)
        if values is None:
            raise UserError(f"{key}: {_why_not(name)}")
        if name in taken:
            raise UserError(f"{key}: student.recompute sets this field; remove the override or set recompute: none")
        if name not in ALLOWED and not has_transformer_engine:
            raise UserError(f"{key}: only TransformerEngine's layers know it, and this student's are local; remove it")
        if not _fits(value, values):
            raise UserError(f"{key}: {value!r} is not {_describe(values)}")
        if name == "recompute_modules" and not has_transformer_engine and _DISCARDING & set(value):
            names = ", ".join(sorted(_DISCARDING & set(value)))
            raise UserError(f"{key}: Megatron recomputes {names} with TransformerEngine only; remove it")
        needed = NEEDS.get(name)
        if needed is not None and value is not False and not overrides.get(needed) and needed not in taken:
            raise UserError(f"{key}: it does nothing without {needed}: set that too, or remove this override")
        checked[name] = AttnBackend[value] if name == "attention_backend" else value
    return checked


def _why_not(name: str) -> str:
    for key, names in OWNED.items():
        if name in names.split():
            return f"mopd sets this field from {key}; remove the override"
    for reason, names in REFUSED.items():
        if name in names.split():
            return f"{reason}; remove the override"
    for config, owner in _OTHERS.items():
        if any(field.name == name for field in dataclasses.fields(config)):
            return f"it is a field of Megatron's {config.__name__}, which mopd builds from {owner}; remove the override"
    known = [field.name for field in dataclasses.fields(MLATransformerConfig)]
    if name in known:
        return (
            "mopd sets it itself, or no test of mopd shows that the model and its gradient stay the same; remove the "
            "override"
        )
    near = difflib.get_close_matches(name, [*ALLOWED, *WITH_TRANSFORMER_ENGINE], n=1)
    near = near or difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"the fields are {', '.join(ALLOWED)}"
    return f"TransformerConfig has no such field; {hint}"


def _fits(value: Any, values: Values) -> bool:
    if values is bool:
        return isinstance(value, bool)
    if values is int:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if isinstance(values, tuple):
        return isinstance(value, str) and value in values
    assert isinstance(values, list)
    is_list = isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)
    return is_list and set(value) <= set(values) and 0 < len(value) == len(set(value))


def _describe(values: Values) -> str:
    if values is bool:
        return "true or false"
    if values is int:
        return "a whole number from 1"
    assert isinstance(values, (tuple, list))
    names = ", ".join(values)
    return f"one of {names}" if isinstance(values, tuple) else f"a list of some of {names}, each once"

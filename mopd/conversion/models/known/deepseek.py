"""DeepSeek-V2-Lite and V3, and Kimi K2, which is V3 by another name: latent attention, groups of experts, shared
experts."""

from __future__ import annotations

from collections.abc import Callable

from mopd.conversion.models.config_keys import Keys
from mopd.conversion.models.dims import MlaDims, MoeDims
from mopd.conversion.models.family import Family
from mopd.conversion.models.rows import EXPERTS, LATENT_ATTENTION, MLP, PRE_MOE_NORM, ROUTER, SHARED_EXPERTS

_LATENT_NORM_EPSILON = 1e-6
"""Epsilon of DeepSeek's norms inside the attention, whatever ``rms_norm_eps``; Megatron-Core has one for all."""


def _latent_attention(keys: Keys) -> MlaDims:
    heads = keys.count("num_attention_heads")
    if keys.positive("rms_norm_eps") != _LATENT_NORM_EPSILON:
        raise keys.error("rms_norm_eps", f"only {_LATENT_NORM_EPSILON} is supported")
    if not keys.absent("rope_interleave") and not keys.flag("rope_interleave"):
        raise keys.error("rope_interleave", "false is not supported; Megatron-Core interleaves")
    if not keys.absent("num_key_value_heads") and keys.count("num_key_value_heads") != heads:
        raise keys.error("num_key_value_heads", f"latent attention has one per attention head, {heads}")
    if keys.count("qk_rope_head_dim") % 2:
        raise keys.error("qk_rope_head_dim", "is odd, rotary embeddings need an even size")
    return MlaDims(
        q_lora_rank=None if keys.absent("q_lora_rank") else keys.count("q_lora_rank"),
        kv_lora_rank=keys.count("kv_lora_rank"),
        qk_nope_head_dim=keys.count("qk_nope_head_dim"),
        qk_rope_head_dim=keys.count("qk_rope_head_dim"),
        v_head_dim=keys.count("v_head_dim"),
    )


def _deepseek_v2(keys: Keys) -> MoeDims:
    keys.only("scoring_func", "softmax")
    keys.only("topk_method", "greedy", "Megatron-Core ranks groups of experts by other sums")
    keys.only("norm_topk_prob", False, "its definitions contradict each other")
    return _deepseek(keys, is_v3=False)


def noaux_experts(keys: Keys) -> MoeDims:
    """Read experts that a bias balances (``noaux_tc``), as other families have them too."""
    keys.only("scoring_func", "sigmoid")
    keys.only("topk_method", "noaux_tc")
    keys.only("norm_topk_prob", True, "Megatron-Core always normalises sigmoid scores")
    groups, chosen, topk = (keys.count(key) for key in ("n_group", "topk_group", "num_experts_per_tok"))
    experts = keys.count("n_routed_experts")
    if experts % groups or chosen > groups or topk > chosen * experts // groups:
        raise keys.error("n_group", f"{groups} groups, {chosen} of them chosen, do not fit {experts} experts")
    if groups == chosen:
        return _deepseek(keys, is_v3=True)
    if topk // chosen != 2:
        raise keys.error(
            "topk_group",
            f"{chosen} is not supported with num_experts_per_tok {topk}: the model ranks groups by their best 2 "
            f"experts, Megatron-Core by {topk} // {chosen}",
        )
    return _deepseek(keys, is_v3=True, num_groups=groups, group_topk=chosen)


def _deepseek(keys: Keys, *, is_v3: bool, num_groups: int | None = None, group_topk: int | None = None) -> MoeDims:
    keys.only("moe_layer_freq", 1)
    num_layers, width = keys.count("num_hidden_layers"), keys.count("moe_intermediate_size")
    num_dense = keys.whole("first_k_dense_replace")
    shared = 0 if keys.absent("n_shared_experts") else keys.whole("n_shared_experts")
    return MoeDims(
        num_experts=keys.count("n_routed_experts"),
        experts_per_token=keys.count("num_experts_per_tok"),
        ffn_hidden_size=width,
        shared_ffn_hidden_size=shared * width,
        layers=tuple(layer >= num_dense for layer in range(num_layers)),
        score_function="sigmoid" if is_v3 else "softmax",
        normalized=is_v3,
        scaling_factor=keys.positive("routed_scaling_factor"),
        num_groups=num_groups,
        group_topk=group_topk,
        expert_bias=is_v3,
        router_fp32=True,
    )


def _family(version: int, experts: Callable[[Keys], MoeDims]) -> Family:
    return Family(
        architecture=f"DeepseekV{version}ForCausalLM",
        # the code that came before transformers had the architecture
        published_code=f"modeling_deepseek.DeepseekV{version}ForCausalLM",
        dense=LATENT_ATTENTION + MLP,
        moe=LATENT_ATTENTION + PRE_MOE_NORM + ROUTER + SHARED_EXPERTS + EXPERTS,
        kv_heads_default_to_heads=True,
        ropes=("yarn",),
        latent_attention=_latent_attention,
        experts=experts,
    )


_V3 = _family(3, noaux_experts)
FAMILIES = {"deepseek_v2": _family(2, _deepseek_v2), "deepseek_v3": _V3, "kimi_k2": _V3}

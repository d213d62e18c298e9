"""Experts and latent attention of a ``config.json``, family by family. What Megatron-Core's router computes
differently is refused by key."""

from __future__ import annotations

from mopd.conversion.models.config_keys import Keys
from mopd.conversion.models.model_dims import MlaDims, MoeDims

MAX_EXPERTS = 100_000
"""Of all layers together; the largest published models have some 20,000."""
DEEPSEEK = ("deepseek_v2", "deepseek_v3")
_LATENT_NORM_EPSILON = 1e-6
"""DeepSeek's norms inside the attention have this epsilon whatever ``rms_norm_eps``; Megatron-Core has one for all."""


def read_mla(keys: Keys, family: str) -> MlaDims | None:
    """Sizes of latent attention; None for families with grouped-query attention."""
    if family not in DEEPSEEK:
        return None
    if keys.positive("rms_norm_eps") != _LATENT_NORM_EPSILON:
        raise keys.error("rms_norm_eps", f"only {_LATENT_NORM_EPSILON} is supported for model_type {family}")
    if not keys.absent("rope_interleave") and not keys.flag("rope_interleave"):
        raise keys.error("rope_interleave", "false is not supported; Megatron-Core interleaves")
    heads = keys.count("num_attention_heads")
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


def read_moe(keys: Keys, family: str) -> MoeDims | None:
    """Experts and router; None for a dense model."""
    readers = {"mixtral": _mixtral, "qwen3_moe": _qwen3_moe, "deepseek_v2": _deepseek_v2, "deepseek_v3": _deepseek_v3}
    if family not in readers:
        return None
    moe = readers[family](keys)
    if moe.experts_per_token > moe.num_experts:
        raise keys.error("num_experts_per_tok", f"{moe.experts_per_token} exceeds the {moe.num_experts} experts")
    if moe.experts_per_token == 1 and moe.normalized:
        raise keys.error("num_experts_per_tok", "1 is not supported: Megatron-Core does not normalise a single score")
    if moe.num_experts * len(moe.layers) > MAX_EXPERTS:
        raise keys.error(
            "num_hidden_layers",
            f"{len(moe.layers)} with {moe.num_experts} experts each: more than {MAX_EXPERTS} in all",
        )
    if not any(moe.layers):
        raise keys.error("num_hidden_layers", "no layer has experts; use a dense model_type")
    return moe


def _mixtral(keys: Keys) -> MoeDims:
    if not keys.absent("router_jitter_noise") and keys.config["router_jitter_noise"]:
        raise keys.error("router_jitter_noise", "is not supported; set it to 0.0")
    return MoeDims(
        num_experts=keys.count("num_local_experts"),
        experts_per_token=keys.count("num_experts_per_tok"),
        ffn_hidden_size=keys.count("intermediate_size"),
        shared_ffn_hidden_size=0,
        layers=(True,) * keys.count("num_hidden_layers"),
        score_function="softmax",
        normalized=True,
        scaling_factor=1.0,
        num_groups=None,
        group_topk=None,
        expert_bias=False,
        router_fp32=False,
    )


def _qwen3_moe(keys: Keys) -> MoeDims:
    num_layers, step = keys.count("num_hidden_layers"), keys.count("decoder_sparse_step")
    dense = [] if keys.absent("mlp_only_layers") else keys.container("mlp_only_layers", list)
    unknown = [layer for layer in dense if type(layer) is not int or not 0 <= layer < num_layers]
    if unknown:
        raise keys.error("mlp_only_layers", f"names layers that do not exist: {unknown!a:.200}")
    # transformers 4 calls it num_experts, transformers 5 num_local_experts
    num_experts = keys.count("num_local_experts" if keys.absent("num_experts") else "num_experts")
    return MoeDims(
        num_experts=num_experts,
        experts_per_token=keys.count("num_experts_per_tok"),
        ffn_hidden_size=keys.count("moe_intermediate_size"),
        shared_ffn_hidden_size=0,
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
        score_function="softmax",
        normalized=keys.flag("norm_topk_prob"),
        scaling_factor=1.0,
        num_groups=None,
        group_topk=None,
        expert_bias=False,
        router_fp32=False,
    )


def _deepseek_v2(keys: Keys) -> MoeDims:
    keys.only("scoring_func", "softmax")
    keys.only("topk_method", "greedy", "Megatron-Core ranks groups of experts by other sums")
    keys.only("norm_topk_prob", False, "its definitions contradict each other")
    return _deepseek(keys, expert_bias=False, num_groups=None, group_topk=None)


def _deepseek_v3(keys: Keys) -> MoeDims:
    keys.only("scoring_func", "sigmoid")
    keys.only("topk_method", "noaux_tc")
    keys.only("norm_topk_prob", True, "Megatron-Core always normalises sigmoid scores")
    groups, chosen, topk = (keys.count(key) for key in ("n_group", "topk_group", "num_experts_per_tok"))
    experts = keys.count("n_routed_experts")
    if experts % groups or chosen > groups or topk > chosen * experts // groups:
        raise keys.error("n_group", f"{groups} groups, {chosen} of them chosen, do not fit {experts} experts")
    if groups == chosen:
        return _deepseek(keys, expert_bias=True, num_groups=None, group_topk=None)
    if topk // chosen != 2:
        raise keys.error(
            "topk_group",
            f"{chosen} is not supported with num_experts_per_tok {topk}: the model ranks groups by their best 2 "
            f"experts, Megatron-Core by {topk} // {chosen}",
        )
    return _deepseek(keys, expert_bias=True, num_groups=groups, group_topk=chosen)


def _deepseek(keys: Keys, *, expert_bias: bool, num_groups: int | None, group_topk: int | None) -> MoeDims:
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
        score_function="sigmoid" if expert_bias else "softmax",
        normalized=expert_bias,
        scaling_factor=keys.positive("routed_scaling_factor"),
        num_groups=num_groups,
        group_topk=group_topk,
        expert_bias=expert_bias,
        router_fp32=True,
    )

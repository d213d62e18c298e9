"""MiniMax-M2: one norm of all queries and one of all keys, a rope over part of each head, and Mixtral's experts, chosen
by the sigmoid of their scores and a bias."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mopd.conversion.models.config_keys import Keys
from mopd.conversion.models.dims import MoeDims
from mopd.conversion.models.family import Family
from mopd.conversion.models.known.mixtral import RENAMED, ROUTER_AND_EXPERTS, mixtral_experts
from mopd.conversion.models.rows import ATTENTION, PRE_MOE_NORM, WIDE_QK_NORMS, one


def _spelled(keys: Keys) -> Keys:
    """Spell the turned channels as their share of a head, and the layers of multi-token prediction as others do."""
    config = {**keys.config, "num_nextn_predict_layers": keys.config.get("num_mtp_modules")}
    if not keys.absent("rotary_dim") and keys.absent("partial_rotary_factor"):
        config["partial_rotary_factor"] = keys.count("rotary_dim") / keys.count("head_dim")
    return Keys(config, keys.path, keys.prefix)


def _experts(keys: Keys) -> MoeDims:
    keys.only("scoring_func", "sigmoid")
    keys.only("use_routing_bias", True)
    keys.only("shared_intermediate_size", 0)
    return replace(mixtral_experts(keys), score_function="sigmoid", expert_bias=True, router_fp32=True)


def _more(keys: Keys) -> dict[str, Any]:
    keys.only("use_qk_norm", True)
    keys.only("qk_norm_type", "per_layer")
    keys.only("attn_type_list", [1] * keys.count("num_hidden_layers"), "all layers attend to all tokens")
    keys.only("mtp_transformer_layers", 1)
    return {"wide_qk_norm": True}


FAMILIES = {
    "minimax_m2": Family(
        architecture="MiniMaxM2ForCausalLM",
        published_code="modeling_minimax_m2.MiniMaxM2ForCausalLM",
        moe=(
            *(row for row in ATTENTION if row.needs is None),
            *WIDE_QK_NORMS,
            *PRE_MOE_NORM,
            *ROUTER_AND_EXPERTS,
            one(
                "mlp.router.expert_bias", "replicated", "block_sparse_moe.e_score_correction_bias", "experts",
                needs="expert_bias",
            ),
        ),
        rotary_base=5000000.0,
        rotary_fraction=1.0,
        renamed=RENAMED,
        experts=_experts,
        vllm_on_cpu="has no router for",
        spelled=_spelled,
        more=_more,
    )
}  # fmt: skip

"""Gemma 3, text: norms of 1 + w before and after attention and MLP, scaled embeddings, windows with their own rope."""

from __future__ import annotations

from typing import Any

from mopd.conversion.models.config_keys import Keys
from mopd.conversion.models.dims import WindowDims
from mopd.conversion.models.family import Family
from mopd.conversion.models.rows import ATTENTION, Param, gate_up, one

_DEFAULT_PATTERN = 6
"""Number of layers of which the last sees all tokens, if the config names neither layers nor another number."""
_NOT_READ = "transformers does not read it where a model has two ropes"


def two_ropes(keys: Keys) -> Keys:
    """Give the whole-attention layers' rope the keys of a model with one rope, and the windows' base its older key."""
    config = dict(keys.config)
    ropes = config.get("rope_parameters")
    if not keys.absent("rope_scaling"):
        keys.section("rope_scaling").only("truncate", True, _NOT_READ)
    if isinstance(ropes, dict) and "full_attention" in ropes:
        section = keys.section("rope_parameters")
        section.section("full_attention").only("truncate", True, _NOT_READ)
        config["rope_parameters"] = ropes["full_attention"]
        local = section.section("sliding_attention")
        local.only("rope_type", "default")
        config["rope_local_base_freq"] = local.positive("rope_theta")
    return Keys(config, keys.path, keys.prefix)


def _spelled(keys: Keys) -> Keys:
    config = {**keys.config, "hidden_act": keys.config.get("hidden_activation")}
    return two_ropes(Keys(config, keys.path, keys.prefix))


def _more(keys: Keys) -> dict[str, Any]:
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if not keys.absent(key):
            raise keys.error(key, f"{keys.config[key]!r:.100} is not supported, only null is")
    keys.only("use_bidirectional_attention", False)
    every = _DEFAULT_PATTERN if keys.absent("sliding_window_pattern") else keys.count("sliding_window_pattern")
    return {
        "zero_centered_norms": True,
        "post_norms": True,
        "scaled_embeddings": True,
        "activation": "gelu_tanh",
        "score_divisor": keys.positive("query_pre_attn_scalar"),
        "window": WindowDims(
            size=keys.count("sliding_window"),
            layers=keys.layers_of("sliding_attention", lambda layer: (layer + 1) % every != 0),
            rotary_base=keys.positive("rope_local_base_freq"),
        ),
    }


def norm(megatron: str, hf: str, *, also: str = "") -> Param:
    """Return the row of a norm of all channels."""
    return one(f"{megatron}.weight", "replicated", f"{hf}.weight", "hidden", also=also)


FAMILIES = {
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        dense=(
            *ATTENTION,
            norm("self_attention.linear_proj.post_layernorm", "post_attention_layernorm"),
            norm("pre_mlp_layernorm", "pre_feedforward_layernorm", also="mlp.linear_fc1.layer_norm_weight"),
            *gate_up("mlp", "mlp", "ffn"),
            norm("mlp.linear_fc2.post_layernorm", "post_feedforward_layernorm"),
        ),
        qk_norm=True,
        layer_types=("full_attention", "sliding_attention"),
        activation="gelu_pytorch_tanh",
        spelled=_spelled,
        more=_more,
    )
}

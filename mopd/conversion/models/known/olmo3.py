"""OLMo 3: norms after attention and MLP alone, one of all queries and one of all keys, windows with a plain rope."""

from __future__ import annotations

from typing import Any

from mopd.conversion.models.config_keys import Keys
from mopd.conversion.models.dims import WindowDims
from mopd.conversion.models.family import Family
from mopd.conversion.models.known.gemma3 import norm, two_ropes
from mopd.conversion.models.rows import ATTENTION, WIDE_QK_NORMS, gate_up

_BASE = 500000.0
"""Base of either rope if the config names none."""


def _spelled(keys: Keys) -> Keys:
    if keys.absent("rope_parameters"):
        keys.only("rope_theta", _BASE, "transformers 4 and 5 give the windowed layers different bases of any other")
    elif keys.section("rope_parameters").absent("full_attention"):
        raise keys.error("rope_parameters", "names no kinds of layers, full_attention and sliding_attention")
    return two_ropes(keys)


def _more(keys: Keys) -> dict[str, Any]:
    layers = keys.layers_of("sliding_attention", lambda layer: (layer + 1) % 4 != 0)
    base = _BASE if keys.absent("rope_local_base_freq") else keys.positive("rope_local_base_freq")
    window = WindowDims(size=keys.count("sliding_window"), layers=layers, rotary_base=base)
    return {"pre_norms": False, "post_norms": True, "wide_qk_norm": True, "window": window}


FAMILIES = {
    "olmo3": Family(
        architecture="Olmo3ForCausalLM",
        dense=(
            *(row for row in ATTENTION if row.merge != "replicated" and row.needs is None),
            *WIDE_QK_NORMS,
            norm("self_attention.linear_proj.post_layernorm", "post_attention_layernorm"),
            *gate_up("mlp", "mlp", "ffn"),
            norm("mlp.linear_fc2.post_layernorm", "post_feedforward_layernorm"),
        ),
        kv_heads_default_to_heads=True,
        head_dim_defaults_to_share=True,
        rotary_base=_BASE,
        layer_types=("full_attention", "sliding_attention"),
        spelled=_spelled,
        more=_more,
    )
}

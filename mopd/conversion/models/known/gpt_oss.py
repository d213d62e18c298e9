"""gpt-oss: sinks and alternating windows in attention, a clamped SwiGLU in the experts, biases everywhere."""

from __future__ import annotations

from typing import Any

from mopd.conversion.models.config_keys import Keys
from mopd.conversion.models.dims import SWIGLU_LIMIT, MoeDims, WindowDims
from mopd.conversion.models.family import Family
from mopd.conversion.models.rows import ATTENTION, HF_LAYER, LAYER, PRE_MOE_NORM, HfTensor, Merge, Param, one


def _experts(keys: Keys) -> MoeDims:
    return MoeDims(
        num_experts=keys.count("num_local_experts"),
        experts_per_token=keys.count("num_experts_per_tok"),
        ffn_hidden_size=keys.count("intermediate_size"),
        layers=(True,) * keys.count("num_hidden_layers"),
        normalized=True,
    )


def _more(keys: Keys) -> dict[str, Any]:
    keys.only("attention_bias", True)
    keys.only("swiglu_alpha", 1.702)
    keys.only("swiglu_limit", SWIGLU_LIMIT, "vLLM reads no other")
    layers = keys.layers_of("sliding_attention", lambda layer: layer % 2 == 0)
    return {
        "activation": "clamped_swiglu",
        "linear_bias": True,
        "has_sinks": True,
        "window": WindowDims(size=keys.count("sliding_window"), layers=layers, rotary_base=None),
    }


def _expert(kind: str, layer: str, merge: Merge, tensor: str, *shape: str) -> Param:
    """Return a row of each expert, whose tensors are parts of stored ones (``conversion/hf/stacked.py``)."""
    sequential, grouped = LAYER + "mlp.experts.local_experts.{expert}.", LAYER + "mlp.experts."
    parts = ("gate", "up") if merge == "gate_up" else ("down",)
    hf = tuple(HfTensor(f"{HF_LAYER}mlp.experts.{tensor}.{{expert}}.{part}", shape) for part in parts)
    return Param((f"{sequential}{layer}.{kind}", f"{grouped}{layer}.{kind}{{expert}}"), merge, hf)


FAMILIES = {
    "gpt_oss": Family(
        architecture="GptOssForCausalLM",
        moe=(
            *ATTENTION,
            one("self_attention.linear_proj.bias", "replicated", "self_attn.o_proj.bias", "hidden"),
            one("self_attention.core_attention.softmax_offset", "rows", "self_attn.sinks", "heads"),
            *PRE_MOE_NORM,
            one("mlp.router.weight", "replicated", "mlp.router.weight", "experts", "hidden"),
            one("mlp.router.bias", "replicated", "mlp.router.bias", "experts"),
            _expert("weight", "linear_fc1", "gate_up", "gate_up_proj", "moe_ffn", "hidden"),
            _expert("bias", "linear_fc1", "gate_up", "gate_up_proj_bias", "moe_ffn"),
            _expert("weight", "linear_fc2", "columns", "down_proj", "hidden", "moe_ffn"),
            _expert("bias", "linear_fc2", "replicated", "down_proj_bias", "hidden"),
        ),
        qkv_bias="attention_bias",
        layer_types=("full_attention", "sliding_attention"),
        quantised="mxfp4",
        stacked_experts=True,
        attention="eager",  # the fused kernel knows no sinks
        experts=_experts,
        more=_more,
    )
}

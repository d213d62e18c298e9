"""Qwen3-Next, and the language models of Qwen3.5 (dense and with experts): gated delta nets in most layers, gated
attention in the others, norms of 1 + w."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from mopd.conversion.models.config_keys import Keys
from mopd.conversion.models.dims import DeltaDims, MoeDims
from mopd.conversion.models.family import Family
from mopd.conversion.models.known.qwen3 import qwen_experts
from mopd.conversion.models.rows import (
    ATTENTION,
    EXPERTS,
    HF_LAYER,
    LAYER,
    PRE_MOE_NORM,
    ROUTER,
    HfTensor,
    Param,
    gate_up,
    one,
)


def _delta(*hf: HfTensor) -> tuple[Param, ...]:
    """Return the rows of a gated delta net whose input projection comes from the tensors ``hf``."""
    row, own = partial(one, needs="delta"), "self_attention."
    conv = HfTensor(f"{HF_LAYER}linear_attn.conv1d.weight", ("delta_qkv", "one", "delta_conv"), _QKV)
    return (
        Param((f"{LAYER}{own}linear_in.weight",), "delta", hf, "delta"),
        Param((f"{LAYER}{own}conv_weight",), "delta", (conv,), "delta"),
        row(f"{own}A_log", "rows", "linear_attn.A_log", "delta_heads"),
        row(f"{own}dt_bias", "rows", "linear_attn.dt_bias", "delta_heads"),
        row(f"{own}out_norm.weight", "replicated", "linear_attn.norm.weight", "delta_head_dim"),
        row(f"{own}linear_out.weight", "columns", "linear_attn.out_proj.weight", "hidden", "delta_v"),
    )


def _into(kind: str, size: str, *parts: str) -> HfTensor:
    return HfTensor(f"{HF_LAYER}linear_attn.in_proj_{kind}.weight", (size, "hidden"), parts)


_QKV = ("delta_k", "delta_k", "delta_v")
_INPUT_NORM = (one("input_layernorm.weight", "replicated", "input_layernorm.weight", "hidden"),)
_ASKED = HfTensor(f"{HF_LAYER}self_attn.q_proj.weight", ("q_gated", "hidden"))
_ATTENTION = tuple(
    replace(row, needs="attention", hf=(_ASKED, *row.hf[1:]) if row.merge == "qkv" else row.hf)
    for row in ATTENTION[1:]
    if row.needs != "qkv_bias"
)
_NEXT = _INPUT_NORM + _delta(_into("qkvz", "delta_qkvz"), _into("ba", "delta_ba")) + _ATTENTION
_QWEN3_5 = (
    _INPUT_NORM
    + _delta(
        _into("qkv", "delta_qkv", *_QKV), _into("z", "delta_v"), _into("b", "delta_heads"), _into("a", "delta_heads")
    )
    + _ATTENTION
)  # fmt: skip
_MLP = (*PRE_MOE_NORM, *gate_up("mlp", "mlp", "ffn"))
_MOE = (
    *PRE_MOE_NORM,
    *ROUTER,
    *gate_up("mlp.shared_experts", "mlp.shared_expert", "shared_ffn"),
    one("mlp.shared_experts.gate_weight", "replicated", "mlp.shared_expert_gate.weight", "one", "hidden"),
    *EXPERTS,
)


def _shared(keys: Keys, moe: MoeDims) -> MoeDims:
    return replace(moe, shared_ffn_hidden_size=keys.count("shared_expert_intermediate_size"), shared_gate=True)


def _next_experts(keys: Keys) -> MoeDims:
    return _shared(keys, qwen_experts(keys))


def _qwen3_5_experts(keys: Keys) -> MoeDims:
    keys.only("norm_topk_prob", True)
    keys.only("decoder_sparse_step", 1)
    keys.only("mlp_only_layers", [])
    plain = {**keys.config, "norm_topk_prob": True, "decoder_sparse_step": 1}
    return _shared(keys, qwen_experts(Keys(plain, keys.path, keys.prefix)))


def _more(keys: Keys) -> dict[str, Any]:
    """Return which layers have gated delta nets, and their sizes. Absent, every fourth layer attends."""
    keys.only("attn_output_gate", True)
    every = 4 if keys.absent("full_attention_interval") else keys.count("full_attention_interval")
    delta = DeltaDims(
        num_key_heads=keys.count("linear_num_key_heads"),
        num_value_heads=keys.count("linear_num_value_heads"),
        key_head_dim=keys.count("linear_key_head_dim"),
        value_head_dim=keys.count("linear_value_head_dim"),
        conv_size=keys.count("linear_conv_kernel_dim"),
        layers=keys.layers_of("linear_attention", lambda layer: (layer + 1) % every != 0),
    )
    if delta.num_value_heads % delta.num_key_heads:
        problem = f"{delta.num_value_heads} is no multiple of linear_num_key_heads {delta.num_key_heads}"
        raise keys.error("linear_num_value_heads", problem)
    return {"delta": delta, "gated_attention": True, "zero_centered_norms": True}


_family = partial(
    Family,
    ropes=(),
    rotary_fraction=0.25,
    qk_norm=True,
    layer_types=("full_attention", "linear_attention"),
    mtp_prefix="mtp.",
    more=_more,
)
FAMILIES = {
    "qwen3_next": _family(
        architecture="Qwen3NextForCausalLM", dense=_NEXT + _MLP, moe=_NEXT + _MOE, experts=_next_experts
    ),
    "qwen3_5_text": _family(architecture="Qwen3_5ForCausalLM", dense=_QWEN3_5 + _MLP, is_text_of_vision=True),
    "qwen3_5_moe_text": _family(
        architecture="Qwen3_5MoeForCausalLM", moe=_QWEN3_5 + _MOE, experts=_qwen3_5_experts, is_text_of_vision=True
    ),
}

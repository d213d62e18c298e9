"""Phi-3 and Phi-4 without scaled ropes. On disk queries, keys and values are one tensor, and so are gate and up."""

from mopd.conversion.models.family import Family
from mopd.conversion.models.rows import ATTENTION, HF_LAYER, LAYER, MLP, Param, weight

_QKV = weight(HF_LAYER + "self_attn.qkv_proj", "qkv", "hidden")
_GATE_UP = weight(HF_LAYER + "mlp.gate_up_proj", "gate_up", "hidden")
_INPUT_NORM, _PROJECTION, _MLP_NORM, _DOWN = ATTENTION[0], ATTENTION[2], MLP[0], MLP[2]

FAMILIES = {
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        published_code="modeling_phi3.Phi3ForCausalLM",
        dense=(
            _INPUT_NORM,
            Param((LAYER + "self_attention.linear_qkv.weight",), "qkv", (_QKV,)),
            _PROJECTION,
            _MLP_NORM,
            Param((LAYER + "mlp.linear_fc1.weight",), "gate_up", (_GATE_UP,)),
            _DOWN,
        ),
        kv_heads_default_to_heads=True,
        head_dim_defaults_to_share=True,
        ropes=(),
        rotary_fraction=1.0,
    )
}

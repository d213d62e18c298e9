"""Qwen2 and Qwen2.5, and the language model of Qwen2.5-VL."""

from mopd.conversion.models.family import Family
from mopd.conversion.models.rows import ATTENTION, MLP

FAMILIES = {
    "qwen2": Family(
        architecture="Qwen2ForCausalLM", dense=ATTENTION + MLP, head_dim_defaults_to_share=True, qkv_bias=True
    ),
    "qwen2_5_vl": Family(
        architecture="Qwen2_5_VLForConditionalGeneration",
        dense=ATTENTION + MLP,
        head_dim_defaults_to_share=True,
        ropes=(),
        qkv_bias=True,
        has_vision=True,
    ),
}

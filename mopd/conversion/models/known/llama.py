"""Llama 2 and 3, and Mistral, which has the same layers."""

from mopd.conversion.models.family import Family
from mopd.conversion.models.rows import ATTENTION, MLP

FAMILIES = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        dense=ATTENTION + MLP,
        kv_heads_default_to_heads=True,
        head_dim_defaults_to_share=True,
        rotary_base=10000.0,  # of Llama 1 and 2, whose configs do not name it
    ),
    "mistral": Family(
        architecture="MistralForCausalLM", dense=ATTENTION + MLP, head_dim_defaults_to_share=True, default_window=4096
    ),
}

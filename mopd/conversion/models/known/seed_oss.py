"""Seed-OSS."""

from mopd.conversion.models.family import Family
from mopd.conversion.models.rows import ATTENTION, MLP

FAMILIES = {
    "seed_oss": Family(
        architecture="SeedOssForCausalLM",
        dense=ATTENTION + MLP,
        kv_heads_default_to_heads=True,
        head_dim_defaults_to_share=True,
        qkv_bias="attention_bias",
    )
}

"""Mixtral."""

from mopd.conversion.models.config_keys import Keys
from mopd.conversion.models.dims import MoeDims
from mopd.conversion.models.family import Family
from mopd.conversion.models.rows import ATTENTION, PRE_MOE_NORM, experts, one

RENAMED = ((".mlp.", ".block_sparse_moe."), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
ROUTER_AND_EXPERTS = (
    one("mlp.router.weight", "replicated", "block_sparse_moe.gate.weight", "experts", "hidden"),
    *experts("block_sparse_moe.experts.{expert}", "w1", "w3", "w2"),
)


def mixtral_experts(keys: Keys) -> MoeDims:
    if not keys.absent("router_jitter_noise") and keys.config["router_jitter_noise"]:
        raise keys.error("router_jitter_noise", "is not supported; set it to 0.0")
    return MoeDims(
        num_experts=keys.count("num_local_experts"),
        experts_per_token=keys.count("num_experts_per_tok"),
        ffn_hidden_size=keys.count("intermediate_size"),
        layers=(True,) * keys.count("num_hidden_layers"),
        normalized=True,
    )


FAMILIES = {
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        moe=ATTENTION + PRE_MOE_NORM + ROUTER_AND_EXPERTS,
        head_dim_defaults_to_share=True,
        renamed=RENAMED,
        experts=mixtral_experts,
    )
}

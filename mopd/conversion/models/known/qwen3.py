"""Qwen3, dense and with experts, and the language model of Qwen3-VL."""

from mopd.conversion.models.config_keys import Keys
from mopd.conversion.models.dims import MoeDims
from mopd.conversion.models.family import Family
from mopd.conversion.models.rows import ATTENTION, EXPERTS, MLP, PRE_MOE_NORM, ROUTER


def qwen_experts(keys: Keys) -> MoeDims:
    num_layers, step = keys.count("num_hidden_layers"), keys.count("decoder_sparse_step")
    dense = [] if keys.absent("mlp_only_layers") else keys.container("mlp_only_layers", list)
    unknown = [layer for layer in dense if type(layer) is not int or not 0 <= layer < num_layers]
    if unknown:
        raise keys.error("mlp_only_layers", f"names layers that do not exist: {unknown!a:.200}")
    return MoeDims(
        # transformers 4 calls it num_experts, transformers 5 num_local_experts
        num_experts=keys.count("num_local_experts" if keys.absent("num_experts") else "num_experts"),
        experts_per_token=keys.count("num_experts_per_tok"),
        ffn_hidden_size=keys.count("moe_intermediate_size"),
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
        normalized=keys.flag("norm_topk_prob"),
    )


FAMILIES = {
    "qwen3": Family(architecture="Qwen3ForCausalLM", dense=ATTENTION + MLP, qk_norm=True),
    "qwen3_vl": Family(
        architecture="Qwen3VLForConditionalGeneration", dense=ATTENTION + MLP, ropes=(), qk_norm=True, has_vision=True
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        dense=ATTENTION + MLP,
        moe=ATTENTION + PRE_MOE_NORM + ROUTER + EXPERTS,
        qk_norm=True,
        experts=qwen_experts,
    ),
}

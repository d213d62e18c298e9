"""GLM-4.5 and 4.6: DeepSeek-V3's experts beside grouped-query attention that turns half of each head."""

from mopd.conversion.models.family import Family
from mopd.conversion.models.known.deepseek import noaux_experts
from mopd.conversion.models.rows import ATTENTION, EXPERTS, MLP, PRE_MOE_NORM, ROUTER, SHARED_EXPERTS

FAMILIES = {
    "glm4_moe": Family(
        architecture="Glm4MoeForCausalLM",
        dense=ATTENTION + MLP,
        moe=ATTENTION + PRE_MOE_NORM + ROUTER + SHARED_EXPERTS + EXPERTS,
        head_dim_defaults_to_share=True,
        rotary_fraction=0.5,
        qk_norm="use_qk_norm",
        qkv_bias="attention_bias",
        experts=noaux_experts,
        vllm_on_cpu="computes wrongly",  # also what transformers has saved; another result each time
    )
}

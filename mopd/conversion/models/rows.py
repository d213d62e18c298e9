"""Name tables: the Hugging Face tensors that make up each Megatron-Core parameter, as rows that families share.

One ``Param`` per Megatron parameter of one layer (and, where the names hold ``{expert}``, of one expert). Shapes are
spelled with the names of ``families.sizes``. ``{layer}`` and ``{expert}`` count from 0 over the whole model. If the
layer specs name a parameter differently, the row has both names: first that of the local spec (``SequentialMLP`` for
experts), last that of TransformerEngine (``TEGroupedMLP``). How the tensors of a row merge is code (``mapping.py``),
named by ``merge``; where a row lies in a distributed checkpoint is ``torch_dist/plan.py``'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mopd.conversion.models.towers import TOWER_PREFIX

Merge = Literal["replicated", "rows", "columns", "vocab", "qkv", "gate_up", "delta"]
"""How a parameter is cut over tensor-parallel ranks (expert-tensor-parallel ranks for experts): ``rows`` = dimension 0
and ``columns`` = dimension 1 of [out, in], ``vocab`` = rows with padding, ``qkv``, ``gate_up`` and ``delta`` = several
tensors merged (see ``mapping.py``)."""
Switch = Literal[
    "qkv_bias", "qk_norm", "q_lora", "no_q_lora", "shared_experts", "expert_bias", "attention", "delta"
]  # fmt: skip
"""Property of the model, or of the layer, that a row depends on."""


@dataclass(frozen=True, slots=True)
class HfTensor:
    """One tensor of the Hugging Face checkpoint."""

    name: str
    shape: tuple[str, ...]
    """Names of sizes, whose values ``sizes`` returns."""
    parts: tuple[str, ...] = ()
    """Names of sizes into which dimension 0 falls, if the parts merge each for itself (``delta``)."""


@dataclass(frozen=True, slots=True)
class Param:
    """One Megatron parameter and its Hugging Face parts."""

    megatron: tuple[str, ...]
    """Names under the layer specs, the local one first, TransformerEngine's last."""
    merge: Merge
    hf: tuple[HfTensor, ...]
    """Hugging Face parts, in the order in which they merge."""
    needs: Switch | None = None
    """Property without which a model does not have the row."""

    @property
    def is_expert(self) -> bool:
        """Whether there is one such parameter per expert."""
        return "{expert}" in self.megatron[0]

    @property
    def is_vision(self) -> bool:
        """Whether it belongs to the vision tower."""
        return self.megatron[0].startswith(TOWER_PREFIX)

    @property
    def stays_fp32(self) -> bool:
        """Whether it is kept in fp32 whatever the model's dtype, by transformers and Megatron alike."""
        return self.needs == "expert_bias"


LAYER = "decoder.layers.{layer}."
HF_LAYER = "model.layers.{layer}."


def weight(name: str, out_size: str, in_size: str) -> HfTensor:
    return HfTensor(name + ".weight", (out_size, in_size))


def one(megatron: str, merge: Merge, hf: str, *shape: str, also: str = "", needs: Switch | None = None) -> Param:
    """Return a row of one tensor inside a layer; ``also`` is its name under TransformerEngine."""
    names = (LAYER + megatron,) + ((LAYER + also,) if also else ())
    return Param(names, merge, (HfTensor(HF_LAYER + hf, shape),), needs)


def _qkv(kind: str, *in_size: str, needs: Switch | None = None) -> Param:
    """Return the merged projection's weight or bias (``kind``)."""
    parts = (("q", "q"), ("k", "kv"), ("v", "kv"))
    hf = tuple(HfTensor(f"{HF_LAYER}self_attn.{part}_proj.{kind}", (size, *in_size)) for part, size in parts)
    return Param((f"{LAYER}self_attention.linear_qkv.{kind}",), "qkv", hf, needs)


def gate_up(megatron: str, hf: str, size: str, *, needs: Switch | None = None) -> tuple[Param, Param]:
    """Return fc1 and fc2 of a gated MLP."""
    gate, up = (weight(f"{HF_LAYER}{hf}.{part}_proj", size, "hidden") for part in ("gate", "up"))
    return (
        Param((f"{LAYER}{megatron}.linear_fc1.weight",), "gate_up", (gate, up), needs),
        one(f"{megatron}.linear_fc2.weight", "columns", f"{hf}.down_proj.weight", "hidden", size, needs=needs),
    )


def experts(hf: str, gate: str, up: str, down: str) -> tuple[Param, Param]:
    """Return fc1 and fc2 of one expert; ``hf`` is the expert's prefix."""
    sequential, grouped = LAYER + "mlp.experts.local_experts.{expert}.", LAYER + "mlp.experts."
    fc1 = tuple(weight(f"{HF_LAYER}{hf}.{part}", "moe_ffn", "hidden") for part in (gate, up))
    fc2 = (weight(f"{HF_LAYER}{hf}.{down}", "hidden", "moe_ffn"),)
    names1 = (sequential + "linear_fc1.weight", grouped + "linear_fc1.weight{expert}")
    names2 = (sequential + "linear_fc2.weight", grouped + "linear_fc2.weight{expert}")
    return Param(names1, "gate_up", fc1), Param(names2, "columns", fc2)


EMBEDDING = Param(("embedding.word_embeddings.weight",), "vocab", (weight("model.embed_tokens", "vocab", "hidden"),))
FINAL_NORM = Param(("decoder.final_layernorm.weight",), "replicated", (HfTensor("model.norm.weight", ("hidden",)),))
LM_HEAD = Param(("output_layer.weight",), "vocab", (weight("lm_head", "vocab", "hidden"),))
TIED_HEAD = Param(("output_layer.weight",), "vocab", EMBEDDING.hf)
"""Second copy of a tied embedding, which the last stage holds with PP > 1."""

ATTENTION = (
    one(
        "input_layernorm.weight", "replicated", "input_layernorm.weight", "hidden",
        also="self_attention.linear_qkv.layer_norm_weight",
    ),
    _qkv("weight", "hidden"),
    one("self_attention.linear_proj.weight", "columns", "self_attn.o_proj.weight", "hidden", "q"),
    _qkv("bias", needs="qkv_bias"),
    one(
        "self_attention.q_layernorm.weight", "replicated", "self_attn.q_norm.weight", "head_dim", needs="qk_norm"
    ),
    one(
        "self_attention.k_layernorm.weight", "replicated", "self_attn.k_norm.weight", "head_dim", needs="qk_norm"
    ),
)  # fmt: skip
WIDE_QK_NORMS = (
    one("self_attention.q_layernorm.weight", "rows", "self_attn.q_norm.weight", "q"),
    one("self_attention.k_layernorm.weight", "rows", "self_attn.k_norm.weight", "kv"),
)
"""One norm of all queries and one of all keys, of which ranks have their own heads'."""
LATENT_ATTENTION = (
    one("input_layernorm.weight", "replicated", "input_layernorm.weight", "hidden"),
    one(
        "self_attention.linear_q_proj.weight", "rows", "self_attn.q_proj.weight", "mla_q", "hidden",
        needs="no_q_lora",
    ),
    one(
        "self_attention.linear_q_down_proj.weight", "replicated", "self_attn.q_a_proj.weight", "q_lora", "hidden",
        needs="q_lora",
    ),
    one(
        "self_attention.q_layernorm.weight", "replicated", "self_attn.q_a_layernorm.weight", "q_lora",
        also="self_attention.linear_q_up_proj.layer_norm_weight", needs="q_lora",
    ),
    one(
        "self_attention.linear_q_up_proj.weight", "rows", "self_attn.q_b_proj.weight", "mla_q", "q_lora",
        needs="q_lora",
    ),
    one(
        "self_attention.linear_kv_down_proj.weight", "replicated", "self_attn.kv_a_proj_with_mqa.weight",
        "kv_lora_rope", "hidden",
    ),
    one(
        "self_attention.kv_layernorm.weight", "replicated", "self_attn.kv_a_layernorm.weight", "kv_lora",
        also="self_attention.linear_kv_up_proj.layer_norm_weight",
    ),
    one("self_attention.linear_kv_up_proj.weight", "rows", "self_attn.kv_b_proj.weight", "mla_kv", "kv_lora"),
    one("self_attention.linear_proj.weight", "columns", "self_attn.o_proj.weight", "hidden", "mla_v"),
)  # fmt: skip
MLP = (
    one(
        "pre_mlp_layernorm.weight", "replicated", "post_attention_layernorm.weight", "hidden",
        also="mlp.linear_fc1.layer_norm_weight",
    ),
    *gate_up("mlp", "mlp", "ffn"),
)  # fmt: skip
PRE_MOE_NORM = (one("pre_mlp_layernorm.weight", "replicated", "post_attention_layernorm.weight", "hidden"),)
"""The norm before experts, which stands alone under both layer specs."""
ROUTER = (
    one("mlp.router.weight", "replicated", "mlp.gate.weight", "experts", "hidden"),
    one(
        "mlp.router.expert_bias", "replicated", "mlp.gate.e_score_correction_bias", "experts", needs="expert_bias"
    ),
)  # fmt: skip
SHARED_EXPERTS = gate_up("mlp.shared_experts", "mlp.shared_experts", "shared_ffn", needs="shared_experts")
EXPERTS = experts("mlp.experts.{expert}", "gate_proj", "up_proj", "down_proj")

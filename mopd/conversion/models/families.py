"""Name tables: the Hugging Face tensors that make up each Megatron-Core parameter, for every supported family.

One ``Param`` per Megatron parameter of one layer (and, where the names hold ``{expert}``, of one expert). Shapes are
spelled with the names of ``sizes``. ``{layer}`` and ``{expert}`` count from 0 over the whole model. If the layer specs
name a parameter differently, the row has both names: first that of the local spec (``SequentialMLP`` for experts), last
that of TransformerEngine (``TEGroupedMLP``). How the tensors of a row merge is code (``mapping.py``), named by
``merge``; where a row lies in a distributed checkpoint is ``torch_dist/plan.py``'s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mopd.conversion.models.dims import ModelDims
from mopd.conversion.models.stages import Stages
from mopd.conversion.models.towers import TOWER_PREFIX, named_as_read, tower_sizes, tower_tensors

Merge = Literal["replicated", "rows", "columns", "vocab", "qkv", "gate_up"]
"""How a parameter is cut over tensor-parallel ranks (expert-tensor-parallel ranks for experts): ``rows`` = dimension 0
and ``columns`` = dimension 1 of [out, in], ``vocab`` = rows with padding, ``qkv`` and ``gate_up`` = several tensors
merged (see ``mapping.py``)."""
Switch = Literal["q_lora", "no_q_lora", "shared_experts", "expert_bias"]
"""Property of the model that a row depends on."""


@dataclass(frozen=True, slots=True)
class HfTensor:
    """One tensor of the Hugging Face checkpoint."""

    name: str
    shape: tuple[str, ...]
    """Names of sizes, whose values ``sizes`` returns."""


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


@dataclass(frozen=True, slots=True)
class Family:
    """The layers of one ``model_type``."""

    dense: tuple[Param, ...]
    """Rows of a layer with one MLP; empty if the family has none."""
    moe: tuple[Param, ...] = ()
    """Rows of a layer with experts."""


_LAYER = "decoder.layers.{layer}."
_HF_LAYER = "model.layers.{layer}."


def _weight(name: str, out_size: str, in_size: str) -> HfTensor:
    return HfTensor(name + ".weight", (out_size, in_size))


def _one(megatron: str, merge: Merge, hf: str, *shape: str, also: str = "", needs: Switch | None = None) -> Param:
    """Return a row of one tensor inside a layer; ``also`` is its name under TransformerEngine."""
    names = (_LAYER + megatron,) + ((_LAYER + also,) if also else ())
    return Param(names, merge, (HfTensor(_HF_LAYER + hf, shape),), needs)


def _qkv(kind: str, *in_size: str) -> Param:
    """Return the merged projection's weight or bias (``kind``)."""
    parts = (("q", "q"), ("k", "kv"), ("v", "kv"))
    hf = tuple(HfTensor(f"{_HF_LAYER}self_attn.{part}_proj.{kind}", (size, *in_size)) for part, size in parts)
    return Param((f"{_LAYER}self_attention.linear_qkv.{kind}",), "qkv", hf)


def _gate_up(megatron: str, hf: str, size: str, *, needs: Switch | None = None) -> tuple[Param, Param]:
    """Return fc1 and fc2 of a gated MLP."""
    gate, up = (_weight(f"{_HF_LAYER}{hf}.{part}_proj", size, "hidden") for part in ("gate", "up"))
    return (
        Param((f"{_LAYER}{megatron}.linear_fc1.weight",), "gate_up", (gate, up), needs),
        _one(f"{megatron}.linear_fc2.weight", "columns", f"{hf}.down_proj.weight", "hidden", size, needs=needs),
    )


def _experts(hf: str, gate: str, up: str, down: str) -> tuple[Param, Param]:
    """Return fc1 and fc2 of one expert; ``hf`` is the expert's prefix."""
    sequential, grouped = _LAYER + "mlp.experts.local_experts.{expert}.", _LAYER + "mlp.experts."
    fc1 = tuple(_weight(f"{_HF_LAYER}{hf}.{part}", "moe_ffn", "hidden") for part in (gate, up))
    fc2 = (_weight(f"{_HF_LAYER}{hf}.{down}", "hidden", "moe_ffn"),)
    names1 = (sequential + "linear_fc1.weight", grouped + "linear_fc1.weight{expert}")
    names2 = (sequential + "linear_fc2.weight", grouped + "linear_fc2.weight{expert}")
    return Param(names1, "gate_up", fc1), Param(names2, "columns", fc2)


EMBEDDING = Param(("embedding.word_embeddings.weight",), "vocab", (_weight("model.embed_tokens", "vocab", "hidden"),))
FINAL_NORM = Param(("decoder.final_layernorm.weight",), "replicated", (HfTensor("model.norm.weight", ("hidden",)),))
LM_HEAD = Param(("output_layer.weight",), "vocab", (_weight("lm_head", "vocab", "hidden"),))
TIED_HEAD = Param(("output_layer.weight",), "vocab", EMBEDDING.hf)
"""Second copy of a tied embedding, which the last stage holds with PP > 1."""

ATTENTION = (
    _one(
        "input_layernorm.weight", "replicated", "input_layernorm.weight", "hidden",
        also="self_attention.linear_qkv.layer_norm_weight",
    ),
    _qkv("weight", "hidden"),
    _one("self_attention.linear_proj.weight", "columns", "self_attn.o_proj.weight", "hidden", "q"),
)  # fmt: skip
QKV_BIAS = (_qkv("bias"),)
QK_NORM = (
    _one("self_attention.q_layernorm.weight", "replicated", "self_attn.q_norm.weight", "head_dim"),
    _one("self_attention.k_layernorm.weight", "replicated", "self_attn.k_norm.weight", "head_dim"),
)
LATENT_ATTENTION = (
    _one("input_layernorm.weight", "replicated", "input_layernorm.weight", "hidden"),
    _one(
        "self_attention.linear_q_proj.weight", "rows", "self_attn.q_proj.weight", "mla_q", "hidden",
        needs="no_q_lora",
    ),
    _one(
        "self_attention.linear_q_down_proj.weight", "replicated", "self_attn.q_a_proj.weight", "q_lora", "hidden",
        needs="q_lora",
    ),
    _one(
        "self_attention.q_layernorm.weight", "replicated", "self_attn.q_a_layernorm.weight", "q_lora",
        also="self_attention.linear_q_up_proj.layer_norm_weight", needs="q_lora",
    ),
    _one(
        "self_attention.linear_q_up_proj.weight", "rows", "self_attn.q_b_proj.weight", "mla_q", "q_lora",
        needs="q_lora",
    ),
    _one(
        "self_attention.linear_kv_down_proj.weight", "replicated", "self_attn.kv_a_proj_with_mqa.weight",
        "kv_lora_rope", "hidden",
    ),
    _one(
        "self_attention.kv_layernorm.weight", "replicated", "self_attn.kv_a_layernorm.weight", "kv_lora",
        also="self_attention.linear_kv_up_proj.layer_norm_weight",
    ),
    _one("self_attention.linear_kv_up_proj.weight", "rows", "self_attn.kv_b_proj.weight", "mla_kv", "kv_lora"),
    _one("self_attention.linear_proj.weight", "columns", "self_attn.o_proj.weight", "hidden", "mla_v"),
)  # fmt: skip
MLP = (
    _one(
        "pre_mlp_layernorm.weight", "replicated", "post_attention_layernorm.weight", "hidden",
        also="mlp.linear_fc1.layer_norm_weight",
    ),
    *_gate_up("mlp", "mlp", "ffn"),
)  # fmt: skip
PRE_MOE_NORM = (_one("pre_mlp_layernorm.weight", "replicated", "post_attention_layernorm.weight", "hidden"),)
"""The norm before experts, which stands alone under both layer specs."""
ROUTER = (
    _one("mlp.router.weight", "replicated", "mlp.gate.weight", "experts", "hidden"),
    _one(
        "mlp.router.expert_bias", "replicated", "mlp.gate.e_score_correction_bias", "experts", needs="expert_bias"
    ),
)  # fmt: skip
SHARED_EXPERTS = _gate_up("mlp.shared_experts", "mlp.shared_experts", "shared_ffn", needs="shared_experts")
EXPERTS = _experts("mlp.experts.{expert}", "gate_proj", "up_proj", "down_proj")
MIXTRAL_EXPERTS = _experts("block_sparse_moe.experts.{expert}", "w1", "w3", "w2")
MIXTRAL_ROUTER = (_one("mlp.router.weight", "replicated", "block_sparse_moe.gate.weight", "experts", "hidden"),)

_LLAMA = Family(dense=ATTENTION + MLP)
_QWEN2 = Family(dense=ATTENTION + QKV_BIAS + MLP)
_QWEN3 = Family(dense=ATTENTION + QK_NORM + MLP)
_DEEPSEEK = Family(
    dense=LATENT_ATTENTION + MLP, moe=LATENT_ATTENTION + PRE_MOE_NORM + ROUTER + SHARED_EXPERTS + EXPERTS
)
FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3_vl": _QWEN3,
    "qwen3_moe": Family(
        dense=ATTENTION + QK_NORM + MLP, moe=ATTENTION + QK_NORM + PRE_MOE_NORM + ROUTER + EXPERTS
    ),
    "mixtral": Family(dense=(), moe=ATTENTION + PRE_MOE_NORM + MIXTRAL_ROUTER + MIXTRAL_EXPERTS),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
}  # fmt: skip
"""``model_type`` -> the parameters of its layers. Names are spelled without ``language_model``; towers are in
``towers.py``."""

IGNORED = re.compile(r"model\.(language_model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Tensors of old checkpoints that follow from the config."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A row of the table at one layer (and expert): names filled in, sizes resolved."""

    param: Param
    layer: int | None
    """Global layer number from 0; None outside the layers."""
    megatron: tuple[str, ...]
    """Full Megatron names with the global layer and expert numbers (stages and expert ranks renumber their own)."""
    hf_names: tuple[str, ...]
    hf_shapes: tuple[tuple[int, ...], ...]
    expert: int | None = None
    """Global expert number from 0; None outside the experts."""

    def stage(self, dims: ModelDims, stages: Stages) -> int:
        """Return the pipeline stage that holds it (the first one if tied stages both do)."""
        if self.layer is None:
            is_first = self.param is EMBEDDING or self.param.is_vision
            return 0 if is_first else stages.pipeline_model_parallel_size - 1
        return stages.stage_of(self.layer, dims.num_layers)

    def owner(self, dims: ModelDims, *, ranks: int) -> int:
        """Return the expert-parallel rank of ``ranks`` that holds the expert: each has equally many, consecutive."""
        assert self.expert is not None and dims.moe is not None
        return self.expert // (dims.moe.num_experts // ranks)


def sizes(dims: ModelDims) -> dict[str, int]:
    """Return the values of the size names that the tables use."""
    heads = dims.num_attention_heads
    values = {
        "hidden": dims.hidden_size,
        "ffn": dims.ffn_hidden_size,
        "vocab": dims.vocab_size,
        "head_dim": dims.head_dim,
        "q": heads * dims.head_dim,
        "kv": dims.num_query_groups * dims.head_dim,
    }
    if dims.mla is not None:
        mla = dims.mla
        values |= {
            "q_lora": mla.q_lora_rank or 0,
            "kv_lora": mla.kv_lora_rank,
            "kv_lora_rope": mla.kv_lora_rank + mla.qk_rope_head_dim,
            "mla_q": heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim),
            "mla_kv": heads * (mla.qk_nope_head_dim + mla.v_head_dim),
            "mla_v": heads * mla.v_head_dim,
        }
    if dims.moe is not None:
        values |= {"experts": dims.moe.num_experts, "moe_ffn": dims.moe.ffn_hidden_size}
        values["shared_ffn"] = dims.moe.shared_ffn_hidden_size
    return values if dims.vision is None else values | tower_sizes(dims.vision)


def layer_params(dims: ModelDims, layer: int) -> tuple[Param, ...]:
    """Return the rows of one layer; those of experts stand for one expert each."""
    family, mla, moe = FAMILIES[dims.family], dims.mla, dims.moe
    rows = family.moe if dims.is_moe_layer(layer) else family.dense
    holds: dict[Switch | None, bool] = {
        None: True,
        "q_lora": mla is not None and mla.q_lora_rank is not None,
        "no_q_lora": mla is not None and mla.q_lora_rank is None,
        "shared_experts": moe is not None and moe.shared_ffn_hidden_size > 0,
        "expert_bias": moe is not None and moe.expert_bias,
    }
    return tuple(row for row in rows if holds[row.needs])


def place(param: Param, dims: ModelDims, layer: int | None = None, expert: int | None = None) -> Placed:
    """Return the row at one layer (and expert) of one model."""
    size = sizes(dims)
    return Placed(
        param=param,
        layer=layer,
        megatron=names(param, layer, expert),
        hf_names=tuple(named_as_read(tensor.name.format(layer=layer, expert=expert), dims) for tensor in param.hf),
        hf_shapes=tuple(tuple(size[name] for name in tensor.shape) for tensor in param.hf),
        expert=expert,
    )


def vocabulary_names(dims: ModelDims) -> tuple[str, str]:
    """Return the Hugging Face names of the head and of the embedding; a tied head is no tensor of its own."""
    return place(LM_HEAD, dims).hf_names[0], place(EMBEDDING, dims).hf_names[0]


def names(param: Param, layer: int | None, expert: int | None) -> tuple[str, ...]:
    """Return the Megatron names of a row with the numbers that a model chunk gives its own layers and experts."""
    return tuple(name.format(layer=layer, expert=expert) for name in param.megatron)


def _place_layer(dims: ModelDims, layer: int) -> Iterator[Placed]:
    """Yield all parameters of one layer, the experts one after another, in checkpoint order."""
    rows = layer_params(dims, layer)
    for expert in (None, *range(0 if dims.moe is None else dims.moe.num_experts)):
        for param in rows:
            if param.is_expert == (expert is not None):
                yield place(param, dims, layer, expert)


def tower_params(dims: ModelDims) -> Iterator[Placed]:
    """Yield all parameters of the vision tower; none for a model of text."""
    if dims.vision is not None:
        for name, shape in tower_tensors(dims.family, dims.vision):
            yield place(Param((TOWER_PREFIX + name,), "replicated", (HfTensor(f"visual.{name}", shape),)), dims)


def all_params(dims: ModelDims) -> Iterator[Placed]:
    """Yield every distinct parameter of the model in checkpoint order: vision tower, embedding, layers, final norm,
    head unless tied."""
    yield from tower_params(dims)
    yield place(EMBEDDING, dims)
    for layer in range(dims.num_layers):
        yield from _place_layer(dims, layer)
    yield place(FINAL_NORM, dims)
    if not dims.tied_embeddings:
        yield place(LM_HEAD, dims)


def hf_tensors(dims: ModelDims) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor that a Hugging Face checkpoint of this model holds."""
    return {
        name: shape
        for placed in all_params(dims)
        for name, shape in zip(placed.hf_names, placed.hf_shapes, strict=True)
    }

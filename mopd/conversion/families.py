"""Name tables: which Hugging Face tensors make up which Megatron-Core parameter, for every supported family.

One ``Param`` per Megatron parameter. Shapes are spelled with the sizes of ``ModelDims``:
``hidden``, ``ffn``, ``vocab``, ``head_dim``, ``q`` (query heads x head_dim) and ``kv`` (key/value heads x head_dim).
``{layer}`` counts from 0 over the whole model. Where the local and the TransformerEngine layer spec name a parameter
differently, both names stand in the row. How the tensors of a row merge is code (``mapping.py``), named by ``merge``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mopd.conversion.dims import ModelDims

Merge = Literal["replicated", "columns", "vocab", "qkv", "gate_up"]
"""How a parameter is cut over tensor-parallel ranks: ``columns`` = dimension 1 (of [out, in]), ``vocab`` = rows with
padding, ``qkv`` and ``gate_up`` = several tensors merged (see ``mapping.py``)."""


@dataclass(frozen=True, slots=True)
class HfTensor:
    """One tensor of the Hugging Face checkpoint."""

    name: str
    shape: tuple[str, ...]
    """Names of sizes, see the module docstring."""


@dataclass(frozen=True, slots=True)
class Param:
    """One Megatron parameter and what it is made of."""

    megatron: tuple[str, ...]
    """Its name, and its other name under the other layer spec."""
    merge: Merge
    hf: tuple[HfTensor, ...]
    """Its parts, in the order in which they merge."""


_LAYER = "decoder.layers.{layer}."
_HF_LAYER = "model.layers.{layer}."


def _weight(name: str, out_size: str, in_size: str) -> HfTensor:
    return HfTensor(name + ".weight", (out_size, in_size))


EMBEDDING = Param(("embedding.word_embeddings.weight",), "vocab", (_weight("model.embed_tokens", "vocab", "hidden"),))
FINAL_NORM = Param(("decoder.final_layernorm.weight",), "replicated", (HfTensor("model.norm.weight", ("hidden",)),))
LM_HEAD = Param(("output_layer.weight",), "vocab", (_weight("lm_head", "vocab", "hidden"),))
TIED_HEAD = Param(("output_layer.weight",), "vocab", EMBEDDING.hf)
"""With tied embeddings and PP > 1 the last stage holds a second copy of the embedding."""

LAYER = (
    Param(
        (_LAYER + "input_layernorm.weight", _LAYER + "self_attention.linear_qkv.layer_norm_weight"),
        "replicated",
        (HfTensor(_HF_LAYER + "input_layernorm.weight", ("hidden",)),),
    ),
    Param(
        (_LAYER + "self_attention.linear_qkv.weight",),
        "qkv",
        (
            _weight(_HF_LAYER + "self_attn.q_proj", "q", "hidden"),
            _weight(_HF_LAYER + "self_attn.k_proj", "kv", "hidden"),
            _weight(_HF_LAYER + "self_attn.v_proj", "kv", "hidden"),
        ),
    ),
    Param(
        (_LAYER + "self_attention.linear_proj.weight",),
        "columns",
        (_weight(_HF_LAYER + "self_attn.o_proj", "hidden", "q"),),
    ),
    Param(
        (_LAYER + "pre_mlp_layernorm.weight", _LAYER + "mlp.linear_fc1.layer_norm_weight"),
        "replicated",
        (HfTensor(_HF_LAYER + "post_attention_layernorm.weight", ("hidden",)),),
    ),
    Param(
        (_LAYER + "mlp.linear_fc1.weight",),
        "gate_up",
        (
            _weight(_HF_LAYER + "mlp.gate_proj", "ffn", "hidden"),
            _weight(_HF_LAYER + "mlp.up_proj", "ffn", "hidden"),
        ),
    ),
    Param(
        (_LAYER + "mlp.linear_fc2.weight",),
        "columns",
        (_weight(_HF_LAYER + "mlp.down_proj", "hidden", "ffn"),),
    ),
)
"""Every layer of every dense family here."""

QKV_BIAS = (
    Param(
        (_LAYER + "self_attention.linear_qkv.bias",),
        "qkv",
        (
            HfTensor(_HF_LAYER + "self_attn.q_proj.bias", ("q",)),
            HfTensor(_HF_LAYER + "self_attn.k_proj.bias", ("kv",)),
            HfTensor(_HF_LAYER + "self_attn.v_proj.bias", ("kv",)),
        ),
    ),
)
QK_NORM = (
    Param(
        (_LAYER + "self_attention.q_layernorm.weight",),
        "replicated",
        (HfTensor(_HF_LAYER + "self_attn.q_norm.weight", ("head_dim",)),),
    ),
    Param(
        (_LAYER + "self_attention.k_layernorm.weight",),
        "replicated",
        (HfTensor(_HF_LAYER + "self_attn.k_norm.weight", ("head_dim",)),),
    ),
)

FAMILIES: dict[str, tuple[Param, ...]] = {
    "llama": LAYER,
    "qwen2": LAYER + QKV_BIAS,
    "qwen3": LAYER + QK_NORM,
}
"""``model_type`` -> the parameters of one layer."""

IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Tensors of old checkpoints that follow from the config."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A row of the table at one layer: names filled in, sizes resolved."""

    param: Param
    layer: int | None
    """Global layer number from 0; None outside the layers."""
    megatron: tuple[str, ...]
    """Full Megatron names with the global layer number (a pipeline stage renumbers its own)."""
    hf_names: tuple[str, ...]
    hf_shapes: tuple[tuple[int, ...], ...]


def sizes(dims: ModelDims) -> dict[str, int]:
    """Values of the size names that the tables use."""
    return {
        "hidden": dims.hidden_size,
        "ffn": dims.ffn_hidden_size,
        "vocab": dims.vocab_size,
        "head_dim": dims.head_dim,
        "q": dims.num_attention_heads * dims.head_dim,
        "kv": dims.num_query_groups * dims.head_dim,
    }


def place(param: Param, dims: ModelDims, layer: int | None = None) -> Placed:
    """The row at one layer of one model."""
    size = sizes(dims)
    return Placed(
        param=param,
        layer=layer,
        megatron=tuple(name.format(layer=layer) for name in param.megatron),
        hf_names=tuple(tensor.name.format(layer=layer) for tensor in param.hf),
        hf_shapes=tuple(tuple(size[name] for name in tensor.shape) for tensor in param.hf),
    )


def all_params(dims: ModelDims) -> Iterator[Placed]:
    """Every distinct parameter of the model in checkpoint order: embedding, layers, final norm, head unless tied."""
    yield place(EMBEDDING, dims)
    for layer in range(dims.num_layers):
        for param in FAMILIES[dims.family]:
            yield place(param, dims, layer)
    yield place(FINAL_NORM, dims)
    if not dims.tied_embeddings:
        yield place(LM_HEAD, dims)


def hf_tensors(dims: ModelDims) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a Hugging Face checkpoint of this model holds."""
    return {
        name: shape
        for placed in all_params(dims)
        for name, shape in zip(placed.hf_names, placed.hf_shapes, strict=True)
    }

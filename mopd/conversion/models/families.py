"""A model's parameters, one by one: the rows of its family's name table with layers, experts and sizes filled in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mopd.conversion.models.dims import ModelDims
from mopd.conversion.models.known import FAMILIES
from mopd.conversion.models.rows import EMBEDDING, FINAL_NORM, LM_HEAD, HfTensor, Param, Switch
from mopd.conversion.models.stages import Stages
from mopd.conversion.models.towers import TOWER_PREFIX, named_as_read, tower_sizes, tower_tensors

IGNORED = re.compile(r"model\.(language_model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Tensors of old checkpoints that follow from the config."""
_OF_LAYER = re.compile(r"model\.layers\.(\d{1,9})\..+")


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
        "qkv": dims.qkv_rows,
        "q_gated": 2 * heads * dims.head_dim,
        "heads": heads,
        "one": 1,
        "gate_up": 2 * dims.ffn_hidden_size,
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
    if dims.delta is not None:
        delta = dims.delta
        values |= {
            "delta_k": delta.key_rows,
            "delta_v": delta.value_rows,
            "delta_qkv": delta.conv_rows,
            "delta_qkvz": delta.conv_rows + delta.value_rows,
            "delta_heads": delta.num_value_heads,
            "delta_ba": 2 * delta.num_value_heads,
            "delta_head_dim": delta.value_head_dim,
            "delta_conv": delta.conv_size,
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
        "qkv_bias": dims.qkv_bias,
        "qk_norm": dims.qk_norm,
        "q_lora": mla is not None and mla.q_lora_rank is not None,
        "no_q_lora": mla is not None and mla.q_lora_rank is None,
        "shared_experts": moe is not None and moe.shared_ffn_hidden_size > 0,
        "expert_bias": moe is not None and moe.expert_bias,
        "attention": not dims.is_delta_layer(layer),
        "delta": dims.is_delta_layer(layer),
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


def mtp_names(names: Iterable[str], dims: ModelDims) -> list[str]:
    """Return those of the names, sorted, that belong to layers of multi-token prediction."""
    if prefix := FAMILIES[dims.family].mtp_prefix:
        return sorted(name for name in names if name.startswith(prefix))
    layers = range(dims.num_layers, dims.num_layers + dims.num_mtp_layers)
    numbered = ((name, _OF_LAYER.fullmatch(name)) for name in names)
    return sorted(name for name, found in numbered if found and int(found[1]) in layers)


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

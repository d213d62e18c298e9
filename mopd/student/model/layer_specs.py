"""The layers of a pipeline stage as Megatron's module specs: TransformerEngine's, or the local ones made to fit.

Under the local spec the norms are our ``RMSNorm``, and a checkpoint gets the keys that TransformerEngine's spec writes
(``conversion.sharded``), so that one folder loads under both.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    HAVE_TE,
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from mopd.config.student import StudentConfig
from mopd.conversion.models.dims import ModelDims
from mopd.student.model.config import uses_transformer_engine

_FUSED_INPUT_NORM = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
_FUSED_MLP_NORM = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
_FUSED_LATENT_NORMS = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
"""Norms that TransformerEngine fuses into the next layer, and their keys there."""


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm of the local layer spec. Megatron's own wrapper refuses sequence parallelism.

    The weight is replicated over tensor-parallel ranks; ``sequence_parallel`` on it makes Megatron sum its gradient.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        super().__init__(hidden_size, eps=eps, device=device, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class LatentDotProductAttention(DotProductAttention):
    """Megatron's local attention, which takes its sizes from the tensors, but not the arguments that latent attention
    announces them with (its base class builds a first one without)."""

    def __init__(self, *, k_channels: int | None = None, v_channels: int | None = None, **options: Any) -> None:
        super().__init__(**options)


def layer_specs(
    student: StudentConfig, dims: ModelDims, config: TransformerConfig
) -> ModuleSpec | TransformerBlockSubmodules:
    """Layers of this pipeline stage."""
    _mark_missing_imports()
    if uses_transformer_engine(student):
        if dims.moe is None:
            return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=dims.qk_norm)
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    specs = {has_experts: _local_spec(dims, has_experts=has_experts) for has_experts in (False, True)}
    first = get_transformer_layer_offset(config)
    layers = [specs[dims.is_moe_layer(first + i)] for i in range(get_num_layers_to_build(config))]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _mark_missing_imports() -> None:
    """Two modules of Megatron 0.16.1 do not notice that TransformerEngine is missing: one reads a name that its failed
    import left undefined, the other takes the stand-ins of a failed import for the real classes."""
    if not HAVE_TE:
        moe_utils.te_general_gemm = None
        multi_latent_attention.HAVE_TE = False


def _local_spec(dims: ModelDims, *, has_experts: bool) -> ModuleSpec:
    is_latent = dims.mla is not None
    layer = get_gpt_layer_local_spec(
        num_experts=dims.moe.num_experts if has_experts and dims.moe is not None else None,
        qk_layernorm=dims.qk_norm or is_latent,
        multi_latent_attention=is_latent,
        normalization="RMSNorm",
    )
    submodules, attention = layer.submodules, layer.submodules.self_attention.submodules
    submodules.input_layernorm = RMSNorm
    submodules.pre_mlp_layernorm = RMSNorm
    keys = {} if has_experts else dict(_FUSED_MLP_NORM)
    if is_latent:
        attention.q_layernorm = RMSNorm
        attention.kv_layernorm = RMSNorm
        # Not split over ranks, as under TransformerEngine. Split, the gradient of the keys' shared rotary part lacks
        # the other ranks' heads in Megatron 0.16.1.
        attention.linear_q_down_proj = Linear
        attention.linear_kv_down_proj = Linear
        attention.core_attention = LatentDotProductAttention
        keys |= _FUSED_LATENT_NORMS
    else:
        keys |= _FUSED_INPUT_NORM
        if dims.qk_norm:
            attention.q_layernorm = RMSNorm
            attention.k_layernorm = RMSNorm
    submodules.sharded_state_dict_keys_map = keys
    return layer

"""From the model's sizes and the recipe to Megatron's ``TransformerConfig`` and layer specs."""

from __future__ import annotations

import dataclasses
import difflib
import enum
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    HAVE_TE,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from mopd.config.schema import Student
from mopd.conversion.dims import ModelDims, check_layout
from mopd.student.parallel import Layout
from mopd.types import UserError

MAKE_VOCAB_SIZE_DIVISIBLE_BY = 1
"""The embedding is padded to a multiple of this times the TP degree: no more than the split needs."""

_OPTIMIZER_OWNED = ("calculate_per_token_loss", "finalize_model_grads_func", "grad_scale_func", "no_sync_func")
_HEAD_OWNED = ("mtp_num_layers", "defer_embedding_wgrad_compute", "wgrad_deferral_limit")
"""Fields of Megatron's own output layer, which mopd does not run."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm of the local layer spec. Megatron's own wrapper refuses sequence parallelism.

    The weight is replicated over tensor-parallel ranks; ``sequence_parallel`` on it makes Megatron sum its gradient.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        super().__init__(hidden_size, eps=eps, device=device, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def uses_transformer_engine(student: Student) -> bool:
    """Whether the layers come from TransformerEngine.

    Raises:
        UserError: the recipe asks for it where CUDA or the package is missing.
    """
    is_available = HAVE_TE and torch.cuda.is_available()
    if student.transformer_impl == "transformer_engine" and not is_available:
        missing = "CUDA" if HAVE_TE else "the transformer_engine package"
        raise UserError(
            f"student.transformer_impl is 'transformer_engine' but {missing} is missing: set it to 'auto' or 'local'"
        )
    return is_available and student.transformer_impl != "local"


def padded_vocab_size(dims: ModelDims, layout: Layout) -> int:
    """Rows of the embedding over all tensor-parallel ranks."""
    return dims.padded_vocab_size(
        tensor_model_parallel_size=layout.tp_size, make_vocab_size_divisible_by=MAKE_VOCAB_SIZE_DIVISIBLE_BY
    )


def transformer_config(student: Student, dims: ModelDims, layout: Layout) -> TransformerConfig:
    """Megatron's model configuration.

    Raises:
        UserError: the layout does not divide the model, or an override is unknown, owned by another recipe key, or
            refused by Megatron.
    """
    check_layout(dims, tensor_model_parallel_size=layout.tp_size, pipeline_model_parallel_size=layout.pp_size)
    fields = {**_model_fields(dims), **_layout_fields(layout), **_execution_fields(student)}
    overrides = check_overrides(student.megatron_overrides, owned=fields.keys())
    try:
        return TransformerConfig(**fields, **overrides)
    except (AssertionError, TypeError, ValueError) as error:
        if not overrides:
            raise
        reason = " ".join(str(error).split())
        named = dict(student.megatron_overrides)
        raise UserError(f"student.megatron_overrides {named}: Megatron refuses: {reason}") from error


def check_overrides(overrides: Mapping[str, Any], *, owned: Any = ()) -> dict[str, Any]:
    """The overrides with enum names resolved.

    Raises:
        UserError: an unknown field (with the nearest name), one that mopd sets itself, or an unknown enum name.
    """
    known = {field.name: field for field in dataclasses.fields(TransformerConfig)}
    checked: dict[str, Any] = {}
    for name, value in overrides.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "see megatron.core's TransformerConfig for the names"
            raise UserError(f"student.megatron_overrides.{name}: TransformerConfig has no such field; {hint}")
        if name in owned or name in (*_OPTIMIZER_OWNED, *_HEAD_OWNED):
            raise UserError(
                f"student.megatron_overrides.{name}: mopd sets this field from the checkpoint and the recipe's other "
                "keys; remove the override"
            )
        default = known[name].default
        if isinstance(default, enum.Enum):
            names = [member.name for member in type(default)]
            if value not in names:
                raise UserError(f"student.megatron_overrides.{name}: {value!r} is none of {', '.join(names)}")
            value = type(default)[value]
        checked[name] = value
    return checked


def layer_specs(
    student: Student, dims: ModelDims, config: TransformerConfig
) -> ModuleSpec | TransformerBlockSubmodules:
    """Layers of this pipeline stage: TransformerEngine's, or the local ones with our ``RMSNorm``."""
    if uses_transformer_engine(student):
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=dims.qk_norm)
    layer = get_gpt_layer_local_spec(qk_layernorm=dims.qk_norm, normalization="RMSNorm")
    attention = layer.submodules.self_attention.submodules
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    if dims.qk_norm:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RMSNorm)


def _model_fields(dims: ModelDims) -> dict[str, Any]:
    return {
        "num_layers": dims.num_layers,
        "hidden_size": dims.hidden_size,
        "ffn_hidden_size": dims.ffn_hidden_size,
        "num_attention_heads": dims.num_attention_heads,
        "num_query_groups": dims.num_query_groups,
        "kv_channels": dims.head_dim,
        "layernorm_epsilon": dims.norm_epsilon,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": dims.qkv_bias,
        "qk_layernorm": dims.qk_norm,
    }


def _layout_fields(layout: Layout) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tp_size,
        "pipeline_model_parallel_size": layout.pp_size,
        "sequence_parallel": layout.sequence_parallel,
        # Micro-batches are padded to their own longest sequence; pipeline stages announce shapes to each other.
        "variable_seq_lengths": layout.pp_size > 1,
        # Without effect in a dense model, but the default dispatcher is refused beside variable lengths.
        "moe_token_dispatcher_type": "alltoall",
        "deallocate_pipeline_outputs": layout.pp_size > 1,
    }


def _execution_fields(student: Student) -> dict[str, Any]:
    dtype = _DTYPES[student.dtype]
    is_fused = uses_transformer_engine(student)
    fields: dict[str, Any] = {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # The loss must be a deterministic function of weights and batch.
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # Weights come from the checkpoint; nothing is drawn.
        "perform_initialization": False,
        "use_cpu_initialization": not torch.cuda.is_available(),
        # Sums over tokens stay sums: the global denominator is already in the loss weights.
        "calculate_per_token_loss": True,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": is_fused,
        "bias_dropout_fusion": is_fused,
        "apply_rope_fusion": is_fused,
        "gradient_accumulation_fusion": False,
    }
    if student.recompute == "selective":
        fields |= {"recompute_granularity": "selective"}
    elif student.recompute == "full":
        fields |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return fields

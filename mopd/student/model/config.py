"""Megatron's ``TransformerConfig`` from the model's sizes and the recipe."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core import __version__ as megatron_version
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.tensor_parallel.layers import _grad_accum_fusion_available
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.utils import get_te_version
from packaging.specifiers import SpecifierSet
from torch.nn.functional import gelu, silu

from mopd.base.text import one_line
from mopd.base.types import UserError
from mopd.config.student import MoeConfig, StudentConfig
from mopd.conversion.models.dims import SWIGLU_LIMIT, ModelDims, YarnRope, check_layers, layout_problem
from mopd.conversion.models.sections import check_sections
from mopd.conversion.models.stages import Stages, stages_of
from mopd.data.packing import FP8_MULTIPLE
from mopd.student.model.overrides import check_overrides
from mopd.student.parallel import Layout

TRANSFORMER_ENGINE = ">=2.9,<2.13"
"""Versions of TransformerEngine that go with megatron-core 0.16.1: its extra declares 2.9 to 2.11, and its lock file
builds 2.12."""
_ACTIVATIONS: dict[str, dict[str, Any]] = {
    "silu": {"activation_func": silu},
    "gelu_tanh": {"activation_func": partial(gelu, approximate="tanh")},
    "clamped_swiglu": {
        "activation_func": quick_gelu,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": SWIGLU_LIMIT,
    },
}
"""Megatron's fields by ``ModelDims.activation``."""
UNFUSED_MAX_LENGTH = 4096
"""Longest sequence, in tokens, for which whole score matrices are acceptable: 2 GiB a layer for 32 heads in fp32."""


def uses_transformer_engine(student: StudentConfig, dims: ModelDims) -> bool:
    """Return whether the layers come from TransformerEngine. Layers of a model's own never do.

    Raises:
        UserError: the recipe asks for it where CUDA or the package is missing; or the package cannot be imported, as
            one that was built for another torch or CUDA, or its version is another than Megatron-Core's.
    """
    has_cuda = torch.cuda.is_available()
    if student.transformer_impl == "local":
        return False
    if dims.has_own_layers:
        check_layers(dims, student.transformer_impl)
        return False
    if has_cuda and not HAVE_TE and find_spec("transformer_engine") is not None:
        raise UserError(
            f"transformer_engine is installed and cannot be imported ({_import_problem()}): install one that was built "
            f"for torch {torch.__version__}, or set student.transformer_impl: local"
        )
    if not (HAVE_TE and has_cuda):
        if student.transformer_impl == "auto":
            return False
        missing = "CUDA" if HAVE_TE else "the transformer_engine package"
        raise UserError(
            f"student.transformer_impl is 'transformer_engine' but {missing} is missing: set it to 'auto' or 'local'"
        )
    if get_te_version() not in SpecifierSet(TRANSFORMER_ENGINE, prereleases=True):
        raise UserError(
            f"transformer_engine {get_te_version()} is installed, and megatron-core {megatron_version} goes with "
            f"{TRANSFORMER_ENGINE}: install one of these, or set student.transformer_impl: local"
        )
    return True


def _import_problem() -> str:
    try:
        import_module("transformer_engine.pytorch")
    except (ImportError, OSError) as error:
        return one_line(error)
    return "it lacks what megatron-core imports"


def check_attention(student: StudentConfig, dims: ModelDims, layout: Layout, *, max_length: int) -> None:
    """Refuse a student for whose attention TransformerEngine has no kernel on this GPU, or for long or packed sequences
    only the one that holds scores [B, heads, S, S]. Call with the model built: Megatron tells TransformerEngine of an
    override ``attention_backend`` then.

    Raises:
        UserError: one line with the keys to set.
    """
    if not uses_transformer_engine(student, dims):
        return
    from transformer_engine.pytorch.attention.dot_product_attention.utils import AttentionParams, get_attention_backend

    mla, is_packed = dims.mla, student.packing
    keys, values = (
        (dims.head_dim, dims.head_dim) if mla is None else (mla.qk_nope_head_dim + mla.qk_rope_head_dim, mla.v_head_dim)
    )
    params = AttentionParams(
        qkv_dtype=getattr(torch, student.dtype),
        qkv_layout="thd_thd_thd" if is_packed else "sbhd_sbhd_sbhd",
        num_heads=dims.num_attention_heads // layout.tp_size,
        num_gqa_groups=dims.groups_on_rank(layout.tp_size),
        max_seqlen_q=max_length,
        max_seqlen_kv=max_length,
        head_dim_qk=keys,
        head_dim_v=values,
        attn_mask_type="padding_causal" if is_packed else "causal",
        window_size=(-1, 0),
        context_parallel=layout.cp_size > 1,
        deterministic=bool(student.megatron_overrides.get("deterministic_mode")),
    )
    has_flash, _, has_fused, _, has_unfused, _ = get_attention_backend(params)
    if has_flash or has_fused or (has_unfused and not is_packed and max_length <= UNFUSED_MAX_LENGTH):
        return
    cure = ", or student.dtype: bfloat16" if student.dtype == "float32" else ""
    raise UserError(
        f"TransformerEngine has no attention on this GPU that does not hold all scores for student.dtype "
        f"{student.dtype}, {'packed' if is_packed else 'padded'} sequences of up to {max_length} tokens and heads of "
        f"{keys} and {values} channels: set student.transformer_impl: local{cure}"
    )


def transformer_config(student: StudentConfig, dims: ModelDims, layout: Layout) -> TransformerConfig:
    """Return Megatron's model configuration.

    Raises:
        UserError: the layout does not divide the model, or an override is unknown, owned by another recipe key, or
            refused by Megatron.
    """
    stages = replace(
        stages_of(student.parallel),
        pipeline_model_parallel_size=layout.pp_size,
        virtual_pipeline_model_parallel_size=layout.vp_size,
    )
    degrees = {"tp": layout.tp_size, "ep": layout.ep_size, "etp": layout.etp_size, "cp": layout.cp_size}
    if problem := layout_problem(dims, stages, **degrees, sp=layout.sequence_parallel):
        raise UserError(problem)
    check_sections(dims, student)
    _check_images(student, dims, layout)
    _check_experts(student, dims)
    fields = {**_model_fields(dims), **_layout_fields(layout), **_execution_fields(student, dims)}
    fields |= asdict(stages)
    if layout.vp_size == 1:
        fields["virtual_pipeline_model_parallel_size"] = None
    fields |= (
        _moe_fields(student.moe, dims) | _vision_fields(dims) | _mla_fields(dims, is_fused=fields["apply_rope_fusion"])
    )
    has_engine = uses_transformer_engine(student, dims)
    overrides = check_overrides(student.megatron_overrides, owned=fields.keys(), has_transformer_engine=has_engine)
    if overrides.get("fp8"):
        check_fp8(student, dims, layout.tp_size)
    config_class = TransformerConfig if dims.mla is None else MLATransformerConfig
    try:
        config = config_class(**fields, **overrides)
    except (AssertionError, TypeError, ValueError) as error:
        if not overrides:
            raise
        named = dict(student.megatron_overrides)
        raise UserError(f"student.megatron_overrides {named}: Megatron refuses: {one_line(error)}") from error
    _check_stages(config, stages)
    # Micro-batches are padded to their own longest sequence; stages announce shapes to each other. Set here because the
    # constructor refuses it beside the all-gather dispatcher, whose ranks must bring equally many tokens: mopd's do.
    config.variable_seq_lengths = layout.pp_size > 1
    return config


def check_fp8(student: StudentConfig, dims: ModelDims, tp_size: int) -> None:
    """Refuse fp8 for sizes that TransformerEngine's fp8 products do not take. Packs of tokens are padded to fit.

    Raises:
        UserError: one line with the key to set.
    """
    key = "student.megatron_overrides.fp8"
    if any(part is not None for part in (dims.moe, dims.mla, dims.vision, dims.delta)):
        raise UserError(f"{key}: mopd knows the shapes of dense text models alone; remove the override")
    if "fp8_recipe" not in student.megatron_overrides:
        raise UserError(
            f"{key}: without fp8_recipe Megatron scales by a history that no checkpoint holds: set fp8_recipe: "
            "tensorwise beside it, or remove the override"
        )
    if student.dtype != "bfloat16":
        raise UserError(f"{key}: student.dtype is {student.dtype}: set it to bfloat16, or remove the override")
    widths = {
        "hidden_size": dims.hidden_size,
        "intermediate_size": dims.ffn_hidden_size // tp_size,
        "num_attention_heads x head_dim": dims.num_attention_heads * dims.head_dim // tp_size,
        "num_key_value_heads x head_dim": dims.groups_on_rank(tp_size) * dims.head_dim,
    }
    for name, width in widths.items():
        if width % FP8_MULTIPLE:
            raise UserError(
                f"{key}: {name} is {width} on a tensor-parallel rank, no multiple of {FP8_MULTIPLE}; remove the "
                "override or lower student.parallel.tensor_model_parallel_size"
            )


def _check_images(student: StudentConfig, dims: ModelDims, layout: Layout) -> None:
    """Refuse context parallelism with images under TransformerEngine, whose rotation of queries and keys knows one axis
    of positions, of whole sequences.

    Raises:
        UserError: one line with the key to set.
    """
    if layout.cp_size > 1 and dims.vision is not None and uses_transformer_engine(student, dims):
        raise UserError(
            f"student.parallel.context_parallel_size is {layout.cp_size} and model_type {dims.family} sees images: set "
            "student.transformer_impl: local, or context_parallel_size: 1"
        )


def _check_stages(config: TransformerConfig, stages: Stages) -> None:
    """Refuse recomputed runs of layers that do not divide a stage's layers, past whose last one Megatron would run; and
    unbatched messages between interleaved stages, which ``student/schedule.py`` does not pair.

    Raises:
        UserError: one line with the key to set.
    """
    run, num_chunks = config.recompute_num_layers, stages.virtual_pipeline_model_parallel_size
    if num_chunks > 1 and not config.batch_p2p_comm:
        raise UserError(
            "student.megatron_overrides.batch_p2p_comm: false with student.parallel."
            f"virtual_pipeline_model_parallel_size {num_chunks}: remove the override"
        )
    for chunk in sorted({len(chunk) for chunks in stages.layers(config.num_layers) for chunk in chunks}):
        if config.recompute_method == "uniform" and run is not None and chunk % run:
            what = "a pipeline stage" if num_chunks == 1 else "a chunk of a pipeline stage"
            raise UserError(
                f"student.megatron_overrides.recompute_num_layers: {run} does not divide the {chunk} layers of {what}; "
                "set a divisor"
            )


def _check_experts(student: StudentConfig, dims: ModelDims) -> None:
    """Check what Megatron-Core asks of a model with experts beyond divisibility and sequence parallelism.

    Raises:
        UserError: one line with the key to set.
    """
    if dims.moe is None:
        return
    if student.moe.moe_grouped_gemm and not uses_transformer_engine(student, dims):
        raise UserError("student.moe.moe_grouped_gemm is true but TransformerEngine is missing: set it to false")
    # Each layer tells its router where packed sequences begin; ``moe`` recomputation runs the router without its layer.
    recomputed = student.megatron_overrides.get("recompute_modules") or ()
    if student.packing and "moe" in recomputed and student.moe.moe_router_load_balancing_type == "seq_aux_loss":
        raise UserError(
            "student.megatron_overrides.recompute_modules has 'moe' and student.moe.moe_router_load_balancing_type is "
            "'seq_aux_loss', which packed sequences do not allow: set student.recompute: full in its place, or "
            "student.packing: false"
        )


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
        **_ACTIVATIONS[dims.activation],
        "add_bias_linear": dims.linear_bias,
        "add_qkv_bias": dims.qkv_bias,
        "qk_layernorm": dims.qk_norm,
        "attention_output_gate": dims.gated_attention,
        # A list makes Megatron give each layer keys of its own in checkpoints.
        "moe_layer_freq": 1 if dims.has_uniform_layers else [int(dims.is_moe_layer(i)) for i in range(dims.num_layers)],
        "softmax_scale": _softmax_scale(dims),
    }


def _softmax_scale(dims: ModelDims) -> float | None:
    """Return the factor of the scores where it is not ``head_dim ** -0.5``: YaRN scales queries and keys alike. Latent
    attention has its own rope, and makes its own."""
    rope, divisor = dims.rope_scaling, dims.score_divisor
    if isinstance(rope, YarnRope) and dims.mla is None:
        return float(rope.scale**2 * (divisor or dims.head_dim) ** -0.5)
    return None if divisor is None else float(divisor**-0.5)


def _moe_fields(moe: MoeConfig, dims: ModelDims) -> dict[str, Any]:
    experts = dims.moe
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.num_experts,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": experts.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": experts.shared_gate,
        "moe_router_topk": experts.experts_per_token,
        "moe_router_score_function": experts.score_function,
        # Softmax after the choice normalises over the chosen; before it, over all experts.
        "moe_router_pre_softmax": experts.score_function == "softmax" and not experts.normalized,
        "moe_router_topk_scaling_factor": None if experts.scaling_factor == 1 else experts.scaling_factor,
        "moe_router_num_groups": experts.num_groups,
        "moe_router_group_topk": experts.group_topk,
        "moe_router_enable_expert_bias": experts.expert_bias,
        "moe_router_dtype": "fp32" if experts.router_fp32 else None,
        "moe_router_load_balancing_type": moe.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": moe.moe_aux_loss_coeff,
        "moe_z_loss_coeff": moe.moe_z_loss_coeff or None,
        "moe_router_bias_update_rate": moe.moe_router_bias_update_rate,
        "moe_grouped_gemm": moe.moe_grouped_gemm,
    }


def _vision_fields(dims: ModelDims) -> dict[str, Any]:
    """Return the fields of a model with vision."""
    if dims.vision is None:
        return {}
    # Positions differ between the sequences of a micro-batch, which TransformerEngine's fused rope does not take.
    return {"mrope_section": list(dims.vision.mrope_section), "apply_rope_fusion": False}


def _mla_fields(dims: ModelDims, *, is_fused: bool) -> dict[str, Any]:
    if dims.mla is None:
        return {}
    mla, rope = dims.mla, dims.rope_scaling
    fields: dict[str, Any] = {
        "multi_latent_attention": True,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        # The attention's output has this width, and the local core attention takes it from here.
        "kv_channels": mla.v_head_dim,
        # The norms of the compressed queries and keys.
        "qk_layernorm": True,
        "rotary_base": rotary_base(dims),
        # The plain rope's softmax is scaled by a factor's logarithm too, which these two make 1.
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
        "mscale_all_dim": 0.0,
        "apply_rope_fusion": is_fused and rope is not None,
    }
    if isinstance(rope, YarnRope):
        fields |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": rope.factor,
            "original_max_position_embeddings": rope.original_max_positions,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "mscale": rope.mscale,
            "mscale_all_dim": rope.mscale_all_dim,
        }
    return fields


def rotary_base(dims: ModelDims) -> float:
    """Return the rope's base. An integral base stays an integer: powers of int and float differ in the last bit, and
    checkpoints store integers."""
    return int(dims.rotary_base) if dims.rotary_base.is_integer() else dims.rotary_base


def _layout_fields(layout: Layout) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tp_size,
        "context_parallel_size": layout.cp_size,
        "sequence_parallel": layout.sequence_parallel,
        "expert_model_parallel_size": layout.ep_size,
        "expert_tensor_parallel_size": layout.etp_size,
        "variable_seq_lengths": False,
        # The all-to-all dispatcher needs CUDA streams.
        "moe_token_dispatcher_type": "alltoall" if torch.cuda.is_available() else "allgather",
        "deallocate_pipeline_outputs": layout.pp_size > 1,
    }


def _execution_fields(student: StudentConfig, dims: ModelDims) -> dict[str, Any]:
    dtype: torch.dtype = getattr(torch, student.dtype)
    is_fused = uses_transformer_engine(student, dims)
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
        # Weight gradients are added up in fp32 by the product's own kernel where apex brings it.
        "gradient_accumulation_fusion": _grad_accum_fusion_available and torch.cuda.is_available(),
        "transformer_impl": "transformer_engine" if is_fused else "local",
    }
    if student.recompute == "selective":
        fields |= {"recompute_granularity": "selective"}
    elif student.recompute == "full":
        fields |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return fields

"""``ModelDims`` from a Hugging Face ``config.json``. No torch in this module.

Only the published meaning of the format is read. A feature that the name tables and Megatron-Core cannot carry (rope
scaling, sliding window, quantised weights, extra biases, …) is refused by file and key, never dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mopd.conversion.models.config_keys import CONFIG_FILE, Keys, read_config, refuse_quantised, without_quantisation
from mopd.conversion.models.dims import Llama3Rope, MlaDims, ModelDims, MoeDims, YarnRope
from mopd.conversion.models.vision_config import MROPE_KEYS, is_tied, read_vision, text_keys

MAX_LAYERS = 2_000
"""Largest number of layers; the deepest published models have some hundreds."""
MAX_EXPERTS = 100_000
"""Largest number of experts of all layers together; the largest published models have some 20,000."""
_LATENT_NORM_EPSILON = 1e-6
"""Epsilon of DeepSeek's norms inside the attention, whatever ``rms_norm_eps``; Megatron-Core has one for all."""
_LLAMA_1_AND_2_ROTARY_BASE = 10000.0
"""Rope base of Llama 1 and 2, whose configs do not name it."""
_LLAMA_3_CONSTANTS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Constants that are built into Megatron-Core's ``RotaryEmbedding``."""
_ROPE_KEYS = {
    "default": set[str](),
    "llama3": {"factor", *_LLAMA_3_CONSTANTS},
    "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"},
}
"""Kind of rope -> its keys beside ``_COMMON_ROPE_KEYS``."""
_COMMON_ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def read_dims(folder: Path, *, takes_quantised: bool = False) -> ModelDims:
    """Return the ``ModelDims`` of a Hugging Face folder (``rope_theta`` and transformers 5's ``rope_parameters`` both
    work).

    Args:
        takes_quantised: the weights may be quantised, as an engine alone reads them.

    Raises:
        UserError: the config is unreadable, lacks a key, has a value of the wrong type, or asks for a feature that
            cannot be carried; the message names file and key.
    """
    config = read_config(folder)
    return dims_from_config(without_quantisation(config) if takes_quantised else config, folder / CONFIG_FILE)


def dims_from_config(config: Mapping[str, Any], path: Path) -> ModelDims:
    """Return the ``ModelDims`` of a parsed config; ``path`` is only for messages. Raise as ``read_dims`` does."""
    whole = Keys(config, path)
    family = whole.one_of("model_type", tuple(_FORMATS), "a model family with a name table")
    format_, keys = _FORMATS[family], text_keys(whole, family)
    _refuse_unsupported(whole, family)
    _refuse_unsupported_layers(keys, family)
    heads = keys.count("num_attention_heads")
    mla = _latent_attention(keys, family, heads) if format_.is_latent else None
    # Absent keys whose meaning the family's format defines; every other key is required.
    own_groups = format_.kv_heads_default_to_heads and keys.absent("num_key_value_heads")
    kv_heads = heads if own_groups else keys.count("num_key_value_heads")
    if heads % kv_heads:
        raise keys.error("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    num_layers = keys.at_most("num_hidden_layers", MAX_LAYERS)
    rotary_base, rope_scaling = _rope(keys, format_)
    head_dim = _head_dim(keys, format_, mla)
    return ModelDims(
        family=family,
        num_layers=num_layers,
        hidden_size=keys.count("hidden_size"),
        ffn_hidden_size=keys.count("intermediate_size"),
        num_attention_heads=heads,
        num_query_groups=kv_heads,
        head_dim=head_dim,
        vocab_size=keys.count("vocab_size"),
        max_positions=keys.count("max_position_embeddings"),
        rotary_base=rotary_base,
        norm_epsilon=keys.positive("rms_norm_eps"),
        tied_embeddings=is_tied(whole, keys, family),
        qk_norm=format_.qk_norm,
        qkv_bias=format_.qkv_bias,
        mla=mla,
        moe=None if format_.experts is None else _checked_experts(keys, format_.experts(keys)),
        rope_scaling=rope_scaling,
        vision=read_vision(whole, keys, family, head_dim=head_dim) if format_.has_vision else None,
    )


def _refuse_unsupported(keys: Keys, family: str) -> None:
    """Raise ``UserError`` for the first property of the whole checkpoint that cannot be carried."""
    refuse_quantised(keys)
    architecture = _FORMATS[family].architecture
    if not keys.absent("architectures") and architecture not in keys.container("architectures", list):
        raise keys.error("architectures", f"{keys.config['architectures']!r} is not supported; {architecture} is")
    if not keys.absent("auto_map") and "AutoModelForCausalLM" in keys.container("auto_map", dict):
        # DeepSeek's own checkpoints name the code that came before transformers had the architecture.
        published = f"modeling_deepseek.{architecture}" if _FORMATS[family].is_latent else None
        if keys.config["auto_map"]["AutoModelForCausalLM"] != published:
            raise keys.error("auto_map", "custom modelling code is not supported; use a plain checkpoint")


def _refuse_unsupported_layers(keys: Keys, family: str) -> None:
    """Raise ``UserError`` for the first feature of the language model that the tables or Megatron-Core cannot carry."""
    refuse_quantised(keys)
    for key in ("attention_bias", "mlp_bias"):
        if not keys.absent(key) and keys.flag(key):
            raise keys.error(key, f"true is not supported for model_type {family}")
    keys.one_of("hidden_act", ("silu",), "a supported activation")
    _refuse_sliding_window(keys, family)


def _refuse_sliding_window(keys: Keys, family: str) -> None:
    has_switch = not keys.absent("use_sliding_window")
    if has_switch and keys.flag("use_sliding_window"):
        raise keys.error("use_sliding_window", "true is not supported; only full attention is")
    if not has_switch and not keys.absent("sliding_window"):
        size = keys.config["sliding_window"]
        raise keys.error("sliding_window", f"{size!r} is not supported; only full attention is")
    if family == "mistral" and "sliding_window" not in keys.config:
        raise keys.error("sliding_window", "missing, which means 4096; set it to null if the model has full attention")
    if not keys.absent("layer_types"):
        other = sorted({str(kind) for kind in keys.container("layer_types", list)} - {"full_attention"})
        if other:
            raise keys.error("layer_types", f"{other} is not supported; only full_attention is")


def _head_dim(keys: Keys, format_: _Format, mla: MlaDims | None) -> int:
    if mla is not None:
        return mla.qk_nope_head_dim + mla.qk_rope_head_dim
    if format_.head_dim_defaults_to_share and keys.absent("head_dim"):
        hidden, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
        if hidden % heads:
            message = f"{hidden} is no multiple of num_attention_heads {heads}, head_dim is absent"
            raise keys.error("hidden_size", message)
        head_dim = hidden // heads
    else:
        head_dim = keys.count("head_dim")
    if head_dim % 2:
        raise keys.error("head_dim", f"{head_dim} is odd, rotary embeddings need an even size")
    return head_dim


def _latent_attention(keys: Keys, family: str, heads: int) -> MlaDims:
    if keys.positive("rms_norm_eps") != _LATENT_NORM_EPSILON:
        raise keys.error("rms_norm_eps", f"only {_LATENT_NORM_EPSILON} is supported for model_type {family}")
    if not keys.absent("rope_interleave") and not keys.flag("rope_interleave"):
        raise keys.error("rope_interleave", "false is not supported; Megatron-Core interleaves")
    if not keys.absent("num_key_value_heads") and keys.count("num_key_value_heads") != heads:
        raise keys.error("num_key_value_heads", f"latent attention has one per attention head, {heads}")
    if keys.count("qk_rope_head_dim") % 2:
        raise keys.error("qk_rope_head_dim", "is odd, rotary embeddings need an even size")
    return MlaDims(
        q_lora_rank=None if keys.absent("q_lora_rank") else keys.count("q_lora_rank"),
        kv_lora_rank=keys.count("kv_lora_rank"),
        qk_nope_head_dim=keys.count("qk_nope_head_dim"),
        qk_rope_head_dim=keys.count("qk_rope_head_dim"),
        v_head_dim=keys.count("v_head_dim"),
    )


def _rope(keys: Keys, format_: _Format) -> tuple[float, Llama3Rope | YarnRope | None]:
    """Return base and scaling, from ``rope_theta`` and ``rope_scaling`` (transformers 4) or ``rope_parameters`` (5)."""
    _require_full_rotation(keys)
    bases: dict[str, float] = {}
    scaling: dict[str, Llama3Rope | YarnRope | None] = {}
    if not keys.absent("rope_theta"):
        bases["rope_theta"] = keys.positive("rope_theta")
    for section in ("rope_scaling", "rope_parameters"):
        if keys.absent(section):
            continue
        rope = keys.section(section)
        _require_full_rotation(rope)
        if not rope.absent("rope_theta"):
            bases[f"{section}.rope_theta"] = rope.positive("rope_theta")
        scaling[section] = _rope_scaling(rope, format_)
    if len(set(bases.values())) > 1:
        raise keys.error(next(iter(bases)), f"the rope bases disagree: {bases}; keep one")
    if len(set(scaling.values())) > 1:
        raise keys.error("rope_scaling", "disagrees with rope_parameters; keep one")
    if not bases and format_.rotary_base is None:
        raise keys.error("rope_theta", "missing, as is rope_parameters.rope_theta; add the base of the rope")
    base = next(iter(bases.values()), format_.rotary_base or 0.0)
    return base, next(iter(scaling.values()), None)


def _require_full_rotation(keys: Keys) -> None:
    key = "partial_rotary_factor"
    if not keys.absent(key) and keys.positive(key) != 1:
        raise keys.error(key, "other values than 1 are not supported")


def _rope_scaling(rope: Keys, format_: _Format) -> Llama3Rope | YarnRope | None:
    """Return the scaling. Refuse kinds that Megatron-Core computes otherwise than transformers: beside the plain rope
    it has one for each kind of attention, and none if positions have three parts."""
    kinds = {str(rope.config[key]) for key in ("rope_type", "type") if not rope.absent(key)}
    if format_.has_vision:  # older configs call the plain rope of three parts a kind
        kinds = {"default" if kind == "mrope" else kind for kind in kinds}
    if len(kinds) > 1:
        raise rope.error("rope_type", f"disagrees with type: {sorted(kinds)}; keep one")
    kind = kinds.pop() if kinds else "default"
    known = ("default",) if format_.has_vision else ("default", "yarn" if format_.is_latent else "llama3")
    if kind not in known:
        label = "rope_type" if not rope.absent("rope_type") else "type"
        supported = "only 'default' is" if format_.has_vision else f"only 'default' and '{known[-1]}' are"
        raise rope.error(label, f"{kind!r} is not supported; {supported}")
    parts = MROPE_KEYS if format_.has_vision else frozenset[str]()
    extra = sorted(set(rope.config) - _COMMON_ROPE_KEYS - _ROPE_KEYS[kind] - parts)
    if extra:
        raise rope.error(extra[0], f"is not supported for the {kind!r} rope")
    if kind == "llama3":
        for key, only in _LLAMA_3_CONSTANTS.items():
            if rope.positive(key) != only:
                raise rope.error(key, f"{rope.config[key]} is not supported; Megatron-Core has {only}")
        return Llama3Rope(factor=rope.positive("factor"))
    return _yarn(rope) if kind == "yarn" else None


def _yarn(rope: Keys) -> YarnRope:
    """Return the YaRN parameters; absent keys get the format's defaults. Without both ``mscale`` keys the format scales
    by ``factor`` alone, which is what Megatron-Core computes for 1 and 0."""
    has_mscales = all(not rope.absent(key) and rope.config[key] for key in ("mscale", "mscale_all_dim"))
    if not has_mscales and not rope.absent("mscale_all_dim") and rope.config["mscale_all_dim"]:
        raise rope.error("mscale_all_dim", "needs mscale beside it")
    return YarnRope(
        factor=rope.positive("factor"),
        original_max_positions=rope.count("original_max_position_embeddings"),
        beta_fast=32.0 if rope.absent("beta_fast") else rope.positive("beta_fast"),
        beta_slow=1.0 if rope.absent("beta_slow") else rope.positive("beta_slow"),
        mscale=rope.positive("mscale") if has_mscales else 1.0,
        mscale_all_dim=rope.positive("mscale_all_dim") if has_mscales else 0.0,
    )


def _checked_experts(keys: Keys, moe: MoeDims) -> MoeDims:
    if moe.experts_per_token > moe.num_experts:
        raise keys.error("num_experts_per_tok", f"{moe.experts_per_token} exceeds the {moe.num_experts} experts")
    if moe.experts_per_token == 1 and moe.normalized:
        raise keys.error("num_experts_per_tok", "1 is not supported: Megatron-Core does not normalise a single score")
    if moe.num_experts * len(moe.layers) > MAX_EXPERTS:
        in_all = f"{len(moe.layers)} with {moe.num_experts} experts each: more than {MAX_EXPERTS} in all"
        raise keys.error("num_hidden_layers", in_all)
    if not any(moe.layers):
        raise keys.error("num_hidden_layers", "no layer has experts; use a dense model_type")
    return moe


def _mixtral(keys: Keys) -> MoeDims:
    if not keys.absent("router_jitter_noise") and keys.config["router_jitter_noise"]:
        raise keys.error("router_jitter_noise", "is not supported; set it to 0.0")
    return MoeDims(
        num_experts=keys.count("num_local_experts"),
        experts_per_token=keys.count("num_experts_per_tok"),
        ffn_hidden_size=keys.count("intermediate_size"),
        layers=(True,) * keys.count("num_hidden_layers"),
        normalized=True,
    )


def _qwen3_moe(keys: Keys) -> MoeDims:
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


def _deepseek_v2(keys: Keys) -> MoeDims:
    keys.only("scoring_func", "softmax")
    keys.only("topk_method", "greedy", "Megatron-Core ranks groups of experts by other sums")
    keys.only("norm_topk_prob", False, "its definitions contradict each other")
    return _deepseek(keys, is_v3=False)


def _deepseek_v3(keys: Keys) -> MoeDims:
    keys.only("scoring_func", "sigmoid")
    keys.only("topk_method", "noaux_tc")
    keys.only("norm_topk_prob", True, "Megatron-Core always normalises sigmoid scores")
    groups, chosen, topk = (keys.count(key) for key in ("n_group", "topk_group", "num_experts_per_tok"))
    experts = keys.count("n_routed_experts")
    if experts % groups or chosen > groups or topk > chosen * experts // groups:
        raise keys.error("n_group", f"{groups} groups, {chosen} of them chosen, do not fit {experts} experts")
    if groups == chosen:
        return _deepseek(keys, is_v3=True)
    if topk // chosen != 2:
        raise keys.error(
            "topk_group",
            f"{chosen} is not supported with num_experts_per_tok {topk}: the model ranks groups by their best 2 "
            f"experts, Megatron-Core by {topk} // {chosen}",
        )
    return _deepseek(keys, is_v3=True, num_groups=groups, group_topk=chosen)


def _deepseek(keys: Keys, *, is_v3: bool, num_groups: int | None = None, group_topk: int | None = None) -> MoeDims:
    keys.only("moe_layer_freq", 1)
    num_layers, width = keys.count("num_hidden_layers"), keys.count("moe_intermediate_size")
    num_dense = keys.whole("first_k_dense_replace")
    shared = 0 if keys.absent("n_shared_experts") else keys.whole("n_shared_experts")
    return MoeDims(
        num_experts=keys.count("n_routed_experts"),
        experts_per_token=keys.count("num_experts_per_tok"),
        ffn_hidden_size=width,
        shared_ffn_hidden_size=shared * width,
        layers=tuple(layer >= num_dense for layer in range(num_layers)),
        score_function="sigmoid" if is_v3 else "softmax",
        normalized=is_v3,
        scaling_factor=keys.positive("routed_scaling_factor"),
        num_groups=num_groups,
        group_topk=group_topk,
        expert_bias=is_v3,
        router_fp32=True,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Format:
    """Properties in which the configs of one ``model_type`` differ from other families'."""

    architecture: str
    """The one architecture of it that is supported."""
    kv_heads_default_to_heads: bool = False
    """Whether an absent ``num_key_value_heads`` means one per attention head."""
    head_dim_defaults_to_share: bool = False
    """Whether an absent ``head_dim`` means ``hidden_size / num_attention_heads``."""
    rotary_base: float | None = None
    """Base of the rope if the config names none; None if the format requires it."""
    is_latent: bool = False
    """Whether the attention is latent; such checkpoints may name their own code."""
    qk_norm: bool = False
    qkv_bias: bool = False
    has_vision: bool = False
    experts: Callable[[Keys], MoeDims] | None = None
    """Reader of experts and router; None for a dense model."""


_FORMATS = {
    "llama": _Format(
        architecture="LlamaForCausalLM", kv_heads_default_to_heads=True, head_dim_defaults_to_share=True,
        rotary_base=_LLAMA_1_AND_2_ROTARY_BASE,
    ),
    "mistral": _Format(architecture="MistralForCausalLM", head_dim_defaults_to_share=True),
    "qwen2": _Format(architecture="Qwen2ForCausalLM", head_dim_defaults_to_share=True, qkv_bias=True),
    "qwen2_5_vl": _Format(
        architecture="Qwen2_5_VLForConditionalGeneration", head_dim_defaults_to_share=True, qkv_bias=True,
        has_vision=True,
    ),
    "qwen3": _Format(architecture="Qwen3ForCausalLM", qk_norm=True),
    "qwen3_vl": _Format(architecture="Qwen3VLForConditionalGeneration", qk_norm=True, has_vision=True),
    "qwen3_moe": _Format(architecture="Qwen3MoeForCausalLM", qk_norm=True, experts=_qwen3_moe),
    "mixtral": _Format(architecture="MixtralForCausalLM", head_dim_defaults_to_share=True, experts=_mixtral),
    "deepseek_v2": _Format(
        architecture="DeepseekV2ForCausalLM", kv_heads_default_to_heads=True, is_latent=True, experts=_deepseek_v2
    ),
    "deepseek_v3": _Format(
        architecture="DeepseekV3ForCausalLM", kv_heads_default_to_heads=True, is_latent=True, experts=_deepseek_v3
    ),
}  # fmt: skip
"""``model_type`` -> its format."""

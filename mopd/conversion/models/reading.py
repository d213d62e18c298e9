"""``ModelDims`` from a Hugging Face ``config.json``. No torch in this module.

Only the published meaning of the format is read. A feature that the name tables and Megatron-Core cannot carry (rope
scaling, sliding window, quantised weights, extra biases, …) is refused by file and key, never dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mopd.conversion.models.config_keys import CONFIG_FILE, Keys, read_config, refuse_quantised, without_quantisation
from mopd.conversion.models.dims import LinearRope, Llama3Rope, MlaDims, ModelDims, MoeDims, RopeScaling, YarnRope
from mopd.conversion.models.family import Family
from mopd.conversion.models.known import FAMILIES
from mopd.conversion.models.vision_config import MROPE_KEYS, is_tied, read_vision, text_keys

_REFUSED = {
    "gemma3": "its vision tower is not read; use a checkpoint of the language model, gemma3_text",
    "gemma4": "its layers differ in head size, share keys and values and add embeddings, which Megatron-Core has not",
    "qwen3_5": "its vision tower is not; use a checkpoint of the language model, qwen3_5_text or qwen3_5_moe_text",
    "llama4": "it attends in chunks, and weighs its experts' inputs, which Megatron-Core does not",
}
"""Beginning of a ``model_type`` -> why such families are refused."""
MAX_LAYERS = 2_000
"""Largest number of layers; the deepest published models have some hundreds."""
MAX_EXPERTS = 100_000
"""Largest number of experts of all layers together; the largest published models have some 20,000."""
_ROPE_KEYS = {
    "default": set[str](),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
        "attention_factor", "truncate",
    },
}  # fmt: skip
"""Kind of rope -> its keys beside ``_COMMON_ROPE_KEYS``."""
_GROUPED_YARN_KEYS = {"attention_factor", "truncate"}
"""Keys that Megatron-Core's latent attention, which computes its own YaRN, does not take."""
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
    family = _family(whole)
    format_, keys = FAMILIES[family], text_keys(whole, family)
    if format_.spelled is not None:
        keys = format_.spelled(keys)
    _refuse_unsupported(whole, family)
    _refuse_unsupported_layers(keys, family)
    heads = keys.count("num_attention_heads")
    mla = None if format_.latent_attention is None else format_.latent_attention(keys)
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
        # A family whose layers all have experts may have no other width.
        ffn_hidden_size=keys.count(
            "intermediate_size" if format_.dense or not keys.absent("intermediate_size") else "moe_intermediate_size"
        ),
        num_attention_heads=heads,
        num_query_groups=kv_heads,
        head_dim=head_dim,
        vocab_size=keys.count("vocab_size"),
        max_positions=keys.count("max_position_embeddings"),
        rotary_base=rotary_base,
        norm_epsilon=keys.positive("rms_norm_eps"),
        tied_embeddings=is_tied(whole, keys, family),
        qk_norm=_flag(keys, format_.qk_norm),
        qkv_bias=_flag(keys, format_.qkv_bias),
        mla=mla,
        moe=None if format_.experts is None else _checked_experts(keys, format_.experts(keys)),
        rope_scaling=rope_scaling,
        num_mtp_layers=0 if keys.absent("num_nextn_predict_layers") else keys.whole("num_nextn_predict_layers"),
        rotary_fraction=_rotary_fraction(keys, format_, head_dim, rope_scaling),
        vision=read_vision(whole, keys, family, head_dim=head_dim) if format_.has_vision else None,
        **({} if format_.more is None else format_.more(keys)),
    )


def _family(keys: Keys) -> str:
    """Return the ``model_type``. Refuse an unknown one with the nearest known, or the reason."""
    key = "model_type"
    name = str(keys.value(key, str, "the name of a model family", lambda v: True))
    if name in FAMILIES:
        return name
    for beginning, reason in _REFUSED.items():
        if name.startswith(beginning):
            raise keys.error(key, f"{name!a:.100} is not supported: {reason}")
    nearest = get_close_matches(name, FAMILIES, n=1, cutoff=0.0)[0]
    raise keys.error(
        key,
        f"{name!a:.100} is not supported; the nearest name that is: {nearest!r}. docs/conversion.md lists all "
        "families, and says how to add one",
    )


def _flag(keys: Keys, known: bool | str) -> bool:
    """Return a property that a family has or has not, or that a key of the config tells."""
    return known if isinstance(known, bool) else keys.flag(known)


def _refuse_unsupported(keys: Keys, family: str) -> None:
    """Raise ``UserError`` for the first property of the whole checkpoint that cannot be carried."""
    refuse_quantised(keys, FAMILIES[family].quantised)
    architecture = FAMILIES[family].architecture
    if not keys.absent("architectures") and architecture not in keys.container("architectures", list):
        raise keys.error("architectures", f"{keys.config['architectures']!r} is not supported; {architecture} is")
    code = "" if keys.absent("auto_map") else keys.container("auto_map", dict).get("AutoModelForCausalLM", "")
    if code and code != FAMILIES[family].published_code:
        raise keys.error("auto_map", "custom modelling code is not supported; use a plain checkpoint")


def _refuse_unsupported_layers(keys: Keys, family: str) -> None:
    """Raise ``UserError`` for the first feature of the language model that the tables or Megatron-Core cannot carry."""
    refuse_quantised(keys, FAMILIES[family].quantised)
    for key in sorted({"attention_bias", "attention_out_bias", "mlp_bias"} - {FAMILIES[family].qkv_bias}):
        if not keys.absent(key) and keys.flag(key):
            raise keys.error(key, f"true is not supported for model_type {family}")
    keys.one_of("hidden_act", (FAMILIES[family].activation,), "a supported activation")
    _refuse_sliding_window(keys, family)


def _refuse_sliding_window(keys: Keys, family: str) -> None:
    known = FAMILIES[family].layer_types
    if not keys.absent("layer_types"):
        other = sorted({str(kind) for kind in keys.container("layer_types", list)} - set(known))
        if other:
            raise keys.error("layer_types", f"{other} is not supported; only {', '.join(known)} is")
    if "sliding_attention" in known:
        return
    has_switch = not keys.absent("use_sliding_window")
    if has_switch and keys.flag("use_sliding_window"):
        raise keys.error("use_sliding_window", "true is not supported; only full attention is")
    if not has_switch and not keys.absent("sliding_window"):
        size = keys.config["sliding_window"]
        raise keys.error("sliding_window", f"{size!r} is not supported; only full attention is")
    window = FAMILIES[family].default_window
    if window is not None and "sliding_window" not in keys.config:
        problem = f"missing, which means {window}; set it to null if the model has full attention"
        raise keys.error("sliding_window", problem)


def _head_dim(keys: Keys, format_: Family, mla: MlaDims | None) -> int:
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


def _rope(keys: Keys, format_: Family) -> tuple[float, RopeScaling | None]:
    """Return base and scaling, from ``rope_theta`` and ``rope_scaling`` (transformers 4) or ``rope_parameters`` (5)."""
    bases: dict[str, float] = {}
    scaling: dict[str, RopeScaling | None] = {}
    if not keys.absent("rope_theta"):
        bases["rope_theta"] = keys.positive("rope_theta")
    for section in ("rope_scaling", "rope_parameters"):
        if keys.absent(section):
            continue
        rope = keys.section(section)
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


def _rotary_fraction(keys: Keys, format_: Family, head_dim: int, scaling: RopeScaling | None) -> float:
    """Return the share of a head's channels that the rope turns."""
    key = "partial_rotary_factor"
    sections = [keys.section(name) for name in ("rope_parameters", "rope_scaling") if not keys.absent(name)]
    # Beside one of the rope's own that of the whole config has no meaning; transformers writes its default there.
    named = [section for section in sections if not section.absent(key)] or [keys] * (not keys.absent(key))
    if not named:
        return format_.rotary_fraction or 1.0
    fraction = named[0].positive(key)
    for section in named:
        if section.positive(key) != fraction or fraction > 1:
            raise section.error(key, f"{section.config[key]} disagrees with {fraction}, or is more than 1")
    if format_.rotary_fraction is None and fraction != 1:
        raise named[0].error(key, "other values than 1 are not supported")
    if int(head_dim * fraction) % 2:
        raise named[0].error(key, f"{fraction} of head_dim {head_dim} is odd, rotary embeddings need an even size")
    if isinstance(scaling, YarnRope) and fraction != 1:
        raise named[0].error(key, f"{fraction} is not supported beside the 'yarn' rope, which scales what it turns")
    return fraction


def _rope_scaling(rope: Keys, format_: Family) -> RopeScaling | None:
    """Return the scaling. Refuse kinds that the family has not."""
    kinds = {str(rope.config[key]) for key in ("rope_type", "type") if not rope.absent(key)}
    if format_.has_vision:  # older configs call the plain rope of three parts a kind
        kinds = {"default" if kind == "mrope" else kind for kind in kinds}
    if len(kinds) > 1:
        raise rope.error("rope_type", f"disagrees with type: {sorted(kinds)}; keep one")
    kind = kinds.pop() if kinds else "default"
    known = ("default", *format_.ropes)
    if kind not in known:
        label = "rope_type" if not rope.absent("rope_type") else "type"
        raise rope.error(label, f"{kind!r} is not supported; supported: {', '.join(known)}")
    parts = MROPE_KEYS if format_.has_vision or format_.is_text_of_vision else frozenset[str]()
    own = _ROPE_KEYS[kind] - (_GROUPED_YARN_KEYS if format_.latent_attention else set())
    extra = sorted(set(rope.config) - _COMMON_ROPE_KEYS - own - parts)
    if extra:
        raise rope.error(extra[0], f"is not supported for the {kind!r} rope")
    if kind == "llama3":
        low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
        if low >= high:
            raise rope.error("low_freq_factor", f"{low} is not below high_freq_factor {high}")
        return Llama3Rope(
            factor=rope.positive("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_positions=rope.count("original_max_position_embeddings"),
        )
    if kind == "linear":
        return LinearRope(factor=rope.positive("factor"))
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
        attention_factor=None if rope.absent("attention_factor") else rope.positive("attention_factor"),
        is_truncated=rope.absent("truncate") or rope.flag("truncate"),
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

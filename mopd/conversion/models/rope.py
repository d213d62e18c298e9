"""The rotary embedding of a ``config.json``: its base and scaling, from ``rope_theta`` and ``rope_scaling``
(transformers 4) or ``rope_parameters`` (transformers 5). Kinds that Megatron-Core computes otherwise are refused."""

from __future__ import annotations

from mopd.conversion.models.config_keys import Keys
from mopd.conversion.models.model_dims import Llama3Rope, YarnRope

_LLAMA_1_AND_2_ROTARY_BASE = 10000.0
"""Their configs do not name it."""
_LLAMA_3_CONSTANTS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Megatron-Core's ``RotaryEmbedding`` has these built in."""
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_YARN = {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}


def read_rope(keys: Keys, family: str, *, is_latent: bool) -> tuple[float, Llama3Rope | YarnRope | None]:
    """Base and scaling of the rope.

    Args:
        is_latent: the model has latent attention, whose rope alone can be YaRN in Megatron-Core.

    Raises:
        UserError: a kind or constant that Megatron-Core cannot express, or two bases that disagree.
    """
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
        scaling[section] = _read_scaling(rope, is_latent=is_latent)
    if len(set(bases.values())) > 1:
        raise keys.error(next(iter(bases)), f"the rope bases disagree: {bases}; keep one")
    if len(set(scaling.values())) > 1:
        raise keys.error("rope_scaling", "disagrees with rope_parameters; keep one")
    if not bases and family != "llama":
        raise keys.error("rope_theta", "missing, as is rope_parameters.rope_theta; add the base of the rope")
    base = next(iter(bases.values())) if bases else _LLAMA_1_AND_2_ROTARY_BASE
    return base, next(iter(scaling.values())) if scaling else None


def _require_full_rotation(keys: Keys) -> None:
    key = "partial_rotary_factor"
    if not keys.absent(key) and keys.positive(key) != 1:
        raise keys.error(key, "other values than 1 are not supported")


def _read_scaling(rope: Keys, *, is_latent: bool) -> Llama3Rope | YarnRope | None:
    kinds = {str(rope.config[key]) for key in ("rope_type", "type") if not rope.absent(key)}
    if len(kinds) > 1:
        raise rope.error("rope_type", f"disagrees with type: {sorted(kinds)}; keep one")
    kind = kinds.pop() if kinds else "default"
    scaled = "yarn" if is_latent else "llama3"
    if kind not in ("default", scaled):
        label = "rope_type" if not rope.absent("rope_type") else "type"
        raise rope.error(label, f"{kind!r} is not supported; only 'default' and '{scaled}' are")
    known = {"default": set(), "llama3": {"factor", *_LLAMA_3_CONSTANTS}, "yarn": _YARN}[kind]
    extra = sorted(set(rope.config) - _COMMON - known)
    if extra:
        raise rope.error(extra[0], f"is not supported for the {kind!r} rope")
    if kind == "llama3":
        return _read_llama3(rope)
    return _read_yarn(rope) if kind == "yarn" else None


def _read_llama3(rope: Keys) -> Llama3Rope:
    for key, only in _LLAMA_3_CONSTANTS.items():
        if rope.positive(key) != only:
            raise rope.error(key, f"{rope.config[key]} is not supported; Megatron-Core has {only}")
    return Llama3Rope(factor=rope.positive("factor"))


def _read_yarn(rope: Keys) -> YarnRope:
    """Absent keys get the format's defaults. Without both ``mscale`` keys the format scales by ``factor`` alone, which
    is what Megatron-Core computes for 1 and 0."""
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

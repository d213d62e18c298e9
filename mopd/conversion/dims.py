"""What a Hugging Face ``config.json`` says about a model, as plain numbers. No torch in this module.

Only the published meaning of the format is read. A feature that the name tables and Megatron-Core cannot carry
(rope scaling, sliding window, quantised weights, extra biases, …) is refused by file and key, never dropped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mopd.types import UserError

CONFIG_FILE = "config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDims:
    """Sizes and switches of one decoder-only model, the same on every rank.

    Example (Qwen3-0.6B): ``family="qwen3", num_layers=28, hidden_size=1024, ffn_hidden_size=3072,
    num_attention_heads=16, num_query_groups=8, head_dim=128, vocab_size=151936, max_positions=40960,
    rotary_base=1e6, norm_epsilon=1e-6, tied_embeddings=True, qk_norm=True, qkv_bias=False``.
    """

    family: str
    """``model_type`` of the config: the key of the name table."""
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    """Width of the gated MLP (gate and up projections each)."""
    num_attention_heads: int
    num_query_groups: int
    """Key/value heads; each serves ``heads_per_group`` query heads."""
    head_dim: int
    """Channels of one head (``kv_channels`` in Megatron); need not be ``hidden_size / num_attention_heads``."""
    vocab_size: int
    """True vocabulary: rows of the embedding in the Hugging Face checkpoint, before padding."""
    max_positions: int
    rotary_base: float
    norm_epsilon: float
    """Epsilon of every RMSNorm."""
    tied_embeddings: bool
    """The output layer shares the embedding matrix."""
    qk_norm: bool
    """RMSNorm over ``head_dim`` on queries and keys."""
    qkv_bias: bool
    """The query, key and value projections (and no other) have biases."""

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_attention_heads // self.num_query_groups

    def padded_vocab_size(self, *, tensor_model_parallel_size: int, make_vocab_size_divisible_by: int) -> int:
        """Rows of Megatron's embedding: the next multiple of the TP degree times ``make_vocab_size_divisible_by``."""
        multiple = tensor_model_parallel_size * make_vocab_size_divisible_by
        return -(-self.vocab_size // multiple) * multiple


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed ``config.json`` of a Hugging Face folder.

    Raises:
        UserError: the folder or file is missing, or the file is not a JSON object.
    """
    path = folder / CONFIG_FILE
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the folder of a Hugging Face checkpoint")
    if not path.is_file():
        raise UserError(f"{path}: missing; a Hugging Face checkpoint folder holds config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=refuse_duplicate_keys)
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); fetch the file again") from error
    if not isinstance(config, dict):
        raise UserError(f"{path}: holds a {type(config).__name__}, not a JSON object; fetch the file again")
    return config


def refuse_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """``object_pairs_hook`` of ``json.loads``, which would keep the last of two equal keys without a word."""
    keys = dict(pairs)
    if len(keys) != len(pairs):
        names = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in names if names.count(key) > 1)!r} occurs twice")
    return keys


def read_dims(folder: Path) -> ModelDims:
    """``ModelDims`` of a Hugging Face folder (``rope_theta`` and transformers 5's ``rope_parameters`` both work).

    Raises:
        UserError: the config is unreadable, lacks a key, has a value of the wrong type, or asks for a feature that
            cannot be carried; the message names file and key.
    """
    return dims_from_config(read_config(folder), folder / CONFIG_FILE)


def dims_from_config(config: Mapping[str, Any], path: Path) -> ModelDims:
    """``ModelDims`` of a parsed config; ``path`` is only for messages. Raises as ``read_dims`` does."""
    keys = _Keys(config, path)
    family = keys.one_of("model_type", tuple(_ARCHITECTURES), "a model family with a name table")
    _refuse_unsupported(keys, family)
    heads = keys.count("num_attention_heads")
    hidden = keys.count("hidden_size")
    # Absent keys whose meaning the family's format defines; every other key is required.
    one_group_per_head = family == "llama" and keys.absent("num_key_value_heads")
    kv_heads = heads if one_group_per_head else keys.count("num_key_value_heads")
    heads_fill_hidden = family != "qwen3" and keys.absent("head_dim")
    head_dim = _divide(keys, hidden, heads) if heads_fill_hidden else keys.count("head_dim")
    if heads % kv_heads:
        raise keys.error("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    if head_dim % 2:
        raise keys.error("head_dim", f"{head_dim} is odd, rotary embeddings need an even size")
    return ModelDims(
        family=family,
        num_layers=keys.count("num_hidden_layers"),
        hidden_size=hidden,
        ffn_hidden_size=keys.count("intermediate_size"),
        num_attention_heads=heads,
        num_query_groups=kv_heads,
        head_dim=head_dim,
        vocab_size=keys.count("vocab_size"),
        max_positions=keys.count("max_position_embeddings"),
        rotary_base=_rotary_base(keys, family),
        norm_epsilon=keys.positive("rms_norm_eps"),
        tied_embeddings=not keys.absent("tie_word_embeddings") and keys.flag("tie_word_embeddings"),
        qk_norm=family == "qwen3",
        qkv_bias=family == "qwen2",
    )


def check_layout(dims: ModelDims, *, tensor_model_parallel_size: int, pipeline_model_parallel_size: int) -> None:
    """Refuses a parallel layout that would split a head group, a row of the MLP or a layer.

    Raises:
        UserError: one line with both numbers and the key to set.
    """
    tp, pp = tensor_model_parallel_size, pipeline_model_parallel_size
    for what, size in (
        ("key/value heads", dims.num_query_groups),
        ("attention heads", dims.num_attention_heads),
        ("MLP columns", dims.ffn_hidden_size),
    ):
        if size % tp:
            raise UserError(
                f"student.parallel.tensor_model_parallel_size {tp} does not divide the model's {size} {what}: "
                f"set it to a divisor of {size}"
            )
    if dims.num_layers % pp:
        raise UserError(
            f"student.parallel.pipeline_model_parallel_size {pp} does not divide the model's {dims.num_layers} layers: "
            f"set it to a divisor of {dims.num_layers}"
        )


_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_LLAMA_1_AND_2_ROTARY_BASE = 10000.0
"""Their configs do not name it."""


class _Keys:
    """Typed access to a parsed config; every complaint names file and key."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        self.config = config
        self.path = path

    def error(self, key: str, problem: str) -> UserError:
        return UserError(f"{self.path}: '{key}': {problem}")

    def absent(self, key: str) -> bool:
        """Missing or null, which the format treats alike."""
        return key not in self.config or self.config[key] is None

    def value(self, key: str, kind: type | tuple[type, ...], expected: str, ok: Callable[[Any], bool]) -> Any:
        if self.absent(key):
            raise self.error(key, "missing; it is needed to build the model")
        value = self.config[key]
        is_bool_as_number = isinstance(value, bool) and kind is not bool
        if not isinstance(value, kind) or is_bool_as_number or not ok(value):
            raise self.error(key, f"{value!r} is not {expected}")
        return value

    def count(self, key: str) -> int:
        return int(self.value(key, int, "a positive whole number", lambda v: v > 0))

    def positive(self, key: str) -> float:
        return float(self.value(key, (int, float), "a positive number", lambda v: v > 0))

    def flag(self, key: str) -> bool:
        return bool(self.value(key, bool, "true or false", lambda v: True))

    def container(self, key: str, kind: type) -> Any:
        return self.value(key, kind, f"a JSON {'object' if kind is dict else 'list'}", lambda v: True)

    def one_of(self, key: str, choices: tuple[str, ...], what: str) -> str:
        return str(self.value(key, str, f"{what}; supported: {', '.join(choices)}", lambda v: v in choices))


def _divide(keys: _Keys, hidden: int, heads: int) -> int:
    if hidden % heads:
        raise keys.error("hidden_size", f"{hidden} is no multiple of num_attention_heads {heads}, head_dim is absent")
    return hidden // heads


def _refuse_unsupported(keys: _Keys, family: str) -> None:
    """Names the first feature of the config that the tables or Megatron-Core cannot carry."""
    for key in ("quantization_config", "compression_config"):
        if not keys.absent(key):
            raise keys.error(key, "quantised weights are not supported; use the unquantised checkpoint")
    if not keys.absent("architectures") and _ARCHITECTURES[family] not in keys.container("architectures", list):
        found = keys.config["architectures"]
        raise keys.error("architectures", f"{found!r} is not supported; {_ARCHITECTURES[family]} is")
    if not keys.absent("auto_map") and "AutoModelForCausalLM" in keys.container("auto_map", dict):
        raise keys.error("auto_map", "custom modelling code is not supported; use a plain checkpoint")
    for key in ("attention_bias", "mlp_bias"):
        if not keys.absent(key) and keys.flag(key):
            raise keys.error(key, f"true is not supported for model_type {family}")
    keys.one_of("hidden_act", ("silu",), "a supported activation")
    _refuse_sliding_window(keys)


def _refuse_sliding_window(keys: _Keys) -> None:
    has_switch = not keys.absent("use_sliding_window")
    if has_switch and keys.flag("use_sliding_window"):
        raise keys.error("use_sliding_window", "true is not supported; only full attention is")
    if not has_switch and not keys.absent("sliding_window"):
        size = keys.config["sliding_window"]
        raise keys.error("sliding_window", f"{size!r} is not supported; only full attention is")
    if not keys.absent("layer_types"):
        other = sorted({str(kind) for kind in keys.container("layer_types", list)} - {"full_attention"})
        if other:
            raise keys.error("layer_types", f"{other} is not supported; only full_attention is")


def _rotary_base(keys: _Keys, family: str) -> float:
    """The rope base, from ``rope_theta`` (transformers 4) or ``rope_parameters`` (transformers 5)."""
    if not keys.absent("partial_rotary_factor") and keys.positive("partial_rotary_factor") != 1:
        raise keys.error("partial_rotary_factor", "other values than 1 are not supported")
    bases: dict[str, float] = {}
    if not keys.absent("rope_theta"):
        bases["rope_theta"] = keys.positive("rope_theta")
    for section in ("rope_scaling", "rope_parameters"):
        if keys.absent(section):
            continue
        rope = _Keys(keys.container(section, dict), keys.path)
        for kind in ("rope_type", "type"):
            if not rope.absent(kind) and rope.config[kind] != "default":
                raise keys.error(f"{section}.{kind}", f"{rope.config[kind]!r} is not supported; only 'default' is")
        extra = sorted(set(rope.config) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"})
        if extra:
            raise keys.error(f"{section}.{extra[0]}", "is not supported; only the default rope with rope_theta is")
        if not rope.absent("partial_rotary_factor") and rope.positive("partial_rotary_factor") != 1:
            raise keys.error(f"{section}.partial_rotary_factor", "other values than 1 are not supported")
        if not rope.absent("rope_theta"):
            bases[f"{section}.rope_theta"] = rope.positive("rope_theta")
    if not bases and family == "llama":
        return _LLAMA_1_AND_2_ROTARY_BASE
    if not bases:
        raise keys.error("rope_theta", "missing, as is rope_parameters.rope_theta; add the base of the rope")
    if len(set(bases.values())) > 1:
        raise keys.error(next(iter(bases)), f"the rope bases disagree: {bases}; keep one")
    return next(iter(bases.values()))

"""Bytes of the weights that an engine holds, where its checkpoint is quantised or the engine quantises them.

Quantised are the matrices of the layers, each with its scales; embedding, head, norms, biases, routers and a vision
tower stay in the engine's dtype, as do the modules that the format's own list of exceptions names.

    format                        bytes a weight         scales
    fp8, fbgemm_fp8               1                      fp32 a block of ``weight_block_size``, else a few a matrix
    awq, gptq                     ``bits`` / 8           fp16 and a zero point of ``bits`` a group
    compressed-tensors            ``num_bits`` / 8       fp16 a group; of a block fp32
    mxfp4                         1/2, experts alone     8 bits a group of 32
    modelopt                      1 or 1/2               8 bits a group of 16, for NVFP4
    bitsandbytes                  1 or 1/2               8 bits a group of 64, for 4 bits
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from mopd.conversion.models import families
from mopd.conversion.models.config_keys import CONFIG_FILE, QUANTISATION, Keys, read_config
from mopd.conversion.models.dims import ModelDims
from mopd.conversion.models.families import Placed
from mopd.planning.memory.shards import total_weights

BY_THE_ENGINE = {
    **dict.fromkeys(("fp8", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel"), 1.0), "bitsandbytes": 0.5 + 1 / 64,
}  # fmt: skip
"""Ways in which vLLM's ``quantization`` quantises a plain checkpoint as it loads it -> bytes a weight."""
METHODS = ("fp8", "fbgemm_fp8", "awq", "gptq", "compressed-tensors", "mxfp4", "modelopt", "bitsandbytes")
MAX_BITS = 16
_EXCEPTIONS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "llm_int8_skip_modules")
"""Keys that list what stays in the engine's dtype, each of some format."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFormat:
    """Format of a quantised model's weights."""

    name: str
    weight_bytes: float
    """Bytes of a quantised weight, with its share of the scales."""
    exceptions: frozenset[str] = frozenset()
    """Modules, or names of modules in every layer, that are not quantised; a regular expression behind ``re:``."""
    is_experts_alone: bool = False


def stored_format(folder: Path) -> StoredFormat | None:
    """Return the format of a Hugging Face folder's weights; ``None`` for one that is not quantised.

    Raises:
        UserError: file and key of a method whose bytes are not known.
    """
    keys = Keys(read_config(folder), folder / CONFIG_FILE)
    for key in QUANTISATION:
        if not keys.absent(key):
            return _read(keys.section(key))
    return None


def _read(keys: Keys) -> StoredFormat:
    method = keys.one_of("quant_method", METHODS, "a quantisation whose bytes a plan knows")
    name, size = method, 1.0
    if method in ("fp8", "fbgemm_fp8"):
        size = 1 + _of_block(keys, "weight_block_size")
    elif method in ("awq", "gptq"):
        key = "bits" if not keys.absent("bits") else "w_bit"
        name, size = f"{method} of {keys.at_most(key, MAX_BITS)} bits", _grouped(keys, key, _group_key(keys))
    elif method == "compressed-tensors":
        name, size = _compressed(keys)
    elif method == "mxfp4":
        size = 0.5 + 1 / 32
    elif method == "modelopt":
        algorithm = keys.one_of("quant_algo", ("FP8", "NVFP4"), "an algorithm whose bytes a plan knows")
        name, size = algorithm.lower(), 1.0 if algorithm == "FP8" else 0.5 + 1 / 16
    elif not keys.absent("load_in_4bit") and keys.flag("load_in_4bit"):
        name, size = f"{method} of 4 bits", BY_THE_ENGINE["bitsandbytes"]
    listed = [str(one) for key in _EXCEPTIONS if not keys.absent(key) for one in keys.container(key, list)]
    for one in (one for one in listed if one.startswith("re:")):
        try:
            re.compile(one.removeprefix("re:"))
        except re.error as error:
            raise keys.error("ignore", f"{one!r:.80} is no regular expression: {error}") from error
    return StoredFormat(name=name, weight_bytes=size, exceptions=frozenset(listed), is_experts_alone=method == "mxfp4")


def _compressed(keys: Keys) -> tuple[str, float]:
    """Return name and bytes of a weight after ``compressed-tensors``; those of its largest group of modules."""
    groups = keys.section("config_groups")
    found = []
    for name in groups.config:
        weights = groups.section(name).section("weights")
        kind = "fp" if not weights.absent("type") and weights.config["type"] == "float" else "int"
        bits = weights.at_most("num_bits", MAX_BITS)
        size = bits / 8 + _of_block(weights, "block_structure")
        if not weights.absent("group_size") and weights.config["group_size"] != -1:
            size += 2 / weights.count("group_size")
        found.append((size, f"{kind}{bits}"))
    if not found:
        raise keys.error("config_groups", "names no group: give one with its weights")
    size, name = max(found)
    return name, size


def _of_block(keys: Keys, key: str) -> float:
    """Return the bytes of a weight's share of one fp32 scale a block."""
    if keys.absent(key):
        return 0.0
    block = keys.container(key, list)
    if len(block) != 2 or not all(isinstance(side, int) and side > 0 for side in block):
        raise keys.error(key, f"{block!r:.80} is no block of rows and columns")
    return float(4 / math.prod(block))


def _group_key(keys: Keys) -> str:
    return "group_size" if not keys.absent("group_size") else "q_group_size"


def _grouped(keys: Keys, bits: str, group: str) -> float:
    each = keys.at_most(bits, MAX_BITS) / 8
    size = -1 if keys.absent(group) else keys.config[group]
    return each if size == -1 else each + (2 + each) / keys.count(group)


@lru_cache(maxsize=256)
def weights_bytes(dims: ModelDims, size: int, stored: StoredFormat | None) -> int:
    """Return the bytes of a model's weights, ``size`` bytes each where they are not quantised."""
    total = total_weights(dims)
    if stored is None:
        return total * size
    quantised = sum(
        math.prod(shape) * (dims.moe.num_experts if placed.param.is_expert and dims.moe is not None else 1)
        for layer in range(dims.num_layers)
        for param in families.layer_params(dims, layer)
        for placed in [families.place(param, dims, layer, 0 if param.is_expert else None)]
        for name, shape in zip(placed.hf_names, placed.hf_shapes, strict=True)
        if _is_quantised(placed, name, shape, stored)
    )
    return round(quantised * stored.weight_bytes + (total - quantised) * size)


def _is_quantised(placed: Placed, name: str, shape: tuple[int, ...], stored: StoredFormat) -> bool:
    if len(shape) < 2 or "router" in placed.megatron[0]:
        return False
    return (placed.param.is_expert or not stored.is_experts_alone) and not _is_exception(name, stored.exceptions)


def _is_exception(name: str, exceptions: frozenset[str]) -> bool:
    """Return whether a list of exceptions has the module of a tensor, one around it, or a part of its name."""
    parts = name.removesuffix(".weight").split(".")
    spans = (".".join(parts[start:end]) for start in range(len(parts)) for end in range(start + 1, len(parts) + 1))
    if not exceptions.isdisjoint(spans):
        return True
    module = ".".join(parts)
    return any(re.match(one[3:], module) is not None for one in exceptions if one.startswith("re:"))


def engine_format(
    stored: StoredFormat | None, extra: Mapping[str, Any]
) -> tuple[StoredFormat | None, float | None, tuple[tuple[str, str], ...]]:
    """Return the format in which vLLM with such further arguments holds a checkpoint's weights, the bytes of a number
    in its cache (``None``: those of its dtype), and by key below the group what a plan knows nothing of."""
    unknown, way, cache = list[tuple[str, str]](), extra.get("quantization"), extra.get("kv_cache_dtype", "auto")
    if way is not None and stored is None:
        if str(way) in BY_THE_ENGINE:
            stored = StoredFormat(name=str(way), weight_bytes=BY_THE_ENGINE[str(way)])
        else:
            text = f"{way!r}: a plan knows the bytes of {', '.join(BY_THE_ENGINE)}, and of checkpoints that are so"
            unknown.append(("engine.extra", f"quantization {text}"))
    size = {"auto": None, "bfloat16": 2.0, "float16": 2.0}.get(str(cache))
    if str(cache).startswith("fp8"):
        size = 1.0
    elif str(cache) not in ("auto", "bfloat16", "float16"):
        unknown.append(("engine.extra", f"kv_cache_dtype {cache!r}: a plan knows auto, bfloat16, float16 and fp8"))
    return stored, size, tuple(unknown)

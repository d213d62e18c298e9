"""Merging of a LoRA adapter, as the PEFT library saves it, into the weights of its base model.

``W + s B A`` with A [r, in], B [out, r] and ``s = lora_alpha / r`` (``/ sqrt(r)`` with ``use_rslora``), in fp32,
rounded once (Hu et al. 2021). Anything else in an adapter is refused by name, never dropped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mopd.base.files.json_text import read_json_object
from mopd.base.types import UserError
from mopd.conversion.hf.header import TensorInfo, read_header
from mopd.conversion.hf.reader import HfReader, open_model, require_finite
from mopd.conversion.job import MAX_FILE_BYTES, Job, sha256_of
from mopd.conversion.jobs.rewriting import rewritten
from mopd.conversion.mapped import TORCH_DTYPES, map_tensor
from mopd.conversion.models.dims import ModelDims
from mopd.conversion.models.towers import named_as_read

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PATTERNS = ("rank_pattern", "alpha_pattern")
_MAX_PATTERN = 200
_REFUSED = (
    "use_dora", "fan_in_fan_out", "layer_replication", "trainable_token_indices", "target_parameters", "lora_bias",
)  # fmt: skip
"""Keys that change what the adapter computes, unless they are empty or false."""


@dataclass(frozen=True, slots=True)
class _Adapter:
    """Low-rank factors by the weight that they change, and whole tensors that replace one."""

    path: Path
    entries: Mapping[str, TensorInfo]
    factors: Mapping[str, tuple[str, str]]
    replaced: Mapping[str, str]
    scale: Mapping[str, float]

    def read(self, name: str) -> Tensor:
        info = self.entries[name]
        return require_finite(name, map_tensor(self.path, info.start, info.shape, TORCH_DTYPES[info.dtype]), self.path)


def merge_lora(source: Path, adapter: Path, target: Path, *, max_file_bytes: int = MAX_FILE_BYTES) -> Job:
    """Return the job of writing the base model ``source`` with the adapter folder merged into it, in the base's dtypes.

    Raises:
        UserError: an adapter of another kind, for another model, or with a part that cannot be merged.
    """
    reader, dims = open_model(source)
    parts = _read_adapter(adapter, reader, dims)

    made_from = {"adapter": [sha256_of(adapter / name) for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]}
    return rewritten(
        "merge-lora", reader, target, lambda name: _merged(name, reader, parts),
        made_from=made_from, max_file_bytes=max_file_bytes,
    )  # fmt: skip


def _merged(name: str, reader: HfReader, parts: _Adapter) -> Tensor:
    weight = reader.read_finite(name)
    if name in parts.replaced:
        return parts.read(parts.replaced[name]).to(weight.dtype)
    if name not in parts.factors:
        return weight
    down, up = (parts.read(factor).float() for factor in parts.factors[name])
    return torch.addmm(weight.float(), up, down, alpha=parts.scale[name]).to(weight.dtype)


def _read_adapter(folder: Path, reader: HfReader, dims: ModelDims) -> _Adapter:
    config = _read_config(folder / ADAPTER_CONFIG)
    path = folder / ADAPTER_WEIGHTS
    entries = read_header(path)
    if not entries:
        raise UserError(f"{path}: holds no tensor: fetch the file again")
    factors: dict[str, dict[str, str]] = {}
    replaced, scale = {}, {}
    for key, info in entries.items():
        if info.dtype not in TORCH_DTYPES:
            raise UserError(
                f"{path}: '{key}' has dtype {info.dtype}, which is no dtype of weights: fetch the file again"
            )
        found = re.fullmatch(re.escape(_PREFIX) + r"(.+?)(\.lora_([AB])|\.modules_to_save)?\.weight", key)
        name = named_as_read(f"{found[1]}.weight", dims) if found else ""
        if found is None or name not in reader.names:
            raise UserError(f"{path}: '{key}' has no place in {reader.folder}: use the base model of this adapter")
        if found[3]:
            factors.setdefault(name, {})[found[3]] = key
            scale[name] = _scale(config, found[1], folder / ADAPTER_CONFIG)
        else:
            replaced[name] = key
    for name, pair in factors.items():
        whole, shapes = list(reader.shape(name)), {side: entries[key].shape for side, key in pair.items()}
        rank = next(iter(shapes.get("A", ())), 0)
        if len(whole) != 2 or shapes != {"A": (rank, whole[1]), "B": (whole[0], rank)}:
            raise UserError(f"{path}: the factors of '{name}' have shapes {shapes}, the weight {whole}")
    for name, key in replaced.items():
        if entries[key].shape != reader.shape(name):
            both = f"{list(entries[key].shape)}, the model {list(reader.shape(name))}"
            raise UserError(f"{path}: '{key}' has shape {both}")
    return _Adapter(path, entries, {name: (pair["A"], pair["B"]) for name, pair in factors.items()}, replaced, scale)


def _read_config(path: Path) -> dict[str, Any]:
    config = read_json_object(path, cure="give the folder of a PEFT adapter, or fetch the file again")
    if config.get("peft_type") != "LORA":
        raise UserError(f"{path}: 'peft_type' is not 'LORA': only LoRA adapters can be merged")
    for key in _REFUSED:
        if config.get(key):
            raise UserError(
                f"{path}: '{key}' is {config[key]!a:.200}, which cannot be merged: use a plain LoRA adapter"
            )
    for key in _PATTERNS:
        patterns = config.get(key)
        if patterns is not None and not (isinstance(patterns, dict) and all(map(_is_plain_pattern, patterns))):
            raise UserError(
                f"{path}: '{key}' is {patterns!a:.200}, not a map from simple patterns of module names: write the "
                "names out, without nested repetition"
            )
    if config.get("bias", "none") != "none":
        raise UserError(f"{path}: 'bias' is {config['bias']!a:.200}, which cannot be merged: only 'none' can")
    return config


def _is_plain_pattern(pattern: str) -> bool:
    """Return whether a regular expression is safe from exponential time: few repetitions, and none of a group."""
    if len(pattern) > _MAX_PATTERN or re.search(r"\)[*+?{]", pattern) or len(re.findall(r"[*+{]", pattern)) > 3:
        return False
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return False
    return True


def _scale(config: Mapping[str, Any], module: str, path: Path) -> float:
    """Return ``lora_alpha / r`` of one module; patterns match the end of its name, as in PEFT."""
    values = {}
    for key, patterns in zip(("r", "lora_alpha"), _PATTERNS, strict=True):
        own = [v for pattern, v in (config.get(patterns) or {}).items() if re.fullmatch(rf"(.*\.)?({pattern})", module)]
        value = own[0] if own else config.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise UserError(f"{path}: '{key}' is {value!a:.200}, not a positive number")
        values[key] = value
    rank = float(values["r"])
    return float(values["lora_alpha"]) / (math.sqrt(rank) if config.get("use_rslora") else rank)

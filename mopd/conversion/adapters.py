"""Low-rank adapters in PEFT's format: a folder with ``adapter_config.json`` and ``adapter_model.safetensors``, whose
tensors are named after the modules of the base model and have its shapes.

Shapes: I inputs and O outputs of a module, r rank.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mopd.base.files.json_text import read_json_object
from mopd.base.types import UserError
from mopd.config.student import LoraConfig
from mopd.conversion.hf.header import TensorInfo, read_header
from mopd.conversion.hf.reader import HfReader
from mopd.conversion.mapped import TORCH_DTYPES, map_tensor
from mopd.conversion.models.adapted import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from mopd.conversion.models.mapping import merged

_PREFIX = "base_model.model."
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.weight")
_REFUSED = (
    "bias", "use_dora", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out",
    "layer_replication", "target_parameters", "trainable_token_indices", "alora_invocation_tokens", "use_bdlora",
    "use_qalora",
)  # fmt: skip
"""Keys of the config that change what the tensors mean, unless they are empty."""
_DTYPES = ("F16", "BF16", "F32", "F64")
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Initial values that leave the base as it is."""


def peft_names(module: str) -> tuple[str, str]:
    """Return the names of A [r, I] and B [O, r] of a module of the base."""
    return f"{_PREFIX}{module}.lora_A.weight", f"{_PREFIX}{module}.lora_B.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """One adapter's folder, checked."""

    path: Path
    rank: int
    scale: float
    """Factor of B A."""
    modules: tuple[str, ...]
    """Names of the base's modules that it changes, sorted."""
    sha256: str
    """Hash of config and tensors."""
    infos: Mapping[str, TensorInfo]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by PEFT's names, in the dtype of the file. ``UserError`` for one that is not finite."""
        found = {}
        for name, info in self.infos.items():
            tensor = map_tensor(self.path / ADAPTER_WEIGHTS, info.start, info.shape, TORCH_DTYPES[info.dtype]).clone()
            if not torch.isfinite(tensor).all():
                raise UserError(f"{self.path}: {name!r} holds NaN or infinite values: train the adapter again")
            found[name] = tensor
        return found


def read_adapter(folder: str | Path, base: str | Path | None = None) -> Adapter:
    """Read and check an adapter, with ``base`` also against the folder of its base model.

    Raises:
        UserError: anything is missing or unreadable, the adapter is of a kind that is not plain LoRA on linear modules,
            or of another base.
    """
    folder = Path(folder)
    path = folder / ADAPTER_WEIGHTS
    if not (folder / ADAPTER_CONFIG).is_file() or not path.is_file():
        raise UserError(
            f"{folder}: no {ADAPTER_CONFIG} with {ADAPTER_WEIGHTS}: name a folder that PEFT or mopd has saved"
        )
    config = read_json_object(folder / ADAPTER_CONFIG, cure="save the adapter again")
    rank, scale = _read_scale(folder, config)
    infos = read_header(path)
    modules = _modules_of(folder, infos, rank)
    if base is not None:
        _check_base(folder, Path(base), modules, infos)
    digest = hashlib.sha256(f"{rank}\0{scale!r}\0".encode() + path.read_bytes()).hexdigest()
    return Adapter(path=folder, rank=rank, scale=scale, modules=modules, sha256=digest, infos=infos)


def read_start(folder: str | Path, base: str | Path, config: LoraConfig, modules: Collection[str]) -> Adapter:
    """Read the adapter that a student begins with, which must be the one of ``student.lora``.

    Raises:
        UserError: as ``read_adapter``, or rank, alpha or ``modules`` are others.
    """
    given = read_adapter(folder, base)
    for key, own, other in (("rank", config.rank, given.rank), ("alpha", config.scale, given.scale)):
        if own != other:
            told = f"{own} and {other}" if key == "rank" else f"{config.alpha:g} and {other * given.rank:g}"
            raise UserError(f"student.lora.{key} and student.lora.path {folder} differ: {told}: give both one {key}")
    if different := {*modules} ^ {*given.modules}:
        where = "path" if min(different) in modules else "target_modules"
        raise UserError(
            f"student.lora.{where} lacks {min(different)!r}, which the other has ({len(different)} modules differ): "
            "name those of the folder in student.lora.target_modules"
        )
    return given


def _read_scale(folder: Path, config: Mapping[str, Any]) -> tuple[int, float]:
    where = folder / ADAPTER_CONFIG
    if config.get("peft_type") != "LORA":
        raise UserError(f"{where}: peft_type is {config.get('peft_type')!r}: only LORA adapters can be used")
    for key in _REFUSED:
        value = config.get(key)
        if value and value != "none":
            raise UserError(f"{where}: {key} is {value!r}, which is not supported: merge the adapter into its base")
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        raise UserError(f"{where}: init_lora_weights {init!r} changes the base: merge the adapter into its base")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise UserError(f"{where}: r is {rank!r}: an adapter's rank is 1 or more")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise UserError(f"{where}: lora_alpha is {alpha!r}, no number: save the adapter again")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _modules_of(folder: Path, infos: Mapping[str, TensorInfo], rank: int) -> tuple[str, ...]:
    """Return the modules of the tensors, each of which has its A and its B of this rank."""
    modules: dict[str, set[str]] = {}
    for name in infos:
        match = _NAME.fullmatch(name)
        if match is None:
            raise UserError(f"{folder}: tensor {name!r} is no lora_A or lora_B of a linear module: merge the adapter")
        if infos[name].dtype not in _DTYPES:
            raise UserError(
                f"{folder}: {name!r} has dtype {infos[name].dtype}, adapters have one of {', '.join(_DTYPES)}: save "
                "the adapter again"
            )
        modules.setdefault(match[1], set()).add(match[2])
    for module, halves in modules.items():
        if module.rsplit(".", 1)[-1] in ("lm_head", "embed_tokens"):
            raise UserError(f"{folder}: adapts {module!r}, and engines keep that matrix: train without it, or merge it")
        if len(halves) < 2:
            raise UserError(f"{folder}: {module!r} has lora_{min(halves)} alone: save the adapter again")
        a, b = (infos[name].shape for name in peft_names(module))
        if len(a) != 2 or len(b) != 2 or (a[0], b[1]) != (rank, rank):
            raise UserError(f"{folder}: {module!r} has A {list(a)} and B {list(b)}, {ADAPTER_CONFIG} says rank {rank}")
    if not modules:
        raise UserError(f"{folder}: {ADAPTER_WEIGHTS} holds no tensor: save the adapter again")
    return tuple(sorted(modules))


def _check_base(folder: Path, base: Path, modules: tuple[str, ...], infos: Mapping[str, TensorInfo]) -> None:
    reader = HfReader(base)
    for module in modules:
        if f"{module}.weight" not in reader.names:
            raise UserError(f"{folder}: adapts {module!r}, which {base} does not have: name the adapter's own base")
        a, b = (infos[name].shape for name in peft_names(module))
        wanted = reader.shape(f"{module}.weight")
        if (b[0], a[1]) != wanted:
            raise UserError(
                f"{folder}: {module!r} has A {list(a)} and B {list(b)}, but its weight in {base} is {list(wanted)}: "
                "name the adapter's own base"
            )


def merge_adapter(base: Mapping[str, Tensor], adapter: Adapter) -> dict[str, Tensor]:
    """Return the changed weights by name, each computed in float64 and rounded once to its own dtype."""
    tensors, changed = adapter.tensors(), {}
    for module in adapter.modules:
        weight = base[f"{module}.weight"]
        a, b = (tensors[name].to(weight.device) for name in peft_names(module))
        changed[f"{module}.weight"] = merged(weight, a, b, adapter.scale)
    return changed

"""Low-rank adapters in PEFT's format: a folder with ``adapter_config.json`` and ``adapter_model.safetensors``, whose
tensors are named after the modules of the base model and have its shapes.

Shapes: I inputs and O outputs of a module, r rank.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mopd.base.files.json_text import read_json_object
from mopd.base.types import UserError
from mopd.config.student import LoraConfig
from mopd.conversion.hf.header import TensorInfo, read_header
from mopd.conversion.hf.reader import HfReader, require_finite
from mopd.conversion.mapped import TORCH_DTYPES, map_tensor
from mopd.conversion.models.adapted import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from mopd.conversion.models.mapping import merged

_NAME = re.compile(r"base_model\.model\.(.+?)(\.lora_[AB]|\.modules_to_save)?\.weight")
_REFUSED = (
    "bias", "use_dora", "lora_bias", "fan_in_fan_out", "layer_replication", "target_parameters",
    "trainable_token_indices", "alora_invocation_tokens", "use_bdlora", "use_qalora",
)  # fmt: skip
"""Keys of the config that change what the tensors mean, unless they are empty."""
_PATTERNS = {"r": "rank_pattern", "lora_alpha": "alpha_pattern"}
"""Key -> key of its values for some modules alone."""
_MAX_PATTERN = 200
_DTYPES = ("F16", "BF16", "F32", "F64")
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Initial values that leave the base as it is."""


def peft_names(module: str) -> tuple[str, str]:
    """Return the names of A [r, I] and B [O, r] of a module of the base."""
    return f"base_model.model.{module}.lora_A.weight", f"base_model.model.{module}.lora_B.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """One adapter's folder, checked."""

    path: Path
    rank: int
    scale: float
    """Factor of B A."""
    scales: Mapping[str, float]
    """The factor of each module with an A and a B; ``scale`` but for patterns."""
    replaced: Mapping[str, str]
    """Module -> name of the tensor that stands in the place of its weight (``modules_to_save``)."""
    infos: Mapping[str, TensorInfo]

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the base's modules with an A and a B, sorted."""
        return tuple(sorted(self.scales))

    @property
    def sha256(self) -> str:
        """Hash of config and tensors."""
        content = (self.path / ADAPTER_WEIGHTS).read_bytes()
        return hashlib.sha256(f"{self.rank}\0{self.scale!r}\0".encode() + content).hexdigest()

    def read(self, name: str) -> Tensor:
        """Return a tensor by PEFT's name, in the dtype of the file. ``UserError`` for one that is not finite."""
        path, info = self.path / ADAPTER_WEIGHTS, self.infos[name]
        return require_finite(name, map_tensor(path, info.start, info.shape, TORCH_DTYPES[info.dtype]), path)

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of all tensors by PEFT's names, as ``read`` does."""
        return {name: self.read(name).clone() for name in self.infos}

    def check_base(self, base: HfReader, named: Callable[[str], str] = str) -> None:
        """Raise ``UserError`` unless each module is the base's, whose spelling of a weight ``named`` returns."""
        for module in (*self.modules, *self.replaced):
            if (weight := named(f"{module}.weight")) not in base.names:
                raise UserError(
                    f"{self.path}: adapts {module!r}, which {base.folder} does not have: name the adapter's own base"
                )
            if module in self.replaced:
                shape = self.infos[self.replaced[module]].shape
                shown = f"the weight {list(shape)}"
            else:
                a, b = (self.infos[name].shape for name in peft_names(module))
                shape, shown = (b[0], a[1]), f"A {list(a)} and B {list(b)}"
            if shape != base.shape(weight):
                raise UserError(
                    f"{self.path}: {module!r} has {shown}, but its weight in {base.folder} is "
                    f"{list(base.shape(weight))}: name the adapter's own base"
                )


def read_adapter(folder: str | Path, base: str | Path | None = None) -> Adapter:
    """Read and check an adapter that stands beside its base, with ``base`` also against the base's folder.

    Raises:
        UserError: as ``read_any_adapter``, or the adapter can only be merged, or is of another base.
    """
    folder = Path(folder)
    adapter = read_any_adapter(folder, refused=("modules_to_save", *_PATTERNS.values()))
    for module in (*adapter.modules, *adapter.replaced):
        if module.rsplit(".", 1)[-1] in ("lm_head", "embed_tokens"):
            raise UserError(f"{folder}: adapts {module!r}, and engines keep that matrix: train without it, or merge it")
        if module in adapter.replaced:
            raise UserError(f"{folder}: tensor {adapter.replaced[module]!r} is no lora_A or lora_B: merge the adapter")
    if base is not None:
        adapter.check_base(HfReader(Path(base)))
    return adapter


def read_any_adapter(folder: Path, *, refused: Sequence[str] = ()) -> Adapter:
    """Read and check an adapter, whatever can be merged: ranks and scales by pattern, and weights saved whole.

    Raises:
        UserError: anything is missing or unreadable, a key of the config that is ``refused`` is set, or the adapter is
            of a kind that is not plain LoRA on linear modules.
    """
    if not (folder / ADAPTER_CONFIG).is_file() or not (folder / ADAPTER_WEIGHTS).is_file():
        raise UserError(
            f"{folder}: no {ADAPTER_CONFIG} with {ADAPTER_WEIGHTS}: name a folder that PEFT or mopd has saved"
        )
    config = _read_config(folder / ADAPTER_CONFIG, refused)
    infos = read_header(folder / ADAPTER_WEIGHTS)
    if not infos:
        raise UserError(f"{folder}: {ADAPTER_WEIGHTS} holds no tensor: save the adapter again")
    halves: dict[str, set[str]] = {}
    replaced = {}
    for name, info in infos.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise UserError(f"{folder}: tensor {name!r} is no weight, lora_A or lora_B: use a plain LoRA adapter")
        if info.dtype not in _DTYPES:
            raise UserError(
                f"{folder}: {name!r} has dtype {info.dtype}, adapters have one of {', '.join(_DTYPES)}: save the "
                "adapter again"
            )
        if (match[2] or "").startswith(".lora"):
            halves.setdefault(match[1], set()).add(name)
        else:
            replaced[match[1]] = name
    rank, scale = _shape_of(folder, config, "")
    scales = {module: _checked_scale(folder, config, module, own, infos) for module, own in halves.items()}
    return Adapter(path=folder, rank=rank, scale=scale, scales=scales, replaced=replaced, infos=infos)


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


def _read_config(path: Path, refused: Sequence[str]) -> dict[str, Any]:
    config = read_json_object(path, cure="save the adapter again")
    if config.get("peft_type") != "LORA":
        raise UserError(f"{path}: peft_type is {config.get('peft_type')!r}: only LORA adapters can be used")
    for key in (*_REFUSED, *refused):
        if (value := config.get(key)) and value != "none":
            cure = "merge the adapter into its base" if key in refused else "use a plain LoRA adapter"
            raise UserError(f"{path}: {key} is {value!a:.200}, which is not supported: {cure}")
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        raise UserError(f"{path}: init_lora_weights {init!r} changes the base: save it as a plain LoRA adapter")
    for key in _PATTERNS.values():
        patterns = config.get(key)
        if patterns is not None and not (isinstance(patterns, dict) and all(map(_is_plain_pattern, patterns))):
            raise UserError(
                f"{path}: {key} is {patterns!a:.200}, not a map from simple patterns of module names: write the names "
                "out, without nested repetition"
            )
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


def _shape_of(folder: Path, config: Mapping[str, Any], module: str) -> tuple[int, float]:
    """Return rank and scale of a module; patterns match the end of its name, as in PEFT."""
    values = {}
    for key, patterns in _PATTERNS.items():
        own = [v for pattern, v in (config.get(patterns) or {}).items() if re.fullmatch(rf"(.*\.)?({pattern})", module)]
        values[key] = own[0] if own else config.get(key)
    (rank, alpha), where = values.values(), folder / ADAPTER_CONFIG
    if type(rank) is not int or rank < 1:
        raise UserError(f"{where}: r is {rank!a:.200}: an adapter's rank is 1 or more")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise UserError(f"{where}: lora_alpha is {alpha!a:.200}, no number: save the adapter again")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _checked_scale(
    folder: Path, config: Mapping[str, Any], module: str, names: Collection[str], infos: Mapping[str, TensorInfo]
) -> float:
    """Return the scale of a module that has its A and its B of the rank that the config says."""
    if len(names) < 2:
        raise UserError(f"{folder}: {module!r} has {min(names).rsplit('.', 2)[1]} alone: save the adapter again")
    rank, scale = _shape_of(folder, config, module)
    a, b = (infos[name].shape for name in peft_names(module))
    if len(a) != 2 or len(b) != 2 or (a[0], b[1]) != (rank, rank):
        raise UserError(f"{folder}: {module!r} has A {list(a)} and B {list(b)}, {ADAPTER_CONFIG} says rank {rank}")
    return scale


def merge_adapter(base: Mapping[str, Tensor], adapter: Adapter) -> dict[str, Tensor]:
    """Return the changed weights by name, each computed in float64 and rounded once to its own dtype."""
    tensors, changed = adapter.tensors(), {}
    for module in adapter.modules:
        weight = base[f"{module}.weight"]
        a, b = (tensors[name].to(weight.device) for name in peft_names(module))
        changed[f"{module}.weight"] = merged(weight, a, b, adapter.scale)
    return changed

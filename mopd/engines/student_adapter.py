"""The adapter that a student sends in the place of all its weights, as engines know it before it arrives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mopd.config.student import LoraConfig
from mopd.conversion.adapters import peft_names
from mopd.conversion.models.adapted import Adapted, adapted_modules
from mopd.conversion.models.reading import read_dims

STUDENT = "student"
"""Its name in engines; no request names it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudentAdapter:
    """Shape of the adapter. Letters: I inputs and O outputs of a module, r rank."""

    rank: int
    alpha: float
    modules: tuple[Adapted, ...]

    @classmethod
    def of(cls, folder: Path, cfg: LoraConfig) -> StudentAdapter:
        """Return that of the student with ``cfg`` beside the model of ``folder``."""
        modules = tuple(adapted_modules(read_dims(folder), cfg.target_modules))
        return cls(rank=cfg.rank, alpha=cfg.alpha, modules=modules)

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / self.rank

    @property
    def slots(self) -> Mapping[str, Tensor]:
        """PEFT's names with empty tensors A [r, I] and B [O, r] of each module."""
        found = {}
        for one in self.modules:
            shapes = (self.rank, one.num_inputs), (one.num_outputs, self.rank)
            for name, shape in zip(peft_names(one.module), shapes, strict=True):
                found[name] = torch.empty(shape, device="meta")
        return found

    @property
    def peft_config(self) -> dict[str, Any]:
        """What vLLM reads of ``adapter_config.json``."""
        targets = sorted({one.module.rsplit(".", 1)[-1] for one in self.modules})
        return {"peft_type": "LORA", "r": self.rank, "lora_alpha": self.alpha, "target_modules": targets}

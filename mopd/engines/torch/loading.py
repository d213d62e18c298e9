"""Loading of transformers models from local folders, and the place of each checkpoint tensor in them.

Nothing is silently initialised, the random state stays untouched, no progress bars appear. A model usually has a
parameter of each name. transformers 5 keeps all experts of a layer in two parameters (``gate_up_proj`` [E, 2F, H] and
``down_proj`` [E, H, F]) and renames Mixtral's blocks, while checkpoints keep one tensor per expert and the old names.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from mopd.base.types import UserError
from mopd.conversion.hf import pretrained
from mopd.conversion.hf.pretrained import read_stop_ids
from mopd.conversion.hf.stacked import split
from mopd.conversion.models.known import FAMILIES

__all__ = ["build_empty_model", "load_model", "read_config", "read_stop_ids", "weight_slots"]

_FUSED_GATE_UP = ".mlp.experts.gate_up_proj"
_FUSED_DOWN = ".mlp.experts.down_proj"
_FLAT = {"model.visual.": "visual.", "model.language_model.": "model."}


def load_model(folder: Path, dtype: str, device: torch.device) -> PreTrainedModel:
    """Load all weights of ``folder`` in ``dtype`` onto ``device``; ``UserError`` names what is wrong in the folder."""
    read_config(folder)
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"{folder}: no safetensors file (other weight formats are not read): save the model with them")
    with _quiet(), _frozen_random_state(device):
        model, info = pretrained.load_weights(folder, getattr(torch, dtype))
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
        if info[kind]:
            raise UserError(f"{folder}: {kind.replace('_', ' ')} in the weights: {sorted(map(str, info[kind]))[:3]}")
    for parameter in model.parameters():
        # The loader maps the file: tensors lie at odd addresses, where kernels round differently than on torch's own
        # memory, and would change with the file. A copy makes equal weights give equal bits.
        parameter.data = parameter.data.to(device, copy=True)
    model = cast(PreTrainedModel, model.to(device))
    with _frozen_random_state(device):
        pretrained.require_computes(folder, model)
    return model


def build_empty_model(folder: Path, dtype: str, device: torch.device) -> PreTrainedModel:
    """Build the model of ``folder/config.json`` with undefined weights."""
    with _quiet(), _frozen_random_state(device):
        return pretrained.build_model(folder, getattr(torch, dtype), device)


def read_config(folder: Path) -> PretrainedConfig:
    """Return ``config.json`` of a local folder; ``UserError`` if it is missing or unreadable."""
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: no config.json: name a folder with a Hugging Face checkpoint")
    return pretrained.load_config(folder)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress transformers' progress bars and reports inside the context: the terminal belongs to the run."""
    shown, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if shown:
            transformers_logging.enable_progress_bar()


@contextmanager
def _frozen_random_state(device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def weight_slots(model: PreTrainedModel, naming: Literal["flat", "nested"] | None = None) -> dict[str, Tensor]:
    """Return checkpoint name -> memory of the weight, in the checkpoint's shape: writing there loads the tensor. Every
    weight of the model occurs once (tied ones under their first name).

    ``naming`` is the checkpoint's (``VisionDims``) for a model that sees images; transformers' own is nested.
    """
    persistent = model.state_dict().keys()
    slots: dict[str, Tensor] = dict(model.named_parameters())
    slots |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    each: dict[str, Tensor] = {}
    family = FAMILIES.get(model.config.model_type)
    for name, tensor in slots.items():
        each |= _split_experts(name, tensor, is_stored_stacked=family is not None and family.stacked_experts)
    if family is not None and family.renamed:
        return {_stored_name(name, family.renamed): tensor for name, tensor in each.items()}
    if naming == "flat":
        return {_flat_name(name): tensor for name, tensor in each.items()}
    return each


def _split_experts(name: str, tensor: Tensor, *, is_stored_stacked: bool) -> dict[str, Tensor]:
    if is_stored_stacked:
        return split(name, tensor) if ".mlp.experts." in name else {name: tensor}
    if name.endswith(_FUSED_GATE_UP):
        prefix = name.removesuffix("gate_up_proj")
        parts = {"gate_proj": 0, "up_proj": 1}
        return {
            f"{prefix}{e}.{part}.weight": own.chunk(2)[half]
            for e, own in enumerate(tensor)
            for part, half in parts.items()
        }
    if name.endswith(_FUSED_DOWN):
        prefix = name.removesuffix("down_proj")
        return {f"{prefix}{e}.down_proj.weight": own for e, own in enumerate(tensor)}
    return {name: tensor}


def _stored_name(name: str, renamed: tuple[tuple[str, str], ...]) -> str:
    if ".mlp." not in name:
        return name
    for new, old in renamed:
        name = name.replace(new, old)
    return name


def _flat_name(name: str) -> str:
    for nested, flat in _FLAT.items():
        if name.startswith(nested):
            return flat + name.removeprefix(nested)
    return name

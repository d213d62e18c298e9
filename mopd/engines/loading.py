"""Transformers models from local folders: safetensors only, nothing silently initialised, random state untouched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils import logging as transformers_logging

from mopd.types import UserError


def load_model(folder: Path, dtype: str, device: torch.device) -> PreTrainedModel:
    """All weights of ``folder`` in ``dtype`` on ``device``; ``UserError`` names the folder and what is wrong in it."""
    read_config(folder)
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"{folder}: no safetensors file (other weight formats are not read): save the model with them")
    with _quiet(), _frozen_random_state(device):
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=getattr(torch, dtype),
                attn_implementation="sdpa",
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise UserError(f"{folder}: cannot load the model: {_one_line(error)}") from error
    model, info = loaded
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
        if info[kind]:
            raise UserError(f"{folder}: {kind.replace('_', ' ')} in the weights: {sorted(map(str, info[kind]))[:3]}")
    for parameter in model.parameters():
        # The loader maps the file: tensors lie at odd addresses, where kernels round differently than on torch's own
        # memory, and would change with the file. A copy makes equal weights give equal bits.
        parameter.data = parameter.data.to(device, copy=True)
    return cast(PreTrainedModel, model.to(device))


def build_empty_model(folder: Path, dtype: str, device: torch.device) -> PreTrainedModel:
    """The model of ``folder/config.json`` with undefined weights."""
    config = read_config(folder)
    with _quiet(), _frozen_random_state(device), no_init_weights(), device:
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    model.tie_weights()
    return model


def read_config(folder: Path) -> PretrainedConfig:
    """``config.json`` of a local folder; ``UserError`` when it is missing or unreadable."""
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: no config.json: name a folder with a Hugging Face checkpoint")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder}/config.json: unreadable: {_one_line(error)}") from error


def read_stop_ids(folder: Path, config: PretrainedConfig) -> tuple[int, ...]:
    """``eos_token_id`` (one or several) of ``generation_config.json``, else of the model config; or ()."""
    path = folder / "generation_config.json"
    eos = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    if eos is None:
        eos = config.get_text_config().eos_token_id
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars while a model loads: the terminal belongs to the run."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


@contextmanager
def _frozen_random_state(device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__

"""Weights in PyTorch's own format, read as tensors alone: no other object is made, and no code of the file runs."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from mopd.conversion.mapped import DTYPE_NAMES
from mopd.conversion.torch_dist_description import UnpicklingError
from mopd.types import UserError


def load_pickled(path: Path) -> dict[str, Tensor]:
    """The tensors of a ``.bin`` file by name, as views of the mapped file.

    Raises:
        UserError: the file is missing, holds anything but named tensors of a plain dtype, is corrupt, or has the format
            that PyTorch wrote before 1.6, which cannot be mapped.
    """
    if not path.is_file():
        raise UserError(f"{path}: missing; fetch the checkpoint again")
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (UnpicklingError, RuntimeError, ValueError, EOFError, OSError, KeyError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"{path}: cannot be read as tensors alone ({reason:.200}); convert it to safetensors where it was made"
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds a {type(content).__name__}, not tensors by name; use a plain checkpoint")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor) or value.dtype not in DTYPE_NAMES:
            raise UserError(f"{path}: {str(name)!r} is no plain tensor; use a plain checkpoint")
    return {name: value.detach() for name, value in content.items()}

"""Where the Triton layer can run. Importing this module imports no triton."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_IDS = 4096
"""Ids of one row, all teachers together: a row's ids are sorted by one program."""
MOST_PAIRS = 1 << 16
"""Ids of one row times teachers: a program holds a number for each, and has registers for about as many."""


@cache
def installed() -> bool:
    """Whether triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def resolve(backend: str, inp: Tensor) -> str:
    """The layer that serves a call: ``auto`` becomes triton for CUDA logits it can take, else chunked.

    Raises ValueError where ``triton`` is asked for by name and cannot serve the call.
    """
    if backend == "auto":
        return "triton" if inp.is_cuda and inp.dtype in DTYPES and installed() else "chunked"
    if backend != "triton":
        return backend
    if not installed():
        raise ValueError("backend is 'triton' and triton is not installed: install it or set 'chunked'")
    if inp.dtype not in DTYPES:
        raise ValueError(
            f"backend is 'triton' and inp is {inp.dtype}: pass bfloat16, float16 or float32, or set 'chunked'"
        )
    if not inp.is_cuda:
        from mopd.losses.triton.streaming import INTERPRETED

        if not INTERPRETED:
            raise ValueError(
                f"backend is 'triton' and inp is on {inp.device}: set 'chunked', "
                "or TRITON_INTERPRET=1 before the program starts"
            )
    return backend


def fits(num_ids: int, teachers: int, backend: str) -> bool:
    """Whether a row of ``num_ids`` ids fits. Raises ValueError where it does not and ``backend`` names the layer."""
    most = min(MOST_IDS, MOST_PAIRS // teachers)
    if num_ids <= most:
        return True
    if backend == "triton":
        raise ValueError(
            f"backend is 'triton' and a row holds {num_ids} ids of {teachers} teachers: at most {most} ids fit, "
            "set 'chunked' or 'auto'"
        )
    return False

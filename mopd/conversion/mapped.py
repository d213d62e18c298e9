"""Tensors that are views of a file: nothing is read before it is touched, and nothing stays resident once dropped."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

TORCH_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""Dtype by its name in the safetensors format; its U16, U32 and U64 have no place in a language model."""
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
WEIGHT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes that a user may ask for."""


def map_tensor(path: Path, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the tensor of ``shape`` whose bytes begin at byte ``start`` of a file: a private view, unmapped when
    freed.

    Writing into the view changes neither the file nor another view.
    """
    num_bytes = prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.empty(tuple(shape), dtype=dtype)
    first = start - start % mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as file:
        pages = mmap.mmap(file.fileno(), start - first + num_bytes, access=mmap.ACCESS_COPY, offset=first)
    raw = torch.frombuffer(pages, dtype=torch.uint8, offset=start - first)
    if start % dtype.itemsize:  # a file written without alignment
        raw = raw.clone()
    return raw.view(dtype).view(tuple(shape))


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy; valid as long as the tensor lives."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data

"""The header of one safetensors file, checked before any tensor is read.

Layout of the format: 8 bytes little-endian header length N, N bytes of JSON ``{name: {dtype, shape, data_offsets}}``,
then the data. A file that was truncated, overwritten or garbled is reported here, by name, and not by a crash later.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from mopd.base.files.json_text import parse_json
from mopd.base.files.reading import open_regular, shown_path
from mopd.base.types import UserError

_MAX_HEADER_BYTES = 2**24
"""Largest header: a hundred thousand tensors, more than the largest published models have in all their files."""
MAX_NAME = 512
_MAX_DIMENSIONS = 16
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Place of one tensor in its file."""

    dtype: str
    """Name in the format: F32, BF16, …"""
    shape: tuple[int, ...]
    start: int
    """First byte, counted from the start of the file."""
    stop: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return every tensor of a safetensors file, in file order.

    Raises:
        UserError: the file is missing, truncated, longer than its header says, or its header is corrupt.
    """
    with open_regular(path, cure="fetch the checkpoint again") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise _corrupt(path, f"its header would be {length} bytes long in a file of {size} bytes")
        text = file.read(length)
    try:
        entries = parse_json(text)
    except ValueError as error:
        raise _corrupt(path, f"its header is not valid JSON ({error})") from error
    if not isinstance(entries, dict):
        raise _corrupt(path, "its header is not a JSON object")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _corrupt(path, "its __metadata__ is not a map from names to text")
    data_start = 8 + length
    tensors = {name: _tensor_info(path, name, entry, data_start) for name, entry in entries.items()}
    _check_layout(path, tensors, data_start, size)
    return dict(sorted(tensors.items(), key=lambda item: item[1].start))


def _tensor_info(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    if not 0 < len(name) <= MAX_NAME:
        raise _corrupt(path, f"a tensor's name has {len(name)} characters ({name!a:.100})")
    try:
        dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers = (*shape, start, stop)
        sane = len(shape) <= _MAX_DIMENSIONS and all(type(number) is int and number >= 0 for number in numbers)
        sane = sane and stop - start == prod(shape) * _ITEM_BYTES[dtype]
    except (KeyError, TypeError, ValueError) as error:
        raise _corrupt(path, f"the header entry of tensor '{name}' is not understood ({entry!r:.200})") from error
    if not sane:
        raise _corrupt(path, f"dtype, shape and offsets of tensor '{name}' contradict each other ({entry!r:.200})")
    return TensorInfo(dtype, shape, data_start + start, data_start + stop)


def _check_layout(path: Path, tensors: dict[str, TensorInfo], data_start: int, size: int) -> None:
    """Check that tensors follow one another without gap or overlap and end where the file ends."""
    position = data_start
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if info.start != position:
            raise _corrupt(path, f"tensor '{name}' starts at byte {info.start}, expected {position}")
        position = info.stop
    if position != size:
        word = "truncated" if size < position else "longer than its header says"
        raise _corrupt(path, f"{word}: {size} bytes, the header describes {position}")


def _corrupt(path: Path, problem: str) -> UserError:
    return UserError(f"{shown_path(path)}: not a sound safetensors file: {problem}; fetch or write the file again")

"""Files in PyTorch's own format, read as plain values alone: no other object is made, and no code of the file runs."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from mopd.base.files.reading import open_regular, shown_path
from mopd.base.text import first_line, message_of
from mopd.base.types import UserError
from mopd.conversion.mapped import DTYPE_NAMES
from mopd.conversion.torch_dist.description import UnpicklingError

MAX_PICKLE_BYTES = 2**26
"""Largest pickle in an archive. It describes tensors, whose values lie beside it."""
DAMAGE = (
    UnpicklingError, zipfile.BadZipFile, RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError,
    EOFError, OSError, MemoryError, OverflowError, AssertionError,
)  # fmt: skip
"""Errors that torch and the standard library raise on a damaged archive."""


def load_pickled(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a ``.bin`` file by name, as views of the mapped file.

    Raises:
        UserError: the file is missing, holds anything but named tensors of a plain dtype, is corrupt, or has the format
            that PyTorch wrote before 1.6, which cannot be mapped.
    """
    cure = "convert it to safetensors where it was made"
    try:
        with open_regular(path, cure=cure) as stream:
            require_plain_archive(stream)
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except DAMAGE as error:
        raise UserError(f"{shown_path(path)}: cannot be read as tensors alone ({reason_of(error)}); {cure}") from error
    if not isinstance(content, dict):
        raise UserError(
            f"{shown_path(path)}: holds a {type(content).__name__}, not tensors by name; use a plain checkpoint"
        )
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor) or value.dtype not in DTYPE_NAMES:
            raise UserError(f"{shown_path(path)}: {str(name)!a:.100} is no plain tensor; use a plain checkpoint")
        if not value.is_contiguous() or value.layout != torch.strided:  # it may be larger than its file
            raise UserError(f"{shown_path(path)}: tensor {name!a:.100} is stored in strides; save it contiguous")
    return {name: value.detach() for name, value in content.items()}


def load_plain(stream: IO[bytes]) -> Any:
    """Return the value of one archive of ``torch.save``: containers, numbers, text and tensors.

    Raises:
        DAMAGE: the archive is damaged, inflates, or holds anything else.
    """
    require_plain_archive(stream)
    stream.seek(0)
    return torch.load(stream, map_location="cpu", weights_only=True)


def require_plain_archive(stream: IO[bytes], *, max_pickle_bytes: int = MAX_PICKLE_BYTES) -> list[zipfile.ZipInfo]:
    """Return the entries of an archive as ``torch.save`` writes it: nothing compressed, so that none is larger than its
    file.

    Raises:
        DAMAGE: it is no such archive.
    """
    with zipfile.ZipFile(stream) as archive:
        entries = archive.infolist()
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise UnpicklingError("it is compressed")
        if entry.filename.endswith(".pkl") and entry.file_size > max_pickle_bytes:
            raise UnpicklingError(f"its description is {entry.file_size} bytes long")
    return entries


def reason_of(error: BaseException) -> str:
    """Return the first line of a library's error, shortened."""
    text = message_of(error)
    if "weights_only" in text:  # torch goes on to recommend reading it without limits
        found = re.search(r"Unsupported (?:global: GLOBAL|class|operand) (\S+)", text)
        return f"it holds {found[1]:.100}, which is no plain value" if found else "it holds more than plain values"
    return f"{first_line(error):.200}"

"""Files on their way to disk: errors in one line, hashes, and a folder that appears whole."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mopd.types import UserError

_READ_BYTES = 1 << 22


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns the operating system's refusal to write (disk full, quota, permissions, …) into one line.

    Raises:
        UserError: names ``path`` and the system's reason.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written: {error.strerror or error}; free space there or name another place"
        ) from error


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Have a file's bytes, or a folder's entries, on disk before anything after this."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON with sorted keys; the same value gives the same bytes. The file is there whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        json.dump(value, stream, indent=1, sort_keys=True)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)


def files_below(folder: Path) -> list[str]:
    """Relative names of all files, sorted."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def require_free_bytes(folder: Path, needed: int) -> None:
    """Refuses to begin what the disk cannot hold.

    Raises:
        UserError: both sizes.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{folder}: needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free; free space there or name another "
            "place"
        )

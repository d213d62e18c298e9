"""Files on their way to disk: errors in one line, hashes, and a folder that appears whole."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mopd.files.reading import shown_path
from mopd.types import UserError

_READ_BYTES = 1 << 22


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


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


def require_new(target: Path) -> None:
    """Refuses a target that is there already, or a link, which a rename cannot replace.

    Raises:
        UserError: names it.
    """
    if target.is_symlink():
        raise UserError(f"{shown_path(target)}: is a symbolic link; name the folder that it leads to, or remove it")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{shown_path(target)}: already exists; name another folder or remove it")


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

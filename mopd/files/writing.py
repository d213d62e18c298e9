"""Files on their way to disk: whole or absent, and the system's refusal in one line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mopd.files.reading import shown_path
from mopd.types import UserError


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Turns the operating system's refusal to write (disk full, quota, permissions, …) into one line.

    Raises:
        UserError: names ``path`` and the system's reason.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{shown_path(path)}: cannot be written: {error.strerror or error}; free space there or name another place"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write a file so that readers, and a crash at any time, see the old text or the new one.

    Raises:
        UserError: the system refuses; what was there before stays.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with writing(path):
        try:
            with partial.open("wb") as file:
                file.write(text.encode("utf-8"))
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        sync(path.parent)


def write_json(path: Path, value: Any, *, sort_keys: bool = False) -> None:
    """``write_text`` of indented JSON; NaN and infinity are refused with ``ValueError``."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, sort_keys=sort_keys) + "\n")


def sync(path: Path) -> None:
    """Have a file's bytes, or a folder's entries, on disk before anything after this."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

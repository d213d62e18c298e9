"""Bytes and text of untrusted files: within a limit of size, every refusal in one line."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from mopd.base.text import visible
from mopd.base.types import UserError

MAX_TEXT_BYTES = 16 * 2**20
"""Default limit of a file that is read whole: far above any real configuration file or index."""
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
"""Mode bits by which users other than the owner may write a file."""


@contextmanager
def open_regular(path: str | Path, *, cure: str, follows_links: bool = True) -> Iterator[BinaryIO]:
    """Open a regular file for reading; errors while it is open are reported likewise.

    A pipe or a device is refused: it may never end, or never begin.

    Raises:
        UserError: the path is absent, is no regular file, or cannot be opened or read; ends in ``cure``.
    """
    try:
        # O_NONBLOCK: opening a pipe without a writer would wait for one.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follows_links else os.O_NOFOLLOW)
        descriptor = os.open(path, flags)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise UserError(f"{shown_path(path)}: not a regular file: {cure}")
        with os.fdopen(descriptor, "rb") as file:
            yield file
    except FileNotFoundError:
        raise UserError(f"{shown_path(path)}: does not exist: {cure}") from None
    except OSError as error:
        raise UserError(f"{shown_path(path)}: cannot be read ({error.strerror or error}): {cure}") from error
    except ValueError as error:
        if isinstance(error, UnicodeError) or "null byte" in str(error):
            raise UserError(f"{shown_path(path)}: not a possible file name: {cure}") from error
        raise


def resolved_file(path: str, *, cure: str) -> Path:
    """Return the absolute path of a file, links followed; ``UserError`` that ends in ``cure`` if there is none."""
    try:
        resolved = Path(path).resolve()
        is_file = resolved.is_file()
    except (OSError, ValueError, RuntimeError):  # too long, NUL, a circle of links
        is_file = False
    if not is_file:
        raise UserError(f"{shown_path(path)}: no such file: {cure}")
    return resolved


def read_bytes(path: str | Path, *, cure: str, max_bytes: int = MAX_TEXT_BYTES, is_private: bool = False) -> bytes:
    """Return the whole file. Raise ``UserError`` as ``open_regular`` does, and above ``max_bytes``.

    Args:
        is_private: refuses a file that another user may have written, and a symbolic link.
    """
    with open_regular(path, cure=cure, follows_links=not is_private) as file:
        # Of the open file, not of the path: the path may be replaced between two looks.
        found = os.fstat(file.fileno())
        if is_private and (found.st_uid != os.geteuid() or found.st_mode & OTHERS_WRITE):
            raise UserError(f"{shown_path(path)}: others than this user may have written it: {cure}")
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise UserError(f"{shown_path(path)}: longer than {max_bytes} bytes, the limit of such a file: {cure}")
    return content


def read_text(path: str | Path, *, cure: str, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Return the whole file as UTF-8. Raise ``UserError`` as ``read_bytes`` does, and for other encodings."""
    content = read_bytes(path, cure=cure, max_bytes=max_bytes)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{shown_path(path)}:{line}: not UTF-8 text ({error.reason}): {cure}") from error


def shown_path(path: str | Path) -> str:
    """Return a path for a message: control characters for terminals are escaped, very long paths are cut."""
    text = visible(os.fspath(path))
    return text if len(text) <= 300 else f"{text[:200]}…{text[-80:]}"

"""Writing of files: whole or absent, and the system's refusal in one line."""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from mopd.base.files.reading import shown_path
from mopd.base.text import visible
from mopd.base.types import CutOffError, UserError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors that mean that the disk, a quota or a limit of file sizes is used up."""
REFUSED = FULL | {errno.EROFS}
"""Errors that only a write gets and only the user can cure, whatever was being written."""
PARTIALS = ".*.partial"
"""Pattern of the files in which ``write_text`` collects its bytes, and which a killed process leaves."""
_CURES = {
    **dict.fromkeys(FULL, "free space there or name another place"),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "make it writable or name another place"),
    errno.ENAMETOOLONG: "name a shorter path",
    errno.ELOOP: "remove the circle of symbolic links or name another place",
}
_RUST_ERROR = re.compile(r"\(os error (\d+)\)")
"""Form in which libraries in Rust (safetensors) show the system's error."""


class WriteRefusedError(CutOffError):
    """The operating system refuses to write a file."""


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Turn the operating system's refusal to write (disk full, quota, permissions, …) into one line.

    Raises:
        WriteRefusedError: names ``path`` and the system's reason.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = _reason(error)
        if reason is None:
            raise
        raise WriteRefusedError(_line(shown_path(path), reason)) from error


def refusal(error: BaseException) -> WriteRefusedError | None:
    """Return the line about a full or read-only disk, if that is the cause of ``error``.

    For the outermost place that sees an error: what libraries write by themselves (caches, temporary files, standard
    output) meets no ``writing``, and torch wraps the errors of all ranks in one of its own, as ``failures``.
    """
    todo, seen = [error], set[int]()
    while todo:
        current = todo.pop(0)
        if isinstance(current, WriteRefusedError):
            return current
        reason = _reason(current)
        if reason is not None and reason.errno in REFUSED:
            return WriteRefusedError(_line(_what_was_written(reason), reason))
        seen.add(id(current))
        failures = getattr(current, "failures", None)
        ranks = [failure[0] for failure in failures.values()] if isinstance(failures, dict) else []
        causes = (*ranks, *getattr(current, "exceptions", ()), current.__cause__, current.__context__)
        todo += [cause for cause in causes if isinstance(cause, BaseException) and id(cause) not in seen]
    return None


def write_text(path: Path, text: str) -> None:
    """Write a file so that readers, and a crash at any time, see the old text or the new one.

    Raises:
        UserError: the system refuses; the old file stays.
    """
    with _replacing(path, 0o666) as file:
        file.write(text.encode("utf-8"))
        file.flush()
        os.fsync(file.fileno())
    # The new name, too, must survive a crash.
    with writing(path):
        sync(path.parent)


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only this user can read, so that readers see the old content or the new one. Meant for files
    that are written anew every few seconds: a crash of the machine may lose the content.

    Raises:
        UserError: the system refuses.
    """
    with _replacing(path, 0o600) as file:
        file.write(content)


@contextmanager
def _replacing(path: Path, mode: int) -> Iterator[BinaryIO]:
    """Yield a new file that takes the name at the block's end, at once; nothing of it stays after an error."""
    partial = partial_of(path)
    with writing(path):
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
            with os.fdopen(descriptor, "wb") as file:
                yield file
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def append_whole(file: BinaryIO, content: bytes, *, is_synced: bool) -> int:
    """Append to an unbuffered file, whole or not at all, and return the offset. ``is_synced``: it must survive a crash
    of the machine."""
    offset, left = file.seek(0, os.SEEK_END), memoryview(content)
    try:
        while left:
            left = left[file.write(left) :]
        if is_synced:
            os.fsync(file.fileno())
    except BaseException:
        file.truncate(offset)  # a part would run into what comes next
        raise
    return offset


def partial_of(path: Path) -> Path:
    """Return the file in which ``write_text`` of this process collects its bytes."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def write_json(path: Path, value: Any, *, sort_keys: bool = False) -> None:
    """Write indented JSON by ``write_text``; NaN and infinity are refused with ``ValueError``."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, sort_keys=sort_keys) + "\n")


def sync(path: Path) -> None:
    """Force a file's bytes, or a folder's entries, to disk before anything after this."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_folder(prefix: str, place: Path | None = None) -> Path:
    """Make a new private folder in ``place``, or where temporary files go (``TMPDIR``).

    Raises:
        UserError: none can be made.
    """
    try:
        within = tempfile.gettempdir() if place is None else str(place)
    except FileNotFoundError as error:
        raise WriteRefusedError(
            f"{visible(str(error.strerror))}: free space there, or set TMPDIR to a folder"
        ) from error
    with writing(within):
        return Path(tempfile.mkdtemp(prefix=prefix, dir=within))


@contextmanager
def reasoned(stream: BinaryIO) -> Iterator[BinaryIO]:
    """Yield ``stream`` for ``torch.save`` and others that replace the error of a failed write by one without a reason;
    raise the stream's own error in its place."""
    remembering = _Remembering(stream)
    try:
        yield cast(BinaryIO, remembering)
    except Exception:
        if remembering.error is not None:
            raise remembering.error from None
        raise


class _Remembering:
    """Stream that keeps the first error of a write."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, data: Any) -> int:
        try:
            return self._stream.write(data)
        except OSError as error:
            self.error = self.error or error
            raise


def _reason(error: BaseException) -> OSError | None:
    """Return the system's error that ``error`` is, or shows in its message."""
    if isinstance(error, OSError):
        return error
    shown = _RUST_ERROR.search(str(error)) if isinstance(error, Exception) else None
    if shown is not None:
        return OSError(int(shown[1]), os.strerror(int(shown[1])))
    return None


def _what_was_written(reason: OSError) -> str:
    """Return the file's name; a failed write, unlike a failed opening, does not tell it."""
    if isinstance(reason.filename, str | bytes):
        return shown_path(os.fsdecode(reason.filename))
    return "standard output or a temporary file"


def _line(shown: str, reason: OSError) -> str:
    cure = _CURES.get(reason.errno or 0, "name another place")
    return f"{shown}: cannot be written: {reason.strerror or reason}; {cure}"

"""``RUN/logs/NODE/ROLE.log``: what every process of a run wrote, from all nodes as one stream of lines."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mopd.base.files.reading import open_regular, shown_path
from mopd.base.text import visible
from mopd.base.types import UserError

MAX_FILES = 20_000
"""Largest number of logs, more than the largest run has ranks and servers."""
TAIL_BYTES = MAX_STEP_BYTES = 2**18
"""Largest part of a file that is read for its last lines, or at a time while it grows."""
MAX_LINE = 4000
"""Largest number of characters that are shown of one line."""
_CURE = "name the run_dir of a run that has begun"


@dataclass(slots=True)
class _Tail:
    """Position in one file."""

    path: Path
    source: str
    """``NODE/ROLE``."""
    offset: int = 0
    rest: bytes = field(default=b"")
    """Bytes of a line that is not complete yet."""


class Logs:
    """The logs of a run's folder. New files are found as they come."""

    def __init__(self, folder: Path, *, node: str = "*", role: str = "*") -> None:
        """``node`` and ``role`` are patterns: ``rank_*``, ``teachers.math.0``.

        Raises:
            UserError: the folder is not there.
        """
        if not folder.is_dir():
            raise UserError(f"{shown_path(folder)}: no logs are there: {_CURE}")
        self._folder, self._node, self._role = folder, node, role
        self._tails: dict[Path, _Tail] = {}

    def last(self, num_lines: int) -> Iterator[str]:
        """Yield the last lines of each file, each after its ``NODE/ROLE``; ``new`` goes on from there."""
        for tail in self._found():
            with open_regular(tail.path, cure=_CURE) as file:
                size = file.seek(0, os.SEEK_END)
                tail.offset = file.seek(max(0, size - TAIL_BYTES))
                text = file.read(TAIL_BYTES)
            lines = self._whole(tail, text)
            yield from lines[-num_lines:] if num_lines else ()

    def new(self) -> Iterator[str]:
        """Yield the lines that were written since the last call."""
        for tail in self._found():
            with open_regular(tail.path, cure=_CURE) as file:
                if file.seek(0, os.SEEK_END) < tail.offset:  # cut off, or another file
                    tail.offset, tail.rest = 0, b""
                file.seek(tail.offset)
                text = file.read(MAX_STEP_BYTES)
            yield from self._whole(tail, text)

    def _whole(self, tail: _Tail, text: bytes) -> list[str]:
        tail.offset += len(text)
        *lines, tail.rest = (tail.rest + text).split(b"\n")
        if len(tail.rest) > MAX_STEP_BYTES:
            lines, tail.rest = [*lines, tail.rest], b""
        shown = (line.decode("utf-8", "replace").rstrip("\r")[:MAX_LINE] for line in lines)
        return [f"{tail.source}: {visible(line, keep=chr(9))}" for line in shown]

    def _found(self) -> list[_Tail]:
        """Return the matching files, sorted by node, then role."""
        paths = sorted(self._folder.glob("*/*.log"))
        if len(paths) > MAX_FILES:
            raise UserError(f"{shown_path(self._folder)}: more than {MAX_FILES} logs: name --node or --role")
        wanted = [
            path
            for path in paths
            if fnmatch.fnmatchcase(path.parent.name, self._node) and fnmatch.fnmatchcase(path.stem, self._role)
        ]
        return [
            self._tails.setdefault(path, _Tail(path, visible(f"{path.parent.name}/{path.stem}"))) for path in wanted
        ]

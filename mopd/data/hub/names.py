"""Names of models and data sets on the Hugging Face Hub, as recipes have them: ``namespace/name[@revision][:part]``.

A recipe's text is read as follows:

- An existing path is a path. So is a text that lacks only its last part: ``models/math`` beside a folder ``models`` is
  a folder that is missing (with a revision, as in ``models/math@main``, it is a name all the same).
- Otherwise a text with exactly one slash before ``@`` and ``:``, in characters that the Hub allows, is a name of the
  Hub, unless it ends as a data file does.
- Anything else is a path that leads nowhere.
"""

from __future__ import annotations

import fnmatch
import os
import re
from dataclasses import dataclass, replace

from mopd.config.output import REPOSITORY

MAX_PART = 500
DATA_SUFFIXES = (".parquet", ".jsonl")
CONVERTED = "refs/convert/parquet"
"""Branch on which the Hub keeps every data set as parquet, as ``CONFIG/SPLIT/0000.parquet``."""
_REVISION = re.compile(r"[A-Za-z0-9_][\w./-]{0,199}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SPLIT = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class HubName:
    """A repository of the Hub, and the selected part of it."""

    repository: str
    """``namespace/name``."""
    revision: str | None
    """Branch, tag or commit; ``None`` for the default branch."""
    part: str | None
    """Part of a data set: a file, a pattern of files, a split or ``CONFIG/SPLIT``."""

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision is not None else ""
        return f"{self.repository}{revision}{f':{self.part}' if self.part is not None else ''}"

    def at(self, commit: str) -> HubName:
        """Return the same name at a commit."""
        return replace(self, revision=commit)


def hub_model(text: str) -> HubName | None:
    """Return the model that ``text`` names on the Hub, or ``None`` if it is a path."""
    return None if _is_path(text) else _parse(text, may_have_part=False)


def hub_data(text: str) -> HubName | None:
    """Return the data set that ``text`` names on the Hub, or ``None`` if it is a path."""
    if _is_path(text) or (":" not in text and text.endswith(DATA_SUFFIXES)):
        return None
    return _parse(text, may_have_part=True)


def _is_path(text: str) -> bool:
    if os.path.lexists(text):
        return True
    folder, _, name = text.rpartition("/")
    return not set("@:") & set(name) and folder != "" and os.path.isdir(folder)


def is_commit(text: str) -> bool:
    """Return whether it is a whole commit, as the Hub writes it."""
    return _COMMIT.fullmatch(text) is not None


def files_of_part(part: str, files: list[str]) -> list[str]:
    """Return those of a repository's ``files`` that ``part`` selects, sorted.

    A part that ends in ``.parquet`` or ``.jsonl`` is a file or a pattern, whose ``*`` and ``?`` stay within a folder.
    Any other is a split, stored as the first of these that exists: ``CONFIG/SPLIT/*.parquet`` (the Hub's converted
    branch), ``CONFIG/SPLIT-*.parquet``, ``CONFIG/SPLIT.parquet``, ``CONFIG/SPLIT.jsonl``. A split alone is one of the
    config ``default``, else of the folder ``data``, else of the repository itself.
    """
    if part.endswith(DATA_SUFFIXES):
        return sorted(file for file in files if matches(file, part))
    if _SPLIT.fullmatch(part) is None:
        return []
    stems = [part] if "/" in part else [f"default/{part}", f"data/{part}", part]
    for stem in stems:
        for pattern in (f"{stem}/*.parquet", f"{stem}-*.parquet", f"{stem}.parquet", f"{stem}.jsonl"):
            found = sorted(file for file in files if matches(file, pattern))
            if found:
                return found
    return []


def matches(file: str, pattern: str) -> bool:
    """Return whether a path has the form of ``pattern``, whose ``*`` and ``?`` stay within a folder."""
    names, wanted = file.split("/"), pattern.split("/")
    return len(names) == len(wanted) and all(map(fnmatch.fnmatchcase, names, wanted))


def _parse(text: str, *, may_have_part: bool) -> HubName | None:
    rest, colon, part = text.partition(":")
    repository, at, revision = rest.partition("@")
    if REPOSITORY.fullmatch(repository) is None or "--" in repository or ".." in repository:
        return None
    if any(name.endswith(("-", ".", ".git")) for name in repository.split("/")) or len(repository) > 96:
        return None
    if at and (_REVISION.fullmatch(revision) is None or ".." in revision):
        return None
    if colon and (not may_have_part or not part or len(part) > MAX_PART or not part.isprintable()):
        return None
    return HubName(repository=repository, revision=revision if at else None, part=part if colon else None)

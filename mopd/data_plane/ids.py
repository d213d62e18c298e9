"""Checks of the ids, fields and claims that storages are given, with their error messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor


def short_ids(ids: Sequence[int]) -> str:
    """Return ids for a message: the first eight and a count."""
    listed = list(ids)
    return str(listed) if len(listed) <= 8 else f"{listed[:8]} and {len(listed) - 8} more"


def check_new(ids: Sequence[int], held: Collection[int]) -> None:
    """Raise ``KeyError`` for ids that are held already, or given twice."""
    existing = sorted({i for i in ids if i in held} | {i for i, n in Counter(ids).items() if n > 1})
    if existing:
        raise KeyError(f"samples {short_ids(existing)} are put a second time")


def check_known(ids: Sequence[int], held: Collection[int]) -> None:
    """Raise ``KeyError`` for ids that are not held."""
    unknown = [i for i in ids if i not in held]
    if unknown:
        raise KeyError(f"samples {short_ids(unknown)} are unknown")


def check_unwritten(ids: Sequence[int], names: Collection[str], held: Mapping[int, Collection[str]]) -> None:
    """Raise ``KeyError`` for a field that a sample already has."""
    for name in names:
        written = [i for i in ids if name in held[i]]
        if written:
            raise KeyError(f"field {name!r} of samples {short_ids(written)} is written a second time")


def check_written(ids: Sequence[int], names: Collection[str], held: Mapping[int, Collection[str]]) -> None:
    """Raise ``KeyError`` for a field that a sample lacks."""
    for name in names:
        missing = [i for i in ids if name not in held[i]]
        if missing:
            raise KeyError(f"field {name!r} does not exist for samples {short_ids(missing)}")


def check_claims(ids: Sequence[int], claimed: Collection[int], *, wanted: bool, what: str) -> None:
    """Raise ``KeyError`` for ids whose claim is not as ``wanted``; ``what`` completes the message."""
    wrong = [i for i in ids if (i in claimed) is not wanted]
    if wrong:
        raise KeyError(f"samples {short_ids(wrong)} are {what}")


def check_lengths(ids: Sequence[int], fields: Mapping[str, Sequence[Any]]) -> None:
    """Raise ``ValueError`` unless every field has one tensor for each sample."""
    for name, values in fields.items():
        if len(values) != len(ids):
            raise ValueError(f"field {name!r} has {len(values)} tensors for {len(ids)} samples")


def kept(values: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors as they are stored and sent: without gradient, on the CPU, contiguous."""
    return [value.detach().cpu().contiguous() for value in values]

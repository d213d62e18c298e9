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


def check_put(ids: Sequence[int], fields: Mapping[str, Sequence[Any]], held: Collection[int]) -> None:
    """Raise ``KeyError`` for ids that are held already or given twice, ``ValueError`` for a field with another number
    of tensors than ids."""
    _check_lengths(ids, fields)
    existing = sorted({i for i in ids if i in held} | {i for i, n in Counter(ids).items() if n > 1})
    _refuse(existing, "samples {} are put a second time")


def check_update(ids: Sequence[int], fields: Mapping[str, Sequence[Any]], held: Mapping[int, Collection[str]]) -> None:
    """Raise ``KeyError`` for unknown ids and for a field that a sample already has, ``ValueError`` as ``check_put``."""
    _check_lengths(ids, fields)
    _check_known(ids, held)
    for name in fields:
        _refuse([i for i in ids if name in held[i]], "field {name!r} of samples {} is written a second time", name)


def check_read(ids: Sequence[int], names: Collection[str], held: Mapping[int, Collection[str]]) -> None:
    """Raise ``KeyError`` for unknown ids and for a field that a sample lacks."""
    _check_known(ids, held)
    for name in names:
        _refuse([i for i in ids if name not in held[i]], "field {name!r} does not exist for samples {}", name)


def check_claim(
    ids: Sequence[int], names: Collection[str], held: Mapping[int, Collection[str]], claimed: Collection[int]
) -> None:
    """Raise ``KeyError`` as ``check_read``, and for ids that are claimed already."""
    check_read(ids, names, held)
    _refuse([i for i in ids if i in claimed], "samples {} are claimed a second time")


def check_release(ids: Sequence[int], claimed: Collection[int]) -> None:
    """Raise ``KeyError`` for ids that are not claimed."""
    _refuse([i for i in ids if i not in claimed], "samples {} are released but not claimed")


def check_discard(ids: Sequence[int], held: Collection[int], claimed: Collection[int]) -> None:
    """Raise ``KeyError`` for ids that are unknown or claimed."""
    _check_known(ids, held)
    _refuse([i for i in ids if i in claimed], "samples {} are discarded but claimed")


def _check_known(ids: Sequence[int], held: Collection[int]) -> None:
    _refuse([i for i in ids if i not in held], "samples {} are unknown")


def _check_lengths(ids: Sequence[int], fields: Mapping[str, Sequence[Any]]) -> None:
    for name, values in fields.items():
        if len(values) != len(ids):
            raise ValueError(f"field {name!r} has {len(values)} tensors for {len(ids)} samples")


def _refuse(ids: Sequence[int], problem: str, name: str = "") -> None:
    if ids:
        raise KeyError(problem.format(short_ids(ids), name=name))


def as_stored(values: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors as they are stored and sent: without gradient, on the CPU, contiguous."""
    return [value.detach().cpu().contiguous() for value in values]

"""Equal ids in one row: across teachers always possible, within one teacher tolerated.

Shape legend: T rows, D teachers, K ids of a teacher, N = D * K.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

PAIR_ELEMENTS = 1 << 20
"""Elements of the largest table of id pairs; rows are taken in groups to stay below it."""


def _equal(ids_TN: Tensor, valid_TN: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Row groups and their tables ``[R, N, N]``: entry i and entry j are both valid and have one id."""
    rows, n = ids_TN.shape
    step = max(1, PAIR_ELEMENTS // max(1, n * n))
    for low in range(0, rows, step):
        part = slice(low, low + step)
        ids, valid = ids_TN[part], valid_TN[part]
        yield part, (ids.unsqueeze(2) == ids.unsqueeze(1)) & valid.unsqueeze(2) & valid.unsqueeze(1)


def first_and_counts(ids_TN: Tensor, valid_TN: Tensor, teachers: int) -> tuple[Tensor, Tensor]:
    """Marks the first entry of each id, ``[T, N]`` bool, and counts how often each teacher lists it, ``[T, N, D]``."""
    rows, n = ids_TN.shape
    first = torch.empty_like(valid_TN)
    counts = torch.empty(rows, n, teachers, dtype=torch.uint8 if n < 256 else torch.int32, device=ids_TN.device)
    for part, equal in _equal(ids_TN, valid_TN):
        first[part] = valid_TN[part] & ~equal.tril(-1).any(2)
        counts[part] = equal.view(-1, n, teachers, n // teachers).sum(3)
    return first, counts


def sum_equal(ids_TN: Tensor, valid_TN: Tensor, values_TN: Tensor) -> Tensor:
    """Each entry becomes the sum of ``values`` over all valid entries of its id, in one fixed order."""
    total = torch.empty_like(values_TN)
    for part, equal in _equal(ids_TN, valid_TN):
        total[part] = torch.where(equal, values_TN[part].unsqueeze(1), 0).sum(2)
    return total

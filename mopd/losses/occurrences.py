"""Equal ids in one row: across teachers always possible, within one teacher tolerated.

Shape legend: T rows, D teachers, K ids of a teacher, N = D * K.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """Which entries of a row hold the same id. Entries that are not valid stand alone."""

    group_TN: Tensor
    """Number of the first entry of the row with this entry's id."""
    valid_TN: Tensor
    teachers: int

    @property
    def first_TN(self) -> Tensor:
        """Marks one valid entry per id."""
        numbers = torch.arange(self.group_TN.size(1), device=self.group_TN.device)
        return (self.group_TN == numbers) & self.valid_TN

    def sum_by_teacher(self, values_TN: Tensor) -> list[Tensor]:
        """Per teacher: for each of the N entries, the sum of that teacher's values over entries of the same id."""
        sums = []
        parts = zip(values_TN.chunk(self.teachers, 1), self.group_TN.chunk(self.teachers, 1), strict=True)
        for values, group in parts:
            sums.append(torch.zeros_like(values_TN).scatter_add_(1, group, values).gather(1, self.group_TN))
        return sums

    def sum_equal(self, values_TN: Tensor) -> Tensor:
        """For each entry the sum over all entries of its id; teacher by teacher, so that the order is fixed."""
        total, *others = self.sum_by_teacher(values_TN)
        for part in others:
            total = total + part
        return total

    def counts_TND(self, dtype: torch.dtype) -> Tensor:
        """How often each teacher lists the entry's id."""
        return torch.stack(self.sum_by_teacher(self.valid_TN.to(dtype)), dim=2)


def group_ids(ids_TN: Tensor, valid_TN: Tensor, teachers: int) -> Groups:
    """Groups equal ids by sorting each row."""
    numbers = torch.arange(ids_TN.size(1), device=ids_TN.device).expand_as(ids_TN)
    ordered, order = torch.where(valid_TN, ids_TN, -1 - numbers).sort(dim=1, stable=True)
    starts = torch.ones_like(valid_TN)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    start = torch.where(starts, numbers, 0).cummax(1).values
    group = torch.empty_like(order).scatter_(1, order, order.gather(1, start))
    return Groups(group, valid_TN, teachers)

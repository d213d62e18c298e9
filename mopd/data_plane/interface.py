"""The data plane: tensors by sample id, field by field. Consumers name the fields they read; "all" does not exist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from mopd.types import Batch, SampleMeta


class DataPlane(Protocol):
    """Producers put, the controller claims and releases, student ranks fetch.

    A field of a sample is written exactly once; writing it again, or naming an unknown sample or field, raises
    ``KeyError`` with the ids. No sample disappears without ``release`` or
    ``discard``.
    """

    async def put(self, metas: Sequence[SampleMeta], fields: Mapping[str, Sequence[Tensor]]) -> None:
        """Write fields of new samples: ``fields[name][i]`` belongs to ``metas[i]``."""
        ...

    async def update(self, sample_ids: Sequence[int], fields: Mapping[str, Sequence[Tensor]]) -> None:
        """Add fields to samples that exist."""
        ...

    async def get(self, sample_ids: Sequence[int], fields: Sequence[str]) -> dict[str, list[Tensor]]:
        """Read fields on the controller's rank (teachers read tokens with this)."""
        ...

    async def claim(self, num_samples: int, fields: Sequence[str], *, timeout_s: float) -> Batch:
        """Wait until ``num_samples`` unclaimed samples have all ``fields``; the lowest ids are claimed first.

        Raises ``TimeoutError`` that says how many samples were ready and which fields the others lacked.
        """
        ...

    async def release(self, batch: Batch) -> None:
        """Forget a claimed batch."""
        ...

    async def discard(self, sample_ids: Sequence[int]) -> None:
        """Forget samples that nobody claimed: they could not be finished, and whoever calls this counts them."""
        ...

    def fetch(self, sample_ids: Sequence[int], fields: Sequence[str]) -> dict[str, list[Tensor]]:
        """Read fields on a student rank. Collective: every trainer rank calls it with the same arguments; CPU tensors
        come back in the order of ``sample_ids``."""
        ...

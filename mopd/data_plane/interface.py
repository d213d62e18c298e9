"""What carries tensors from those that make them to the ranks that train on them: a storage for whoever writes and
orders samples, and a reader for each student rank. Consumers name the fields they read; "all" does not exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from mopd.types import Batch, CutOffError, SampleMeta


class StorageEnded(CutOffError):
    """Whoever held the samples is gone, by its own death or because its process met an error of its own."""


class Storage(Protocol):
    """Tensors by sample id, field by field. Lives on one event loop of one process.

    A field of a sample is written exactly once; writing it again, or naming an unknown sample or field, raises
    ``KeyError`` with the ids. No sample disappears without ``release`` or ``discard``.
    """

    @property
    def num_samples(self) -> int:
        """Samples held now, claimed ones included."""

    @property
    def address(self) -> dict[str, Any]:
        """What ``open_reader`` needs in another process, as JSON; it may hold keys, so it is shown to nobody."""

    async def put(self, metas: Sequence[SampleMeta], fields: Mapping[str, Sequence[Tensor]]) -> None:
        """Write fields of new samples: ``fields[name][i]`` belongs to ``metas[i]``. All or nothing; kept on the CPU."""

    async def update(self, sample_ids: Sequence[int], fields: Mapping[str, Sequence[Tensor]]) -> None:
        """Add fields to samples that exist. All or nothing."""

    async def get(self, sample_ids: Sequence[int], fields: Sequence[str]) -> dict[str, list[Tensor]]:
        """Read fields, in the order of ``sample_ids``."""

    async def claim(self, sample_ids: Sequence[int], fields: Sequence[str]) -> Batch:
        """Claim these samples, which must have all ``fields``. At once, without reading a tensor."""

    async def release(self, batch: Batch) -> None:
        """Forget a claimed batch; ``KeyError`` for samples that are not claimed."""

    async def discard(self, sample_ids: Sequence[int]) -> None:
        """Forget samples that nobody claimed: they could not be finished, and whoever calls this counts them.

        ``KeyError`` for samples that are unknown or claimed. All or nothing.
        """

    async def close(self) -> None:
        """Forget everything; readers elsewhere get one clear line."""


class Reader(Protocol):
    """One process's way to the tensors. Blocking; one call at a time."""

    @property
    def bytes_received(self) -> int:
        """Bytes of tensors, and of what came with them, that ``fetch`` has brought into this process."""

    def fetch(self, sample_ids: Sequence[int], fields: Sequence[str]) -> dict[str, list[Tensor]]:
        """Fields as CPU tensors in the order of ``sample_ids``, which nobody may write to.

        Raises:
            KeyError: an unknown sample or field, with the ids.
            StorageEnded: the storage has ended.
            UserError: it does not answer in time.
        """

    def close(self) -> None:
        """Nothing is read any more."""

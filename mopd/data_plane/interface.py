"""Interfaces of the data plane, which carries tensors from their producers to the ranks that train on them: one storage
for the process that writes and orders samples, and one reader for each student rank. Consumers name the fields they
read; "all" does not exist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from mopd.base.types import Batch, LostError, SampleMeta


class StorageEnded(LostError):
    """The storage has ended: the process that held the samples died, or met an error of its own."""


class Storage(Protocol):
    """Tensors by sample id, field by field. Lives on one event loop of one process.

    A field of a sample is written exactly once; writing it again, or naming an unknown sample or field, raises
    ``KeyError`` with the ids. No sample disappears without ``release`` or ``discard``.
    """

    @property
    def num_samples(self) -> int:
        """Number of samples held now, claimed ones included."""

    @property
    def address(self) -> dict[str, Any]:
        """Argument of ``open_reader`` in another process, as JSON. It may hold keys: never log or show it."""

    async def put(self, metas: Sequence[SampleMeta], fields: Mapping[str, Sequence[Tensor]]) -> None:
        """Write fields of new samples: ``fields[name][i]`` belongs to ``metas[i]``. All or nothing; kept on the CPU."""

    async def update(self, sample_ids: Sequence[int], fields: Mapping[str, Sequence[Tensor]]) -> None:
        """Add fields to samples that exist. All or nothing."""

    async def get(self, sample_ids: Sequence[int], fields: Sequence[str]) -> dict[str, list[Tensor]]:
        """Read fields, in the order of ``sample_ids``."""

    async def claim(self, sample_ids: Sequence[int], fields: Sequence[str]) -> Batch:
        """Claim these samples, which must have all ``fields``. Returns at once, without reading a tensor."""

    async def release(self, batch: Batch) -> None:
        """Forget a claimed batch. Raise ``KeyError`` for samples that are not claimed."""

    async def discard(self, sample_ids: Sequence[int]) -> None:
        """Forget unclaimed samples that could not be finished; the caller counts them.

        Raise ``KeyError`` for samples that are unknown or claimed. All or nothing.
        """

    async def close(self) -> None:
        """Forget everything; readers in other processes raise one clear line."""


class Reader(Protocol):
    """Read access of one process to the tensors. Blocking; one call at a time."""

    @property
    def bytes_received(self) -> int:
        """Bytes that ``fetch`` has brought into this process: tensors, and what came with them."""

    def fetch(
        self, sample_ids: Sequence[int], fields: Sequence[str], *, waited_s: float = 0.0
    ) -> dict[str, list[Tensor]]:
        """Return fields as CPU tensors in the order of ``sample_ids``. They must not be written to.

        ``waited_s``: seconds that other reads of the same command have been waited for. Its reads have one deadline
        together, which ends before that of a collective in which the other ranks wait for them.

        Raises:
            KeyError: an unknown sample or field, with the ids.
            StorageEnded: the storage has ended.
            UserError: it does not answer in time.
        """

    def close(self) -> None:
        """End the connection."""

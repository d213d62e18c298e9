"""Interfaces of the data plane, which carries tensors from their producers to the ranks that train on them: one storage
for the process that writes and orders samples, and one reader for each student rank. Consumers name the fields they
read; "all" does not exist."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from mopd.base.types import Batch, LostError, SampleMeta


class StorageEnded(LostError):
    """The storage has ended: the process that held the samples died, or met an error of its own."""


class Storage(ABC):
    """Tensors by sample id, field by field. Lives on one event loop of one process.

    A field of a sample is written exactly once; writing it again, or naming an unknown sample or field, raises
    ``KeyError`` with the ids. No sample disappears without ``release`` or ``discard``. These rules are kept here; an
    implementation moves the tensors.
    """

    def __init__(self) -> None:
        self._held: dict[int, set[str]] = {}
        """Names of the fields of each sample that is held."""
        self._claimed: set[int] = set()

    @property
    def num_samples(self) -> int:
        """Number of samples held now, claimed ones included."""
        return len(self._held)

    @property
    @abstractmethod
    def address(self) -> dict[str, Any]:
        """Argument of ``open_reader`` in another process, as JSON. It may hold keys: never log or show it."""

    async def put(self, metas: Sequence[SampleMeta], fields: Mapping[str, Sequence[Tensor]]) -> None:
        """Write fields of new samples: ``fields[name][i]`` belongs to ``metas[i]``. All or nothing; kept on the CPU."""
        ids = [meta.sample_id for meta in metas]
        _check_lengths(ids, fields)
        again = {i for i in ids if i in self._held} | {i for i, count in Counter(ids).items() if count > 1}
        _refuse(sorted(again), "samples {} are put a second time")
        if ids:
            await self._add(metas, {name: as_stored(values) for name, values in fields.items()})
            # After the write: a ``put`` that failed leaves the samples unknown.
            self._held.update({i: set(fields) for i in ids})

    async def update(self, sample_ids: Sequence[int], fields: Mapping[str, Sequence[Tensor]]) -> None:
        """Add fields to samples that exist. All or nothing."""
        _check_lengths(sample_ids, fields)
        check_read(sample_ids, (), self._held)
        for name in fields:
            again = [i for i in sample_ids if name in self._held[i]]
            _refuse(again, "field {name!r} of samples {} is written a second time", name)
        if sample_ids:
            await self._extend(sample_ids, {name: as_stored(values) for name, values in fields.items()})
            for sample_id in sample_ids:
                self._held[sample_id].update(fields)

    @abstractmethod
    async def get(self, sample_ids: Sequence[int], fields: Sequence[str]) -> dict[str, list[Tensor]]:
        """Read fields, in the order of ``sample_ids``."""

    async def claim(self, sample_ids: Sequence[int], fields: Sequence[str]) -> Batch:
        """Claim these samples, which must have all ``fields``. Returns at once, without reading a tensor."""
        check_read(sample_ids, fields, self._held)
        _refuse([i for i in sample_ids if i in self._claimed], "samples {} are claimed a second time")
        metas = await self._metas_of(sample_ids, fields)
        self._claimed.update(sample_ids)
        return Batch(samples=tuple(sorted(metas, key=lambda meta: meta.sample_id)))

    async def release(self, batch: Batch) -> None:
        """Forget a claimed batch. Raise ``KeyError`` for samples that are not claimed."""
        ids = batch.sample_ids
        _refuse([i for i in ids if i not in self._claimed], "samples {} are released but not claimed")
        await self._forget(ids)
        self._claimed.difference_update(ids)

    async def discard(self, sample_ids: Sequence[int]) -> None:
        """Forget unclaimed samples that could not be finished; the caller counts them.

        Raise ``KeyError`` for samples that are unknown or claimed. All or nothing.
        """
        check_read(sample_ids, (), self._held)
        _refuse([i for i in sample_ids if i in self._claimed], "samples {} are discarded but claimed")
        await self._forget(sample_ids)

    async def close(self) -> None:
        """Forget everything; readers in other processes raise one clear line."""
        self._held.clear()
        self._claimed.clear()

    async def _forget(self, sample_ids: Sequence[int]) -> None:
        if sample_ids:
            await self._remove(sample_ids)
        for sample_id in sample_ids:
            del self._held[sample_id]

    @abstractmethod
    async def _add(self, metas: Sequence[SampleMeta], tensors: Mapping[str, list[Tensor]]) -> None:
        """Write fields of new samples."""

    @abstractmethod
    async def _extend(self, sample_ids: Sequence[int], tensors: Mapping[str, list[Tensor]]) -> None:
        """Write further fields of samples."""

    @abstractmethod
    async def _metas_of(self, sample_ids: Sequence[int], fields: Sequence[str]) -> list[SampleMeta]:
        """Return the metas of samples that have all ``fields``."""

    @abstractmethod
    async def _remove(self, sample_ids: Sequence[int]) -> None:
        """Remove all fields of samples."""


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


def check_read(ids: Sequence[int], names: Collection[str], held: Mapping[int, Collection[str]]) -> None:
    """Raise ``KeyError`` for unknown ids and for a field that a sample lacks."""
    _refuse([i for i in ids if i not in held], "samples {} are unknown")
    for name in names:
        _refuse([i for i in ids if name not in held[i]], "field {name!r} does not exist for samples {}", name)


def as_stored(values: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors as they are stored and sent: without gradient, on the CPU, contiguous."""
    return [value.detach().cpu().contiguous() for value in values]


def _check_lengths(ids: Sequence[int], fields: Mapping[str, Sequence[Any]]) -> None:
    for name, values in fields.items():
        if len(values) != len(ids):
            raise ValueError(f"field {name!r} has {len(values)} tensors for {len(ids)} samples")


def _refuse(ids: Sequence[int], problem: str, name: str = "") -> None:
    """Raise ``KeyError`` with ``problem``, which names the first eight of ``ids``, unless there are none."""
    if ids:
        shown = str(list(ids)) if len(ids) <= 8 else f"{list(ids[:8])} and {len(ids) - 8} more"
        raise KeyError(problem.format(shown, name=name))

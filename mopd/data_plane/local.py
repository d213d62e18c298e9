"""The local plane: every field of every sample in the memory of one process, which serves readers in others."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mopd.base.types import Batch, SampleMeta
from mopd.data_plane.ids import (
    as_stored,
    check_claim,
    check_discard,
    check_put,
    check_read,
    check_release,
    check_update,
)
from mopd.data_plane.reading import DirectReader
from mopd.data_plane.server import SampleServer


class LocalDataPlane:
    """Implementation of ``Storage`` in this process's memory. Read from any thread, written to on one event loop."""

    def __init__(self) -> None:
        self._metas: dict[int, SampleMeta] = {}
        self._fields: dict[int, dict[str, Tensor]] = {}
        self._claimed: set[int] = set()
        self._writing = threading.Lock()
        self._server: SampleServer | None = None

    def serve(self, *, host: str | None) -> None:
        """Start serving readers in other processes: on this machine, or also on others, which reach this one as
        ``host``.

        Raises:
            UserError: nothing can listen there.
        """
        self._server = SampleServer(self._read, host=host)

    @property
    def address(self) -> dict[str, Any]:
        """Address of the server that ``serve`` has started."""
        assert self._server is not None, "serve() has been called"
        return self._server.address

    def reader(self) -> DirectReader:
        """Return a reader for this process."""
        return DirectReader(self._read)

    @property
    def num_samples(self) -> int:
        """Number of samples held now, claimed ones included."""
        return len(self._metas)

    async def put(self, metas: Sequence[SampleMeta], fields: Mapping[str, Sequence[Tensor]]) -> None:
        """Write fields of new samples."""
        ids = [meta.sample_id for meta in metas]
        check_put(ids, fields, self._metas)
        tensors = {name: as_stored(values) for name, values in fields.items()}
        # Readers in other threads see a sample with all its fields or not at all.
        with self._writing:
            for i, meta in enumerate(metas):
                self._metas[meta.sample_id] = meta
                self._fields[meta.sample_id] = {name: values[i] for name, values in tensors.items()}

    async def update(self, sample_ids: Sequence[int], fields: Mapping[str, Sequence[Tensor]]) -> None:
        """Add fields to samples that exist."""
        check_update(sample_ids, fields, self._fields)
        tensors = {name: as_stored(values) for name, values in fields.items()}
        with self._writing:
            for name, values in tensors.items():
                for sample_id, value in zip(sample_ids, values, strict=True):
                    self._fields[sample_id][name] = value

    async def get(self, sample_ids: Sequence[int], fields: Sequence[str]) -> dict[str, list[Tensor]]:
        """Return fields, in the order of ``sample_ids``."""
        return self._read(sample_ids, fields)

    async def claim(self, sample_ids: Sequence[int], fields: Sequence[str]) -> Batch:
        """Claim samples that have all ``fields``."""
        check_claim(sample_ids, fields, self._fields, self._claimed)
        self._claimed.update(sample_ids)
        return Batch(samples=tuple(self._metas[i] for i in sorted(sample_ids)))

    async def release(self, batch: Batch) -> None:
        """Forget a claimed batch."""
        check_release(batch.sample_ids, self._claimed)
        self._claimed.difference_update(batch.sample_ids)
        self._forget(batch.sample_ids)

    async def discard(self, sample_ids: Sequence[int]) -> None:
        """Forget samples that are not claimed."""
        check_discard(sample_ids, self._fields, self._claimed)
        self._forget(sample_ids)

    async def close(self) -> None:
        """End the server and forget everything."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self._claimed.clear()
        self._forget(list(self._metas))

    def _read(self, sample_ids: Sequence[int], fields: Sequence[str]) -> dict[str, list[Tensor]]:
        """Return fields; called from any thread."""
        with self._writing:
            check_read(sample_ids, fields, self._fields)
            return {name: [self._fields[i][name] for i in sample_ids] for name in fields}

    def _forget(self, sample_ids: Sequence[int]) -> None:
        with self._writing:
            for sample_id in sample_ids:
                del self._metas[sample_id], self._fields[sample_id]

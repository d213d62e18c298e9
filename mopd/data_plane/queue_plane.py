"""Samples in TransferQueue: a storage and readers that keep the rules of ``interface.py`` on top of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from mopd.base.files.json_text import read_json_object
from mopd.base.files.writing import write_json, writing
from mopd.base.types import SampleMeta, UserError
from mopd.conversion.job import sha256_of
from mopd.data_plane.interface import Storage, check_read
from mopd.data_plane.transfer_queue import QueueClient

HASHES = "files.json"
"""Name of the file in a folder of ``save`` that holds SHA-256 by file name; written last."""
CURE = "remove the folder to have its samples drawn again"


class QueuePlane(Storage):
    """Storage on TransferQueue. One process writes; it remembers field names, never tensors."""

    def __init__(self, address: Mapping[str, Any], *, timeout_s: float, end: Callable[[], None]) -> None:
        """Connect to a queue that is this run's alone; ``close`` calls ``end``, which ends the queue."""
        super().__init__()
        self._address = dict(address)
        self._client = QueueClient(address, timeout_s=timeout_s)
        self._end = end
        self._writing = asyncio.Lock()
        """Held by every change of the samples, so that none falls between the actors' saves, which run in sequence."""

    def enter_around_calls(self, around: Callable[[], AbstractContextManager[None]]) -> None:
        """Have every call of the queue enter what ``around`` returns."""
        self._client.around_calls = around

    @property
    def address(self) -> dict[str, Any]:
        """Address of the controller and the storage units."""
        return self._address

    async def get(self, sample_ids: Sequence[int], fields: Sequence[str]) -> dict[str, list[Tensor]]:
        return await _read(self._client, sample_ids, fields)

    async def _add(self, metas: Sequence[SampleMeta], tensors: Mapping[str, list[Tensor]]) -> None:
        """Write the fields, with the metas as tags."""
        async with self._writing:
            batch = await self._client.retrieve([meta.sample_id for meta in metas], create=True)
            await self._client.write(batch, tensors, [asdict(meta) for meta in metas])

    async def _extend(self, sample_ids: Sequence[int], tensors: Mapping[str, list[Tensor]]) -> None:
        async with self._writing:
            await self._client.write(await self._client.retrieve(sample_ids), tensors)

    async def _metas_of(self, sample_ids: Sequence[int], fields: Sequence[str]) -> list[SampleMeta]:
        """Return the controller actor's tags of samples that have all ``fields`` in its view."""
        return [SampleMeta(**tag) for tag in (await _retrieve(self._client, sample_ids, fields)).custom_meta]

    async def _remove(self, sample_ids: Sequence[int]) -> None:
        async with self._writing:
            await self._client.clear(await self._client.retrieve(sample_ids))

    async def save(self, folder: Path) -> str:
        """Write all samples into ``folder``, which every actor's machine must see, with a hash of each file. Return the
        hash of these hashes, for the checkpoint that the samples belong to."""
        with writing(folder):
            folder.mkdir(parents=True)
        async with self._writing:
            await self._client.save(str(folder.resolve()))
        write_json(folder / HASHES, {name: sha256_of(folder / name) for name in _files(folder)})
        return sha256_of(folder / HASHES)

    async def load(self, folder: Path, digest: str, fields: Sequence[str]) -> list[SampleMeta]:
        """Read what ``save`` wrote into an empty storage. Return the samples that have all ``fields``, unclaimed, and
        forget the others. ``digest`` is what ``save`` returned.

        Raises:
            UserError: a file is missing, unknown or changed, which is noticed before any is read; or the number of
                storage units is another.
        """
        assert not self._held, "samples are loaded into an empty storage"
        # The actors unpickle these files: nothing but what this run wrote may be there.
        _verify(folder, digest, len(self._address["units"]))
        await self._client.load(str(folder.resolve()))
        for sample_id in await self._client.sample_ids():
            self._held[sample_id] = set((await self._client.retrieve([sample_id])).field_names)
        await self._forget([i for i, names in self._held.items() if not names.issuperset(fields)])
        if not self._held:
            return []
        return [SampleMeta(**tag) for tag in (await self._client.retrieve(list(self._held))).custom_meta]

    async def close(self) -> None:
        """Disconnect, forget everything and end the queue."""
        self._client.close()
        await super().close()
        self._end()


class QueueReader:
    """Implementation of ``Reader`` on TransferQueue. The calling thread waits, on an event loop of the reader's own."""

    def __init__(self, address: Mapping[str, Any], *, timeout_s: float) -> None:
        """Connect; ``timeout_s`` is the deadline of that and of each command's reads together.

        Raises:
            UserError: the queue does not answer.
        """
        self._timeout_s = timeout_s
        self.bytes_received = 0
        self._turn = threading.Lock()
        self._client = QueueClient(address, timeout_s=timeout_s)
        self._loop = asyncio.new_event_loop()

    def fetch(
        self, sample_ids: Sequence[int], fields: Sequence[str], *, waited_s: float = 0.0
    ) -> dict[str, list[Tensor]]:
        """Return fields as CPU tensors in the order of ``sample_ids``."""
        with self._turn:
            # of all calls of the queue that it takes, together
            self._client.deadline = self._loop.time() + self._timeout_s - waited_s
            values = self._loop.run_until_complete(_read(self._client, sample_ids, fields))
            self.bytes_received += sum(tensor.nbytes for tensors in values.values() for tensor in tensors)
            return values

    def close(self) -> None:
        """End the connection and the event loop."""
        self._client.close()
        self._loop.close()


async def _read(client: QueueClient, sample_ids: Sequence[int], fields: Sequence[str]) -> dict[str, list[Tensor]]:
    if not sample_ids or not fields:
        return {name: [] for name in fields}
    return await client.read(await _retrieve(client, sample_ids, fields), fields)


async def _retrieve(client: QueueClient, sample_ids: Sequence[int], fields: Sequence[str]) -> Any:
    """Return the metadata of samples. Raise ``KeyError`` unless the queue has them all, with these fields."""
    batch = await client.retrieve(sample_ids)
    check_read(sample_ids, (), {tag["sample_id"]: () for tag in batch.custom_meta})
    if not set(fields) <= set(batch.field_names):  # field_names are those that all of them have
        by_sample = {i: (await client.retrieve([i])).field_names for i in sample_ids}
        check_read(sample_ids, fields, by_sample)
    return batch


def _files(folder: Path) -> list[str]:
    """Return the names below ``folder`` of all files but ``HASHES``."""
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    return sorted(name for name in names if name != HASHES)


def _verify(folder: Path, digest: str, num_units: int) -> None:
    """Raise ``UserError`` unless ``folder`` holds exactly the files that ``save`` wrote."""
    _verify_file(folder / HASHES, digest)
    hashes = read_json_object(folder / HASHES, cure=CURE)
    if sorted(hashes) != _files(folder):
        raise UserError(f"{folder}: other files than {HASHES} names: {CURE}")
    if (num_saved := sum(name.endswith(".pkl") for name in hashes) - 1) != num_units:
        raise UserError(
            f"{folder}: written by {num_saved} storage units, which data_plane.num_storage_units {num_units} cannot "
            f"read: set it to {num_saved}"
        )
    for name, own in hashes.items():
        _verify_file(folder / name, own)


def _verify_file(path: Path, digest: str) -> None:
    if not path.is_file() or path.is_symlink() or sha256_of(path) != digest:
        raise UserError(f"{path}: not what was written (SHA-256): {CURE}")

"""Reader of tensors of a distributed checkpoint (``torch_dist``) that does not build the model.

The format (PyTorch's distributed checkpoint, as Megatron-Core 0.16 writes it): ``.metadata`` is a pickle that says into
which chunks each tensor is cut and where each chunk lies; a chunk is a small ``torch.save`` archive inside a
``.distcp`` file. Chunks are mapped, not read. ``description.py`` reads the pickle as inert values.
"""

from __future__ import annotations

import io
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mopd.base.files.json_text import read_json_object
from mopd.base.files.reading import shown_path
from mopd.base.types import UserError
from mopd.conversion.job import sha256_of
from mopd.conversion.mapped import map_tensor
from mopd.conversion.torch_dist.description import read_description
from mopd.conversion.torch_dist.pickled import DAMAGE, require_plain_archive

METADATA_FILE = ".metadata"
MANIFEST_FILE = "manifest.json"
FORMAT_FILE = "metadata.json"
STATE_FILE = "state.json"
FORMAT = {
    "sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch",
    "common_backend_version": 1,
}  # fmt: skip
_LOCAL_HEADER_BYTES = 30
"""Length of a zip entry's local header, before its name."""
_TENSOR_PICKLE_BYTES = 2**16
"""Largest description of one tensor in its archive; torch writes a few hundred bytes."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stored box of one tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    """First byte of its archive in the file."""
    num_bytes: int


class TorchDistReader:
    """Reader of boxes of the tensors of one checkpoint folder, by key.

    Opening compares the pickled description with the manifest; ``check_hashes`` does so with the data files.

    Raises:
        UserError: incomplete, changed, without a manifest (unless ``allow_pickle``), or of another format.
    """

    def __init__(self, folder: Path, *, allow_pickle: bool = False) -> None:
        self.folder = Path(folder)
        self.hashes = _read_hashes(self.folder, allow_pickle)
        require_format(self.folder)
        if self.hashes:
            data_files = {path.name for path in self.folder.glob("*.distcp")}
            for name in sorted({METADATA_FILE, *self.hashes} - data_files):
                self._check_hash(name)
        metadata = read_description(self.folder / METADATA_FILE)
        entries = metadata.state_dict_metadata.items()
        self._tensors = {key: entry for key, entry in entries if isinstance(entry, TensorStorageMetadata)}
        self._stacked = {
            key: len(entry.size) > 0 and all(chunk.sizes[0] == 1 for chunk in entry.chunks)
            for key, entry in self._tensors.items()
        }
        self._chunks = self._index(metadata.storage_data)

    @property
    def keys(self) -> frozenset[str]:
        """Keys of all tensors, optimizer states included."""
        return frozenset(self._tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor, stacked dimensions included."""
        return tuple(self._find(key).size)

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self._find(key).properties.dtype

    def num_chunks(self, key: str) -> int:
        """Return the number of boxes that a tensor is cut into."""
        return len(self._find(key).chunks)

    def files_of(self, keys: Iterable[str]) -> list[str]:
        """Return the names of the files that hold these tensors, sorted."""
        return sorted({chunk.file for key in keys for chunks in self._chunks[key].values() for chunk in chunks})

    def read(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a box of a tensor, of shape ``sizes``: a view of the mapped file if one chunk is that box, else a
        copy.

        Raises:
            UserError: no chunk holds some part of it, or a chunk is corrupt.
        """
        begin, length = tuple(offsets), tuple(sizes)
        whole = self.shape(key)
        if len(whole) != len(begin) or any(a + n > m for a, n, m in zip(begin, length, whole, strict=True)):
            raise UserError(
                f"{self.folder}: tensor '{key}' has shape {list(whole)}, which has no part {list(begin)} + "
                f"{list(length)}; config and weights belong to different models"
            )
        rows = range(begin[0], begin[0] + length[0]) if self._stacked[key] else (0,)
        near = [chunk for row in rows for chunk in self._chunks[key].get(row, ())]
        for chunk in near:
            if chunk.offsets == begin and chunk.sizes == length:
                return self._map(key, chunk)
        box = torch.empty(length, dtype=self.dtype(key))
        num_found = 0
        for chunk in dict.fromkeys(near):
            boxes = zip(begin, length, chunk.offsets, chunk.sizes, strict=True)
            bounds = [range(max(a, b), min(a + n, b + m)) for a, n, b, m in boxes]
            if all(bounds):
                target = [slice(own.start - a, own.stop - a) for own, a in zip(bounds, begin, strict=True)]
                source = [slice(own.start - b, own.stop - b) for own, b in zip(bounds, chunk.offsets, strict=True)]
                box[tuple(target)] = self._map(key, chunk)[tuple(source)]
                num_found += prod(map(len, bounds))
        # Chunks do not overlap, so the number of elements shows whether every part was found.
        if num_found != box.numel():
            raise UserError(
                f"{self.folder / METADATA_FILE}: has no entry for a part of tensor '{key}' (asked for "
                f"{list(begin)} + {list(length)}); the checkpoint is incomplete"
            )
        return box

    def check_hashes(self, names: Sequence[str], is_over: Callable[[], bool]) -> None:
        """Compare files with the manifest, one after another until ``is_over()``; without a manifest, do nothing.

        Raises:
            UserError: the file has changed since it was written.
        """
        for name in names if self.hashes else ():
            if is_over():
                return
            self._check_hash(name)

    def _check_hash(self, name: str) -> None:
        path = self.folder / name
        if name not in self.hashes:
            raise UserError(f"{path}: not listed in {MANIFEST_FILE}; restore the folder")
        if not path.is_file():
            raise UserError(f"{path}: missing; restore the folder")
        if sha256_of(path) != self.hashes[name]:
            raise UserError(f"{path}: changed since it was saved (sha256); restore the folder")

    def _index(self, storage: dict[Any, Any]) -> dict[str, dict[int, list[Chunk]]]:
        """Return chunks by key and first row, so that one layer of a stacked tensor is found without a search."""
        index: dict[str, dict[int, list[Chunk]]] = {key: defaultdict(list) for key in self._tensors}
        places = {(entry.fqn, entry.offset): place for entry, place in storage.items()}
        for key, tensor in self._tensors.items():
            for part in tensor.chunks:
                place = places.get((key, part.offsets))
                if place is None:
                    raise UserError(
                        f"{self.folder / METADATA_FILE}: does not say where tensor '{key}' at {list(part.offsets)} "
                        "lies; the checkpoint is incomplete"
                    )
                chunk = Chunk(tuple(part.offsets), tuple(part.sizes), place.relative_path, place.offset, place.length)
                index[key][chunk.offsets[0] if self._stacked[key] else 0].append(chunk)
        return index

    def _find(self, key: str) -> TensorStorageMetadata:
        if key not in self._tensors:
            raise UserError(f"{self.folder / METADATA_FILE}: tensor '{key}' is missing; the checkpoint is incomplete")
        return self._tensors[key]

    def _map(self, key: str, chunk: Chunk) -> Tensor:
        path = self.folder / chunk.file
        try:
            tensor = _map_archive(path, chunk.start, chunk.num_bytes).view(chunk.sizes)
        except FileNotFoundError as error:
            raise UserError(f"{path}: missing; restore the folder") from error
        except DAMAGE as error:
            raise UserError(
                f"{path}: tensor '{key}' at {list(chunk.offsets)} is truncated or corrupt; restore the folder"
            ) from error
        if tensor.dtype != self.dtype(key):
            raise UserError(f"{path}: tensor '{key}' is {tensor.dtype}, {METADATA_FILE} says {self.dtype(key)}")
        return tensor


class _FilePart(io.RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, file: IO[bytes], start: int, num_bytes: int) -> None:
        self._descriptor, self._start, self._size, self._position = file.fileno(), start, num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._size - self._position))
        data = os.pread(self._descriptor, count, self._start + self._position)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def _map_archive(path: Path, start: int, num_bytes: int) -> Tensor:
    """Return the one tensor of a ``torch.save`` archive inside a file, mapped."""
    if path.stat().st_size < start + num_bytes:
        raise ValueError("shorter than described")
    with path.open("rb") as file:
        view = _FilePart(file, start, num_bytes)
        entries = require_plain_archive(cast(IO[bytes], view), max_pickle_bytes=_TENSOR_PICKLE_BYTES)
        view.seek(0)
        # On the meta device only shape and dtype are read; the values are mapped from their place in the archive.
        like = torch.load(cast(IO[bytes], view), map_location="meta", weights_only=True)
        data = next((item for item in entries if item.filename.endswith("/data/0")), None)
        if not isinstance(like, Tensor) or data is None:
            raise ValueError("no tensor")
        # An expanded tensor would ask for more memory than its file has.
        if like.numel() * like.dtype.itemsize > data.file_size:
            raise ValueError("fewer values than its shape")
        file.seek(start + data.header_offset)
        header = file.read(_LOCAL_HEADER_BYTES)
    skipped = _LOCAL_HEADER_BYTES + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    flat = map_tensor(path, start + data.header_offset + skipped, (data.file_size // like.dtype.itemsize,), like.dtype)
    return flat.as_strided(like.shape, like.stride(), like.storage_offset())


def require_format(folder: Path) -> None:
    """Refuse what is no distributed checkpoint of Megatron-Core, or of an unknown version.

    Raises:
        UserError: names ``metadata.json`` and what it says.
    """
    path = folder / FORMAT_FILE
    format_ = read_json_object(path, cure="give the folder of a Megatron-Core distributed checkpoint")
    for key, value in {"sharded_backend": None, **format_}.items():
        if FORMAT.get(key) != value:
            raise UserError(
                f"{shown_path(path)}: {key!a:.100} is {value!a:.100}, which is not supported; restore the folder, or "
                "give one of 'sharded_backend' 'torch_dist'"
            )


def _read_hashes(folder: Path, allow_pickle: bool) -> dict[str, str]:
    path = folder / MANIFEST_FILE
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the folder of a Megatron-Core distributed checkpoint")
    if not path.is_file():
        if allow_pickle:
            return {}
        raise UserError(
            f"{folder}: no complete checkpoint of mopd ({MANIFEST_FILE} is missing); for one that another program "
            "wrote, pass --allow-pickle"
        )
    return read_hashes(path)


def read_hashes(path: Path) -> dict[str, str]:
    """Return the ``sha256`` of a ``manifest.json``: file names relative to its folder -> hexadecimal hashes.

    They prove that the files are those that were written with this manifest. An author who can change the files can
    write another manifest, so the files' content must still be treated as untrusted.

    Raises:
        UserError: the manifest is missing, damaged or another program's.
    """
    cure = "restore the folder or name another checkpoint"
    hashes = read_json_object(path, cure=cure).get("sha256")
    if not isinstance(hashes, dict) or not all(isinstance(value, str) for value in hashes.values()):
        raise UserError(f"{shown_path(path)}: 'sha256' is not a map from names to hashes: {cure}")
    for name in hashes:
        if PurePosixPath(name).is_absolute() or not {"..", ""}.isdisjoint(name.split("/")):
            raise UserError(f"{shown_path(path)}: lists {name!a:.100}, which is no file of this folder: {cure}")
    return dict(hashes)

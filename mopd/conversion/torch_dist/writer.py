"""Writer of the files of a distributed checkpoint, box by box; ``reader.py`` describes the format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from mopd.base.files.writing import reasoned, write_json
from mopd.conversion.job import OutputFile, Written
from mopd.conversion.torch_dist.description import write_description
from mopd.conversion.torch_dist.plan import Piece, extra_state_keys
from mopd.conversion.torch_dist.reader import FORMAT, FORMAT_FILE, METADATA_FILE, STATE_FILE

COMMON_FILE = "common.pt"
EXTRA_STATE_FILE = "__0_extra_state.distcp"
SIDE_FILES = "hf"
"""Folder of the files that an export needs: config, tokenizer, licence, …"""
ARCHIVE_BYTES = 1200
"""Approximate size of an archive beyond its tensor."""
CONTENT = {"distrib_optim_sharding_type": "fully_reshardable"}
"""Description of the checkpoint for Megatron's readers."""


def data_file(
    name: str, content: Sequence[Piece], itemsize: Mapping[str, int], read: Callable[[Piece], Tensor]
) -> OutputFile:
    """Return one ``.distcp`` file; ``read`` returns a piece's values, of its ``sizes``. Its facts: archive lengths."""

    def write(stream: BinaryIO) -> list[int]:
        lengths = []
        for piece in content:
            before = stream.tell()
            tensor = read(piece).contiguous().view(piece.box)
            if tensor.untyped_storage().nbytes() != tensor.nbytes:  # torch.save would write the whole storage
                tensor = tensor.clone()
            with reasoned(stream) as reasoning:
                torch.save(tensor, reasoning)
            lengths.append(stream.tell() - before)
        return lengths

    num_bytes = sum(prod(piece.sizes) * itemsize[piece.place.key] + ARCHIVE_BYTES for piece in content)
    return OutputFile(name, num_bytes, write, len(content))


def extra_state_file() -> OutputFile:
    """Return the file of one empty object, to which all extra-state keys point."""

    def write(stream: BinaryIO) -> list[int]:
        with reasoned(stream) as reasoning:
            torch.save([None], reasoning)
        return [stream.tell()]

    return OutputFile(EXTRA_STATE_FILE, ARCHIVE_BYTES, write, 1)


def write_rest(
    folder: Path,
    contents: Mapping[str, Sequence[Piece]],
    written: Mapping[str, Written],
    dtypes: Mapping[str, torch.dtype],
    state: Mapping[str, Any],
) -> None:
    """Write what makes the data files a checkpoint: description, common part, ``state.json``."""
    write_description(folder / METADATA_FILE, _metadata(contents, written, dtypes))
    torch.save({"content_metadata": CONTENT}, folder / COMMON_FILE)
    (folder / FORMAT_FILE).write_text(json.dumps(FORMAT), encoding="utf-8")
    write_json(folder / STATE_FILE, state, sort_keys=True)


def _metadata(
    contents: Mapping[str, Sequence[Piece]], written: Mapping[str, Written], dtypes: Mapping[str, torch.dtype]
) -> Metadata:
    tensors: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for name, content in contents.items():
        start = 0
        for piece, length in zip(content, written[name].facts, strict=True):
            key, offsets = piece.place.key, torch.Size(piece.offsets)
            if key not in tensors:
                shape = torch.Size((*piece.place.stacked, *piece.whole))
                tensors[key] = TensorStorageMetadata(TensorProperties(dtype=dtypes[key]), shape, [])
            tensors[key].chunks.append(ChunkStorageMetadata(offsets, torch.Size(piece.box)))
            storage[MetadataIndex(key, offsets)] = _StorageInfo(name, start, length)
            start += length
    (length,) = written[EXTRA_STATE_FILE].facts
    places = list({piece.place: None for content in contents.values() for piece in content})
    for key in extra_state_keys(places):
        tensors[key] = BytesStorageMetadata()
        storage[MetadataIndex(key)] = _StorageInfo(EXTRA_STATE_FILE, 0, length)
    return Metadata(tensors, storage_data=storage, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION)

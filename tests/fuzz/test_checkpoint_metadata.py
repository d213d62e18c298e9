"""The pickled description of a distributed checkpoint."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from mopd.base.types import UserError
from mopd.conversion.torch_dist.description import read_description
from tests.fuzz.harness import fuzz


def description() -> Metadata:
    """One tensor in two boxes, and an object."""
    key, halves = "decoder.layers.mlp.linear_fc1.weight", (torch.Size((0, 0)), torch.Size((2, 0)))
    chunks = [ChunkStorageMetadata(offsets, torch.Size((2, 3))) for offsets in halves]
    return Metadata(
        {key: TensorStorageMetadata(TensorProperties(), torch.Size((4, 3)), chunks), "rng": BytesStorageMetadata()},
        storage_data={
            **{MetadataIndex(key, half): _StorageInfo("__0_0.distcp", i * 100, 100) for i, half in enumerate(halves)},
            MetadataIndex("rng"): _StorageInfo("__0_1.distcp", 2**40, 7),
        },
        storage_meta=StorageMeta(checkpoint_id=Path("/here")),
        version="1.0.0",
    )


def test_descriptions(tmp_path: Path) -> None:
    def read(content: bytes) -> Metadata:
        path = tmp_path / ".metadata"
        path.write_bytes(content)
        return read_description(path)

    made = description()
    found = read(pickle.dumps(made))
    assert (found.state_dict_metadata, found.storage_data) == (made.state_dict_metadata, made.storage_data)
    fuzz(".metadata", [pickle.dumps(made, protocol) for protocol in (2, 4, 5)], read, (UserError,))

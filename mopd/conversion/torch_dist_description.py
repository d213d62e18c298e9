"""The description of a distributed checkpoint, ``.metadata``, which the format defines as a pickle.

The only file of mopd that pickles. Reading constructs the classes of such a description and no others, so that not even
a forged one runs code; whoever has a manifest compares hashes before.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from mopd.types import UserError

__all__ = ["UnpicklingError", "read_description", "write_description"]


def read_description(path: Path) -> Metadata:
    """What ``write_description`` or Megatron wrote.

    Raises:
        UserError: corrupt, or with anything in it that no description needs.
    """
    try:
        with path.open("rb") as file:
            metadata = _DescriptionUnpickler(file).load()
        if not isinstance(metadata.state_dict_metadata, dict) or not isinstance(metadata.storage_data, dict):
            raise UnpicklingError("it describes no tensors")
    except (UnpicklingError, AttributeError, EOFError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: not understood ({error}); restore the folder") from error
    return metadata


def write_description(path: Path, metadata: Metadata) -> None:
    """Write it; equal descriptions give equal bytes."""
    with path.open("wb") as stream:
        pickle.dump(metadata, stream)


class _DescriptionUnpickler(pickle.Unpickler):
    """Constructs what a description of chunks consists of."""

    _DESCRIPTION = frozenset(
        {
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
            "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        }
    )  # fmt: skip
    _ALLOWED = frozenset(
        {
            *(("torch.distributed.checkpoint.metadata", name) for name in _DESCRIPTION),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch", "Size"),
            ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"), ("pathlib", "PosixPath"),
        }
    )  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        """The class or dtype of that name, if it is one of the format's."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in self._ALLOWED:
            return super().find_class(module, name)
        raise UnpicklingError(f"it holds a {module}.{name}, which no description of tensors needs")

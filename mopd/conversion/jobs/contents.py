"""Contents of a checkpoint of either format as Hugging Face tensors, read one parameter at a time. Used by
``mopd convert verify`` and ``inspect``."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from mopd.base.types import UserError
from mopd.conversion.hf.reader import HfReader, kept_files, named_as_in
from mopd.conversion.jobs.streaming import open_distributed, read_row
from mopd.conversion.mapped import as_bytes
from mopd.conversion.models import families
from mopd.conversion.models.dims import ModelDims
from mopd.conversion.models.families import Placed
from mopd.conversion.models.reading import read_dims
from mopd.conversion.models.towers import TOWER_PREFIX
from mopd.conversion.torch_dist.plan import sharded_key
from mopd.conversion.torch_dist.reader import FORMAT_FILE, TorchDistReader

_WEIGHTS = ("decoder.", "embedding.", "output_layer.", TOWER_PREFIX)
"""Beginnings of the keys of weights in a distributed checkpoint."""


@dataclass(frozen=True, eq=False)
class Contents:
    """One opened checkpoint."""

    folder: Path
    origin: Path
    """Folder of its config and tokenizer."""
    dims: ModelDims
    reader: HfReader | TorchDistReader

    @property
    def is_megatron(self) -> bool:
        """Whether it is a distributed checkpoint, not a Hugging Face folder."""
        return isinstance(self.reader, TorchDistReader)

    def rows(self) -> list[Placed]:
        """Return the parameters that its config asks for."""
        return list(families.all_params(self.dims))

    def read(self, row: Placed) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of one parameter.

        Raises:
            UserError: one is missing, has another shape or is corrupt.
        """
        if isinstance(self.reader, TorchDistReader):
            yield from zip(row.hf_names, read_row(self.reader, row, self.dims), strict=True)
            return
        for name, shape in zip(row.hf_names, row.hf_shapes, strict=True):
            self.reader.require_shape(name, shape)
            yield name, self.reader.read(name)

    def unexpected(self) -> list[str]:
        """Return the names of weights that the config has no place for. Optimizer states are not weights."""
        if isinstance(self.reader, TorchDistReader):
            known = {sharded_key(row, self.dims).key for row in self.rows()}
            found = {key for key in self.reader.keys if key.startswith(_WEIGHTS)}
            return sorted(found - known)
        known = {*families.hf_tensors(self.dims), *families.mtp_names(self.reader.names, self.dims)}
        if self.dims.tied_embeddings:
            known.add(families.vocabulary_names(self.dims)[0])
        return sorted(name for name in self.reader.names - known if not families.IGNORED.fullmatch(name))


def open_checkpoint(folder: Path, *, allow_pickle: bool = False) -> Contents:
    """Open a Hugging Face folder or a distributed checkpoint, whichever it is.

    Raises:
        UserError: it is neither, or unsound.
    """
    if (folder / FORMAT_FILE).is_file():
        reader, origin, dims = open_distributed(folder, allow_pickle=allow_pickle)
        return Contents(folder, origin, dims, reader)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give a Hugging Face folder or a distributed checkpoint")
    config, hf = read_dims(folder), HfReader(folder, allow_pickle=allow_pickle)
    return Contents(folder, folder, named_as_in(hf, config), hf)


def fingerprint(tensor: Tensor) -> dict[str, Any]:
    """Return dtype, shape and SHA-256 of one tensor."""
    digest = hashlib.sha256(as_bytes(tensor.contiguous())).hexdigest()
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "sha256": digest}


def describe(folder: Path, *, allow_pickle: bool = False, lists_tensors: bool = False) -> dict[str, Any]:
    """Return format, sizes, dtypes, files and architecture of a folder; JSON-able.

    Args:
        lists_tensors: adds ``tensors``, one row for each tensor as it is stored.

    Raises:
        UserError: it is no checkpoint, or unsound.
    """
    contents = open_checkpoint(folder, allow_pickle=allow_pickle)
    tensors, weight_files = _tensors(contents), _weight_files(contents)
    dtypes = Counter[str]()
    for tensor in tensors:
        dtypes[tensor["dtype"]] += prod(tensor["shape"])
    report: dict[str, Any] = {
        "folder": str(folder),
        "format": "megatron torch_dist" if contents.is_megatron else "hugging face",
        "parameters": dtypes.total(),
        "parameters_by_dtype": dict(dtypes),
        "tensors_stored": len(tensors),
        "weight_files": len(weight_files),
        "bytes": sum(path.stat().st_size for path in weight_files),
        "side_files": [p.relative_to(contents.origin).as_posix() for p in kept_files(contents.origin)],
        "unexpected": contents.unexpected(),
        "model": {key: value for key, value in asdict(contents.dims).items() if value is not None},
    }
    if isinstance(contents.reader, TorchDistReader):
        num_others = len(contents.reader.keys) - len(tensors)
        report |= {"has_manifest": bool(contents.reader.hashes), "optimizer_tensors": num_others}
    if lists_tensors:
        report["tensors"] = tensors
    return report


def _tensors(contents: Contents) -> list[dict[str, Any]]:
    reader = contents.reader
    if isinstance(reader, HfReader):
        names = sorted(reader.stored_names)
    else:
        names = sorted({sharded_key(row, contents.dims).key for row in contents.rows()} & reader.keys)
    return [
        {"name": name, "dtype": str(reader.dtype(name)).removeprefix("torch."), "shape": list(reader.shape(name))}
        | ({"chunks": reader.num_chunks(name)} if isinstance(reader, TorchDistReader) else {})
        for name in names
    ]


def _weight_files(contents: Contents) -> list[Path]:
    if isinstance(contents.reader, HfReader):
        return contents.reader.files
    return sorted(contents.folder.glob("*.distcp"))

"""What a checkpoint folder holds, without reading a weight."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

from mopd.conversion.hf.reader import HfReader, kept_files
from mopd.conversion.jobs.contents import Contents, open_checkpoint
from mopd.conversion.torch_dist.reader import TorchDistReader
from mopd.conversion.torch_dist.sharded import sharded_key

_LAYOUT = "_parallel_size"


def describe(folder: Path, *, allow_pickle: bool = False, lists_tensors: bool = False) -> dict[str, Any]:
    """Format, sizes, dtypes, files and architecture of a folder; JSON-able.

    Args:
        lists_tensors: adds ``tensors``, one row for each tensor as it is stored.

    Raises:
        UserError: it is no checkpoint, or unsound.
    """
    contents = open_checkpoint(folder, allow_pickle=allow_pickle)
    tensors = _tensors(contents)
    dtypes = Counter({"": 0})
    for tensor in tensors:
        dtypes[tensor["dtype"]] += prod(tensor["shape"])
    report: dict[str, Any] = {
        "folder": str(folder),
        "format": "megatron torch_dist" if contents.is_megatron else "hugging face",
        "parameters": sum(dtypes.values()),
        "parameters_by_dtype": {name: count for name, count in dtypes.items() if count},
        "tensors_stored": len(tensors),
        "weight_files": len(_weight_files(contents)),
        "bytes": sum(path.stat().st_size for path in _weight_files(contents)),
        "side_files": [p.relative_to(contents.origin).as_posix() for p in kept_files(contents.origin)],
        "unexpected": contents.unexpected(),
        "model": {key: value for key, value in asdict(contents.dims).items() if value is not None},
    }
    if isinstance(contents.reader, TorchDistReader):
        others = [key for key in contents.reader.keys if key not in {tensor["name"] for tensor in tensors}]
        report |= {"has_manifest": bool(contents.reader.hashes), "optimizer_tensors": len(others)}
    if lists_tensors:
        report["tensors"] = tensors
    return report


def _tensors(contents: Contents) -> list[dict[str, Any]]:
    reader = contents.reader
    if isinstance(reader, HfReader):
        names = sorted(reader.names)
    else:
        names = sorted({sharded_key(row, contents.dims).key for row in contents.rows()} & reader.keys)
    rows = []
    for name in names:
        row: dict[str, Any] = {"name": name}
        row |= {"dtype": str(reader.dtype(name)).removeprefix("torch."), "shape": list(reader.shape(name))}
        if isinstance(reader, TorchDistReader):
            row["chunks"] = reader.num_chunks(name)
        rows.append(row)
    return rows


def _weight_files(contents: Contents) -> list[Path]:
    if isinstance(contents.reader, HfReader):
        return contents.reader.files
    return sorted(contents.folder.glob("*.distcp"))

"""New weights from several models of one architecture: their average, or task arithmetic on a base.

Average (Wortsman et al. 2022, "model soups"): ``sum_i w_i x_i`` with ``sum_i w_i = 1``. Task arithmetic (Ilharco et al.
2023): ``base + sum_i w_i (x_i - base)``. Sums are taken in fp32 (fp64 for fp64 weights) and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mopd.conversion.hf.names import check_names
from mopd.conversion.hf.reader import HfReader, read_tokenizer_json
from mopd.conversion.hf.writer import MAX_SHARD_BYTES, Group, hf_job, require_finite
from mopd.conversion.job import Job
from mopd.conversion.jobs.streaming import describe_hf
from mopd.conversion.models.dims import CONFIG_FILE, read_dims
from mopd.files.reading import shown_path
from mopd.types import UserError

_BLOCK_ELEMENTS = 2**24
"""Elements that are widened at a time."""


def merge(
    models: Sequence[Path],
    target: Path,
    *,
    weights: Sequence[float] | None = None,
    base: Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Job:
    """The job of combining Hugging Face folders; config and tokenizer are those of ``base``, else of the first model.

    Args:
        weights: one per model; None gives each ``1 / len(models)``.
        base: where given, task arithmetic on it.

    Raises:
        UserError: the models differ in architecture, names, shapes, dtypes or vocabulary; or the weights do not fit.
    """
    chosen = list(weights) if weights is not None else [1 / len(models)] * len(models)
    if len(chosen) != len(models):
        raise UserError(f"--weights has {len(chosen)} values for {len(models)} models: give one per model")
    if not all(math.isfinite(weight) for weight in chosen):
        raise UserError(f"--weights {chosen}: every one must be a finite number")
    if base is None and abs(sum(chosen) - 1) > 1e-6:
        raise UserError(f"--weights sum to {sum(chosen):g}: an average needs 1, task arithmetic needs --base")
    folders = [*([base] if base is not None else []), *models]
    readers = [HfReader(folder) for folder in folders]
    _require_alike(readers)
    factors = chosen if base is None else [1 - sum(chosen), *chosen]

    def group(name: str) -> Group:
        dtype = readers[0].dtype(name)
        return Group((name,), (readers[0].shape(name),), (dtype,), lambda: [_combine(name, readers, factors)])

    description = {
        "command": "merge",
        "options": {"weights": chosen, "has_base": base is not None, "max_file_bytes": max_shard_bytes},
        "source": [describe_hf(reader.folder, reader) for reader in readers],
    }
    names = sorted(readers[0].names)
    return hf_job(
        target, [group(name) for name in names],
        side_files=folders[0], description=description, max_shard_bytes=max_shard_bytes,
    )  # fmt: skip


def _combine(name: str, readers: Sequence[HfReader], factors: Sequence[float]) -> Tensor:
    sources = [require_finite(name, reader.read(name), reader.folder) for reader in readers]
    first = sources[0]
    if not first.is_floating_point():
        for reader, other in zip(readers, sources, strict=True):
            if not torch.equal(first, other):
                raise UserError(f"{reader.folder}: tensor '{name}' of {first.dtype} differs between the models")
        return first
    wide = torch.float64 if first.dtype == torch.float64 else torch.float32
    result = torch.empty_like(first)
    flat = [source.reshape(-1).split(_BLOCK_ELEMENTS) for source in sources]
    for out, *blocks in zip(result.view(-1).split(_BLOCK_ELEMENTS), *flat, strict=True):
        total = torch.zeros(out.shape, dtype=wide)
        for block, factor in zip(blocks, factors, strict=True):
            total.add_(block.to(wide), alpha=factor)
        out.copy_(total)
    return result


def _require_alike(readers: Sequence[HfReader]) -> None:
    first, *others = readers
    dims = read_dims(first.folder)
    check_names(first, dims)
    vocabulary = _vocabulary(first.folder)
    for other in others:
        if read_dims(other.folder) != dims:
            raise UserError(
                f"{other.folder / CONFIG_FILE}: another architecture than {first.folder}: merge like models"
            )
        for name in sorted(first.names ^ other.names):
            holder = first if name in first.names else other
            raise UserError(f"{holder.folder}: tensor '{name}' is in this model alone: merge like models")
        for name in sorted(first.names):
            if (first.shape(name), first.dtype(name)) != (other.shape(name), other.dtype(name)):
                raise UserError(
                    f"{other.folder}: tensor '{name}' is {other.dtype(name)} {list(other.shape(name))}, in "
                    f"{first.folder} {first.dtype(name)} {list(first.shape(name))}: merge like models"
                )
        if _vocabulary(other.folder) != vocabulary:
            raise UserError(f"{other.folder}: another vocabulary than {first.folder}: token ids would mean other text")


def _vocabulary(folder: Path) -> Any:
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    model = read_tokenizer_json(path).get("model")
    if not isinstance(model, dict) or "vocab" not in model:
        raise UserError(f"{shown_path(path)}: has no 'model.vocab'; fetch the file again")
    return model["vocab"]

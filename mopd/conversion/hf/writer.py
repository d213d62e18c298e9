"""Hugging Face folders written shard by shard, tensor by tensor: the shards are known before the first byte."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from mopd.conversion.hf.reader import INDEX_FILE, WEIGHTS_FILE, kept_files
from mopd.conversion.job import Job, OutputFile, Written
from mopd.conversion.mapped import DTYPE_NAMES, as_bytes
from mopd.conversion.models.dims import CONFIG_FILE
from mopd.conversion.output import files_below, sha256_of, write_json
from mopd.types import UserError

MARKER = "conversion.json"
"""Written last into a Hugging Face folder: what was converted, and the SHA-256 of every other file."""
MAX_SHARD_BYTES = 2**30
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors that are made together and therefore lie in one shard."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    read: Callable[[], Sequence[Tensor]]
    """Makes them, in this order; called once, when the shard is written."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True))


def hf_job(
    target: Path,
    groups: Sequence[Group],
    *,
    side_files: Path,
    description: Mapping[str, Any],
    config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    check_inputs: Callable[[int, int, Callable[[], bool]], None] = lambda rank, size, is_over: None,
) -> Job:
    """The job of writing a Hugging Face folder.

    Args:
        groups: all tensors, in the order in which the shards fill.
        side_files: folder whose config, generation config, tokenizer, chat template and licence files are copied byte
            for byte.
        config: replaces ``config.json``; None copies it.
        max_shard_bytes: a shard is ended before it would grow beyond this; one larger group has a shard of its own.
    """
    shards = _fill(groups, max_shard_bytes)
    names = [WEIGHTS_FILE] if len(shards) == 1 else [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)
    ]  # fmt: skip

    def finish(folder: Path, written: Mapping[str, Written]) -> None:
        if len(shards) > 1:
            index = {name: file for file, shard in zip(names, shards, strict=True) for g in shard for name in g.names}
            total = sum(group.num_bytes for group in groups)
            content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
            (folder / INDEX_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        copy_side_files(side_files, folder, config=config)
        hashes = {
            name: written[name].sha256 if name in written else sha256_of(folder / name) for name in files_below(folder)
        }
        write_json(folder / MARKER, {"sha256": hashes, "job": description})

    return Job(
        target=target,
        files=[_shard_file(name, shard) for name, shard in zip(names, shards, strict=True)],
        description=description,
        finish=finish,
        marker=MARKER,
        check_inputs=check_inputs,
    )


def copy_side_files(source: Path, folder: Path, *, config: Mapping[str, Any] | None = None) -> None:
    """Copy everything but the weights, byte for byte; ``config`` replaces ``config.json``."""
    for path in kept_files(source):
        copy = folder / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    if config is not None:
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def require_finite(name: str, tensor: Tensor, where: Path) -> Tensor:
    """The tensor itself. One pass over it, without a copy.

    Raises:
        UserError: some value is NaN or infinite.
    """
    if tensor.is_floating_point() and tensor.numel() and tensor.element_size() > 1:
        low, high = tensor.aminmax()  # NaN makes both NaN
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            raise UserError(f"{where}: tensor '{name}' has NaN or infinite values; use a checkpoint of a sound model")
    return tensor


def _fill(groups: Sequence[Group], max_shard_bytes: int) -> list[list[Group]]:
    shards: list[list[Group]] = []
    filled = 0
    for group in groups:
        if not shards or filled + group.num_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(group)
        filled += group.num_bytes
    # Wide elements first, so that each tensor begins at a multiple of its element size.
    return [sorted(shard, key=lambda group: -group.dtypes[0].itemsize) for shard in shards]


def _shard_file(name: str, shard: Sequence[Group]) -> OutputFile:
    header = _header(shard)

    def write(stream: BinaryIO) -> list[int]:
        stream.write(header)
        for group in shard:
            expected = zip(group.names, group.shapes, group.dtypes, group.read(), strict=True)
            for tensor_name, shape, dtype, tensor in expected:
                if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                    raise RuntimeError(f"{tensor_name} is {tensor.dtype} {list(tensor.shape)}, announced {shape}")
                stream.write(as_bytes(tensor.contiguous()))
        return []

    return OutputFile(name, len(header) + sum(group.num_bytes for group in shard), write)


def _header(shard: Sequence[Group]) -> bytes:
    """Length and JSON of a safetensors file whose tensors follow in the order of the groups."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape, dtype in _tensors(shard):
        num_bytes = prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [position, position + num_bytes],
        }  # fmt: skip
        position += num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _tensors(shard: Sequence[Group]) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    for group in shard:
        yield from zip(group.names, group.shapes, group.dtypes, strict=True)

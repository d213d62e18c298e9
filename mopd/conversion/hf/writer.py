"""Writing of Hugging Face folders shard by shard: by a job, whose shards are known before the first byte, or from a
stream of tensors."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import save_file
from torch import Tensor

from mopd.base.files.writing import sync, writing
from mopd.conversion.hf.reader import INDEX_FILE, WEIGHTS_FILE, HfReader, kept_files
from mopd.conversion.hf.stacked import parts_of, put, restacked, stacked_shape, stored_name
from mopd.conversion.job import MAX_FILE_BYTES, CheckInputs, Job, OutputFile, Written, grouped_by_size, require_new
from mopd.conversion.mapped import DTYPE_NAMES, as_bytes
from mopd.conversion.models import families
from mopd.conversion.models.config_keys import CONFIG_FILE, QUANTISATION, read_config, without_quantisation
from mopd.conversion.models.dims import ModelDims
from mopd.conversion.models.known import FAMILIES

MANIFEST_FILE = "conversion.json"
"""File written last into a Hugging Face folder: what was converted, and the SHA-256 of every other file."""
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors that are made together and therefore lie in one shard."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    read: Callable[[], Sequence[Tensor]]
    """Function that makes them, in this order; called once, when the shard is written."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True))


def mtp_groups(dims: ModelDims, *folders: Path, dtype: torch.dtype | None = None) -> list[Group]:
    """Return the tensors of multi-token prediction, which no conversion changes but by its ``dtype``, from the first of
    the folders that has weights; none if it has none of these."""
    may_have = dims.num_mtp_layers > 0 or bool(FAMILIES[dims.family].mtp_prefix)
    found = next((folder for folder in folders if may_have and any(folder.glob("*.safetensors"))), None)
    if found is None:
        return []
    reader = HfReader(found)

    def group(name: str) -> Group:
        wanted = dtype or reader.dtype(name)
        return Group((name,), (reader.shape(name),), (wanted,), lambda: [reader.read_finite(name).to(wanted)])

    return list(map(group, families.mtp_names(reader.names, dims)))


def mtp_tensors(dims: ModelDims, folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of a Hugging Face folder's multi-token prediction."""
    return ((group.names[0], group.read()[0]) for group in mtp_groups(dims, folder))


def mtp_file(groups: Sequence[Group]) -> list[OutputFile]:
    """Return the file that keeps the tensors of multi-token prediction in a distributed checkpoint; none if there are
    none."""
    return [shard_file(WEIGHTS_FILE, groups)] if groups else []


def hf_job(
    target: Path,
    groups: Sequence[Group],
    *,
    side_files: Path,
    description: Mapping[str, Any],
    config: Mapping[str, Any] | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    check_inputs: CheckInputs | None = None,
) -> Job:
    """Return the job of writing a Hugging Face folder.

    Args:
        groups: all tensors, in the order in which the shards fill.
        side_files: folder whose config, generation config, tokenizer, chat template and licence files are copied byte
            for byte.
        config: replaces ``config.json``; None copies it.
        max_file_bytes: a shard is ended before it would grow beyond this; one larger group has a shard of its own.
    """
    groups = restacked_groups(groups)
    runs = grouped_by_size(groups, lambda group: group.num_bytes, max_file_bytes)
    # Wide elements first, so that each tensor begins at a multiple of its element size.
    shards = [sorted(run, key=lambda group: -group.dtypes[0].itemsize) for run in runs]
    names = _shard_names(len(shards))

    def finish(folder: Path, written: Mapping[str, Written]) -> None:
        held = [[name for group in shard for name in group.names] for shard in shards]
        _write_index(folder, held, sum(group.num_bytes for group in groups))
        copy_side_files(side_files, folder, config=config)

    return Job(
        target=target,
        files=[shard_file(name, shard) for name, shard in zip(names, shards, strict=True)],
        description=description,
        finish=finish,
        manifest=MANIFEST_FILE,
        check_inputs=check_inputs,
    )


def restacked_groups(groups: Sequence[Group]) -> list[Group]:
    """Return the groups such that all experts of a layer are made together where checkpoints store them together."""
    stacks: dict[str, list[Group]] = {}
    for group in groups:
        for stored in dict.fromkeys(map(stored_name, group.names)):
            if stored is not None:
                stacks.setdefault(stored, []).append(group)
    found: dict[str, Group] = {}
    for group in groups:
        stored = stored_name(group.names[0])
        if stored is None:
            found[group.names[0]] = group
        elif stored not in found:
            found[stored] = _stack(stored, stacks[stored])
    return list(found.values())


def _stack(stored: str, groups: Sequence[Group]) -> Group:
    first, num_experts = groups[0], sum(len(group.names) for group in groups) // len(parts_of(stored))
    shape = stacked_shape(first.names[0], first.shapes[0], num_experts)

    def read() -> list[Tensor]:
        stacked = torch.empty(shape, dtype=first.dtypes[0])
        for group in groups:
            for name, tensor in zip(group.names, group.read(), strict=True):
                put(stacked, name, tensor)
        return [stacked]

    return Group((stored,), (shape,), first.dtypes[:1], read)


def require_exportable(target: Path, source: Path) -> None:
    """Refuse what ``write_folder`` would refuse.

    Raises:
        UserError: ``target`` exists and is not an empty folder, or ``source`` has a file that leads out of it.
    """
    require_new(target)
    kept_files(source)


def write_folder(
    target: Path, tensors: Iterable[tuple[str, Tensor]], *, source: Path, max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Write a Hugging Face folder that appears whole, from a stream whose end is not known.

    Shards are written as they fill into a temporary sibling folder, which is removed if anything raises.

    Args:
        tensors: names and tensors, on any device; kept in their dtypes.
        source: folder whose config, generation config, tokenizer and licence files are copied.

    Raises:
        UserError: as ``require_exportable`` does, or a write is refused.
        ValueError: a name comes twice, or none at all.
    """
    require_exportable(target, source)
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
        folder.chmod(0o755)  # mkdtemp makes private folders
    held: list[list[str]] = []
    num_bytes = 0
    try:
        config = read_config(source) if (source / CONFIG_FILE).exists() else {}
        stored = restacked(tensors, config.get("num_local_experts", 0))
        for run in grouped_by_size(_on_cpu(stored), lambda item: item[1].nbytes, max_file_bytes):
            with writing(target):
                save_file(dict(run), folder / f"part-{len(held)}", metadata={"format": "pt"})
            held.append([name for name, _ in run])
            num_bytes += sum(tensor.nbytes for _, tensor in run)
            run.clear()  # freed before the next run fills
        if not held:
            raise ValueError("no tensor was added")
        with writing(target):
            for number, name in enumerate(_shard_names(len(held))):
                (folder / f"part-{number}").rename(folder / name)
            _write_index(folder, held, num_bytes)
            copy_side_files(source, folder)
            for path in folder.rglob("*"):
                if path.is_file():
                    sync(path)
            folder.rename(target)  # atomic; replaces an empty folder of that name
            sync(target.parent)
    finally:
        if folder.exists():
            shutil.rmtree(folder)


def _on_cpu(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    names: set[str] = set()
    for name, tensor in tensors:
        if name in names:
            raise ValueError(f"tensor {name!r} was added twice")
        names.add(name)
        yield name, tensor.detach().cpu().contiguous()


def copy_side_files(source: Path, folder: Path, *, config: Mapping[str, Any] | None = None) -> None:
    """Copy everything but the weights, byte for byte; ``config`` replaces ``config.json``, as does one without the
    quantisation that the source's weights have."""
    for path in kept_files(source):
        copy = folder / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    if config is None and (source / CONFIG_FILE).is_file():
        own = read_config(source)
        config = own if any(own.get(key) is not None for key in QUANTISATION) else None
    if config is not None:
        config = without_quantisation(config)
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _shard_names(number: int) -> list[str]:
    if number == 1:
        return [WEIGHTS_FILE]
    return [f"model-{i:05d}-of-{number:05d}.safetensors" for i in range(1, number + 1)]


def _write_index(folder: Path, held: Sequence[Sequence[str]], num_bytes: int) -> None:
    """Write the index of a folder with several shards, from the names in each."""
    if len(held) <= 1:
        return
    index = {name: file for file, names in zip(_shard_names(len(held)), held, strict=True) for name in names}
    content = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(index.items()))}
    (folder / INDEX_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def shard_file(name: str, shard: Sequence[Group]) -> OutputFile:
    """Return the description of a safetensors file that holds the groups' tensors in this order."""
    header = _header(shard)

    def write(stream: BinaryIO) -> list[int]:
        stream.write(header)
        for group in shard:
            for tensor in group.read():
                stream.write(as_bytes(tensor.contiguous()))
        return []

    return OutputFile(name, len(header) + sum(group.num_bytes for group in shard), write)


def _header(shard: Sequence[Group]) -> bytes:
    """Return length and JSON of a safetensors file whose tensors follow in the order of the groups."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for group in shard:
        for name, shape, dtype in zip(group.names, group.shapes, group.dtypes, strict=True):
            start, position = position, position + prod(shape) * dtype.itemsize
            entries[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, position]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text

"""The vocabulary dimension of Hugging Face folders: padded, cut to its true size, or the LM head on its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mopd.conversion.hf.names import check_names
from mopd.conversion.hf.reader import HfReader
from mopd.conversion.hf.writer import MAX_SHARD_BYTES, Group, hf_job, require_finite
from mopd.conversion.job import Job
from mopd.conversion.jobs.streaming import describe_hf
from mopd.conversion.models import families
from mopd.conversion.models.dims import ModelDims, read_config, read_dims
from mopd.types import UserError

_VOCABULARY = tuple(row.hf[0].name for row in (families.EMBEDDING, families.LM_HEAD))


def pad(source: Path, target: Path, *, multiple: int, max_shard_bytes: int = MAX_SHARD_BYTES) -> Job:
    """The job of adding zero rows to embedding and LM head until their number is a multiple of ``multiple``.

    A padded token has logit 0; engines that do not mask it give it some probability.

    Raises:
        UserError: ``multiple`` is less than 1, or the folder is unsound.
    """
    if multiple < 1:
        raise UserError(f"--multiple is {multiple}: set 1 or more")
    reader, dims = _open(source)
    rows = -(-dims.vocab_size // multiple) * multiple

    def padded(tensor: Tensor) -> Tensor:
        result = tensor.new_zeros(rows, *tensor.shape[1:])
        result[: tensor.shape[0]] = tensor
        return result

    return _resized(reader, target, rows, padded, {"multiple": multiple}, max_shard_bytes)


def unpad(source: Path, target: Path, *, vocab_size: int, max_shard_bytes: int = MAX_SHARD_BYTES) -> Job:
    """The job of keeping the first ``vocab_size`` rows of embedding and LM head.

    Raises:
        UserError: there are fewer rows, or a row that would be lost is not zero.
    """
    reader, dims = _open(source)
    if not 1 <= vocab_size <= dims.vocab_size:
        raise UserError(f"--vocab-size is {vocab_size}: set 1 to {dims.vocab_size}, the rows of {source}")

    def cut(tensor: Tensor) -> Tensor:
        if tensor[vocab_size:].any():
            raise UserError(
                f"{source}: rows from {vocab_size} on are not zero, so they are no padding: set a larger --vocab-size"
            )
        return tensor[:vocab_size]

    return _resized(reader, target, vocab_size, cut, {"vocab_size": vocab_size}, max_shard_bytes)


def extract_head(source: Path, target: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> Job:
    """The job of writing ``lm_head.weight`` [V, H] (the embedding where they are tied) with config and tokenizer.

    Raises:
        UserError: the folder is unsound.
    """
    reader, dims = _open(source)
    (head,) = families.LM_HEAD.hf
    name = families.EMBEDDING.hf[0].name if dims.tied_embeddings else head.name

    def read() -> list[Tensor]:
        return [require_finite(name, reader.read(name), reader.folder)]

    groups = [Group((head.name,), (reader.shape(name),), (reader.dtype(name),), read)]
    description = _description("extract-head", {"max_file_bytes": max_shard_bytes}, reader)
    return hf_job(target, groups, side_files=source, description=description, max_shard_bytes=max_shard_bytes)


def _resized(
    reader: HfReader,
    target: Path,
    rows: int,
    change: Callable[[Tensor], Tensor],
    options: Mapping[str, int],
    max_shard_bytes: int,
) -> Job:
    def group(name: str) -> Group:
        shape = reader.shape(name)

        def read() -> list[Tensor]:
            tensor = require_finite(name, reader.read(name), reader.folder)
            return [change(tensor) if name in _VOCABULARY else tensor]

        return Group((name,), ((rows, *shape[1:]) if name in _VOCABULARY else shape,), (reader.dtype(name),), read)

    config = {**read_config(reader.folder), "vocab_size": rows}
    description = _description("resize-vocab", {**options, "max_file_bytes": max_shard_bytes}, reader)
    return hf_job(
        target, [group(name) for name in sorted(reader.names)],
        side_files=reader.folder, description=description, config=config, max_shard_bytes=max_shard_bytes,
    )  # fmt: skip


def _open(source: Path) -> tuple[HfReader, ModelDims]:
    reader, dims = HfReader(source), read_dims(source)
    check_names(reader, dims)
    return reader, dims


def _description(command: str, options: Mapping[str, int], reader: HfReader) -> dict[str, Any]:
    return {"command": command, "options": dict(options), "source": describe_hf(reader.folder, reader)}

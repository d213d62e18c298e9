"""Conversions as jobs: Hugging Face to Megatron's distributed format, back, and from one parallel layout to another.

No model is built. One tensor, or one layer's part of a stacked tensor, is in memory at a time, read as a view of its
file. Every weight is checked for NaN on its way.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from mopd.base.files.json_text import read_json_object
from mopd.base.types import UserError
from mopd.conversion.adapter_writer import adapter_job
from mopd.conversion.adapters import peft_names
from mopd.conversion.hf.reader import HfReader, hash_side_files, identity, named_as_in, open_model, require_finite
from mopd.conversion.hf.writer import Group, copy_side_files, hf_job, mtp_file, mtp_groups
from mopd.conversion.job import MAX_FILE_BYTES, CheckInputs, Job, Written, sha256_of
from mopd.conversion.mapped import WEIGHT_DTYPES
from mopd.conversion.models import families
from mopd.conversion.models.config_keys import CONFIG_FILE, read_config
from mopd.conversion.models.dims import ModelDims, Naming
from mopd.conversion.models.families import Placed
from mopd.conversion.models.mapping import merged, pad_rows, read_box, split_whole, whole_shape
from mopd.conversion.models.reading import read_dims
from mopd.conversion.models.towers import with_naming
from mopd.conversion.torch_dist.plan import Piece, TargetLayout, files, one_dtype_per_key, pieces, sharded_key
from mopd.conversion.torch_dist.reader import MANIFEST_FILE, STATE_FILE, TorchDistReader
from mopd.conversion.torch_dist.writer import SIDE_FILES, data_file, extra_state_file, write_rest


def hf_to_megatron(
    source: Path,
    target: Path,
    layout: TargetLayout,
    *,
    dtype: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    allow_pickle: bool = False,
) -> Job:
    """Return the job of converting a Hugging Face folder into a distributed checkpoint cut for ``layout``, bit for bit.

    Args:
        dtype: dtype of the result, by its name in ``WEIGHT_DTYPES``; None keeps each tensor's own.
        max_file_bytes: a file of the checkpoint is ended before it would grow beyond this.
        allow_pickle: read ``.bin`` files too, as tensors alone.

    Raises:
        UserError: the folder cannot be read or its features are not supported, or the layout does not fit.
    """
    reader, dims = open_model(source, allow_pickle=allow_pickle)
    layout.check(dims)
    rows = families.all_params(dims)
    dtypes = {name: _wanted(row, reader.dtype(name), dtype) for row in rows for name in row.hf_names}

    def read_slice(name: str, dim: int, start: int, stop: int) -> Tensor:
        return require_finite(name, reader.read_slice(name, dim, start, stop), reader.folder)

    def read(piece: Piece) -> Tensor:
        tensor = read_box(piece.placed, read_slice, dims, piece.start, piece.stop)
        return tensor.to(dtypes[piece.placed.hf_names[0]])

    return _megatron_job(
        "hf-to-megatron", target, dims, layout, dtypes, read,
        options={"dtype": dtype}, identity=identity(reader.files, source), side_files=source,
        beside=mtp_groups(dims, source, dtype=WEIGHT_DTYPES[dtype] if dtype else None),
        config=config_with_dtype(source, dtype), max_file_bytes=max_file_bytes,
    )  # fmt: skip


def megatron_to_hf(
    source: Path,
    target: Path,
    *,
    dtype: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    allow_pickle: bool = False,
    side_files: Path | None = None,
) -> Job:
    """Return the job of converting a distributed checkpoint into a Hugging Face folder, bit for bit.

    Args:
        source: a folder of ``hf_to_megatron`` or a checkpoint of a run; optimizer states are left out. Adapters are
            merged into the model that the run began with.
        side_files: folder of config, tokenizer and so on; None takes those inside the checkpoint, or of the folder that
            the run began with.

    Raises:
        UserError: the checkpoint is incomplete, changed or lacks a tensor, or there is no config.
    """
    reader, origin, dims = open_distributed(source, side_files, allow_pickle=allow_pickle)
    base = _MergedReader(source, reader, open_model(origin)[0]) if adapter_keys(reader) else None
    if base is None:
        check_keys(reader, dims)

    def group(row: Placed) -> Group:
        own = reader.dtype(sharded_key(row, dims).key) if base is None else base.dtype(row.hf_names[0])
        wanted = _wanted(row, own, dtype)

        def read() -> list[Tensor]:
            found = read_row(reader, row, dims) if base is None else [base.read(name) for name in row.hf_names]
            tensors = zip(row.hf_names, found, strict=True)
            return [require_finite(name, tensor, reader.folder).to(wanted) for name, tensor in tensors]

        return Group(row.hf_names, row.hf_shapes, (wanted,) * len(row.hf_names), read)

    options = {"dtype": dtype, "max_shard_bytes": max_file_bytes}
    description = {"command": "megatron-to-hf", "options": options, "source": _identity(reader, origin)}
    return hf_job(
        target,
        [
            *map(group, families.all_params(dims)),
            *mtp_groups(dims, source, origin, dtype=WEIGHT_DTYPES[dtype] if dtype else None),
        ],
        side_files=origin, description=description, config=config_with_dtype(origin, dtype),
        max_file_bytes=max_file_bytes,
        check_inputs=_checks_hashes(reader, dims) if base is None else _checks_files(reader, adapter_keys(reader)),
    )  # fmt: skip


class _MergedReader:
    """Reader of a model whose checkpoint holds adapters, by Hugging Face names."""

    def __init__(self, source: Path, reader: TorchDistReader, base: HfReader) -> None:
        config = _adapter_config(source)
        self._reader, self._base, self._scale = reader, base, config["lora_alpha"] / config["r"]
        self.dtype = base.dtype

    def read(self, name: str) -> Tensor:
        """Return a tensor of the base, with its adapter merged if it has one."""
        weight, keys = self._base.read_finite(name), peft_names(name.removesuffix(".weight"))
        if keys[0] not in self._reader.keys:
            return weight
        a, b = (_read_whole(self._reader, key) for key in keys)
        return merged(weight, a, b, self._scale)


def _read_whole(reader: TorchDistReader, key: str) -> Tensor:
    shape = reader.shape(key)
    return require_finite(key, reader.read(key, (0,) * len(shape), shape), reader.folder)


def _adapter_config(source: Path) -> dict[str, Any]:
    """Return PEFT's description of the adapters in a run's checkpoint."""
    config = read_json_object(source / STATE_FILE, cure="restore the folder").get("adapter")
    numbers = [config.get(key) for key in ("r", "lora_alpha")] if isinstance(config, dict) else []
    if not isinstance(config, dict) or not all(isinstance(n, int | float) and n > 0 for n in numbers):
        raise UserError(f"{source}: holds no adapters: name a step folder of a run with student.lora")
    return config


def adapter_keys(reader: TorchDistReader) -> list[str]:
    """Return PEFT's names of the adapters in a checkpoint, sorted; none in one of a whole model."""
    return sorted(key for key in reader.keys if key.startswith("base_model.model."))


def megatron_to_peft(source: Path, target: Path, *, max_file_bytes: int = MAX_FILE_BYTES) -> Job:
    """Return the job of writing the adapters of a run's checkpoint as a folder in PEFT's format, bit for bit.

    Raises:
        UserError: the checkpoint is incomplete, changed, or holds no adapters.
    """
    reader = TorchDistReader(source)
    config, names = _adapter_config(source), adapter_keys(reader)

    def group(name: str) -> Group:
        return Group((name,), (reader.shape(name),), (reader.dtype(name),), lambda: [_read_whole(reader, name)])

    description = {"command": "megatron-to-peft", "source": {"manifest": sha256_of(source / MANIFEST_FILE)}}
    return adapter_job(
        target, [group(name) for name in names], config=config, description=description,
        check_inputs=_checks_files(reader, names),
    )  # fmt: skip


def reshard(
    source: Path,
    target: Path,
    layout: TargetLayout,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    allow_pickle: bool = False,
    side_files: Path | None = None,
) -> Job:
    """Return the job of cutting the weights of a distributed checkpoint for another layout. Optimizer states are left
    out.

    Raises:
        UserError: as ``megatron_to_hf`` does, or the layout does not fit.
    """
    reader, origin, dims = open_distributed(source, side_files, allow_pickle=allow_pickle)
    layout.check(dims)
    check_keys(reader, dims)
    rows = families.all_params(dims)
    dtypes = {name: reader.dtype(sharded_key(row, dims).key) for row in rows for name in row.hf_names}

    def read(piece: Piece) -> Tensor:
        sizes, offsets = list(piece.box), list(piece.offsets)
        if piece.placed.param.merge == "vocab":  # the source may have other padding, and none of these rows
            sizes[0] = max(0, min(piece.stop, whole_shape(piece.placed)[0]) - piece.start)
            offsets[0] = piece.start if sizes[0] else 0
        tensor = reader.read(piece.place.key, offsets, sizes).view(*sizes[len(piece.place.index) :])
        return pad_rows(require_finite(piece.place.key, tensor, reader.folder), piece.sizes[0])

    return _megatron_job(
        "reshard", target, dims, layout, dtypes, read,
        options={}, identity=_identity(reader, origin), side_files=origin, config=None,
        beside=mtp_groups(dims, source, origin),
        max_file_bytes=max_file_bytes, check_inputs=_checks_hashes(reader, dims),
    )  # fmt: skip


def read_row(reader: TorchDistReader, row: Placed, dims: ModelDims) -> list[Tensor]:
    """Return the Hugging Face tensors of one parameter, from a distributed checkpoint."""
    place, shape = sharded_key(row, dims), whole_shape(row)
    ones, rest = tuple(1 for _ in place.index), (0,) * (len(shape) - 1)
    if row.param.merge == "gate_up":  # read apart: a box that is one chunk is a view, no copy
        starts = [sum(part[0] for part in row.hf_shapes[:i]) for i in range(len(row.hf_shapes))]
        return [
            reader.read(place.key, (*place.index, start, *rest), (*ones, *part)).view(part)
            for start, part in zip(starts, row.hf_shapes, strict=True)
        ]
    whole = reader.read(place.key, (*place.index, 0, *rest), (*ones, *shape)).view(shape)
    return split_whole(row, whole, dims)


def check_keys(reader: TorchDistReader, dims: ModelDims) -> None:
    """Check that the checkpoint has every parameter of the model, in its shape. A padded vocabulary may have more rows.

    Raises:
        UserError: names the first tensor that is missing or has another shape.
    """
    known: set[str] = set()
    for row in families.all_params(dims):  # ends at the first missing one, whatever the config asks for
        place = sharded_key(row, dims)
        if place.key in known:
            continue
        known.add(place.key)
        found, expected = reader.shape(place.key), (*place.stacked, *whole_shape(row))
        fits = found == expected
        if row.param.merge == "vocab" and len(found) == len(expected):
            fits = found[1:] == expected[1:] and found[0] >= expected[0]
        if not fits:
            raise UserError(
                f"{reader.folder}: tensor '{place.key}' has shape {list(found)}, {CONFIG_FILE} asks for "
                f"{list(expected)}; config and weights belong to different models"
            )


def open_distributed(
    source: Path, side_files: Path | None = None, *, allow_pickle: bool = False
) -> tuple[TorchDistReader, Path, ModelDims]:
    """Return the reader of a distributed checkpoint, the folder with its config, tokenizer and so on, and the sizes of
    its model. These name tensors as the folder's own weights do, else as the weights did that the checkpoint was made
    from.

    Raises:
        UserError: the checkpoint is unsound, there is no such folder, or its config is unsound.
    """
    reader, path = TorchDistReader(source, allow_pickle=allow_pickle), source / STATE_FILE
    state = read_json_object(path, cure="restore the folder") if path.exists() else {}
    folder = _side_files_of(source, state, side_files)
    dims = read_dims(folder)
    if dims.vision is None:
        return reader, folder, dims
    if any(folder.glob("*.safetensors")):
        return reader, folder, named_as_in(HfReader(folder), dims)
    naming = state.get("naming", dims.vision.naming)
    if naming not in get_args(Naming):
        raise UserError(f"{path}: 'naming' is {naming!a:.100}; restore the folder")
    return reader, folder, with_naming(dims, naming)


def _side_files_of(source: Path, state: Mapping[str, Any], given: Path | None) -> Path:
    for folder in (given,) if given is not None else (source / SIDE_FILES, Path(str(state.get("source", "")))):
        if (folder / CONFIG_FILE).is_file():
            return folder
    if given is not None:
        raise UserError(f"{given}: no {CONFIG_FILE}; name the Hugging Face folder that the weights belong to")
    raise UserError(
        f"{source}: its config and tokenizer came from {str(state.get('source'))!r}, which is gone: restore that "
        "folder or name another with --side-files"
    )


def config_with_dtype(folder: Path, dtype: str | None) -> dict[str, Any] | None:
    """Return the config with another dtype; None if nothing changes and the file is copied as it is."""
    if dtype is None:
        return None
    config = read_config(folder)
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    nested = {  # a config with vision repeats the dtype in its sections
        name: {**part, inner: dtype}
        for name, part in config.items() if name in ("text_config", "vision_config") and isinstance(part, dict)
        for inner in ("torch_dtype", "dtype") if inner in part
    }  # fmt: skip
    return {**config, **nested, key: dtype}


def _identity(reader: TorchDistReader, origin: Path) -> dict[str, Any]:
    """Return the identity of a distributed checkpoint: its manifest, or sizes and times of its files."""
    if reader.hashes:
        return {"manifest": sha256_of(reader.folder / MANIFEST_FILE), "side_files": hash_side_files(origin)}
    return identity(sorted(path for path in reader.folder.iterdir() if path.is_file()), origin)


def _megatron_job(
    command: str,
    target: Path,
    dims: ModelDims,
    layout: TargetLayout,
    dtype_of: Mapping[str, torch.dtype],
    read: Callable[[Piece], Tensor],
    *,
    options: Mapping[str, Any],
    identity: Mapping[str, Any],
    side_files: Path,
    beside: Sequence[Group],
    config: Mapping[str, Any] | None,
    max_file_bytes: int,
    check_inputs: CheckInputs | None = None,
) -> Job:
    """Return the job of writing a distributed checkpoint whose pieces ``read`` returns, and a file of what stands
    ``beside`` the model."""
    description = {
        "command": command,
        "options": {**dataclasses.asdict(layout), **options, "max_file_bytes": max_file_bytes},
        "source": identity,
    }
    main_dtype = Counter(dtype_of.values()).most_common(1)[0][0]
    state = {
        "source": str(side_files.resolve()),
        "dtype": str(main_dtype).removeprefix("torch."),
        "layout": {**dataclasses.asdict(layout), "data_parallel_size": 1},
    }
    if dims.vision is not None:
        state["naming"] = dims.vision.naming
    cut = list(pieces(dims, layout))
    dtypes = one_dtype_per_key(cut, dtype_of)
    itemsize = {key: dtype.itemsize for key, dtype in dtypes.items()}
    contents = files(cut, itemsize, max_file_bytes)

    def finish(folder: Path, written: Mapping[str, Written]) -> None:
        (folder / SIDE_FILES).mkdir(exist_ok=True)
        copy_side_files(side_files, folder / SIDE_FILES, config=config)
        write_rest(folder, contents, written, dtypes, state)

    outputs = [data_file(name, content, itemsize, read) for name, content in contents.items()]
    return Job(
        target=target,
        files=[*outputs, extra_state_file(), *mtp_file(beside)],
        description=description,
        finish=finish,
        manifest=MANIFEST_FILE,
        check_inputs=check_inputs,
    )


def _checks_hashes(reader: TorchDistReader, dims: ModelDims) -> CheckInputs:
    return _checks_files(reader, {sharded_key(row, dims).key for row in families.all_params(dims)})


def _checks_files(reader: TorchDistReader, keys: Collection[str]) -> CheckInputs:
    names = reader.files_of(keys)
    return lambda rank, size, is_over: reader.check_hashes(names[rank::size], is_over)


def _wanted(row: Placed, own: torch.dtype, dtype: str | None) -> torch.dtype:
    """Return the dtype that was asked for, unless the tensor keeps its own."""
    return own if dtype is None or not own.is_floating_point or row.param.stays_fp32 else WEIGHT_DTYPES[dtype]

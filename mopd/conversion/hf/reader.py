"""Hugging Face checkpoint folders: their files, and a reader that maps tensors instead of loading them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mopd.base.files.json_text import read_json_object
from mopd.base.files.reading import shown_path
from mopd.base.types import UserError
from mopd.conversion.hf.header import MAX_NAME, TensorInfo, read_header
from mopd.conversion.hf.stacked import expert_parts
from mopd.conversion.job import sha256_of
from mopd.conversion.mapped import DTYPE_NAMES, TORCH_DTYPES, map_tensor
from mopd.conversion.models import families
from mopd.conversion.models.config_keys import CONFIG_FILE
from mopd.conversion.models.dims import ModelDims
from mopd.conversion.models.reading import read_dims
from mopd.conversion.models.towers import naming_of, with_naming
from mopd.conversion.torch_dist.pickled import load_pickled

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLED_FILE = "pytorch_model.bin"
PICKLED_INDEX_FILE = "pytorch_model.bin.index.json"
TOKENIZER_PATTERNS = (
    "tokenizer*", "vocab.json", "vocab.txt", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "additional_chat_templates/*", "*.model", "*.tiktoken",
)  # fmt: skip
"""Files that make up a tokenizer, chat template included."""
PROCESSOR_PATTERNS = ("preprocessor_config.json", "processor_config.json")
"""Files that define how an image becomes patches."""
KEPT_PATTERNS = (
    "config.json", "generation_config.json", *TOKENIZER_PATTERNS, *PROCESSOR_PATTERNS, "video_preprocessor_config.json",
    "README.md", "LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
"""Files that an export copies byte for byte."""
_MAX_INDEX_BYTES = 2**26
_BLOCK_ROWS = 4096
"""Number of rows compared at a time."""


def matching_files(folder: Path, patterns: Iterable[str]) -> list[Path]:
    """Return the files of ``folder`` that match any of the glob patterns, each once, sorted by path."""
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def kept_files(folder: Path) -> list[Path]:
    """Return the files that an export copies, sorted by path. A link may lead to another file of the folder or into a
    cache of the Hugging Face hub, whose folders consist of links; any other link of an untrusted folder could copy
    private files of this machine into the result.

    Raises:
        UserError: names a link that leads elsewhere.
    """
    whole = folder.resolve()
    paths = matching_files(folder, KEPT_PATTERNS)
    for path in paths:
        target = path.resolve()
        if not target.is_relative_to(whole) and not _is_in_hub_cache(target):
            raise UserError(
                f"{shown_path(path)}: leads out of the folder, to {shown_path(target)}, and an export would copy "
                "that file; put a copy in its place if that is meant, or remove the link"
            )
    return paths


def _is_in_hub_cache(target: Path) -> bool:
    """Return whether the path is ``…/models--OWNER--NAME/blobs/HASH``, or ``…/blobs/HA/HASH``, which models share."""
    if target.parent.name == "blobs":
        return target.parents[1].name.startswith("models--")
    is_hash = re.fullmatch("[0-9a-f]{64}", target.name) is not None and target.parent.name == target.name[:2]
    return is_hash and target.parents[1].name == "blobs"


def identity(weights: Iterable[Path], side_files: Path) -> dict[str, Any]:
    """Return what distinguishes a checkpoint without reading its weights: their sizes and times, by file name; hashes
    of the small files of folder ``side_files``. JSON-able."""
    stats = {path.name: path.stat() for path in weights}
    return {
        "weights": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
        "side_files": hash_side_files(side_files),
    }


def hash_side_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of the files that an export copies, by relative name."""
    return {path.relative_to(folder).as_posix(): sha256_of(path) for path in kept_files(folder)}


def weight_files(folder: Path, *, allow_pickle: bool = False) -> list[Path]:
    """Return the weight files of a folder, sorted: safetensors, or with ``allow_pickle`` also PyTorch's own format.

    Raises:
        UserError: no such weights, or an index that is corrupt or points outside the folder.
    """
    index = _index_of(folder, allow_pickle)
    if index is not None:
        return [folder / name for name in sorted(set(_read_index(index).values()))]
    if (folder / WEIGHTS_FILE).exists():
        return [folder / WEIGHTS_FILE]
    pickled = sorted(path for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickled and not allow_pickle:
        raise UserError(
            f"{pickled[0]}: pickled weights can run code when read; convert them to safetensors, or pass "
            "--allow-pickle to 'mopd convert', which reads tensors alone"
        )
    if (folder / PICKLED_FILE).is_file():
        return [folder / PICKLED_FILE]
    raise UserError(f"{folder}: no {WEIGHTS_FILE} and no {INDEX_FILE}; give the folder of a Hugging Face checkpoint")


def read_tokenizer_json(path: Path) -> dict[str, Any]:
    """Return the content of a ``tokenizer.json``. The limits fit the largest published vocabularies, a quarter of a
    million tokens and twice as many merges. Raise ``UserError`` if it is damaged."""
    return read_json_object(path, cure="fetch the file again", max_bytes=2**28, max_values=20_000_000)


class HfReader:
    """Reader of tensors, or slices of them, of one Hugging Face folder by name, as views of the mapped files.

    Opening checks every header and that index and files name the same tensors; no weight is read.

    Raises:
        UserError: anything missing, corrupt or contradictory, in one line that names the file.
    """

    def __init__(self, folder: Path, *, allow_pickle: bool = False) -> None:
        self.folder = Path(folder)
        self.files = weight_files(self.folder, allow_pickle=allow_pickle)
        """The weight files."""
        self._where: dict[str, tuple[Path, TensorInfo]] = {}
        self._pickled: dict[Path, dict[str, Tensor]] = {}
        """Tensors of files in PyTorch's format, mapped as a whole."""
        for path in self.files:
            for name, info in self._header(path).items():
                if name in self._where:
                    raise UserError(f"{path}: tensor '{name}' is also in {self._where[name][0]}; keep one")
                self._where[name] = (path, info)
        index = _index_of(self.folder, allow_pickle)
        if index is not None:
            self._check_index(index)
        self._parts = expert_parts({name: info.shape for name, (_, info) in self._where.items()})
        stacked = {name for part in self._parts.values() for name in (part.stored, part.scales)}
        self.names = (self.stored_names - stacked) | self._parts.keys()
        """Names of all tensors, each expert's for itself."""

    @property
    def stored_names(self) -> frozenset[str]:
        """Names of all tensors as the files have them."""
        return frozenset(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, without reading it."""
        return self._parts[name].shape if name in self._parts else self._find(name)[1].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor, without reading it.

        Raises:
            UserError: a dtype of the format that torch cannot compute with.
        """
        if name in self._parts:
            return torch.bfloat16 if self._parts[name].scales else self.dtype(self._parts[name].stored)
        path, info = self._find(name)
        if info.dtype not in TORCH_DTYPES:
            raise UserError(f"{path}: tensor '{name}' has dtype {info.dtype}, which is no dtype of weights")
        return TORCH_DTYPES[info.dtype]

    def require_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise UserError unless the tensor exists with this shape."""
        found = self.shape(name)
        if found != shape:
            path = self._find(self._parts[name].stored if name in self._parts else name)[0]
            raise UserError(
                f"{path}: tensor '{name}' has shape {list(found)}, config.json asks for {list(shape)}; "
                "config and weights belong to different models"
            )

    def read(self, name: str) -> Tensor:
        """Return the whole tensor on CPU, in the dtype of the file: a view of the file, which is read when touched;
        or in bfloat16, if the file has an expert's weights in MXFP4."""
        if name in self._parts:
            return self._parts[name].of(self.read)
        path, info = self._find(name)
        if path in self._pickled:
            return self._pickled[path][name]
        return map_tensor(path, info.start, info.shape, self.dtype(name))

    def read_finite(self, name: str) -> Tensor:
        """Return ``read`` of a tensor with finite values. Raise ``UserError`` as ``require_finite`` does."""
        return require_finite(name, self.read(name), self.folder)

    def read_slice(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Return ``tensor.narrow(dim, start, stop - start)`` on CPU, in the dtype of the file; only its bytes are
        touched.

        The result may be a view of the mapped file: copy what is kept.
        """
        # A rank whose vocabulary rows are all padding asks for none, beyond the last.
        return self.read(name).narrow(dim, start, stop - start) if stop > start else self.read(name).narrow(dim, 0, 0)

    def _find(self, name: str) -> tuple[Path, TensorInfo]:
        if name not in self._where:
            raise UserError(f"{self.folder}: tensor '{name}' is missing; the checkpoint is incomplete")
        return self._where[name]

    def _header(self, path: Path) -> dict[str, TensorInfo]:
        if path.suffix == ".safetensors":
            return read_header(path)
        tensors = self._pickled[path] = load_pickled(path)
        return {name: TensorInfo(DTYPE_NAMES[own.dtype], tuple(own.shape), 0, 0) for name, own in tensors.items()}

    def _check_index(self, path: Path) -> None:
        index = _read_index(path)
        for name, file in index.items():
            if name not in self._where or self._where[name][0].name != file:
                raise UserError(f"{path}: says that tensor '{name}' is in {file}, which does not hold it")
        unlisted = sorted(set(self._where) - set(index))
        if unlisted:
            raise UserError(f"{path}: does not list tensor '{unlisted[0]}' of {self._where[unlisted[0]][0].name}")


def require_finite(name: str, tensor: Tensor, where: Path) -> Tensor:
    """Return the tensor itself. One pass over it, without a copy.

    Raises:
        UserError: some value is NaN or infinite.
    """
    if tensor.is_floating_point() and tensor.numel() and tensor.element_size() > 1:
        low, high = tensor.aminmax()  # NaN makes both NaN
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            raise UserError(f"{where}: tensor '{name}' has NaN or infinite values; use a checkpoint of a sound model")
    return tensor


def open_model(folder: Path, *, allow_pickle: bool = False) -> tuple[HfReader, ModelDims]:
    """Return the reader of a folder and the sizes of its model, which name tensors as the folder does.

    Raises:
        UserError: config or weights are unsound or do not belong together.
    """
    config, reader = read_dims(folder), HfReader(folder, allow_pickle=allow_pickle)
    dims = named_as_in(reader, config)
    check_names(reader, dims)
    return reader, dims


def named_as_in(reader: HfReader, dims: ModelDims) -> ModelDims:
    """Return ``dims`` with the checkpoint's way of naming tensors, which no config says."""
    return with_naming(dims, naming_of(reader.names))


def check_names(reader: HfReader, dims: ModelDims) -> None:
    """Refuse a checkpoint that lacks a tensor, has one that the family's table does not have, or one of another shape.
    A tied checkpoint may repeat the embedding as its head; a different head would be lost, so it is refused.

    Raises:
        UserError: names the folder and the first such tensor.
    """
    expected: dict[str, tuple[int, ...]] = {}
    for placed in families.all_params(dims):  # ends at the first missing one, whatever the config asks for
        for name, shape in zip(placed.hf_names, placed.hf_shapes, strict=True):
            reader.require_shape(name, shape)
            expected[name] = shape
    extra = {name for name in reader.names - expected.keys() if not families.IGNORED.fullmatch(name)}
    extra.difference_update(families.mtp_names(extra, dims))
    head, embedding = families.vocabulary_names(dims)
    if dims.tied_embeddings and head in extra:
        extra.discard(head)
        reader.require_shape(head, expected[embedding])
        one, other = reader.read(head), reader.read(embedding)
        if not all(torch.equal(a, b) for a, b in zip(one.split(_BLOCK_ROWS), other.split(_BLOCK_ROWS), strict=True)):
            raise UserError(
                f"{reader.folder / CONFIG_FILE}: 'tie_word_embeddings' is true but tensor '{head}' differs from "
                f"'{embedding}'; set it to false or fix the weights"
            )
    if extra:
        raise UserError(
            f"{reader.folder}: tensor '{min(extra)}' has no place in model_type {dims.family}"
            f"{f' (and {len(extra) - 1} more)' if len(extra) > 1 else ''}; use a checkpoint of the plain architecture"
        )


def _index_of(folder: Path, allow_pickle: bool) -> Path | None:
    names = (INDEX_FILE, PICKLED_INDEX_FILE) if allow_pickle else (INDEX_FILE,)
    return next((folder / name for name in names if (folder / name).exists()), None)


def _read_index(path: Path) -> dict[str, str]:
    """Return the ``weight_map`` of an index file: tensor name -> name of a file in the same folder."""
    index = read_json_object(path, cure="fetch the file again", max_bytes=_MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(file, str) for file in index.values()):
        raise UserError(
            f"{shown_path(path)}: has no 'weight_map' from tensor names to file names; fetch the file again"
        )
    suffix = ".bin" if path.name == PICKLED_INDEX_FILE else ".safetensors"
    for name, file in index.items():
        if not file.endswith(suffix) or any(letter in file for letter in "/\\\0"):
            raise UserError(
                f"{shown_path(path)}: tensor '{name:.200}' points to {file!r:.200}, which is not a {suffix} file of "
                "this folder"
            )
        if len(name) > MAX_NAME:
            raise UserError(f"{shown_path(path)}: a tensor's name has {len(name)} characters ({name!a:.100})")
    return index

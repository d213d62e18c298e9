"""The description of a distributed checkpoint, ``.metadata``, which the format defines as a pickle.

The only file of mopd that pickles. Reading instantiates no class and makes no call that the file chooses: names that
the format needs become inert parts, every other name and every other opcode is refused, and the description is built
anew from the parts that make sense. A manifest beside the file proves that it is whole, not who wrote it, so files with
a manifest are read the same way.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, ClassVar

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

from mopd.base.files.reading import read_bytes, shown_path
from mopd.base.text import one_line
from mopd.base.types import UserError

__all__ = ["UnpicklingError", "read_description", "write_description"]

MAX_BYTES = 2**30
"""Largest description; that of 671 billion weights with optimizer states has some tens of megabytes."""
_MAX_DIMENSIONS = 16
_MAX_NUMBER = 2**63
_CURE = "restore the folder"
_DAMAGE = (
    UnpicklingError, struct.error, AttributeError, EOFError, IndexError, KeyError, TypeError, ValueError, MemoryError,
)  # fmt: skip
"""Errors that the standard library's unpickler raises on a damaged pickle."""


def read_description(path: Path) -> Metadata:
    """Return what ``write_description`` or Megatron wrote: names, dtypes and boxes of tensors, and the places of both
    tensors and objects, each a plain file name and a range of bytes.

    Raises:
        UserError: corrupt, or with anything in it that no description needs.
    """
    content = read_bytes(path, cure=_CURE, max_bytes=MAX_BYTES)
    try:
        return _metadata(_DescriptionUnpickler(BytesIO(content)).load())
    except _DAMAGE as error:
        raise UserError(f"{shown_path(path)}: not understood ({one_line(error):.300}): {_CURE}") from error


def write_description(path: Path, metadata: Metadata) -> None:
    """Write a description; equal descriptions give equal bytes."""
    with path.open("wb") as stream:
        pickle.dump(metadata, stream)


@dataclass(frozen=True, slots=True)
class _Name:
    """Name of a class or function that the file mentions; never the thing itself."""

    name: str


@dataclass(eq=False, slots=True)
class _Part:
    """Inert stand-in for an object of the file: the class name and the state that the file gives."""

    name: str
    state: Any = None

    def field(self, key: str) -> Any:
        """Return one entry of the state."""
        if type(self.state) is not dict or key not in self.state:
            raise UnpicklingError(f"a {self.name} has no {key}")
        return self.state[key]


_METADATA = "torch.distributed.checkpoint.metadata"
_OBJECTS = frozenset(
    {
        *((_METADATA, kind.__name__) for kind in (
            BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorProperties,
            TensorStorageMetadata,
        )),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    }
)  # fmt: skip
_CALLS = frozenset(
    {
        ("torch", "Size"), ("torch.serialization", "_get_layout"), (_METADATA, "_MEM_FORMAT_ENCODING"),
        ("collections", "OrderedDict"), ("pathlib", "PosixPath"),
    }
)  # fmt: skip
_OPCODES = (
    "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "GET", "BINGET", "LONG_BINGET", "POP",
    "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE",
    "BINUNICODE", "BINUNICODE8", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_TUPLE",
    "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "GLOBAL", "STACK_GLOBAL", "NEWOBJ", "REDUCE", "BUILD",
)  # fmt: skip
"""Opcodes that make plain data, and the four that make parts."""


class _DescriptionUnpickler(pickle._Unpickler):
    """Unpickler of descriptions. Derived from the standard library's in Python, whose table of opcodes can be cut and
    whose memo is a dictionary: the one in C allocates whatever the file asks for."""

    stack: list[Any]
    append: Callable[[Any], None]
    dispatch: ClassVar[dict[int, Any]] = {
        getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in _OPCODES
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return a dtype, or the inert name of something that the format needs."""
        dtype = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if (module, name) in _OBJECTS | _CALLS:
            return _Name(name)
        raise UnpicklingError(f"it holds a {module}.{name}, which no description of tensors needs")

    def load_newobj(self) -> None:
        """Push an object without a state."""
        arguments, kind = self.stack.pop(), self.stack.pop()
        if type(kind) is not _Name or arguments != ():
            raise UnpicklingError("it makes an object that no description of tensors needs")
        self.append(_Part(kind.name))

    def load_reduce(self) -> None:
        """Replace the format's few calls by values."""
        arguments, function = self.stack.pop(), self.stack[-1]
        if type(function) is not _Name or type(arguments) is not tuple:
            raise UnpicklingError("it calls what no description of tensors needs")
        if function.name == "Size" and len(arguments) == 1:
            self.stack[-1] = _numbers(arguments[0])
        elif function.name == "OrderedDict" and not arguments:
            self.stack[-1] = {}
        elif function.name in ("_get_layout", "_MEM_FORMAT_ENCODING", "PosixPath"):
            self.stack[-1] = None  # deprecated, or about the machine that wrote it
        else:
            raise UnpicklingError(f"it calls {function.name} with {len(arguments)} arguments")

    def load_build(self) -> None:
        """Set the state of an object, once."""
        state, part = self.stack.pop(), self.stack[-1]
        if type(part) is not _Part or part.state is not None:
            raise UnpicklingError("it changes what no description of tensors changes")
        part.state = state

    dispatch |= {pickle.NEWOBJ[0]: load_newobj, pickle.REDUCE[0]: load_reduce, pickle.BUILD[0]: load_build}


def _metadata(root: Any) -> Metadata:
    """Return the description that the parts make up."""
    _require(root, "Metadata")
    tensors, storage = root.field("state_dict_metadata"), root.field("storage_data")
    if type(tensors) is not dict or type(storage) is not dict:
        raise UnpicklingError("it describes no tensors")
    places: dict[MetadataIndex, _StorageInfo] = {}
    for index, info in storage.items():
        _require(index, "MetadataIndex")
        _require(info, "_StorageInfo")
        offset = index.state.get("offset") if type(index.state) is dict else None
        places[MetadataIndex(_text(index.field("fqn")), None if offset is None else _numbers(offset))] = _place(info)
    version = root.state.get("version")
    return Metadata(
        {_text(key): _entry(key, entry) for key, entry in tensors.items()},
        storage_data=places,
        storage_meta=StorageMeta(),
        version=version if version is None else _text(version),
    )


def _entry(key: str, entry: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(entry) is _Part and entry.name == "BytesStorageMetadata":
        return BytesStorageMetadata()
    _require(entry, "TensorStorageMetadata")
    properties, size, chunks = entry.field("properties"), _numbers(entry.field("size")), entry.field("chunks")
    _require(properties, "TensorProperties")
    if type(properties.state) is not tuple or not properties.state or not isinstance(properties.state[0], torch.dtype):
        raise UnpicklingError(f"tensor {key!r} has no dtype")
    if type(chunks) is not list or prod(size) >= _MAX_NUMBER:
        raise UnpicklingError(f"tensor {key!r} has an impossible size")
    parts = []
    for chunk in chunks:
        _require(chunk, "ChunkStorageMetadata")
        offsets, sizes = _numbers(chunk.field("offsets")), _numbers(chunk.field("sizes"))
        has_rank = len(offsets) == len(sizes) == len(size)
        if not has_rank or any(start + own > whole for start, own, whole in zip(offsets, sizes, size, strict=True)):
            raise UnpicklingError(f"a part of tensor {key!r} lies outside it")
        parts.append(ChunkStorageMetadata(offsets, sizes))
    return TensorStorageMetadata(TensorProperties(dtype=properties.state[0]), size, parts)


def _place(info: _Part) -> _StorageInfo:
    file, offset, length = _text(info.field("relative_path")), info.field("offset"), info.field("length")
    if file in ("", ".", "..") or any(letter in file for letter in "/\\\0"):
        raise UnpicklingError(f"it points to {file!a:.100}, which is not a file name in this folder")
    if info.state.get("transform_descriptors"):
        raise UnpicklingError("it describes transformed data, which is not supported")
    start, num_bytes = _numbers((offset, length))
    return _StorageInfo(file, start, num_bytes)


def _require(part: Any, name: str) -> None:
    if type(part) is not _Part or part.name != name:
        raise UnpicklingError(f"it has a {type(part).__name__} where a {name} belongs")


def _text(value: Any) -> str:
    if type(value) is not str:
        raise UnpicklingError(f"it has a {type(value).__name__} where a name belongs")
    return value


def _numbers(values: Any) -> torch.Size:
    """Return sizes or offsets, checked."""
    if not isinstance(values, (tuple, list)) or len(values) > _MAX_DIMENSIONS:
        raise UnpicklingError("it has no list of sizes where one belongs")
    if not all(type(value) is int and 0 <= value < _MAX_NUMBER for value in values):
        raise UnpicklingError("it has sizes that are no whole numbers >= 0")
    return torch.Size(values)

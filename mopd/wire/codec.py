"""Messages as bytes: a small msgpack map whose arrays are raw little-endian buffers.

A message is a frozen dataclass with a class attribute ``kind``; fields made by ``array_field`` are one-dimensional
numpy arrays, all others scalars. On the wire::

    {"kind": "score", "version": 2, "head": <msgpack map of the scalars>,
     "arrays": {"tokens": <4 bytes per id>, ...}, "crc": CRC-32 of head and arrays in order}
"""

from __future__ import annotations

import asyncio
import dataclasses
import typing
import zlib
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from functools import cache, reduce
from typing import Any, ClassVar, TypeVar

import msgpack
import numpy as np

from mopd.text import visible
from mopd.wire.limits import MAX_HEAD_BYTES

VERSION = 2
"""Version of the wire format; the two ends must agree."""
LARGE_BYTES = 2**18
"""Bodies above this are coded in a thread, so that the event loop hears others meanwhile."""

Array = np.ndarray[Any, Any]


class WireError(ValueError):
    """Bytes that are not the message they should be."""


@dataclasses.dataclass(frozen=True)
class Message:
    """What ``encode`` and ``decode`` handle."""

    kind: ClassVar[str]

    def check(self) -> None:
        """``WireError`` if the fields do not fit one another."""


MessageT = TypeVar("MessageT", bound=Message)


def array_field(dtype: str) -> Any:
    """A field that holds a one-dimensional array: numpy's name of a little-endian dtype."""
    return dataclasses.field(metadata={"dtype": dtype})


def encode(message: Message) -> bytes:
    """The message as a body."""
    scalars, dtypes = _fields(typing.cast(Any, type(message)))
    head = msgpack.packb({name: getattr(message, name) for name in scalars})
    arrays = {name: _buffer(getattr(message, name), dtype, name) for name, dtype in dtypes.items()}
    crc = _crc(head, arrays.values())
    outer = {"kind": type(message).kind, "version": VERSION, "head": head, "arrays": arrays, "crc": crc}
    return typing.cast(bytes, msgpack.packb(outer))


def decode(body: bytes | bytearray | memoryview, cls: type[MessageT]) -> MessageT:
    """Inverse of ``encode``: arrays are fresh, writable and of the machine's byte order.

    Raises:
        WireError: not msgpack, another kind or version, a missing or unknown field, a wrong type, a wrong checksum, or
            fields that do not fit one another.
    """
    outer = _unpack(body)
    _require_keys(outer, {"kind", "version", "head", "arrays", "crc"}, "message")
    if outer["kind"] != cls.kind or outer["version"] != VERSION:
        raise WireError(
            f"expected kind {cls.kind!r} version {VERSION}, got {_shown(outer['kind'])} version "
            f"{_shown(outer['version'])}"
        )
    head, arrays = outer["head"], outer["arrays"]
    if not isinstance(head, bytes) or len(head) > MAX_HEAD_BYTES:
        raise WireError(f"head is not a buffer of at most {MAX_HEAD_BYTES} bytes")
    scalars, dtypes = _fields(typing.cast(Any, cls))
    _require_keys(arrays, dtypes.keys(), "arrays")
    for name in dtypes:
        if not isinstance(arrays[name], bytes):
            raise WireError(f"array {name!r} is not a buffer")
    if type(outer["crc"]) is not int or _crc(head, (arrays[name] for name in dtypes)) != outer["crc"]:
        raise WireError("checksum does not match: the bytes changed on their way")
    given = _unpack(head)
    _require_keys(given, scalars.keys(), "head")
    values = {name: _scalar(given[name], annotation, name) for name, annotation in scalars.items()}
    message = cls(**values, **{name: _array(arrays[name], dtype, name) for name, dtype in dtypes.items()})
    message.check()
    return message


async def encode_aside(message: Message) -> bytes:
    """``encode``; a large message in a thread."""
    num_bytes = sum(value.nbytes for value in vars(message).values() if isinstance(value, np.ndarray))
    return await asyncio.to_thread(encode, message) if num_bytes > LARGE_BYTES else encode(message)


async def decode_aside(body: bytes | bytearray, cls: type[MessageT]) -> MessageT:
    """``decode``; a large body in a thread."""
    return await asyncio.to_thread(decode, body, cls) if len(body) > LARGE_BYTES else decode(body, cls)


@cache
def _fields(cls: type[Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """By name: the annotations of the scalars, and the dtypes of the arrays."""
    hints = typing.get_type_hints(cls)
    dtypes = {field.name: field.metadata["dtype"] for field in dataclasses.fields(cls) if field.metadata}
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if not field.metadata}, dtypes


def _crc(head: bytes, buffers: Iterable[bytes | memoryview]) -> int:
    return reduce(lambda crc, buffer: zlib.crc32(buffer, crc), buffers, zlib.crc32(head))


def _buffer(array: Array, dtype: str, name: str) -> memoryview:
    cast = np.ascontiguousarray(array, dtype=dtype)
    if cast.ndim != 1:
        raise ValueError(f"array {name!r} has {cast.ndim} dimensions, expected 1")
    return cast.view(np.uint8).data  # msgpack wants bytes, not elements


def _array(data: bytes, dtype: str, name: str) -> Array:
    wire = np.dtype(dtype)
    if len(data) % wire.itemsize:
        raise WireError(f"array {name!r} has {len(data)} bytes, not a multiple of {wire.itemsize}")
    return np.frombuffer(data, dtype=wire).astype(wire.newbyteorder("="), copy=True)


def _unpack(data: bytes | bytearray | memoryview) -> Any:
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=True, max_ext_len=0)
    except RecursionError as error:
        raise WireError("not msgpack: nested too deeply") from error
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        # a truncated body, an unknown type byte, extra bytes, text that is not UTF-8 or a map key that is no text
        raise WireError(f"not msgpack: {_shown(str(error) or type(error).__name__)}") from error


def _require_keys(value: Any, keys: AbstractSet[str], what: str) -> None:
    if not isinstance(value, dict):
        raise WireError(f"{what} is not a map")
    if value.keys() != keys:
        odd = sorted(visible(str(key))[:40] for key in value.keys() ^ keys)
        raise WireError(f"{what} misses or does not know {', '.join(odd[:4])}")


def _scalar(value: Any, annotation: Any, name: str) -> Any:
    if typing.get_origin(annotation) is tuple:
        if isinstance(value, list):
            return tuple(_plain(item) for item in value)
    elif annotation is float and type(value) in (int, float):
        return float(value)
    elif type(value) is annotation:
        return value
    raise WireError(f"{name} is {_shown(value)}: wrong type")


def _plain(value: Any) -> Any:
    """Lists as tuples, all the way down."""
    return tuple(_plain(item) for item in value) if isinstance(value, list) else value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

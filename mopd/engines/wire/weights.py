"""A model's weights as a series of bounded messages.

::

    sender                               receiver
    begin: version ────────────────────> version
    chunk 0, 1, 2, … ──────────────────> kept aside
    commit: number, digest ────────────> compared with what arrived, swapped in, version

A chunk holds whole tensors and parts of tensors, in the order of the stream; a tensor larger than a chunk is cut. The
receiver keeps everything aside until the commit, which tells the number of tensors and a digest of their names, dtypes
and shapes: an incomplete update is never used.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mopd.engines.wire.limits import MAX_CHUNK_BYTES, MAX_CHUNK_PIECES, MAX_HEAD_BYTES, MAX_NAME_BYTES
from mopd.engines.wire.messages import Array, Message, WireError, array_field, decode, encode
from mopd.weights.receiving import Fit

DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int8", "uint8")
}
"""Dtypes of weights on the wire, by name: raw little-endian bytes."""
MAX_ELEMENTS = 2**48
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
DIGEST_BYTES = 16
DATA_BYTES = MAX_CHUNK_BYTES - MAX_HEAD_BYTES - 4096
"""Tensor bytes of one chunk: the body, msgpack frame and head included, stays within ``MAX_CHUNK_BYTES``."""


@dataclass(frozen=True, kw_only=True)
class WeightBegin(Message):
    """First message of an update: the server keeps aside what follows and works on. ``WeightVersion`` answers every
    message."""

    kind: ClassVar[str] = "weight_begin"
    update_id: str
    """Random id of the update, repeated in every later message."""
    weight_version: int

    def check(self) -> None:
        """Raise ``WireError`` for an id or a version that cannot be right."""
        if self.weight_version < 0:
            raise WireError(f"weight_version is {self.weight_version}: set 0 or more")
        if not 1 <= len(self.update_id) <= 64:
            raise WireError("update_id is not text of 1 to 64 characters")


@dataclass(frozen=True, kw_only=True)
class WeightChunk(Message):
    """Tensors and parts of tensors, one after the other in ``data``."""

    kind: ClassVar[str] = "weight_chunk"
    update_id: str
    """``update_id`` of ``WeightBegin``."""
    index: int
    """0, 1, 2, …: a chunk out of turn is refused."""
    pieces: tuple[Any, ...]
    """``(name, dtype, shape, first byte within the tensor, bytes)`` of each part."""
    data: Array = array_field("|u1")
    """[bytes of all parts] uint8."""

    def check(self) -> None:
        """Raise ``WireError`` for an impossible part, or if the parts do not add up to the data."""
        if not 1 <= len(self.pieces) <= MAX_CHUNK_PIECES:
            raise WireError(f"{len(self.pieces)} pieces in a chunk: send 1 to {MAX_CHUNK_PIECES}")
        total = 0
        for piece in self.pieces:
            _check_piece(piece)
            total += piece[4]
        if total != len(self.data):
            raise WireError(f"the pieces add up to {total} bytes but {len(self.data)} came")


@dataclass(frozen=True, kw_only=True)
class WeightCommit(Message):
    """Last message of an update: everything was sent, use it if all of it arrived."""

    kind: ClassVar[str] = "weight_commit"
    update_id: str
    num_tensors: int
    digest: bytes
    """``TensorLedger.digest`` of what was sent."""
    on_running: str
    """``finish`` or ``continue`` (``mopd.engines.interface.OnRunning``)."""

    def check(self) -> None:
        """Raise ``WireError`` for an unknown ``on_running``."""
        if self.on_running not in ("finish", "continue"):
            raise WireError("on_running is neither finish nor continue")


@dataclass(frozen=True, kw_only=True)
class WeightVersion(Message):
    """Answer of the server: the version of the weights that it has now (an update in progress does not count)."""

    kind: ClassVar[str] = "weight_version"
    weight_version: int


class TensorLedger:
    """Count and digest of tensors in order; both ends keep one and compare at the commit."""

    def __init__(self) -> None:
        self.num_tensors = 0
        self._digest = hashlib.blake2b(digest_size=DIGEST_BYTES)

    def add(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        """Add one tensor."""
        self.num_tensors += 1
        self._digest.update(f"{name}\0{dtype}\0{list(shape)}\n".encode())

    @property
    def digest(self) -> bytes:
        """Digest so far, ``DIGEST_BYTES`` long."""
        return self._digest.digest()


Piece = tuple[str, str, tuple[int, ...], int, int]


def cut(
    weights: Iterable[tuple[str, Tensor]], ledger: TensorLedger, *, data_bytes: int = DATA_BYTES
) -> Iterator[tuple[tuple[Piece, ...], Array]]:
    """Yield ``(pieces, data [at most data_bytes] uint8)`` of each chunk; tensors enter ``ledger`` as they pass.

    Holds one chunk and one tensor at a time. ``ValueError`` for a dtype or name that cannot travel.
    """
    pieces: list[Piece] = []
    parts: list[Array] = []
    free = data_bytes
    for name, tensor in weights:
        if tensor.dtype not in _DTYPE_NAMES:
            raise ValueError(f"weight {name!r} has dtype {tensor.dtype}, which does not travel")
        if len(name.encode()) > MAX_NAME_BYTES:
            raise ValueError(f"weight name {name[:40]!r}… is longer than {MAX_NAME_BYTES} bytes")
        dtype, shape = _DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)
        ledger.add(name, dtype, shape)
        # one copy, into memory of our own: the stream may reuse its tensor while a part of it waits here
        raw = tensor.detach().to("cpu", copy=True).contiguous().reshape(-1).view(torch.uint8).numpy()
        start = 0
        while True:
            stop = min(len(raw), start + free)
            pieces.append((name, dtype, shape, start, stop - start))
            parts.append(raw[start:stop])
            free -= stop - start
            if free == 0 or len(pieces) == MAX_CHUNK_PIECES:
                yield tuple(pieces), np.concatenate(parts)
                pieces, parts, free = [], [], data_bytes
            start = stop
            # checked last: an empty tensor has a piece too
            if start == len(raw):
                break
    if pieces:
        yield tuple(pieces), np.concatenate(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedWeights:
    """One version of the weights, ready for the wire: made once, sent as often as replicas need it, by any process."""

    weight_version: int
    update_id: str
    bodies: tuple[bytes, ...]
    """Encoded chunks of at most ``MAX_CHUNK_BYTES`` each; together the whole model."""
    num_tensors: int
    digest: bytes

    def begin(self) -> WeightBegin:
        """Return the message before the chunks."""
        return WeightBegin(update_id=self.update_id, weight_version=self.weight_version)

    def commit(self, on_running: str) -> WeightCommit:
        """Return the message after the chunks."""
        return WeightCommit(
            update_id=self.update_id, num_tensors=self.num_tensors, digest=self.digest, on_running=on_running
        )


class WeightPacker:
    """Cuts one stream of weights into encoded chunks, and counts what it has cut."""

    def __init__(self) -> None:
        self.id = secrets.token_hex(8)
        """``update_id``."""
        self._ledger = TensorLedger()

    def chunks(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[bytes]:
        """Encoded ``WeightChunk`` messages of at most ``MAX_CHUNK_BYTES``, one at a time. ``ValueError`` for a dtype or
        name that does not travel."""
        for index, (pieces, data) in enumerate(cut(weights, self._ledger)):
            yield encode(WeightChunk(update_id=self.id, index=index, pieces=pieces, data=data))

    @property
    def num_tensors(self) -> int:
        """Tensors so far."""
        return self._ledger.num_tensors

    @property
    def digest(self) -> bytes:
        """``DIGEST_BYTES`` long, of the tensors so far."""
        return self._ledger.digest


def stage_updates(weights: Iterable[tuple[str, Tensor]], weight_version: int) -> StagedWeights:
    """Read the stream to its end, into host memory. Raises as ``WeightPacker.chunks``."""
    packer = WeightPacker()
    return StagedWeights(
        weight_version=weight_version,
        update_id=packer.id,
        bodies=tuple(packer.chunks(weights)),
        num_tensors=packer.num_tensors,
        digest=packer.digest,
    )


def unpacked_weights(bodies: Iterable[bytes]) -> Iterator[tuple[str, Tensor]]:
    """The stream that ``WeightPacker.chunks`` has cut, in memory of its own."""
    tensor, room, filled = torch.empty(0), np.empty(0, dtype=np.uint8), 0
    for body in bodies:
        chunk, start = decode(body, WeightChunk), 0
        for name, dtype, shape, offset, num_bytes in chunk.pieces:
            if offset == 0:
                tensor = torch.empty(shape, dtype=DTYPES[dtype])
                room, filled = tensor.reshape(-1).view(torch.uint8).numpy(), 0
            room[filled : filled + num_bytes] = chunk.data[start : start + num_bytes]
            start, filled = start + num_bytes, filled + num_bytes
            if filled == len(room):
                yield name, tensor


class Staging:
    """Collects the tensors of one update on the receiving side."""

    def __init__(self, slots: Mapping[str, Tensor], update_id: str) -> None:
        """Start an update. ``slots``: the weights that can arrive, with their shapes and kinds of dtype; nothing else
        takes memory."""
        self._update_id, self._next_index = update_id, 0
        self._fit, self._ledger = Fit(slots, name="this model"), TensorLedger()
        self._tensors: dict[str, Tensor] = {}
        self._open: tuple[str, Array, int] | None = None
        """Name, buffer and filled bytes of the incomplete tensor, if any."""

    def add(self, chunk: WeightChunk) -> None:
        """Take the next chunk. ``WireError`` for one out of turn, or a tensor that comes twice, in disorder or is not
        the model's."""
        if chunk.update_id != self._update_id:
            raise WireError(f"a chunk of {chunk.update_id[:64]!r} came, which is another update")
        if chunk.index != self._next_index:
            raise WireError(f"chunk {chunk.index} came when {self._next_index} was due")
        self._next_index += 1
        start = 0
        for name, dtype, shape, offset, num_bytes in chunk.pieces:
            self._add_piece(name, dtype, shape, offset, chunk.data[start : start + num_bytes])
            start += num_bytes

    def _add_piece(self, name: str, dtype: str, shape: tuple[int, ...], offset: int, data: Array) -> None:
        if self._open is None:
            try:  # checked before memory is taken for it
                self._fit.take(name, DTYPES[dtype], shape)
            except ValueError as error:
                raise WireError(str(error)) from error
            self._tensors[name] = torch.empty(shape, dtype=DTYPES[dtype])
            buffer = self._tensors[name].reshape(-1).view(torch.uint8).numpy()
            self._ledger.add(name, dtype, shape)
            self._open = (name, buffer, 0)
        open_name, buffer, filled = self._open
        tensor = self._tensors[open_name]
        if name != open_name or offset != filled or DTYPES[dtype] != tensor.dtype or shape != tuple(tensor.shape):
            raise WireError(f"weight {name!r} at byte {offset} came when byte {filled} of {open_name!r} was due")
        buffer[filled : filled + len(data)] = data
        filled += len(data)
        self._open = None if filled == len(buffer) else (open_name, buffer, filled)

    def finish(self, commit: WeightCommit) -> dict[str, Tensor]:
        """Return all tensors by name. ``WireError`` if what arrived is not all that was sent."""
        if self._open is not None:
            name, buffer, filled = self._open
            raise WireError(f"weight {name!r} is incomplete: {filled} of {len(buffer)} bytes arrived")
        if (commit.num_tensors, commit.digest) != (self._ledger.num_tensors, self._ledger.digest):
            raise WireError(f"{commit.num_tensors} weights were sent but {self._ledger.num_tensors} arrived, or others")
        return self._tensors


def _check_piece(piece: Any) -> None:
    if not isinstance(piece, tuple) or len(piece) != 5:
        raise WireError("a piece is not (name, dtype, shape, first byte, bytes)")
    name, dtype, shape, offset, num_bytes = piece
    if not isinstance(name, str) or not 1 <= len(name.encode()) <= MAX_NAME_BYTES:
        raise WireError(f"a weight's name is not text of 1 to {MAX_NAME_BYTES} bytes")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise WireError(f"weight {name!r} has an unknown dtype")
    if not isinstance(shape, tuple) or len(shape) > 8 or not all(type(size) is int and size >= 0 for size in shape):
        raise WireError(f"weight {name!r} has an impossible shape")
    if prod(max(size, 1) for size in shape) >= MAX_ELEMENTS:  # strides of an empty tensor count as well
        raise WireError(f"weight {name!r} has an impossible shape")
    if type(offset) is not int or type(num_bytes) is not int or offset < 0 or num_bytes < 0:
        raise WireError(f"weight {name!r} has a negative place")
    if offset + num_bytes > prod(shape) * DTYPES[dtype].itemsize:
        raise WireError(f"weight {name!r} has more bytes than its shape")

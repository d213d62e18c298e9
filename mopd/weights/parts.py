"""A model's tensors as parts, cut alike on all sides, and the digest of what travels.

::

    tensors:  norm  q_proj        k_proj  norm  norm  embedding
    parts:   [Bucket][Segment   ][Segment ][Bucket    ][Segment  ][Segment  ][Segment]     in the order of the tensors
    bucket:  tensor 0 | pad | tensor 1 | … | pad          tensors begin at multiples of 16

A large tensor travels from its own memory into its slot's, in segments of at most a bucket; small neighbours of one
sender are copied into a bucket first.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

import torch
from torch import Tensor

ALIGN = 16
"""Bytes between the places at which tensors may begin in a buffer."""
_WORDS = 2**18
"""Words of 8 bytes that a digest takes at a time: its own memory stays below some MiB."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Name, dtype and shape of a tensor, which both sides know before it travels."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    sender: int = 0
    """Member of the group that sends it."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    """Places of several tensors in one buffer."""

    parts: tuple[tuple[TensorMeta, int], ...]
    """Each tensor with the place of its first byte."""
    num_bytes: int
    """Bytes of the buffer, padding included; never 0."""

    @property
    def sender(self) -> int:
        """Member of the group that sends it."""
        return self.parts[0][0].sender

    @property
    def metas(self) -> tuple[TensorMeta, ...]:
        """Its tensors' metas, in order."""
        return tuple(meta for meta, _ in self.parts)

    def views(self, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield its tensors by name, as views of ``buffer`` ([num_bytes] uint8)."""
        for meta, start in self.parts:
            yield meta.name, buffer[start : start + meta.num_bytes].view(meta.dtype).view(meta.shape)


def digest(data: Tensor) -> Tensor:
    """Return the digest of [n] uint8 as [] int64 on its device: n and the sum of words of 8 bytes times odd numbers,
    modulo 2**64. Any flipped bit changes it, as do two words that change places; that of empty memory is not 0."""
    num_bytes, whole = len(data), len(data) // 8 * 8
    total = torch.tensor(num_bytes, dtype=torch.int64, device=data.device)
    for start in range(0, num_bytes, 8 * _WORDS):
        part = data[start : min(start + 8 * _WORDS, whole)]
        if start + 8 * _WORDS >= num_bytes > whole:
            part = torch.nn.functional.pad(data[start:], (0, whole + 8 - num_bytes))
        # a view as int64 must begin at a multiple of 8 bytes
        words = (part.clone() if part.storage_offset() % 8 else part).view(torch.int64)
        first = start // 4 + 1
        # odd factors are invertible modulo 2**64: one changed word always changes the sum
        total += (words * torch.arange(first, first + 2 * len(words), 2, device=data.device)).sum()
    return total


def _buckets(metas: Iterable[TensorMeta], bucket_bytes: int) -> list[Bucket]:
    """Cut tensors into buckets, in order: at most ``bucket_bytes`` in each, unless one tensor alone is larger."""
    buckets: list[Bucket] = []
    parts: list[tuple[TensorMeta, int]] = []
    end = 0
    for meta in metas:
        size = -(-meta.num_bytes // ALIGN) * ALIGN
        if parts and end + size > bucket_bytes:
            buckets.append(Bucket(tuple(parts), max(end, ALIGN)))
            parts, end = [], 0
        parts.append((meta, end))
        end += size
    if parts:
        buckets.append(Bucket(tuple(parts), max(end, ALIGN)))
    return buckets


def to_json(metas: Sequence[TensorMeta]) -> bytes:
    """Encode metas for ``from_json`` in another process."""
    return json.dumps([[meta.name, str(meta.dtype)[6:], list(meta.shape), meta.sender] for meta in metas]).encode()


def from_json(rows: object) -> list[TensorMeta]:
    """Return the metas of parsed ``to_json`` rows; ``ValueError`` for other rows."""
    if not isinstance(rows, list):
        raise ValueError("no list of tensors")
    return [_meta(row) for row in rows]


def _meta(row: object) -> TensorMeta:
    if not isinstance(row, list) or len(row) != 4:
        raise ValueError("a tensor is not [name, dtype, shape, sender]")
    name, dtype, shape, sender = row
    kind = getattr(torch, dtype) if isinstance(dtype, str) and dtype.isidentifier() and hasattr(torch, dtype) else None
    if not isinstance(name, str) or not isinstance(kind, torch.dtype):
        raise ValueError("a tensor has no name or an unknown dtype")
    if not isinstance(shape, list) or len(shape) > 8 or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"weight {name[:64]!r} has an impossible shape")
    if type(sender) is not int or sender < 0:
        raise ValueError(f"weight {name[:64]!r} has an impossible sender")
    return TensorMeta(name, kind, tuple(shape), sender)


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of values of one large tensor."""

    meta: TensorMeta
    first: int
    """Index of its first value in the flat tensor."""
    count: int

    @property
    def sender(self) -> int:
        """Member of the group that sends it."""
        return self.meta.sender

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return self.count * self.meta.dtype.itemsize

    @property
    def is_last(self) -> bool:
        """Whether the tensor is complete with it."""
        return self.num_bytes + self.first * self.meta.dtype.itemsize == self.meta.num_bytes

    def of(self, tensor: Tensor) -> Tensor:
        """Return [count] values of a contiguous tensor in the shape of ``meta``, as a view."""
        return tensor.view(-1)[self.first : self.first + self.count]

    def is_as_it_travels(self, tensor: Tensor, device: torch.device) -> bool:
        """Return whether it can leave from, or arrive in, the memory of this contiguous tensor."""
        return tensor.dtype == self.meta.dtype and tensor.device == device


Part = Bucket | Segment


def cut_parts(metas: Sequence[TensorMeta], bucket_bytes: int, large_bytes: int) -> list[Part]:
    """Cut tensors into parts, in order, of at most ``bucket_bytes`` each (at least one value) and of one sender. A
    tensor of ``large_bytes`` or more becomes segments of its own."""
    parts: list[Part] = []
    for (_, is_large), run in groupby(metas, lambda meta: (meta.sender, meta.num_bytes >= large_bytes)):
        if not is_large:
            parts += _buckets(run, bucket_bytes)
            continue
        for meta in run:
            step = max(1, bucket_bytes // meta.dtype.itemsize)
            total = meta.num_bytes // meta.dtype.itemsize
            parts += (Segment(meta, first, min(step, total - first)) for first in range(0, total, step))
    return parts

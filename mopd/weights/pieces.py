"""A model's tensors as parts that travel over a group, without a copy on either side where that is possible.

::

    tensors:  norm  q_proj        k_proj  norm  norm  embedding
    parts:   [Bucket][Segment   ][Segment ][Bucket    ][Segment  ][Segment  ][Segment]     in the order of the tensors

A large tensor travels from its own memory into its slot's, in segments of at most a bucket; small neighbours are copied
into a bucket first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from mopd.weights.buckets import Bucket, TensorMeta, cut, digest
from mopd.weights.group import TransferFailed

LARGE_BYTES = 2**20
"""Smallest tensor, in bytes, that travels without a bucket. A broadcast of this size takes 0.5 ms over a CPU's
loopback, of which 0.1 ms is the fixed cost of every broadcast."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of values of one large tensor."""

    meta: TensorMeta
    first: int
    """Index of its first value in the flat tensor."""
    count: int

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

    def digest(self, buffer: Tensor) -> Tensor:
        """Return the digest of its bytes in ``buffer``."""
        return digest(buffer)


Part = Bucket | Segment


def cut_pieces(metas: Sequence[TensorMeta], bucket_bytes: int, *, large_bytes: int = LARGE_BYTES) -> list[Part]:
    """Cut tensors into parts, in order, of at most ``bucket_bytes`` each (at least one value). A tensor of
    ``large_bytes`` or more becomes segments of its own."""
    parts: list[Part] = []
    for is_large, run in groupby(metas, lambda meta: meta.num_bytes >= large_bytes):
        if not is_large:
            parts += cut(run, bucket_bytes)
            continue
        for meta in run:
            step = max(1, bucket_bytes // meta.dtype.itemsize)
            total = meta.num_bytes // meta.dtype.itemsize
            parts += (Segment(meta, first, min(step, total - first)) for first in range(0, total, step))
    return parts


class Expected:
    """Parts that a receiver waits for: all of them, or, once it has had all, those behind some first tensors that no
    step changes."""

    def __init__(self, metas: Sequence[TensorMeta], cut_parts: Callable[[Sequence[TensorMeta]], list[Part]]) -> None:
        self._metas, self._cut = metas, cut_parts
        self.parts = cut_parts(metas)
        self.num_skipped = 0
        self.has_all = False
        """Whether a whole update has arrived."""

    def skip(self, count: int) -> None:
        """Expect no values of the first ``count`` tensors. ``TransferFailed`` if they never came, or none is left."""
        if not 0 <= count < len(self._metas) or (count and not self.has_all):
            raise TransferFailed(f"{count} of {len(self._metas)} weights are left out, which never came")
        if count != self.num_skipped:
            self.parts, self.num_skipped = self._cut(self._metas[count:]), count


class Ring:
    """Memory of two parts that cannot stay in their tensors' own: part i uses half i % 2."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._halves = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]

    def room(self, number: int, num_bytes: int) -> Tensor:
        """Return [num_bytes] uint8 of undefined values; those of the part two before are overwritten."""
        if len(self._halves[number % 2]) < num_bytes:
            self._halves[number % 2] = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return self._halves[number % 2][:num_bytes]

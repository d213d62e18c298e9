"""Tensors as bytes: a msgpack head, and frames that hold whole tensors end to end. Nothing is pickled.

The head of fields ``tokens`` of two samples and ``loss_mask``::

    [["tokens", "I64", [[5], [4]]], ["loss_mask", "BOOL", [[2], [2]]]]

Dtypes have the names of the safetensors format. Large tensors are frames of their own and are not copied; runs of small
ones share a frame.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import numpy as np
import torch
from torch import Tensor

from mopd.conversion.mapped import DTYPE_NAMES, TORCH_DTYPES, as_bytes

OWN_FRAME_BYTES = 2**16
"""Smallest size of a tensor that is a frame of its own, sent from its own memory."""
Buffer = bytes | memoryview


class FrameError(ValueError):
    """Received bytes that are not the tensors they should be."""


def packed(value: Any) -> bytes:
    """Return a head as msgpack. Lone surrogates, which an error's text may hold, are escaped."""
    body: bytes = msgpack.packb(value, unicode_errors="backslashreplace")
    return body


def unpacked(body: Buffer) -> Any:
    """Return the value that ``packed`` was given. Raise ``FrameError`` for anything else."""
    try:
        return msgpack.unpackb(body)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise FrameError(f"a head is not msgpack: {error}") from error


def to_frames(fields: Mapping[str, Sequence[Tensor]]) -> tuple[list[Any], list[Buffer]]:
    """Return head and frames of contiguous CPU tensors.

    Raises:
        KeyError: a field's tensors differ in dtype.
    """
    head: list[Any] = []
    frames: list[Buffer] = []
    small: list[Buffer] = []
    size = 0
    for name, tensors in fields.items():
        head.append([name, _dtype(name, tensors), [list(tensor.shape) for tensor in tensors]])
        for tensor in tensors:
            own = as_bytes(tensor)
            if size and size + own.nbytes > OWN_FRAME_BYTES:
                frames.append(b"".join(small))
                small, size = [], 0
            if own.nbytes >= OWN_FRAME_BYTES:
                frames.append(own)
            else:
                small.append(own)
                size += own.nbytes
    if size:
        frames.append(b"".join(small))
    return head, frames


def from_frames(head: Any, frames: Sequence[Buffer]) -> dict[str, list[Tensor]]:
    """Return the tensors of head and frames. They lie in the frames' memory if it is aligned for them.

    Raises:
        FrameError: the frames are not what the head says.
    """
    rest = [memoryview(frame) for frame in reversed(frames)]
    fields: dict[str, list[Tensor]] = {}
    try:
        for name, dtype, shapes in head:
            fields[name] = [_take(rest, TORCH_DTYPES[dtype], shape) for shape in shapes]
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise FrameError(f"a head does not describe tensors: {error!r:.200}") from error
    if any(frame.nbytes for frame in rest):
        raise FrameError("frames hold more than their head says")
    return fields


def _take(rest: list[memoryview], dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Return the next tensor; ``rest`` holds the remaining frames, the next one last."""
    if any(type(size) is not int or size < 0 for size in shape):
        raise FrameError(f"{shape!r:.100} is no shape")
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    while rest and not rest[-1].nbytes:
        rest.pop()
    if not rest or rest[-1].nbytes < num_bytes:
        raise FrameError("frames hold less than their head says")
    array = np.frombuffer(rest[-1][:num_bytes], dtype=np.uint8)
    rest[-1] = rest[-1][num_bytes:]
    if array.ctypes.data % dtype.itemsize or not array.flags.writeable:  # torch wants aligned, writable memory
        array = array.copy()
    return torch.from_numpy(array).view(dtype).view(list(shape))


def _dtype(name: str, tensors: Sequence[Tensor]) -> str:
    dtypes = {DTYPE_NAMES[tensor.dtype] for tensor in tensors}
    if len(dtypes) > 1:
        raise KeyError(f"field {name!r} mixes dtypes {sorted(dtypes)}")
    return dtypes.pop() if dtypes else "F32"

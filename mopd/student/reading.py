"""Reading of a rank's samples: the fields of its own micro-batches that its pipeline stage needs, one batch ahead.

====================  ============================================
stage                 reads
====================  ============================================
first                 ``tokens``
between               nothing: lengths are in the plan
last                  ``tokens`` and what the loss reads
all of vision models  ``tokens`` and ``images``, for positions
all that replay       ``routes``, for the experts
====================  ============================================

Of the ranks that compute the same samples (tensor and context parallelism) the first reads and broadcasts the bytes to
the others.

Ranks of other samples may wait in one collective (the sum of gradients) for all reads of a step, so these share one
deadline: what one of them was waited for is taken from that of the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.base.text import message_of
from mopd.base.types import ROUTES_FIELD, SampleMeta, UserError
from mopd.data_plane.frames import from_frames, packed, to_frames, unpacked
from mopd.data_plane.interface import Reader
from mopd.student.batch import Fields, MicroBatch
from mopd.student.parallel import Layout

T = TypeVar("T")


class StageReader:
    """Reader of one rank's sample fields. ``fetch`` is collective over the ranks that compute the same samples."""

    def __init__(
        self, reader: Reader, layout: Layout, *, has_images: bool = False, replays_routes: bool = False
    ) -> None:
        """``has_images``: the student's family has vision."""
        self._reader = reader
        self._more = (ROUTES_FIELD,) * replays_routes
        self._has_images = has_images
        self._layout = layout
        self._group = layout.samples_group
        self._bytes_shared = 0
        self._waited_s = self._last_fetch_s = 0.0

    @property
    def bytes_received(self) -> int:
        """Bytes of samples that have come into this process, from the data plane or from a neighbour."""
        return self._reader.bytes_received + self._bytes_shared

    def begin(self) -> None:
        """Give the following reads a deadline of their own: a command begins."""
        self._waited_s = 0.0

    def note_wait(self, seconds: float) -> None:
        """Take from the deadline of later reads what the last one was waited for; not what was computed meanwhile."""
        self._waited_s += min(seconds, self._last_fetch_s)

    def fetch(self, samples: Sequence[SampleMeta], loss_fields: Sequence[str]) -> Fields:
        """Return what this rank's stage needs of ``samples``; the last stage reads ``loss_fields``, ``tokens``
        included.

        Raises:
            KeyError, UserError: as ``Reader.fetch`` does; on every rank of the group.
        """
        self._last_fetch_s = 0.0
        names: Sequence[str] = ("tokens",) if self._layout.is_first_stage else ()
        if self._layout.is_last_stage:
            names = loss_fields
        if self._has_images:
            names = tuple(dict.fromkeys(("tokens", *names, "images")))
        names = (*names, *self._more)
        if not names or not samples:
            return {name: {} for name in names}
        ids = [sample.sample_id for sample in samples]
        began = time.monotonic()
        values = self._read(ids, names) if self._group.size() == 1 else self._shared(ids, names)
        self._last_fetch_s = time.monotonic() - began
        return {name: dict(zip(ids, values[name], strict=True)) for name in names}

    def _read(self, ids: Sequence[int], names: Sequence[str]) -> dict[str, list[Tensor]]:
        return self._reader.fetch(ids, names, waited_s=self._waited_s)

    def _shared(self, ids: Sequence[int], names: Sequence[str]) -> dict[str, list[Tensor]]:
        """Read on the group's first rank and broadcast values or error; receive on the others."""
        if self._group.rank():
            return self._from_neighbour()
        try:
            values = self._read(ids, names)
            head, frames = to_frames(values)
        except (KeyError, UserError) as error:
            # The neighbours wait in a broadcast: they get the error in the values' place and raise it too.
            self._send(packed({"error": message_of(error), "is_user_error": isinstance(error, UserError)}), [])
            raise
        self._send(packed(head), frames)
        return values

    def _send(self, head: bytes, frames: Sequence[Any]) -> None:
        """Broadcast the sizes, then head and frames in one message."""
        # Sizes first: a receiver must allocate before it takes part in the broadcast.
        body = b"".join(frames)
        dist.broadcast(torch.tensor([len(head), len(body)]), group_src=0, group=self._group)
        dist.broadcast(torch.frombuffer(bytearray(head + body), dtype=torch.uint8), group_src=0, group=self._group)

    def _from_neighbour(self) -> dict[str, list[Tensor]]:
        """Receive what the first rank sent; raise its error."""
        sizes = torch.zeros(2, dtype=torch.int64)
        dist.broadcast(sizes, group_src=0, group=self._group)
        head_bytes, body_bytes = sizes.tolist()
        received = torch.empty(head_bytes + body_bytes, dtype=torch.uint8)
        dist.broadcast(received, group_src=0, group=self._group)
        self._bytes_shared += received.nbytes
        whole = received.numpy().data
        head = unpacked(whole[:head_bytes])
        if isinstance(head, dict):
            raise (UserError if head["is_user_error"] else KeyError)(head["error"])
        return from_frames(head, [whole[head_bytes:]])


def one_ahead(
    build: Callable[[T], MicroBatch],
    items: Sequence[T],
    device: torch.device,
    note_wait: Callable[[float], None] = lambda seconds: None,
) -> Iterator[MicroBatch]:
    """Yield ``build`` of each item, while a thread builds the next. ``note_wait`` hears how long each was waited for,
    before the next one is begun.

    On a GPU the thread has a stream of its own, so that its copies overlap the caller's kernels.
    """
    on_gpu = device.type == "cuda"
    stream = torch.cuda.Stream(device) if on_gpu else None

    def prepare(item: T) -> tuple[MicroBatch, Any]:
        if stream is None:
            return build(item), None
        with torch.cuda.stream(stream):  # the stream's device becomes the thread's
            return build(item), stream.record_event()

    # One thread: ``fetch`` is collective, so every rank must make its calls in the same order.
    with ThreadPoolExecutor(1, thread_name_prefix="micro-batch") as pool:
        following = pool.submit(prepare, items[0]) if items else None
        for number in range(len(items)):
            assert following is not None
            began = time.monotonic()
            batch, copied = following.result()
            note_wait(time.monotonic() - began)
            following = pool.submit(prepare, items[number + 1]) if number + 1 < len(items) else None
            if copied is not None:
                current = torch.cuda.current_stream(device)
                current.wait_event(copied)
                for tensor in batch.tensors():  # the allocator must not reuse the copying stream's memory early
                    tensor.record_stream(current)
            yield batch

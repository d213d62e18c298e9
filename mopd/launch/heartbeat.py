"""Signs of life: a wait for another process lasts as long as it gives them, however long its own waits are together.

::

    orchestrator   a thread beats on the link, whatever the process waits for or computes, while its event loop turns
    rank 0         waits for the orchestrator's next command; a thread counts in the store of torchrun's agent
    other ranks    wait for rank 0 to join, or for its next command, and look at the count meanwhile:
                     it goes on                        wait on: each wait of rank 0 has a deadline of its own
                     it stands still for timeout_s     UserError
                     the connection is closed          the collective's error, at once

A process that was stopped, or is held inside of a library, beats no more; nor does one whose event loop has not turned
for ``LOOP_S``. Where torchrun's agent keeps no store, ranks wait for ``timeout_s``, as if nobody counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from mopd.base.types import UserError
from mopd.config.values import MAX_SECONDS
from mopd.launch.failure import rank_and_world_size

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup, Store

BEAT_S, BEAT_SHARE = 10.0, 0.1
"""Seconds between two signs, or this share of a shorter deadline."""
LOOK_S, LOOK_SHARE = 60.0, 0.25
"""Seconds between two looks of a rank that waits, or this share of a shorter deadline: 9 a second of 512 ranks."""
LOOP_S = 600.0
"""An event loop that computes (packing, a checkpoint's hashes) may be busy for so long, or for a longer deadline."""
_PREFIX, _COUNT, _COMES = "rank_0", "count", "comes"
_ANSWER_S = 5.0
"""For the store to answer a look. One that is late is no sign."""


class Heartbeat:
    """Beats from a thread, around all work of a process; the thread ends with the block."""

    def __init__(self, beat: Callable[[], object], timeout_s: float) -> None:
        """``beat`` gives one sign; it raises ``RuntimeError`` where nobody is there to see it. ``timeout_s``: the
        longest silence."""
        self._beat_once = beat
        self._every_s = min(BEAT_S, timeout_s * BEAT_SHARE)
        self._longest_turn_s = max(LOOP_S, timeout_s)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turned_at = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join(_ANSWER_S)

    @contextlib.contextmanager
    def depending_on(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Beat only while this event loop turns, until the block ends."""
        self._turned_at, self._loop = time.monotonic(), loop
        try:
            yield
        finally:
            self._loop = None

    def _beat(self) -> None:
        while not self._is_over.wait(self._every_s):
            if self._is_turning():
                try:
                    self._beat_once()
                except RuntimeError:  # whoever looked has ended, and this process will
                    return

    def _is_turning(self) -> bool:
        loop = self._loop
        if loop is None:
            return True
        with contextlib.suppress(RuntimeError):  # closed a moment ago
            loop.call_soon_threadsafe(self._note_turn)
        return time.monotonic() - self._turned_at < self._longest_turn_s

    def _note_turn(self) -> None:
        self._turned_at = time.monotonic()


@contextlib.contextmanager
def beating(timeout_s: float) -> Iterator[None]:
    """In a rank: give signs of life while the block lasts, if this is rank 0 and not alone."""
    rank, world_size = rank_and_world_size()
    store = None if rank or world_size == 1 else agent_store(_PREFIX)
    if store is None:
        yield
        return
    with Heartbeat(lambda: store.add(_COUNT, 1), timeout_s):
        yield


def announce() -> None:
    """On rank 0: tell the other ranks that it is about to join them."""
    store = agent_store(_PREFIX)
    if store is not None:
        store.set(_COMES, "")


class LeaderWatch:
    """What another rank sees of rank 0."""

    def __init__(self, timeout_s: float) -> None:
        """``timeout_s``: longest silence (``schedule.wait_timeout_s``)."""
        self._timeout_s = timeout_s
        self._look_s = min(LOOK_S, timeout_s * LOOK_SHARE)
        self.on_sign: Callable[[], None] = lambda: None
        """Called for each new sign."""

    def await_joining(self) -> None:
        """Returns when rank 0 is about to join; until then it may read data and hash models. Raises as ``receive``."""
        store = agent_store(_PREFIX)
        if store is None:
            return
        from torch.distributed import DistStoreError

        def has_come(seconds: float) -> bool:
            try:
                store.wait([_COMES], timedelta(seconds=seconds))
            except DistStoreError:
                return False
            return True

        self._until(has_come, "join the other ranks")

    def receive(self, buffer: Tensor, group: ProcessGroup) -> None:
        """Fill ``buffer`` with what rank 0 broadcasts in ``group`` (gloo).

        Raises:
            UserError: no sign of life for ``timeout_s``.
            RuntimeError: the connection is closed.
        """
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=MAX_SECONDS)  # not the group's: the count decides
        work = group.broadcast([buffer], options)

        def has_come(seconds: float) -> bool:
            try:
                work.wait(timedelta(seconds=seconds))
            except RuntimeError:
                if not work.is_completed():
                    return False
                work.wait()  # raises the error that ended it, if one did
            return True

        self._until(has_come, "say what comes next")

    def _until(self, has_come: Callable[[float], bool], what: str) -> None:
        count, seen_at = -1, time.monotonic()
        while not has_come(self._look_s):
            seen = _count()
            if seen > count:
                count, seen_at = seen, time.monotonic()
                self.on_sign()
            elif time.monotonic() - seen_at >= self._timeout_s:
                raise UserError(
                    f"rank 0 gave no sign of life for {self._timeout_s:g} s (schedule.wait_timeout_s), and did not "
                    f"{what}: it was stopped, or its machine hangs: see its log and dmesg there"
                )


def agent_store(prefix: str) -> Store | None:
    """Connect to the store of torchrun's agent, which outlives every rank; ``None`` if it keeps none. Keys of a purpose
    have a ``prefix``."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    from torch.distributed import PrefixStore, TCPStore  # heavy

    host, port, timeout = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timedelta(seconds=_ANSWER_S)
    store = TCPStore(host, port, is_master=False, timeout=timeout)
    return PrefixStore(f"mopd/{prefix}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _count() -> int:
    """Rank 0's count, over a connection of this look's own: those of all ranks at once would use up descriptors."""
    try:
        store = agent_store(_PREFIX)
        return 0 if store is None else int(store.add(_COUNT, 0))
    except RuntimeError:  # no answer is no sign
        return -1

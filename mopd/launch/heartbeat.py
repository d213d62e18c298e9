"""Signs of life: a wait for another process lasts as long as it gives them, however long its own waits are together.

============  ==================================================================================================
process       what it does
============  ==================================================================================================
orchestrator  a thread beats on the link, whatever the process waits for or computes, while its event loop turns
rank 0        waits for the orchestrator's next command; a thread raises a count in the agent's store
other ranks   wait for rank 0 to join, or for its next command, and look at the count meanwhile
============  ==================================================================================================

A count that goes on renews the wait: each wait of rank 0 has a deadline of its own. One that stands still for
``timeout_s`` is a ``UserError``, a closed connection the collective's error, at once. A process that was stopped, or is
held inside of a library, beats no more; nor does one whose event loop has not turned for ``LOOP_S``.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from mopd.base.types import LostError
from mopd.config.values import MAX_SECONDS
from mopd.launch.failure import ANSWER_S, agent_store, rank_and_world_size

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

BEAT_S, BEAT_SHARE = 10.0, 0.1
"""Seconds between two signs, or this share of a shorter deadline."""
LOOK_S, LOOK_SHARE = 60.0, 0.25
"""Seconds between two looks of a rank that waits, or this share of a shorter deadline: 9 a second of 512 ranks."""
LOOP_S = 600.0
"""An event loop that computes (packing, a checkpoint's hashes) may be busy for so long, or for a longer deadline."""
_PREFIX, _COUNT, _COMES = "rank_0", "count", "comes"


class Heartbeat:
    """A thread that gives signs of life as long as the block lasts."""

    def __init__(self, beat: Callable[[], object], timeout_s: float) -> None:
        """``beat`` gives one sign; it raises ``RuntimeError`` once its receiver has ended. ``timeout_s``: the longest
        silence that the receiver allows."""
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
        self._thread.join(ANSWER_S)

    @contextlib.contextmanager
    def depending_on(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Beat only while this event loop turns, until the block ends."""
        self._turned_at, self._loop = time.monotonic(), loop
        try:
            yield
        finally:
            self._loop = None

    def _beat(self) -> None:
        with contextlib.suppress(RuntimeError):  # the receiver has ended, and so will this process
            while not self._is_over.wait(self._every_s):
                if self._is_turning():
                    self._beat_once()

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
    """Give signs of life in the block, if this rank is rank 0 and not alone."""
    rank, world_size = rank_and_world_size()
    if rank or world_size == 1:
        yield
        return
    store = agent_store(_PREFIX)
    with Heartbeat(lambda: store.add(_COUNT, 1), timeout_s):
        yield


def announce() -> None:
    """Tell the other ranks, from rank 0, that it is about to join them."""
    if rank_and_world_size()[1] > 1:
        agent_store(_PREFIX).set(_COMES, "")


class LeaderWatch:
    """Another rank's waits for rank 0."""

    def __init__(self, timeout_s: float) -> None:
        """``timeout_s``: longest silence (``schedule.wait_timeout_s``)."""
        self._timeout_s = timeout_s
        self._look_s = min(LOOK_S, timeout_s * LOOK_SHARE)
        self.on_sign: Callable[[], None] = lambda: None
        """Called for each new sign."""

    def await_joining(self) -> None:
        """Return when rank 0 is about to join; until then it may read data and hash models. Raises as ``receive``."""
        from torch.distributed import DistStoreError

        store = agent_store(_PREFIX)

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
                raise LostError(
                    f"rank 0 gave no sign of life for {self._timeout_s:g} s (schedule.wait_timeout_s), and did not "
                    f"{what}: it was stopped, or its machine hangs: see its log and dmesg there"
                )


def _count() -> int:
    """Read rank 0's count, over a connection of its own: permanent ones of all ranks would use up descriptors."""
    try:
        return int(agent_store(_PREFIX).add(_COUNT, 0))
    except RuntimeError:  # no answer is no sign
        return -1

"""Signals that end a run: the first SIGTERM only asks, and rank 0 ends in order what it started."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from weakref import WeakSet

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
AGAIN_S = 0.01
"""After which a signal is sent again that came at a bad moment."""
_OF_WEAK_SETS = WeakSet.add.__code__.co_filename


class _Asking:
    """A handler of SIGTERM."""

    def __init__(self, ask: Callable[[], None], then: Callable[[int, FrameType | None], Any]) -> None:
        self._ask: Callable[[], None] | None = ask
        self.then = then

    def __call__(self, number: int, frame: FrameType | None) -> None:
        ask, self._ask = self._ask, None
        if ask is None:
            self.then(number, frame)
        else:
            ask()


def first_sigterm_asks(ask: Callable[[], None], then: Callable[[int, FrameType | None], Any] | None = None) -> None:
    """From now on the first SIGTERM to this process calls ``ask``; the next one does ``then``, or what it would have
    done. An error of ``ask`` leaves the main thread's work."""
    signal.signal(signal.SIGTERM, _Asking(ask, _die if then is None else then))


@contextlib.contextmanager
def asked_by_sigterm(ask: Callable[[], None]) -> Iterator[None]:
    """``first_sigterm_asks`` while the block lasts."""
    before = signal.getsignal(signal.SIGTERM)
    first_sigterm_asks(ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def outlive_sigterm() -> None:
    """For a rank other than 0: a job that ends sends SIGTERM to every process of it, and rank 0 says what becomes of
    the step. Not ignored, which a child would inherit."""
    signal.signal(signal.SIGTERM, lambda *_: None)


@contextlib.contextmanager
def ending_in_order() -> Iterator[None]:
    """Have the signals that end a run leave the block as an error does; then the process dies of the signal. On other
    ranks, which nothing depends on, they keep their effect: at once."""

    def leave(number: int, frame: FrameType | None) -> None:
        if _is_swallowed(frame):
            threading.Timer(AGAIN_S, os.kill, (os.getpid(), number)).start()
            return
        for one in ENDING:  # the launcher does not wait for long; of one that is pending and ignored Python complains
            signal.signal(one, lambda *_: None)
        raise _Ended(number)

    before = {one: signal.getsignal(one) for one in ENDING}
    asking = before[signal.SIGTERM]
    for one in ENDING:
        if isinstance(before[one], _Asking) or before[one] == signal.SIG_IGN:  # as under nohup
            continue
        signal.signal(one, leave)
    if isinstance(asking, _Asking):
        asking.then = leave
    try:
        yield
    except _Ended as ended:
        (number,) = ended.args
        _die(number, None)
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _is_swallowed(frame: FrameType | None) -> bool:
    """Whether Python prints and forgets what leaves this place: a finalizer, or the callback of a weak reference (of an
    event loop's set of tasks, which comes with the end of each)."""
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_code.co_filename == _OF_WEAK_SETS:
            return True
        frame = frame.f_back
    return False


class _Ended(KeyboardInterrupt):
    """A signal asks for the end. An event loop lets this kind through."""


def _die(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)

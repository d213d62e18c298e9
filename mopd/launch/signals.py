"""Signals that end a run: the first SIGTERM only asks, and rank 0 ends in order what it started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from mopd.launch.failure import leave

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


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
def ending_in_order(end: Callable[[], object], ask: Callable[[], None] | None = None) -> Iterator[None]:
    """On rank 0: have the signals that end a run call ``end`` before this process dies of them; with ``ask`` the first
    SIGTERM calls that instead. They are heard in a thread, as the main thread may be inside a collective for long."""
    hearing, telling = socket.socketpair()
    telling.setblocking(False)
    heard = [one for one in ENDING if signal.getsignal(one) != signal.SIG_IGN]  # as under nohup

    def hear() -> None:
        has_asked = False
        while number := hearing.recv(1):
            if number[0] == signal.SIGTERM and ask is not None and not has_asked:
                has_asked = True
                try:
                    ask()
                except BaseException as error:  # a full disk: ends the run, as this thread can raise to nobody
                    end()
                    leave(error)
            elif number[0] in heard:
                end()
                ctypes.CDLL(None).signal(number[0], 0)  # SIG_DFL; Python's own would need the main thread
                os.kill(os.getpid(), number[0])

    before = {one: signal.signal(one, lambda *_: None) for one in heard}
    descriptor = signal.set_wakeup_fd(telling.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=hear, name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor)
        for one, handler in before.items():
            signal.signal(one, handler)
        telling.close()
        thread.join()
        hearing.close()


def _die(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)

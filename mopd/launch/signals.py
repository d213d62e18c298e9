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
Handler = Callable[[int, "FrameType | None"], Any]


def _die(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def first_sigterm_asks(ask: Callable[[], None], then: Handler = _die) -> None:
    """From now on have the first SIGTERM to this process call ``ask``, and later ones ``then``. An error of ``ask``
    leaves the main thread's work."""

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, then)
        ask()

    signal.signal(signal.SIGTERM, handle)


@contextlib.contextmanager
def asked_by_sigterm(ask: Callable[[], None]) -> Iterator[None]:
    """Apply ``first_sigterm_asks`` while the block lasts."""
    before = signal.getsignal(signal.SIGTERM)
    first_sigterm_asks(ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def outlive_sigterm() -> None:
    """Have a rank other than 0 survive SIGTERM, which a scheduler sends to every process of a job: rank 0 decides what
    becomes of the step. The signal is not ignored, since a child would inherit that."""
    signal.signal(signal.SIGTERM, lambda *_: None)


@contextlib.contextmanager
def ending_in_order(end: Callable[[], object], ask: Callable[[], None] | None = None) -> Iterator[None]:
    """On rank 0: have the signals that end a run call ``end`` before this process dies of them; with ``ask`` the first
    SIGTERM calls that instead. A thread handles them, as the main thread may be inside a collective for long."""
    receiving, waking = socket.socketpair()
    waking.setblocking(False)
    handled = [one for one in ENDING if signal.getsignal(one) != signal.SIG_IGN]  # as under nohup

    def handle() -> None:
        has_asked = ask is None
        while number := receiving.recv(1):
            if number[0] == signal.SIGTERM and ask is not None and not has_asked:
                has_asked = True
                try:
                    ask()
                except BaseException as error:  # a full disk ends the run, as a thread's own error would not
                    end()
                    leave(error)
            elif number[0] in handled:
                end()
                ctypes.CDLL(None).signal(number[0], 0)  # SIG_DFL; Python's own would need the main thread
                os.kill(os.getpid(), number[0])

    before = {one: signal.signal(one, lambda *_: None) for one in handled}
    descriptor = signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=handle, name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor)
        for one, handler in before.items():
            signal.signal(one, handler)
        waking.close()
        thread.join()
        receiving.close()

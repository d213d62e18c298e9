"""Two networks on this machine (Linux namespaces) and the link between them, for root alone: two machines' networks
without two machines."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from mopd.base.types import UserError

ADDRESSES = ("10.77.31.1", "10.77.31.2")
CLONE_NEWNET = 0x4000_0000
SHAPED = "tbf rate {mbit}mbit burst 256kb latency 50ms"
"""Token bucket of each end of a link that has a rate."""


def can_make_networks(*tools: str) -> bool:
    """Return whether this user may make namespaces, with ``ip`` and these other ``tools``."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", *tools))):
        return False
    return subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode == 0


def enter_network(name: str) -> None:
    """Move this thread, and the threads and processes that it starts, into a namespace.

    Raises:
        OSError: there is none of this name, or this user may not.
    """
    with open(f"/run/netns/{name}", "rb") as network:
        _enter(network.fileno(), name)


@contextmanager
def inside(name: str) -> Iterator[None]:
    """Be in a namespace, as ``enter_network``, until the end of the block; processes that were started stay there."""
    with open("/proc/thread-self/ns/net", "rb") as before:
        enter_network(name)
        try:
            yield
        finally:
            _enter(before.fileno(), "before")


@contextmanager
def two_networks(*, mbit: int | None = None) -> Iterator[list[str]]:
    """Yield the names of two namespaces. Each has its address of ``ADDRESSES`` on the interface of its own name, and a
    loopback interface. ``mbit``: rate of the link in either direction.

    Raises:
        UserError: they cannot be made.
    """
    names = [f"mopd{os.getpid() % 100_000}{letter}" for letter in "ab"]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", names[0], "netns", names[0], "type", "veth", "peer", names[1], "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", name)
            for device in (name, "lo"):
                _run("ip", "-n", name, "link", "set", device, "up")
            if mbit is not None:
                _run("tc", "-n", name, "qdisc", "add", "dev", name, "root", *SHAPED.format(mbit=mbit).split())
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _enter(descriptor: int, name: str) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")


def _run(*words: str) -> None:
    try:
        subprocess.run(words, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1]
        raise UserError(f"`{' '.join(words)}` failed: {why}") from error

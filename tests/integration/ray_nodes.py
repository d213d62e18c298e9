"""A Ray cluster of two nodes in two networks. The first has Ray's head and no CPU to give away, so that all actors are
on the second."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.fixtures.networks import ADDRESSES, within
from tests.integration.world import environment

PORT = 6379
START_S = 240.0
REMOVE_S = 60.0


@contextmanager
def ray_nodes(networks: Sequence[str], *, num_cpus: int) -> Iterator[str]:
    """The cluster's address, in the first network."""
    folder = Path(tempfile.mkdtemp(prefix="m-"))  # pytest's own folders are too long for Ray's sockets
    address = f"{ADDRESSES[0]}:{PORT}"
    head = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={folder}", "--num-cpus=0"]
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for network, own, options in zip(
            networks, ADDRESSES, (head, [f"--address={address}", f"--num-cpus={num_cpus}"]), strict=True
        ):
            words = [str(Path(sys.executable).with_name("ray")), "start", "--block", f"--node-ip-address={own}"]
            with (folder / f"{own}.log").open("ab") as log:
                daemons.append(
                    subprocess.Popen(
                        [*within(network), *words, *options],
                        env=environment() | {"RAY_USAGE_STATS_ENABLED": "0"},
                        stdout=log,
                        stderr=log,
                    )
                )
            _wait_until_there(folder / f"{own}.log", daemons[-1])
        yield address
    finally:
        family = [psutil.Process(one.pid) for one in daemons if one.poll() is None]
        for process in [*(child for one in family for child in one.children(recursive=True)), *family]:
            if process.is_running():
                process.kill()
        for daemon in daemons:
            daemon.wait()
        remove(folder)


def _wait_until_there(log: Path, daemon: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while "Ray runtime started" not in log.read_text(encoding="utf-8"):
        assert daemon.poll() is None and time.monotonic() < deadline, log.read_text(encoding="utf-8")
        time.sleep(0.1)


def remove(folder: Path) -> None:
    """Remove a folder, again while Ray's last processes, which ``shutdown`` does not wait for, still write into it."""
    deadline = time.monotonic() + REMOVE_S
    while folder.exists():
        try:
            shutil.rmtree(folder)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)

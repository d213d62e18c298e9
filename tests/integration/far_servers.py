"""Rollout servers on another machine, as far as this one can tell: processes of another network, which somebody there
starts again when they die."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from mopd.placement.engine_file import EngineFile
from tests.fixtures.networks import ADDRESSES, within
from tests.fixtures.servers import wait_until
from tests.integration.world import REPOSITORY, environment

TOKEN = "secret-of-the-servers"
FIRST_PORT = 18_000
START_S = 400.0
LOOK_EVERY_S = 0.1


class FarServers:
    """``mopd serve`` of each engine file, in a network of its own."""

    def __init__(self, network: str, folder: Path, files: Sequence[EngineFile]) -> None:
        self._network, self._folder = network, folder
        folder.mkdir(exist_ok=True)
        self.token_file = folder / "token"
        self.token_file.write_text(TOKEN)
        self.ports = [FIRST_PORT + number for number in range(len(files))]
        self.urls = [f"http://{ADDRESSES[1]}:{port}" for port in self.ports]
        for number, file in enumerate(files):
            file.write(folder / f"{number}.json")
        self.num_restarts = 0
        """Servers that died and answer again."""
        self._starting: set[int] = set()
        self._processes = [self._start(number) for number in range(len(files))]
        self._is_over = threading.Event()
        self._keeper = threading.Thread(target=self._keep, daemon=True)

    @property
    def living(self) -> dict[str, psutil.Process]:
        """By role, as ``Run.family``; those that answer."""
        return {
            f"rollout.{number}": psutil.Process(process.pid)
            for number, process in enumerate(self._processes)
            if process.poll() is None and self._is_ready(number)
        }

    def wait_ready(self) -> None:
        """Until all answer."""
        wait_until(lambda: len(self.living) == len(self.ports) or any(p.poll() for p in self._processes), START_S)
        assert len(self.living) == len(self.ports), self.log

    @property
    def log(self) -> str:
        """What all of them have written."""
        return "".join(path.read_text(encoding="utf-8") for path in sorted(self._folder.glob("*.log")))

    def keep(self) -> None:
        """From now on start those again that have died."""
        self._keeper.start()

    def close(self) -> None:
        """Kill them."""
        self._is_over.set()
        if self._keeper.is_alive():
            self._keeper.join()
        for process in self._processes:
            family = [psutil.Process(process.pid)] if process.poll() is None else []
            for one in [*family, *(child for parent in family for child in parent.children(recursive=True))]:
                one.kill()
            process.wait()

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        serve = [sys.executable, "-m", "mopd", "serve", str(self._folder / f"{number}.json")]
        serve += ["--host", ADDRESSES[1], "--port", str(self.ports[number]), "--token-file", str(self.token_file)]
        serve += ["--ready-file", str(self._ready_file(number))]
        with (self._folder / f"{number}.log").open("ab") as log:
            return subprocess.Popen(
                [*within(self._network), *serve], cwd=REPOSITORY, env=environment(), stdout=log, stderr=log
            )

    def _ready_file(self, number: int) -> Path:
        return self._folder / f"{number}.ready"

    def _is_ready(self, number: int) -> bool:
        try:
            told = json.loads(self._ready_file(number).read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return False
        return bool(told["pid"] == self._processes[number].pid)

    def _keep(self) -> None:
        while not self._is_over.wait(LOOK_EVERY_S):
            for number, process in enumerate(self._processes):
                if process.poll() is not None:
                    self._processes[number] = self._start(number)
                    self._starting.add(number)
                elif number in self._starting and self._is_ready(number):
                    self._starting.remove(number)
                    self.num_restarts += 1


@contextmanager
def far_servers(network: str, folder: Path, files: Sequence[EngineFile]) -> Iterator[FarServers]:
    """Servers that answer, and do not outlive the block."""
    servers = FarServers(network, folder, files)
    try:
        servers.wait_ready()
        yield servers
    finally:
        servers.close()

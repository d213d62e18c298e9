"""Processes of benchmarks: started from one that has done nothing else, what they take, the servers among them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

import psutil
import torch

from mopd.base.hardware import give_back_freed_memory
from mopd.base.types import UserError
from mopd.bench.harness import own_busy_s
from mopd.bench.networks import ADDRESSES, inside
from mopd.placement.engine_file import EngineFile
from mopd.placement.process import ServerCommand, ServerProcess

TIMEOUT_S = 600.0
"""Longest wait for another process."""
TOKEN = secrets.token_hex(16)
"""Secret of this benchmark's servers."""
RESET_PEAK = "5"
"""Text that resets a process's peak of resident memory: proc(5), clear_refs."""
LOOK_EVERY_S = 0.002


def forks(module: str) -> ForkServerContext:
    """Return a context whose processes are forked from a server that has imported ``module`` and done nothing else: a
    process group or threads of this process would come along."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    return context


@contextmanager
def children(work: Callable[..., None], arguments: Sequence[tuple[object, ...]]) -> Iterator[list[Connection]]:
    """Run ``work(end, *arguments[i])`` in a process each, until the end of the block; yields the other ends."""
    context = forks(work.__module__)
    ends, started = [], []
    for own in arguments:
        end, other = context.Pipe()
        process = context.Process(target=work, args=(other, *own), daemon=True)
        process.start()
        other.close()
        ends.append(end)
        started.append(process)
    try:
        yield ends
    finally:
        for process in started:
            process.terminate()
            process.join()


def received(end: Connection, who: str) -> bytes:
    """Wait for the next message of a child and return its bytes.

    Raises:
        UserError: it ended, or said nothing in time.
    """
    if not end.poll(TIMEOUT_S):
        raise UserError(f"bench: {who} said nothing within {TIMEOUT_S:g} s")
    try:
        return end.recv_bytes()
    except (EOFError, ConnectionResetError) as error:
        raise UserError(f"bench: {who} ended before it was done") from error


@asynccontextmanager
async def servers(
    folder: Path, engine_file: EngineFile, environments: Sequence[Mapping[str, str]] = ({},), *, network: str = ""
) -> AsyncIterator[dict[str, int]]:
    """Run ``mopd serve`` as a run's ``local`` placement does, once for each of ``environments``, in the second of two
    networks if its name is given. Yields URLs of servers that answer, with their processes' ids.

    Raises:
        UserError: a server did not start.
    """
    text, started = json.dumps(engine_file.to_json()), []
    with inside(network) if network else contextlib.nullcontext():
        for number, environment in enumerate(environments):
            host = ADDRESSES[1] if network else "127.0.0.1"
            command = ServerCommand(engine_file=text, token=TOKEN, host=host, environment=environment)
            started.append(ServerProcess(command, folder=folder / f"server.{number}", log=folder / f"{number}.log"))
    try:
        yield dict([await _ready(server) for server in started])
    finally:
        for server in started:
            await server.kill()


async def _ready(server: ServerProcess) -> tuple[str, int]:
    give_up_at = time.monotonic() + TIMEOUT_S
    while True:
        state = await server.state()
        if state.url is not None and state.pid is not None:
            return state.url, state.pid
        if state.exit_code is not None or time.monotonic() > give_up_at:
            raise UserError(f"bench: a server did not start: {await server.last_words()}")
        await asyncio.sleep(0.1)


def family_busy_s() -> float:
    """Return the busy seconds of this process and its children, running ones included."""
    busy_s = own_busy_s()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            busy_s += sum(process.cpu_times()[:4])
    return busy_s


class HostPeaks:
    """Meter of processes' peak resident memory, as Linux counts it, above what they had at the start."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        """Begin to watch these processes. What this process has freed is given back before, so that none of it is
        taken again unseen."""
        give_back_freed_memory()
        self._pids = pids
        for pid in pids.values():
            Path(f"/proc/{pid}/clear_refs").write_text(RESET_PEAK)
        self._before = {name: _status_bytes(pid, "VmRSS") for name, pid in pids.items()}

    def extra_bytes(self) -> dict[str, int]:
        """Return each process's peak since the start above what it had."""
        return {name: _status_bytes(pid, "VmHWM") - self._before[name] for name, pid in self._pids.items()}


def _status_bytes(pid: int, key: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{key}:")]
    return int(line.split()[1]) * 1024


class DevicePeaks:
    """Meter of GPUs' peak memory above what was in use at the start. It polls every other millisecond, as CUDA keeps no
    peak of other processes' memory. What allocators keep for the next time is not seen again."""

    def __init__(self, gpus: Mapping[str, int]) -> None:
        """Begin to watch GPUs of these numbers."""
        self._gpus = gpus
        self._before = self._taken()
        self._most = dict(self._before)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def extra_bytes(self) -> dict[str, int]:
        """Stop watching. Return each GPU's peak above what was in use at the start."""
        self._is_over.set()
        self._thread.join()
        return {name: self._most[name] - self._before[name] for name in self._gpus}

    def _look(self) -> None:
        while not self._is_over.wait(LOOK_EVERY_S):
            for name, taken in self._taken().items():
                self._most[name] = max(self._most[name], taken)

    def _taken(self) -> dict[str, int]:
        memory = {name: torch.cuda.mem_get_info(gpu) for name, gpu in self._gpus.items()}
        return {name: total - free for name, (free, total) in memory.items()}

"""One server behind its reaper, as whoever started it sees it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from mopd.placement.process import ServerCommand, ServerProcess, ServerState
from tests.fixtures.servers import wait_until


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServerProcess:
    """One that waits for its end."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o755)
    command = ServerCommand(engine_file="{}", token="t", host="127.0.0.1", environment={}, python=str(python))
    return ServerProcess(command, folder=tmp_path / "servers" / "1", log=tmp_path / "log")


def ended(server: ServerProcess) -> ServerState:
    found: list[ServerState] = []

    def has_ended() -> bool:
        found[:] = [asyncio.run(server.state())]
        return found[0].exit_code is not None

    wait_until(has_ended)
    return found[0]


def started_pid(folder: Path) -> int:
    wait_until(lambda: list(folder.glob("*.pid")))
    (note,) = folder.glob("*.pid")
    return int(note.stem)


@pytest.mark.parametrize("way", [ServerProcess.terminate, ServerProcess.kill])
def test_a_signal_of_ours_is_told_as_ours(server: ServerProcess, tmp_path: Path, way: Callable[..., object]) -> None:
    started_pid(tmp_path / "servers")
    asyncio.run(way(server))  # type: ignore[arg-type]
    assert ended(server).how_it_ended == "was ended by mopd"
    assert not (tmp_path / "servers").exists()


def test_a_signal_of_somebody_else_is_told_as_that(server: ServerProcess, tmp_path: Path) -> None:
    os.kill(started_pid(tmp_path / "servers"), signal.SIGKILL)
    state = ended(server)
    asyncio.run(server.kill())  # as whoever clears up does
    assert ended(server) == state
    assert state.how_it_ended == "was killed by SIGKILL (often the kernel, out of memory)"

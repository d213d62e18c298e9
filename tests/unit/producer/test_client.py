"""The process beside rank 0, as rank 0 sees its end."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mopd.data_plane.interface import StorageEnded
from mopd.producer import client
from mopd.producer.client import ProducerProcess
from mopd.run.folder import RunDir
from mopd.types import CutOffError

ENDS = "import sys; sys.stdin.read()"


class Producer(ProducerProcess):
    """A process that ends when it is told to."""

    def __enter__(self) -> Producer:
        self._socket, theirs = socket.socketpair()
        self._process = subprocess.Popen([sys.executable, "-c", ENDS], stdin=theirs.fileno())
        self._file = Path("recipe.json")
        theirs.close()
        return self


@pytest.fixture
def producer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Producer:
    monkeypatch.chdir(tmp_path)
    recipe: Any = None
    return Producer(recipe, RunDir("run"))


def test_its_death_is_told_whoever_saw_it_first(producer: Producer) -> None:
    """A reader that lost its samples knows less."""
    line = r"^the producer process \(rollout, teachers, data\) was killed by SIGKILL .*producer.log\)$"
    with pytest.raises(CutOffError, match=line), producer:
        assert producer._process is not None
        producer._process.kill()
        raise StorageEnded("data plane: process 1, which holds the samples, has ended")


def test_samples_that_others_held_are_told_as_such(producer: Producer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "DYING_S", 0.1)
    with pytest.raises(StorageEnded, match=r"^data plane: TransferQueue's storage unit has ended$"), producer:
        raise StorageEnded("data plane: TransferQueue's storage unit has ended")

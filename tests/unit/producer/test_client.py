"""The process beside rank 0, as rank 0 sees its end."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from mopd.config.data import LocalPlaneConfig, TransferQueueConfig
from mopd.config.schema import Recipe
from mopd.data_plane.interface import StorageEnded
from mopd.producer.client import ProducerProcess
from mopd.run.folder import RunDir
from mopd.types import CutOffError

ENDS = "import sys; sys.stdin.read()"


class Producer(ProducerProcess):
    """A process that ends when it is told to."""

    def __enter__(self) -> Producer:
        self._socket, theirs = socket.socketpair()
        self._process = subprocess.Popen([sys.executable, "-c", ENDS], stdin=theirs.fileno())
        theirs.close()
        return self


@pytest.fixture
def make_producer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[object], Producer]:
    monkeypatch.chdir(tmp_path)
    return lambda plane: Producer(cast("Recipe", SimpleNamespace(data_plane=plane)), RunDir("run"))


def test_its_death_is_told_whoever_saw_it_first(make_producer: Callable[[object], Producer]) -> None:
    """A reader that lost its samples knows less."""
    producer = make_producer(LocalPlaneConfig())
    line = r"^the producer process \(rollout, teachers, data\) was killed by SIGKILL .*producer.log\)$"
    with pytest.raises(CutOffError, match=line), producer:
        assert producer._process is not None
        producer._process.kill()
        raise StorageEnded("data plane: process 1, which holds the samples, has ended")


def test_the_end_of_samples_that_others_held_is_told_as_it_is(make_producer: Callable[[object], Producer]) -> None:
    """The process then ends in order, as its connection does."""
    producer = make_producer(TransferQueueConfig(type="transfer_queue"))
    with pytest.raises(StorageEnded, match=r"^data plane: TransferQueue's storage unit has ended$"), producer:
        producer._socket.close()
        raise StorageEnded("data plane: TransferQueue's storage unit has ended")


def test_a_producer_that_mopd_has_to_kill_is_no_failure_of_the_run(
    make_producer: Callable[[object], Producer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the run did stands; nobody blames the kernel."""
    monkeypatch.setattr("mopd.producer.client.END_S", 0.1)
    producer = make_producer(LocalPlaneConfig())
    with producer:
        assert producer._process is not None
        producer._process.send_signal(signal.SIGSTOP)
    (line,) = caplog.messages
    assert line.startswith("the producer process did not end within 0.1 s and was killed (log: ")

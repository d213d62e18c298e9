"""The orchestrator process, as rank 0 sees its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mopd.base.types import CutOffError, UserError
from mopd.data_plane.interface import StorageEnded
from mopd.launch import leading
from mopd.launch.leading import OrchestratorProcess

ROOT = Path(__file__).parents[3]
SAYS = """
import json, os, socket, sys, time
from mopd.launch.link import RankLink, LinkEnded, error_head
from mopd.base.types import UserError
link = RankLink(socket.socket(fileno=int(sys.argv[1])), "rank 0")
does = json.load(sys.stdin)
if does == "kill":
    os.kill(os.getpid(), 9)
if does == "error":
    link.send(error_head(UserError("no such file")))
if does == "stop":
    link.send({"end": "asked"})
    os.kill(os.getpid(), 19)
try:
    link.receive()
except LinkEnded:
    pass
sys.exit(3 if does == "fail" else 0)
"""


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[OrchestratorProcess]:
    """One that does what its task says."""
    (tmp_path / "other_orchestrator.py").write_text(SAYS)
    monkeypatch.setattr(leading, "MODULE", "other_orchestrator")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    return OrchestratorProcess


def test_its_death_is_the_cause_of_a_lost_link_and_of_lost_samples(process: type[OrchestratorProcess]) -> None:
    """A reader that lost its samples knows less."""
    line = r"^the orchestrator process was killed by SIGKILL .*\(log: o.log\)$"
    with pytest.raises(CutOffError, match=line), process('"kill"', log=Path("o.log"), timeout_s=60.0) as one:
        one.link.next_command()
    with pytest.raises(CutOffError, match=line), process('"kill"', log=Path("o.log"), timeout_s=60.0):
        raise StorageEnded("data plane: process 1, which holds the samples, has ended")


def test_what_it_said_before_it_ended_is_what_is_told(process: type[OrchestratorProcess]) -> None:
    with pytest.raises(UserError, match=r"^no such file$"), process('"error"', log=None, timeout_s=60.0) as one:
        one.link.next_command()
    with pytest.raises(UserError, match=r"^no such file$"), process('"error"', log=None, timeout_s=60.0):
        raise StorageEnded("data plane: process 1, which holds the samples, has ended")


def test_the_end_of_samples_that_others_held_is_told_as_it_is(process: type[OrchestratorProcess]) -> None:
    with (
        pytest.raises(StorageEnded, match=r"^data plane: TransferQueue's storage unit has ended$"),
        process('""', log=None, timeout_s=60.0),
    ):
        raise StorageEnded("data plane: TransferQueue's storage unit has ended")


def test_an_exit_code_of_its_own_is_told(process: type[OrchestratorProcess]) -> None:
    with (
        pytest.raises(CutOffError, match=r"^the orchestrator process ended with exit code 3$"),
        process('"fail"', log=None, timeout_s=60.0),
    ):
        pass


def test_one_that_mopd_has_to_kill_is_no_failure_of_the_run(
    process: type[OrchestratorProcess], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the run did stands, and the kernel is not blamed."""
    monkeypatch.setattr(leading, "END_S", 0.1)
    with process('"stop"', log=Path("o.log"), timeout_s=60.0) as one:
        assert one.link.next_command() == {"end": "asked"}
    (line,) = caplog.messages
    assert line == "the orchestrator process did not end within 0.1 s and was killed (log: o.log)"


ENDS = """
import os, signal, sys, time
from mopd.launch.signals import ending_in_order
from mopd.base.types import UserError
def refuse():
    raise UserError("disk full")
signal.signal(signal.SIG{first}, signal.SIG_DFL)  # ignored where the tests run under nohup
with ending_in_order(lambda: print("in order", flush=True), {ask}):
    os.kill(os.getpid(), signal.SIG{first})
    {then}
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_what_was_started_while_the_main_thread_is_in_a_library(number: signal.Signals) -> None:
    program = ENDS.format(ask=None, first=number.name[3:], then="import ctypes; ctypes.CDLL(None).sleep(60)")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (-number, "in order\n", "")


def test_the_first_sigterm_asks_and_the_next_ends() -> None:
    then = "time.sleep(0.5); os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)"
    program = ENDS.format(ask="lambda: print('asked', flush=True)", first="TERM", then=then)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGTERM, "asked\nin order\n", "")


def test_a_request_that_cannot_be_written_is_told_as_it_is() -> None:
    program = ENDS.format(ask="refuse", first="TERM", then="time.sleep(60)")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (2, "in order\n", "mopd: error: disk full\n")

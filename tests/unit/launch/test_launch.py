"""The launcher with real processes: what the user reads, the exit code, and that nothing is left running."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from mopd.base.types import UserError
from mopd.launch import failure
from mopd.launch.failure import read_failures, reserve
from tests.unit.launch import launchers
from tests.unit.launch.launchers import pid_from

pytestmark = pytest.mark.multirank

HERE = Path(__file__).parent
DEADLINE_S = 90.0

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """Where the launcher puts its folder."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder


@pytest.fixture
def start(tmp_path: Path, temporary: Path) -> Iterator[Start]:
    """Start a launcher (or another command) whose ranks behave as told."""
    started: list[subprocess.Popen[str]] = []

    def begin(behaviour: str, *, command: list[str] | None = None, **variables: str) -> subprocess.Popen[str]:
        command = command or [str(HERE / "launch_script.py"), "2"]
        process = launchers.start(behaviour, tmp_path, command, TMPDIR=str(temporary), **variables)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        for path in tmp_path.glob("*.pid"):  # ranks that a failing launcher left behind hold our pipes open
            if is_running(int(path.read_text())):
                os.kill(int(path.read_text()), signal.SIGKILL)
        process.communicate(timeout=DEADLINE_S)


def is_running(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_end(*pids: int, within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still running: {[pid for pid in pids if is_running(pid)]}"
        time.sleep(0.02)


def test_all_well(start: Start, tmp_path: Path, temporary: Path) -> None:
    process = start("environment")
    out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out, err) == (0, "", "")
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert (tmp_path / "environment").read_text() == f"{threads} 1 127.0.0.1 2"
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("behaviour", "line"),
    [
        ("user_error", "recipe.yaml:3: student.model: this folder is broken"),
        ("user_error_everywhere", "every rank saw it"),
        (
            "full_disk_behind_torch",
            "/runs/one/file: cannot be written: No space left on device; free space there or name another place",
        ),
        (
            "full_output",
            "standard output or a temporary file: cannot be written: No space left on device; free space there or name "
            "another place",
        ),
    ],
)
def test_user_error_is_one_line(start: Start, tmp_path: Path, behaviour: str, line: str) -> None:
    process = start(behaviour)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out, err) == (2, "", f"mopd: error: {line}\n")
    wait_for_end(*(pid_from(tmp_path / f"{rank}.pid") for rank in (0, 1)))


@pytest.mark.parametrize(("behaviour", "rank"), [("bug", "1"), ("bug_behind_torch", "[01]")])
def test_bug_shows_the_failing_ranks_traceback(start: Start, behaviour: str, rank: str) -> None:
    process = start(behaviour)
    _out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert "ZeroDivisionError: the bug in rank one" in err
    assert err.count("Traceback") == (1 if behaviour == "bug" else 2)  # torch's own, and the rank's within
    assert re.search(rf"mopd: error: rank {rank} failed, see the traceback above\n$", err)


@pytest.mark.parametrize("place", ["/proc", "/dev/null"])
def test_room_for_errors_is_needed_before_the_ranks_start(place: str) -> None:
    with pytest.raises(UserError, match=rf"^{place}: cannot be written"):
        reserve(Path(place), range(2))


def test_errors_find_room_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest error fits into what was reserved: the file does not grow."""
    reserve(tmp_path, range(1))
    before = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "one"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(failure.LAUNCH_DIR, str(tmp_path))
    monkeypatch.setattr(os, "_exit", lambda code: None)
    failure.leave(ValueError("é" * 100_000))
    (told,) = tmp_path.glob("*.error.json")
    assert told.stat().st_size < before["0.partial"]
    assert [error.rank for error in read_failures(tmp_path)] == [0]


def test_killed_rank_is_named_and_ends_the_others(start: Start, tmp_path: Path) -> None:
    process = start("kill_itself")
    rank_0 = pid_from(tmp_path / "0.pid")
    _out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert err == "mopd: error: rank 1 was killed by SIGKILL: often the kernel, out of memory\n"
    wait_for_end(rank_0)


def test_rank_that_exits_without_a_word(start: Start) -> None:
    process = start("exit_silently")
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert err.endswith("mopd: error: rank 1 ended with exit code 7 and no message\n")


def test_killed_launcher_leaves_nothing(start: Start, tmp_path: Path, temporary: Path) -> None:
    process = start("with_child")
    pids = [pid_from(tmp_path / name) for name in ("0.pid", "1.pid", "child.pid")]
    process.kill()
    wait_for_end(*pids)
    deadline = time.monotonic() + 10
    while list(temporary.iterdir()):
        assert time.monotonic() < deadline, "the launch folder is still there"
        time.sleep(0.02)


def test_killed_rank_takes_its_children_along(start: Start, tmp_path: Path) -> None:
    process = start("with_child")
    rank_0, rank_1, child = (pid_from(tmp_path / name) for name in ("0.pid", "1.pid", "child.pid"))
    os.kill(rank_0, signal.SIGKILL)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert "rank 0 was killed by SIGKILL" in err
    wait_for_end(rank_1, child, within_s=0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_to_the_launcher_ends_everything(start: Start, tmp_path: Path, number: signal.Signals) -> None:
    process = start("hang_in_python", MOPD_TESTS_PATIENCE_S="6000")  # none has to be killed
    pids = [pid_from(tmp_path / f"{rank}.pid") for rank in (0, 1)]
    process.send_signal(number)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + number
    assert err == f"mopd: ended by {number.name}\n"
    wait_for_end(*pids, within_s=0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_at_any_moment_of_the_start(
    start: Start, tmp_path: Path, temporary: Path, number: signal.Signals
) -> None:
    """From the launcher's first deed on: before its ranks, between them, while they are Python that has just begun."""
    for moment_s in (0.0, 0.003, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3):
        process = start("hang_in_python")
        deadline = time.monotonic() + DEADLINE_S
        while not list(temporary.glob("mopd-launch-*/0.*")):
            assert time.monotonic() < deadline, "the launcher does not start"
            time.sleep(0.0005)
        time.sleep(moment_s)
        process.send_signal(number)
        _, err = process.communicate(timeout=DEADLINE_S)
        assert (process.returncode, err) == (128 + number, f"mopd: ended by {number.name}\n"), moment_s
        assert not list(temporary.iterdir())
        wait_for_end(*(int(path.read_text()) for path in tmp_path.glob("*.pid")), within_s=0)


def test_signals_that_were_ignored_stay_so(start: Start, tmp_path: Path) -> None:
    """As ``nohup`` has it: the terminal may go."""
    process = start("hang_in_python", MOPD_TESTS_IGNORES="SIGHUP")
    pid_from(tmp_path / "0.pid")
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)  # several looks of the launcher
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, err) == (128 + signal.SIGTERM, "mopd: ended by SIGTERM\n")


def test_raw_torchrun_prints_the_line_once_before_its_report(start: Start) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = start("user_error_everywhere", command=torchrun)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode != 0
    assert err.count("every rank saw it") == 1
    assert err.index("mopd: error: every rank saw it") < err.index("ChildFailedError")


def test_the_line_is_told_if_the_rank_that_was_to_tell_it_dies(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under raw torchrun; else by that rank alone."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in (("TORCHELASTIC_USE_AGENT_STORE", "True"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setattr(failure, "STORE_TIMEOUT_S", 2.0)
    failure.agent_store("user_errors").add("count", 1)
    failure._print_once("a line")
    assert capsys.readouterr().err == "a line\n"
    failure.agent_store("user_errors").set("printed", "")
    failure._print_once("a line")
    assert capsys.readouterr().err == ""


def test_ranks_do_not_outlive_raw_torchrun(start: Start, tmp_path: Path) -> None:
    process = start("hang_in_python", command=["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"])
    pids = [pid_from(tmp_path / f"{rank}.pid") for rank in (0, 1)]
    process.kill()
    wait_for_end(*pids)

"""Launchers of several nodes, as processes of this machine: who tells what, and that all end."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed import HashStore, TCPStore

from mopd.base.hardware import NODE_NAME
from mopd.base.types import UserError
from mopd.launch import nodes as module
from mopd.launch.node import RUN_SECRET, Place, add_node_arguments, place_of
from mopd.launch.nodes import NodeLostError, Nodes
from tests.fixtures.ports import free_port
from tests.fixtures.warm import cold
from tests.unit.launch import launchers
from tests.unit.launch.launchers import ended, pid_from

DEADLINE_S = 90.0
Start = Callable[..., list["subprocess.Popen[str]"]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start two launchers of one rank each, ``node-0`` and ``node-1``."""
    started: list[subprocess.Popen[str]] = []

    def begin(behaviour: str, cold_one: int | None = None) -> list[subprocess.Popen[str]]:
        port = free_port()
        for rank in range(2):
            command = [str(launchers.HERE / "launch_script.py"), f"1,2,{rank},{port}"]
            with cold() if rank == cold_one else contextlib.nullcontext():
                started.append(launchers.start(behaviour, tmp_path, command, **{NODE_NAME: f"node-{rank}"}))
        return started

    yield begin
    for process in started:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("behaviour", "code", "there", "here"),
    [
        (
            "bug",
            1,
            "mopd: error: rank 1 on node-1 failed, see the traceback above\n",
            "mopd: error: node-0 ends with node-1: rank 1 on node-1 failed: the bug in rank one\n",
        ),
        (
            "user_error",
            2,
            "mopd: error: recipe.yaml:3: student.model: this folder is broken\n",
            "mopd: error: node-0 ends with node-1: recipe.yaml:3: student.model: this folder is broken\n",
        ),
    ],
)
def test_an_error_is_told_where_it_happened(start: Start, behaviour: str, code: int, there: str, here: str) -> None:
    first, second = start(behaviour)
    assert ended(first) == (code, here)
    its_code, its_errors = ended(second)
    assert its_code == code and its_errors.endswith(there)
    assert its_errors.count("Traceback") == (behaviour == "bug")


@pytest.mark.multirank
@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_node_that_is_gone(start: Start, tmp_path: Path, lost: int) -> None:
    """Its launcher is killed, and the kernel kills its ranks: the other node ends soon, and says which one it was."""
    # torch, which would tell of it too, reads how much it is to tell when it is imported
    both = start("hang_in_python", 1 - lost)
    for rank in range(2):
        pid_from(tmp_path / f"{rank}.pid")
    both[lost].kill()
    code, errors = ended(both[1 - lost])
    assert (code, errors) == (
        69,
        f"mopd: error: node {lost} (node-{lost}) is gone: its launcher was killed, or its machine is lost\n",
    )


@pytest.mark.multirank
def test_one_interrupt_ends_all(start: Start, tmp_path: Path) -> None:
    first, second = start("hang_in_python")
    for rank in range(2):
        pid_from(tmp_path / f"{rank}.pid")
    second.send_signal(signal.SIGINT)
    assert ended(second) == (130, "mopd: ended by SIGINT\n")
    assert ended(first) == (130, "mopd: error: node-0 ends with node-1: ended by SIGINT on node-1\n")


def meet_as(place: Place, work: Callable[[Nodes], object]) -> Callable[[], object]:
    """A launcher in a thread; the returned call waits for its end and gives its result, or raises its error."""
    found: list[object] = []

    def live() -> None:
        try:
            with Nodes(place) as nodes:
                nodes.join()
                found.append(work(nodes))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=live)
    thread.start()

    def end() -> object:
        thread.join(DEADLINE_S)
        (one,) = found
        if isinstance(one, Exception):
            raise one
        return one

    return end


def test_all_meet_and_have_node_0s_text() -> None:
    port, order = free_port(), list[str]()

    def work(nodes: Nodes) -> str:
        text = nodes.once_per_node(lambda: "first", lambda first: f"after {first}")
        order.append("before")
        nodes.meet("here")
        order.append("behind")
        deadline = time.monotonic() + DEADLINE_S
        while nodes.place.is_first and order.count("behind") < 3 and time.monotonic() < deadline:
            time.sleep(0.05)  # the store goes with it
        return text

    ends = [meet_as(Place(num_nodes=3, node_rank=rank, port=port), work) for rank in range(3)]
    assert [end() for end in ends] == ["first", "after first", "after first"]
    assert order == ["before"] * 3 + ["behind"] * 3


def test_a_launcher_that_comes_late_was_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is listened to from when it is there."""
    monkeypatch.setattr(module, "SILENT_S", 0.0)
    first, store, seen = Nodes(Place(num_nodes=2, node_rank=0)), HashStore(), dict[int, tuple[bytes, float]]()
    first._find_silent(store, seen)
    store.set("here/1", "node-1")
    first._find_silent(store, seen)
    assert not store.check(["failed"])
    first._find_silent(store, seen)
    assert store.check(["failed", "silent/1"])


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_before_the_ranks_ends_the_waits_of_the_others(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where their ranks, which do not end by a signal, take longer than a report: node 0 keeps its word."""
    monkeypatch.setattr(module, "REPORT_S", 0.5)
    port, heard = free_port(), list[tuple[str, int]]()

    def fail(nodes: Nodes) -> None:
        raise UserError("student.model: is not here")

    def end_slowly(nodes: Nodes) -> None:
        with pytest.raises(NodeLostError):
            nodes.meet("the checks")
        time.sleep(4 * module.REPORT_S)
        cause = nodes.cause()
        heard.append((cause.line, cause.code))

    ends = [
        meet_as(Place(num_nodes=2, node_rank=rank, port=port), fail if rank == failing else end_slowly)
        for rank in range(2)
    ]
    with pytest.raises(UserError, match="is not here"):
        ends[failing]()
    if failing:
        ends[0]()
    assert heard == [("student.model: is not here", 2)]  # of node 0: before it and its store have gone
    ends[1 - failing]()


def test_who_failed_first_is_what_the_store_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks of machines differ: here each look is an hour before the one before it."""
    clock = itertools.count(1e9, -3600)
    monkeypatch.setattr("time.time", lambda: next(clock))
    told = threading.Barrier(2)

    def fail(nodes: Nodes, *, is_first: bool) -> str:
        if not is_first:
            told.wait(DEADLINE_S)
        nodes.report("error", f"failure of node {nodes.place.node_rank}")
        if is_first:
            told.wait(DEADLINE_S)
            nodes.report("died", f"death on node {nodes.place.node_rank}")  # what is known later keeps its place
        return nodes.cause().line

    for first in (0, 1):
        port = free_port()
        ends = [
            meet_as(Place(num_nodes=2, node_rank=rank, port=port), functools.partial(fail, is_first=rank == first))
            for rank in range(2)
        ]
        assert {end() for end in ends} <= {f"death on node {first}", f"failure of node {first}"}


def wait_for_store(port: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 5).close()
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("other", "line"),
    [
        (Place(num_nodes=2, node_rank=0), r"--rdzv-endpoint .*: cannot be listened on here .*Address already in use"),
        (Place(num_nodes=3, node_rank=1), r"--nnodes is 3 here and 2 on node 0: set the same"),
    ],
    ids=["the same rank", "another number"],
)
def test_launchers_that_do_not_fit(other: Place, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "JOIN_S", 2.5)
    port = free_port()
    first = meet_as(Place(num_nodes=2, node_rank=0, port=port), lambda nodes: None)
    wait_for_store(port)
    second = meet_as(Place(num_nodes=other.num_nodes, node_rank=other.node_rank, port=port), lambda nodes: None)
    with pytest.raises(UserError, match=line):
        second()
    with pytest.raises((UserError, NodeLostError)):
        first()


SECRET = "only the launchers know it"


@pytest.mark.parametrize("key", ["num_nodes", "here/0"])
def test_an_entry_that_a_stranger_writes_between_two_reads(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_SECRET, SECRET)
    port, wait = free_port(), Nodes._wait

    def wait_and_spoil(self: Nodes, is_so: Callable[[], bool], deadline: float | None = None) -> None:
        wait(self, is_so, deadline)
        stranger = TCPStore("127.0.0.1", port, is_master=False)
        if stranger.check([key]):
            stranger.set(key, "{}")

    monkeypatch.setattr(Nodes, "_wait", wait_and_spoil)
    end = meet_as(Place(num_nodes=2, node_rank=0, port=port), lambda nodes: None)
    with pytest.raises(UserError, match=rf"^--rdzv-endpoint 127.0.0.1:{port}: the store's entry '{key}' is not signed"):
        end()


@pytest.mark.parametrize(
    ("key", "junk"),
    [
        *(("num_nodes", junk) for junk in ("", "2", "{}", "x" * 500)),
        *((key, "other nodes ended well") for key in ("here/0", "shared", "failed", "end/0")),
    ],
)
def test_what_a_stranger_writes_is_not_believed(key: str, junk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry in the store of launchers with a secret: its reader ends in one line that says so."""
    monkeypatch.setenv(RUN_SECRET, SECRET)
    monkeypatch.setattr(module, "BEAT_S", 0.1)
    monkeypatch.setattr(module, "POLL_S", 0.02)
    port, is_spoiled, have_met = free_port(), threading.Event(), threading.Event()

    def lead(nodes: Nodes) -> None:
        have_met.set()
        assert is_spoiled.wait(DEADLINE_S)
        nodes.meet("an end that never comes")

    def follow(nodes: Nodes) -> None:
        assert is_spoiled.wait(DEADLINE_S)
        if key == "end/0":
            nodes.report("ended", "")
            nodes.cause()
        try:
            nodes.once_per_node(str, str)
        except NodeLostError:  # node 0 saw it first, and told
            raise UserError(nodes.cause().line) from None

    first = meet_as(Place(num_nodes=2, node_rank=0, port=port), lead)
    wait_for_store(port)
    stranger = TCPStore("127.0.0.1", port, is_master=False)
    if key in ("num_nodes", "here/0"):  # read as a launcher comes
        stranger.wait(["num_nodes", "here/0"])
        stranger.set(key, junk)
    second = meet_as(Place(num_nodes=2, node_rank=1, port=port), follow)
    if key not in ("num_nodes", "here/0"):
        assert have_met.wait(DEADLINE_S)
        stranger.set(key, junk)
    is_spoiled.set()
    with pytest.raises(UserError, match=rf"^--rdzv-endpoint 127.0.0.1:{port}: the store's entry '{key}' is not signed"):
        second()
    with contextlib.suppress(UserError, NodeLostError):
        first()


def test_an_entry_that_no_launcher_writes_is_one_line() -> None:
    """Without a secret, where there is less to see."""
    port = free_port()
    first = meet_as(Place(num_nodes=2, node_rank=0, port=port), lambda nodes: None)
    wait_for_store(port)
    stranger = TCPStore("127.0.0.1", port, is_master=False)
    stranger.wait(["num_nodes", "here/0"])
    stranger.set("num_nodes", "a line of noise")
    second = meet_as(Place(num_nodes=2, node_rank=1, port=port), lambda nodes: None)
    with pytest.raises(UserError, match=r"is no number of nodes: set MOPD_RUN_SECRET to the same on all nodes"):
        second()
    stranger.set("end/1", '{"kind": "ended"}')
    stranger.set("here/1", "a stranger")
    with contextlib.suppress(UserError, NodeLostError):
        first()


@pytest.mark.multirank
def test_launchers_with_a_secret_run_ranks(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks meet in the signed store too."""
    monkeypatch.setenv(RUN_SECRET, SECRET)
    assert [ended(process)[0] for process in start("user_error")] == [2, 2]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_that_does_not_come(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "JOIN_S", 1.0)
    line = "node 1 did not come within 1 s" if rank == 0 else "node 0 does not listen there after 1 s"
    with pytest.raises(UserError, match=line):
        meet_as(Place(num_nodes=2, node_rank=rank, port=free_port()), lambda nodes: None)()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--nnodes", "0"], "--nnodes is 0"),
        (["--nnodes", "2", "--node-rank", "2", "--rdzv-endpoint", "a:1"], "--node-rank is 2: with --nnodes 2 set 0 to"),
        (["--nnodes", "2"], "needs --rdzv-endpoint HOST:PORT"),
        (["--nnodes", "2", "--rdzv-endpoint", "host"], "write HOST:PORT"),
        (["--nnodes", "2", "--rdzv-endpoint", "host:70000"], "a port from 1 to 65535"),
        (["--nnodes", "2", "--rdzv-endpoint", "::1:29500"], "write HOST:PORT"),
    ],
)
def test_places_that_are_none(words: list[str], line: str) -> None:
    parser = argparse.ArgumentParser()
    add_node_arguments(parser)
    with pytest.raises(UserError, match=line):
        place_of(parser.parse_args(words))


def test_places() -> None:
    parser = argparse.ArgumentParser()
    add_node_arguments(parser)
    place = place_of(parser.parse_args(["--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "[::1]:29500"]))
    assert place == Place(num_nodes=2, node_rank=1, host="::1", port=29500) and place.is_on_loopback
    assert not Place(num_nodes=2, host="10.0.0.1", port=1).is_on_loopback

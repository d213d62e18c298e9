"""Nodes as threads of one process, over a real store: who does not come is named, and so is who is gone."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from mopd.base.types import UserError
from mopd.config.load import load_recipe
from mopd.launch.checks import conducting, run_folder
from mopd.launch.checks import meeting as meeting_module
from mopd.launch.checks.conducting import check_nodes
from mopd.launch.checks.inputs import Check
from mopd.launch.checks.meeting import Meeting, meeting_at
from mopd.launch.checks.run_folder import RunFolderTrials, TrialFiles
from mopd.launch.node import RUN_SECRET, Place
from tests.fixtures.ports import free_port
from tests.fixtures.recipe import RECIPE

T = TypeVar("T")
DEADLINE_S = 60.0


def places(count: int) -> list[Place]:
    port = free_port()
    return [Place(num_nodes=count, node_rank=node, host="127.0.0.1", port=port) for node in range(count)]


def everywhere(work: Callable[[Meeting], T], count: int = 2) -> list[T]:
    """What each node's thread returns."""

    def one(place: Place) -> T:
        threading.current_thread().name = f"node {place.node_rank}"
        meeting = meeting_at(place, DEADLINE_S)
        result = work(meeting)
        meeting.part()
        return result

    with ThreadPoolExecutor(count) as pool:
        return [future.result(DEADLINE_S) for future in [pool.submit(one, place) for place in places(count)]]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path / "recipe.yaml"


@pytest.mark.parametrize("secret", ["", "only the nodes know it"])
def test_node_0_hears_all_and_decides_for_all(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_SECRET, secret)

    def work(meeting: Meeting) -> tuple[list[Any], Any]:
        told = meeting.gather("number", {"own": meeting.place.node_rank}, DEADLINE_S)
        return told, meeting.decide("sum", lambda: sum(one["own"] for one in told), DEADLINE_S)

    assert everywhere(work, 3) == [([{"own": 0}, {"own": 1}, {"own": 2}], 3), ([], 3), ([], 3)]


def test_a_node_that_does_not_come_is_named(recipe: Path) -> None:
    (failed, *_) = [
        c for c in check_nodes(places(2)[0], lambda: load_recipe(recipe), join_s=0.5) if c.status == "failed"
    ]
    assert failed.name == "nodes" and "node 1 of 2 (from 0) did not come to 127.0.0.1:" in failed.detail


def test_the_meeting_listens_where_it_is_told_alone() -> None:
    place = places(1)[0]
    meeting = meeting_at(place, DEADLINE_S)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", meeting.place.port), 5)


def test_a_node_0_that_is_gone_is_one_line() -> None:
    place = places(2)[1]
    server: list[TCPStore] = [TCPStore("127.0.0.1", place.port, is_master=True, wait_for_workers=False)]
    meeting = meeting_at(place, DEADLINE_S)
    server.clear()
    with pytest.raises(UserError, match="the connection to node 0 is lost"):
        meeting.decide("never", lambda: None, DEADLINE_S)


def test_what_is_no_json_is_refused() -> None:
    place = places(2)[1]
    server = TCPStore("127.0.0.1", place.port, is_master=True, wait_for_workers=False)
    server.set("mopd/check/decided/verdict", "[NaN]")
    with pytest.raises(UserError, match="is no JSON"):
        meeting_at(place, DEADLINE_S).decide("verdict", lambda: None, DEADLINE_S)


def test_a_clock_that_is_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 7.0 * (threading.current_thread().name == "node 1"))
    checks, others = everywhere(lambda meeting: conducting._clocks(meeting, ["a", "b"]))
    assert others == []
    (check,) = checks
    assert check.status == "failed" and re.match(r"b: clock: (6\.[89]|7\.[0-2]) s behind a's", check.detail)


def folders(tmp_path: Path) -> dict[int, Path]:
    for node in range(2):
        (tmp_path / str(node)).mkdir()
    return {node: tmp_path / str(node) for node in range(2)}


def test_a_lock_that_does_not_exclude_is_named(recipe: Path, tmp_path: Path) -> None:
    """Two folders, as a file system without locks across nodes is two."""
    own = folders(tmp_path)
    for folder in own.values():
        TrialFiles(folder, "t").lock.touch()

    def work(meeting: Meeting) -> list[Check]:
        return RunFolderTrials(meeting, load_recipe(recipe), ["a", "b"])._locked(
            TrialFiles(own[meeting.place.node_rank], "t")
        )

    (check,), others = everywhere(work)
    assert others == [] and check.status == "failed"
    assert check.detail.startswith(f"b: {recipe}:1: run_dir: 'runs/one': a lock of a does not exclude it")


def test_a_rename_that_is_seen_late_is_named(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "LOOK_S", 0.3)
    monkeypatch.setattr(run_folder, "VISIBLE_IN_S", 0.2)
    own = folders(tmp_path)

    def work(meeting: Meeting) -> list[Check]:
        return RunFolderTrials(meeting, load_recipe(recipe), ["a", "b"])._replaced(
            TrialFiles(own[meeting.place.node_rank], "t")
        )

    (check,), _ = everywhere(work)
    assert check.status == "failed" and "b: " in check.detail and "a rename is seen after 0.3 s or more" in check.detail


def test_the_documentation_says_how_late_a_rename_may_be_seen() -> None:
    text = (Path(__file__).parents[4] / "docs" / "cluster.md").read_text()
    (row,) = (line for line in text.splitlines() if line.startswith("| rename |"))
    assert "is not seen by all within a second" in row and run_folder.VISIBLE_IN_S == 1


def test_a_disk_without_room_for_checkpoints_is_named(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    student = tmp_path / "models" / "student"
    student.mkdir(parents=True)
    (student / "config.json").write_text('{"dtype": "bfloat16"}')
    with (student / "model.safetensors").open("wb") as file:
        file.truncate(2**43)  # a hole
    found = everywhere(lambda meeting: RunFolderTrials(meeting, load_recipe(recipe), ["a", "b"]).run())
    failed = {check.name: check.detail for check in found[0] if check.status == "failed"}
    assert set(failed) == {"room"} and "2 checkpoints take 114688.0: free space there" in failed["room"]
    assert not (tmp_path / "runs").exists()


def test_a_link_that_fails_at_once_on_one_node_waits_for_the_others(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 0's own all-reduce may take its whole deadline, and the other node's after it."""
    begun = threading.Barrier(2)

    def measured(meeting: Meeting) -> dict[str, Any]:
        begun.wait(DEADLINE_S)
        if meeting.place.is_first:
            time.sleep(4.0)
        return {"backend": "gloo", "error": "no such interface"}

    monkeypatch.setattr(conducting, "measured_all_reduce", measured)
    monkeypatch.setattr(conducting, "STAGE_S", 1.0)
    monkeypatch.setattr(meeting_module, "MARGIN_S", 1.0)
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(check_nodes, place, lambda: load_recipe(recipe), join_s=DEADLINE_S) for place in places(2)]
        for checks in [end.result(2 * DEADLINE_S) for end in ends]:
            assert checks[-1].name == "all-reduce" and "no such interface" in checks[-1].detail


def test_gpus_are_measured_over_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the node's first GPU; gloo stands in for NCCL, and host memory for the device's."""
    devices: list[Any] = []
    empty, connect = torch.empty, dist.init_process_group

    def connected(backend: str, **options: Any) -> None:
        assert backend == "nccl" and options["timeout"].total_seconds() == conducting.OPERATION_S["nccl"]
        connect("gloo", **options)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(torch, "empty", lambda size, device: devices.append(device) or empty(size))
    monkeypatch.setattr(dist, "init_process_group", connected)
    meeting: Any = SimpleNamespace(place=Place(num_nodes=1, node_rank=0), store=dist.HashStore())
    assert conducting.measured_all_reduce(meeting) == {"backend": "nccl", "bytes_per_s": 0.0}
    assert devices == [torch.device("cuda", 0)] * 2

"""A run whose servers register by themselves, on whatever machine: they come and go while it trains."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mopd.cli.main import main
from tests.fixtures.servers import ServeProcess, serve_process, wait_until
from tests.integration.world import ANSWERS, World, start_mopd

pytestmark = [pytest.mark.slow, pytest.mark.multirank]

REGISTERED = {"type": "registered", "startup_timeout_s": 25.0}


class Servers:
    """``mopd serve --register`` of one recipe's engines."""

    def __init__(self, recipe: Path, folder: Path, stack: ExitStack) -> None:
        self._recipe, self.folder, self._stack = recipe, folder, stack

    def start(self, *which: str) -> ServeProcess:
        return self._stack.enter_context(serve_process(self._recipe, *which, "--register", self.folder))

    def files(self, key: str) -> list[Path]:
        return list(self.folder.glob(f"{key}.*.json"))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def lines(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def follow(run: subprocess.Popen[str], run_dir: Path, condition: Callable[[list[dict[str, Any]]], bool]) -> int:
    """Wait until the run's metrics are as wanted; the last step."""
    deadline = time.monotonic() + 120
    while not condition(lines(run_dir)):
        assert run.poll() is None and time.monotonic() < deadline, run.communicate()
        time.sleep(0.05)
    return int(lines(run_dir)[-1]["step"])


def test_replicas_come_and_go_in_a_run(world: World, tmp_path: Path, stack: ExitStack) -> None:
    """A second replica of a teacher registers in mid-run, the first is killed, then the second one too."""
    run_dir = tmp_path / "run"
    recipe = world.write_recipe(
        run_dir,
        teachers__left__placement=REGISTERED,
        teachers__right__placement={"type": "local", "num_threads": 1},
        rollout__placement=REGISTERED,
        student__parallel={"tensor_model_parallel_size": 1},
        schedule__steps=100_000,
        checkpoint__every_steps=100_000,
        validation__every_steps=100_000,
    )
    servers = Servers(recipe, run_dir / "replicas", stack)
    first, rollout = servers.start("--teacher", "left"), servers.start("--rollout")  # before there is a run
    wait_until(lambda: bool(servers.files("teachers.left") and servers.files("rollout")))
    run = start_mopd("train", recipe)
    try:
        joined_after = follow(run, run_dir, lambda seen: len(seen) >= 3)
        second = servers.start("--teacher", "left")
        follow(run, run_dir, lambda seen: seen[-1].get("teachers/samples/left.1", 0) > 0)
        os.kill(first.process.pid, signal.SIGKILL)
        killed_after = int(lines(run_dir)[-1]["step"])
        both_killed_after = follow(run, run_dir, lambda seen: seen[-1]["step"] > killed_after + 5)
        os.kill(second.process.pid, signal.SIGKILL)
        _, errors = run.communicate(timeout=120)
    finally:
        if run.poll() is None:
            run.kill()
    assert run.returncode == 69, errors
    said = [line for line in errors.splitlines() if line.startswith("mopd: error: ")]
    assert len(said) == 1 and "Traceback" not in errors
    assert "teachers.left.placement.min_replicas: 0 of 1 servers are there after 25 s" in said[0], errors
    assert "left.1 works: http://127.0.0.1:" in errors and "left.0 gets no more work" in errors
    steps = lines(run_dir)
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1)) and len(steps) >= both_killed_after
    for line in steps[1:]:  # step 1: preflight too
        assert [line[f"num_samples/{domain}"] for domain in ANSWERS] == [4, 4]
        assert [line[f"teachers/samples/{name}"] for name in ANSWERS] == [4, 4] and line["rollout/samples"] == 8
    assert all("teachers/samples/left.1" not in line for line in steps[:joined_after])
    by_replica = [(line["teachers/samples/left.0"], line["teachers/samples/left.1"]) for line in steps[killed_after:]]
    assert all(one + other == 4 for one, other in by_replica)
    assert {one for one, _ in by_replica[3:]} == {0.0}
    rollout.process.terminate()
    assert rollout.end()[0] == 0
    assert not servers.files("rollout") and len(servers.files("teachers.left")) == 2  # the killed ones' stay


def test_refusals_are_one_line(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    folder = str(run_dir / "replicas")
    absent = {**REGISTERED, "python": "/none/python"}
    recipe = world.write_recipe(run_dir, teachers__left__placement=REGISTERED, rollout__placement=absent)
    secret = tmp_path / "secret"
    secret.write_text("s" * 40)
    (tmp_path / "open" / "replicas").mkdir(parents=True)
    (tmp_path / "open" / "replicas").chmod(0o777)
    refused = {
        ("--teacher", "right", "--register", folder): "teachers.right.placement: is of type in_process, whose run",
        ("--rollout", "--register", folder): "rollout.placement.python: '/none/python' does not exist on ",
        ("--teacher", "none", "--register", folder): "--teacher none: the recipe has no such teacher",
        ("--teacher", "left", "--register", str(run_dir)): "name the folder replicas of a run",
        ("--teacher", "left", "--register", folder, "--host", "0.0.0.0"): "is no address that a run could call",
        ("--teacher", "left", "--register", folder, "--token-file", str(secret)): "leave --token-file out",
        ("--teacher", "left", "--register", str(tmp_path / "open" / "replicas")): "others than this user may write",
        ("--teacher", "left", "--register", str(secret / "replicas")): "cannot be written",
    }
    for arguments, said in refused.items():
        assert main(["serve", str(recipe), *arguments]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and said in error

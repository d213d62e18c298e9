"""Killed and resumed equals uninterrupted.

Invariant: what a run computes is a function of its recipe and its inputs. A SIGKILL at any moment, of the launcher or
of a rank, followed by ``--resume`` at the same layout gives the same weights and the same metrics, bit for bit (times,
rates and memory aside). At another layout sums are ordered differently: the next losses agree to 1e-5.
Two launchers of one machine stand for two nodes. Not exercised here: CUDA.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from mopd.base.hardware import NODE_NAME
from mopd.cli.main import main
from mopd.cli.watching.status import status_of
from mopd.launch.failure import STOPPED_CODE
from mopd.run.checkpointing import MANIFEST, complete_steps
from tests.fixtures.chance import seed_of
from tests.fixtures.ports import free_port
from tests.integration.world import World, mopd, read_metrics, read_validation, start_mopd, takes_signals

pytestmark = [pytest.mark.slow, pytest.mark.multirank]
FORMAT = "metadata.json"
"""Of a checkpoint: before this file is there, no rank tells the others the hashes of what it has written."""


@pytest.fixture(scope="module")
def uninterrupted(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    done = mopd("train", world.write_recipe(run_dir))
    assert done.returncode == 0, done.stderr
    return run_dir


def chance() -> random.Random:
    """Always the same in ``make test``."""
    return random.Random(seed_of("MOPD_KILLS_SEED", is_new="MOPD_KILLS" in os.environ))


def wait_for_step(process: subprocess.Popen[str], run_dir: Path, step: int) -> None:
    """Until the metrics file holds ``step`` lines."""
    deadline = time.monotonic() + 120
    metrics = run_dir / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < step:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, f"no step {step} after 120 s"
        time.sleep(0.01)


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def is_rank(process: psutil.Process) -> bool:
    """The leader of a session of its own; none that ends meanwhile."""
    try:
        return "mopd" in process.cmdline() and os.getsid(process.pid) == process.pid
    except (psutil.NoSuchProcess, ProcessLookupError):
        return False


def ranks_of(*launchers: subprocess.Popen[str]) -> list[psutil.Process]:
    """None before a launcher takes signals: its guard looks like one as it starts."""
    ready = [launcher for launcher in launchers if takes_signals(launcher.pid)]
    return [one for launcher in ready for one in descendants(launcher) if is_rank(one)]


def wait_for_ranks(*launchers: subprocess.Popen[str], count: int) -> list[psutil.Process]:
    deadline = time.monotonic() + 60
    while len(ranks := ranks_of(*launchers)) < count:
        assert time.monotonic() < deadline and all(launcher.poll() is None for launcher in launchers)
        time.sleep(0.005)
    return ranks


@contextlib.contextmanager
def stopped_clock(ranks: list[psutil.Process]) -> Iterator[None]:
    """They get no further, however long this process takes."""
    for rank in ranks:
        rank.suspend()
    try:
        yield
    finally:
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.resume()


def assert_all_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive, f"left behind: {[p.cmdline() for p in alive]}"


def test_killed_run_resumes_bit_for_bit(world: World, uninterrupted: Path, tmp_path: Path) -> None:
    """The launcher, at any moment. It leaves no process and no temporary file."""
    run_dir, temporary = tmp_path / "run", tmp_path / "tmp"
    temporary.mkdir()
    recipe = world.write_recipe(run_dir)
    process = start_mopd("train", recipe, TMPDIR=str(temporary))
    wait_for_step(process, run_dir, chance().randint(1, 6))
    family = descendants(process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    assert_all_gone(family)
    assert [path.name for path in temporary.iterdir()] == []
    goes_on(recipe, run_dir, uninterrupted)


def test_killed_while_a_checkpoint_is_written(world: World, uninterrupted: Path, tmp_path: Path) -> None:
    """A rank: what was being written beside the steps counts for nothing, in either run's eyes."""
    run_dir = tmp_path / "run"
    # All are kept: one that is being removed looks like one that is being written.
    recipe = world.write_recipe(run_dir, checkpoint={"every_steps": 1, "keep_last": 10})
    process = start_mopd("train", recipe)
    wait_for_step(process, run_dir, 1)
    family = descendants(process)
    ranks = ranks_of(process)
    assert len(ranks) == 2
    unfinished = suspend_in_mid_write(ranks, run_dir / "checkpoints")
    chance().choice(ranks).kill()
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.resume()
    process.wait(timeout=60)
    assert process.returncode != 0
    assert_all_gone(family)
    assert unfinished.exists() and not (unfinished / MANIFEST).exists()
    goes_on(recipe, run_dir, uninterrupted)


def suspend_in_mid_write(ranks: list[psutil.Process], checkpoints: Path) -> Path:
    """The checkpoint that was begun, and cannot become whole without either of them, while nobody runs."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        time.sleep(0.001)  # who never sleeps waits for a processor when it matters
        for folder in checkpoints.glob("step_????????"):
            if (folder / FORMAT).exists():
                continue
            for rank in ranks:
                rank.suspend()
            if folder.exists() and not (folder / FORMAT).exists():
                return folder
            for rank in ranks:
                rank.resume()
    raise AssertionError("no checkpoint was met while it was written")


def goes_on(recipe: Path, run_dir: Path, uninterrupted: Path) -> None:
    done = mopd("train", recipe, "--resume")
    assert done.returncode == 0, done.stderr
    assert_same_run(run_dir, uninterrupted)


def test_interrupted_before_it_has_begun(world: World, tmp_path: Path) -> None:
    """Nothing is left that could be resumed, and the line says so; nor does it count as a start that failed."""
    run_dir = tmp_path / "run"
    process = start_mopd("train", world.write_recipe(run_dir), "--resume=auto")
    with stopped_clock(wait_for_ranks(process, count=1)):
        family = descendants(process)
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (128 + signal.SIGINT, "mopd: ended by SIGINT; start again\n")
    assert_all_gone(family)
    assert not run_dir.exists()


def start_nodes(recipe: Path, *flags: str) -> list[subprocess.Popen[str]]:
    """Two launchers, which take this machine for two."""
    nodes = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    return [
        start_mopd("train", recipe, *flags, *nodes, "--node-rank", str(rank), **{NODE_NAME: f"node-{rank}"})
        for rank in range(2)
    ]


def stopped(process: subprocess.Popen[str], run_dir: Path, by: str) -> int:
    """After how many steps: told in one line, with a checkpoint of the last one."""
    _, errors = process.communicate(timeout=60)
    assert process.returncode == STOPPED_CODE, errors
    done = len(read_metrics(run_dir))
    (line,) = [line for line in errors.splitlines() if line.startswith("mopd: ")]
    assert line.startswith(f"mopd: stopped after step {done} of 6, as {by}") and line.endswith("go on with --resume")
    assert "Traceback" not in errors
    assert complete_steps(run_dir / "checkpoints")[-1] == done
    return done


def test_stopped_run_goes_on_anywhere_bit_for_bit(world: World, uninterrupted: Path, tmp_path: Path) -> None:
    """Asked on one machine, then on the second of two nodes; then on one again: the same run. ``mopd status`` and
    ``mopd logs`` know of all."""
    run_dir = tmp_path / "run"
    recipe = world.write_recipe(run_dir)
    process = start_mopd("train", recipe, "--resume=auto")
    ranks = wait_for_ranks(process, count=2)
    wait_for_step(process, run_dir, 1)
    with stopped_clock(ranks):
        assert main(["stop", str(run_dir)]) == 0
    family = descendants(process)
    done = stopped(process, run_dir, "mopd stop (")
    assert_all_gone(family)
    assert status_of(run_dir).state == "has ended"

    nodes = start_nodes(recipe, "--resume=auto")
    ranks = wait_for_ranks(*nodes, count=2)
    wait_for_step(nodes[0], run_dir, done + 1)
    with stopped_clock(ranks):
        family = [one for node in nodes for one in descendants(node)]
        assert status_of(run_dir).state == "runs"
        for one in (nodes[1], *ranks):  # as a node that ends does: to every process
            one.send_signal(signal.SIGTERM)
    assert done < stopped(nodes[0], run_dir, "SIGTERM on node-")
    errors = nodes[1].communicate(timeout=60)[1]  # torch may tell there that node 0's store has gone first
    assert nodes[1].returncode == STOPPED_CODE and "mopd: " not in errors and "Traceback" not in errors, errors
    assert_all_gone(family)
    assert {path.name for path in (run_dir / "logs" / "node-1").iterdir()} == {"rank_1.log"}

    finished = mopd("train", recipe, "--resume=auto")

    assert finished.returncode == 0, finished.stderr
    assert_same_run(run_dir, uninterrupted)
    assert not (run_dir / "stop").exists() and not (run_dir / "attempts.json").exists()
    assert status_of(run_dir).state == "is done"
    assert main(["logs", str(run_dir), "--node", "node-1", "--role", "rank_*"]) == 0


def test_stopped_before_its_first_step(world: World, tmp_path: Path) -> None:
    """Nothing was trained: nothing is left, and the exit code says that it was asked to."""
    run_dir = tmp_path / "run"
    process = start_mopd("train", world.write_recipe(run_dir, schedule__steps=500), "--resume=auto")
    deadline = time.monotonic() + 60
    while not (run_dir / ".lock").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    (run_dir / "stop").touch()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == STOPPED_CODE, errors
    assert "mopd: stopped before a step was trained, as the file stop asked\n" in errors
    assert not (run_dir / "metrics.jsonl").exists()
    assert not (run_dir / "attempts.json").exists()  # a person asked: no failed start


def assert_same_run(one: Path, other: Path) -> None:
    assert read_metrics(one) == read_metrics(other)
    assert read_validation(one) == read_validation(other)
    ours, theirs = (load_file(run / "hf" / "model.safetensors") for run in (one, other))
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name


def test_an_older_checkpoint_by_name(world: World, uninterrupted: Path, tmp_path: Path) -> None:
    """The newest checkpoint is damaged: the line names the older one, from which the same run comes out. What was
    measured after it is computed again, and no step counts what checks and validation asked for."""
    run_dir = tmp_path / "run"
    shutil.copytree(uninterrupted, run_dir)
    recipe = world.write_recipe(run_dir)
    newest = run_dir / "checkpoints" / "step_00000006"
    with (newest / "state.json").open("ab") as file:
        file.write(b" ")
    (run_dir / "checkpoints" / "step_00000002.bak").mkdir()
    before = (run_dir / "metrics.jsonl").read_bytes()

    refused = mopd("train", recipe, "--resume")

    (line,) = [line for line in refused.stderr.splitlines() if line.startswith("mopd: error:")]
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert "step_00000006/state.json: changed" in line and "--from step_00000004" in line
    assert (run_dir / "metrics.jsonl").read_bytes() == before

    done = mopd("train", recipe, "--resume", "--from", "step_00000004")

    assert done.returncode == 0, done.stderr
    assert_same_run(run_dir, uninterrupted)
    for line in read_metrics(run_dir):
        assert line["rollout/samples"] == 8
        assert line["teachers/samples/left"] + line["teachers/samples/right"] == 8
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert names == ["step_00000002.bak", "step_00000004", "step_00000006", "step_00000006.aside"]


def test_resume_at_another_layout(world: World, uninterrupted: Path, tmp_path: Path) -> None:
    """One other; ``tests/parity/student/test_checkpoints.py`` tries more."""
    layout = {"tensor_model_parallel_size": 1, "data_parallel_size": 2}
    run_dir = tmp_path / "run"
    shutil.copytree(uninterrupted, run_dir)
    for path in (run_dir / "checkpoints").glob("step_*"):
        if path.name != "step_00000004":
            shutil.rmtree(path)
    assert (run_dir / "checkpoints" / "step_00000004").exists()

    done = mopd("train", world.write_recipe(run_dir, student__parallel=layout), "--resume")

    assert done.returncode == 0, done.stderr
    ours, theirs = read_metrics(run_dir), read_metrics(uninterrupted)
    assert [line["step"] for line in ours] == [1, 2, 3, 4, 5, 6]
    for step in (5, 6):
        assert ours[step - 1]["loss"] == pytest.approx(theirs[step - 1]["loss"], rel=1e-5)
        assert ours[step - 1]["grad_norm"] == pytest.approx(theirs[step - 1]["grad_norm"], rel=1e-4)

"""Killed at any point and resumed, a conversion gives the bytes of an uninterrupted one, and nothing else ever appears.

The process is killed with SIGKILL when it is about to make its n-th file-system call (an audit hook in a forked child
counts them), for n over its whole life: while it writes, hashes, journals, completes and renames.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mopd.base.types import UserError
from mopd.conversion.job import Job, Stopped
from mopd.conversion.jobs import streaming
from mopd.conversion.torch_dist.plan import TargetLayout
from tests.fixtures.tiny_models import make_hf_model, make_tokenizer
from tests.unit.conversion.jobs import all_bytes, run_job

MAX_FILE_BYTES = 60_000
EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")
STEP = 7
"""Every seventh call is a point of death."""


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_hf_model(tmp_path_factory.mktemp("source") / "hf", "qwen3_moe", vocab_size=61, num_layers=2)
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def megatron(hf: Path) -> Path:
    folder = hf.parent / "megatron"
    run_job(streaming.hf_to_megatron(hf, folder, TargetLayout()))
    return folder


@pytest.fixture(params=["hf-to-megatron", "megatron-to-hf"])
def make(request: pytest.FixtureRequest, hf: Path, megatron: Path) -> Callable[[Path], Job]:
    if request.param == "hf-to-megatron":
        layout = TargetLayout(tensor_model_parallel_size=2)
        return lambda target: streaming.hf_to_megatron(hf, target, layout, max_file_bytes=MAX_FILE_BYTES)
    return lambda target: streaming.megatron_to_hf(megatron, target, max_file_bytes=MAX_FILE_BYTES)


def run_in_child(job: Job, *, resume: bool, dies_at: int | None) -> int | None:
    """Run the job in a forked child that kills itself at its ``dies_at``-th call; None if it lived, else the signal."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        count = 0

        def die(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal count
            if dies_at is not None and event in EVENTS and str(job.target.parent) in str(arguments[0]):
                count += 1
                if count == dies_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(die)
        try:
            if job.begin(resume=resume):
                job.write_share(0, 1)
                job.complete()
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status)
    assert os.WEXITSTATUS(status) == 0
    return None


def test_every_point_of_death(make: Callable[[Path], Job], tmp_path: Path):
    run_job(make(tmp_path / "expected"))
    expected = all_bytes(tmp_path / "expected")
    assert len(make(tmp_path / "any").files) > 4
    dies_at, is_done = 1, False
    while not is_done:
        place = tmp_path / str(dies_at)
        place.mkdir()
        target = place / "out"
        is_done = run_in_child(make(target), resume=False, dies_at=dies_at) is None
        assert not target.exists() or all_bytes(target) == expected, "a target is whole or absent"
        assert run_in_child(make(target), resume=True, dies_at=None) is None
        assert all_bytes(target) == expected
        assert [path.name for path in place.iterdir()] == ["out"]
        dies_at += STEP
    assert dies_at > 6 * STEP


def test_death_upon_death(make: Callable[[Path], Job], tmp_path: Path):
    """Each attempt dies after some calls more; the last one finishes what all have begun."""
    run_job(make(tmp_path / "expected"))
    expected = all_bytes(tmp_path / "expected")
    target, dies_at = tmp_path / "out", 20
    while run_in_child(make(target), resume=True, dies_at=dies_at) is not None:
        assert not target.exists() or all_bytes(target) == expected
        dies_at += 3
    assert dies_at > 20 + 3 * 3
    assert all_bytes(target) == expected


def test_another_number_of_ranks_goes_on(make: Callable[[Path], Job], tmp_path: Path):
    """What is written is left alone, unless it has changed since."""
    run_job(make(tmp_path / "expected"))
    job = make(tmp_path / "out")
    assert job.begin(resume=False)
    job.write_share(1, 3)
    done = {path.name: path.stat().st_mtime_ns for path in job.out.iterdir()}
    assert len(done) > 1
    spoiled = job.out / done.popitem()[0]
    content = bytearray(spoiled.read_bytes())
    content[len(content) // 2] ^= 1
    spoiled.write_bytes(content)
    del job  # its lock with it
    again = make(tmp_path / "out")
    assert again.begin(resume=True)
    for rank in range(2):
        again.write_share(rank, 2)
    assert all(again.out.joinpath(name).stat().st_mtime_ns == time for name, time in done.items()), "written once"
    again.complete()
    assert all_bytes(tmp_path / "out") == all_bytes(tmp_path / "expected")


def test_resume_of_something_else_is_refused(hf: Path, tmp_path: Path):
    job = streaming.hf_to_megatron(hf, tmp_path / "out", TargetLayout())
    assert job.begin(resume=False)
    other = streaming.hf_to_megatron(hf, tmp_path / "out", TargetLayout(tensor_model_parallel_size=2))
    with pytest.raises(UserError, match="another process is converting"):
        other.begin(resume=True)
    del job
    with pytest.raises(UserError, match="had another 'options'"):
        other.begin(resume=True)
    with pytest.raises(UserError, match=r"\.out\.converting: left by an interrupted conversion; add --resume"):
        streaming.hf_to_megatron(hf, tmp_path / "out", TargetLayout()).begin(resume=False)
    assert not (tmp_path / "out").exists()


def test_resume_of_a_whole_target_does_nothing(make: Callable[[Path], Job], tmp_path: Path):
    run_job(make(tmp_path / "out"))
    before = all_bytes(tmp_path / "out")
    assert not make(tmp_path / "out").begin(resume=True)
    assert all_bytes(tmp_path / "out") == before
    with pytest.raises(UserError, match="already exists"):
        make(tmp_path / "out").begin(resume=False)
    other = make(tmp_path / "out")
    other.description = {**other.description, "command": "another"}
    with pytest.raises(UserError, match="already exists"):
        other.begin(resume=True)


def test_a_failing_rank_stops_the_others(make: Callable[[Path], Job], tmp_path: Path):
    job = make(tmp_path / "out")
    assert job.begin(resume=False)
    job.stop()
    with pytest.raises(Stopped):
        job.write_share(0, 2)
    job.discard()
    assert list(tmp_path.iterdir()) == []

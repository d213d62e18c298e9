"""vLLM's processes end with the process that started them, however it ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

REPOSITORY = Path(__file__).parents[3]
OWNER = """
import os, time, types
from mopd.engines.vllm.worker import WorkerExtension

def watch(owner):
    extension = WorkerExtension()
    extension.parallel_config = types.SimpleNamespace(node_rank=0)
    extension.mopd_watch(owner)
    os.write(1, b"ready\\n")
    time.sleep(120)

owner = os.getpid()
if os.fork() == 0:    # vLLM's core holds its worker itself (one GPU)
    watch(owner)
elif os.fork() == 0:  # or starts it (several)
    if os.fork() == 0:
        watch(owner)
time.sleep(120)
"""


@pytest.mark.vllm
def test_a_killed_owner_takes_vllm_with_it() -> None:
    pytest.importorskip("vllm")
    owner = subprocess.Popen([sys.executable, "-c", OWNER], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert [owner.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    children = psutil.Process(owner.pid).children(recursive=True)
    assert len(children) == 3
    owner.kill()
    owner.wait(10)
    owner.stdout.close()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive

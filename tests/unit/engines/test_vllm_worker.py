"""vLLM's processes end with the process that started them, however it ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

REPOSITORY = Path(__file__).parents[3]
CORE = """
import subprocess, sys, time, types
if sys.argv[1] == "core":       # vLLM's core: holds its worker itself (one GPU) or starts it (several)
    owner, deep = sys.argv[2], sys.argv[3] == "deep"
    if deep:
        subprocess.Popen([sys.executable, "-c", "CODE = " + repr(CODE) + CODE, "worker", owner])
if sys.argv[1] == "worker" or not deep:
    from mopd.engines.vllm.worker import WorkerExtension
    extension = WorkerExtension()
    extension.parallel_config = types.SimpleNamespace(node_rank=0)
    extension.mopd_watch(int(sys.argv[2]))
    print("ready", flush=True)
time.sleep(120)
"""
OWNER = """
import os, subprocess, sys
CODE = {code!r}
subprocess.Popen([sys.executable, "-c", "CODE = " + repr(CODE) + CODE, "core", str(os.getpid()), sys.argv[1]]).wait()
"""


@pytest.mark.parametrize("depth", ["flat", "deep"])
def test_a_killed_owner_takes_vllm_with_it(depth: str) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER.format(code=CORE), depth], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None and owner.stdout.readline() == "ready\n"
    children = psutil.Process(owner.pid).children(recursive=True)
    assert len(children) == (1 if depth == "flat" else 2)
    owner.kill()
    owner.wait(10)
    owner.stdout.close()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive

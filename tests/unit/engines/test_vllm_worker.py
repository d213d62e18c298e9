"""vLLM's processes end with the process that started them, however it ended; what a worker derives from new weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


@pytest.mark.vllm
@pytest.mark.parametrize("is_last", [True, False])
def test_the_tied_head_is_refreshed_where_it_is(is_last: bool) -> None:
    """Of a replica with pipeline stages, which only GPUs have, the last one holds it."""
    pytest.importorskip("vllm")
    from vllm.model_executor.models.utils import PPMissingLayer

    from mopd.engines.vllm.worker import GroupTransferEngine

    refreshed: list[Any] = []
    method = SimpleNamespace(process_weights_after_loading=refreshed.append)
    head: Any = SimpleNamespace(quant_method=method) if is_last else PPMissingLayer()
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(tie_word_embeddings=True))
    engine: Any = object.__new__(GroupTransferEngine)
    engine.model = SimpleNamespace(config=config, lm_head=head)
    engine._refresh_tied_head()
    assert refreshed == ([head] if is_last else [])

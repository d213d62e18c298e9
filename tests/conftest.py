"""Settings of the whole test run."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Generator
from typing import Any

# Before torch and its OpenMP are there: several processes with a thread for each core would wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A folder that is not there may be a name of the Hub: no test asks the world for it.
os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
import torch
from hypothesis import settings

from tests.fixtures import warm

if not torch.cuda.is_available():
    # Triton reads this when a kernel is decorated: it must stand before any test imports the Triton layer.
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Ignored in the background of a script, and then in all that tests start.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, usual)
warm.install()
# Before a test module makes settings of its own, which take the rest from here. The same inputs on every start: what
# fails, fails again; others are searched for on purpose (make fuzz).
settings.register_profile("tests", derandomize="MOPD_FUZZ_MUTATIONS" not in os.environ, deadline=None)
settings.load_profile("tests")
SHARING = (
    ("tests/parity/student/",),
    (
        "tests/integration/test_export_serves.py", "tests/integration/test_groups.py",
        "tests/integration/test_replica_on_two_nodes.py", "tests/integration/test_server_vllm.py",
        "tests/integration/test_stock_vllm.py", "tests/unit/engines/test_vllm_",
    ),
)  # fmt: skip
"""Beginnings of names: the sessions' fixtures are starts of ranks, and children are forks of vLLM's template."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What all test modules import stays: the collector looks at it neither meanwhile nor later, which would take half
    a second each time, and forked children do not copy it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # Whatever this worker ran before: what is drawn without a seed of its own is the same on every start, too.
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    warm.state.kind = "mopd" if item.get_closest_marker("vllm") is None else "vllm"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker for a file, and for files that share what takes long to make."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return next((names[0] for names in SHARING if nodeid.startswith(names)), super()._split_scope(nodeid))

    return Scheduling(config, log)

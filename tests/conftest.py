"""Settings of the whole test run."""

from __future__ import annotations

import os

# Before torch and its OpenMP are there: several processes with a thread for each core would wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A folder that is not there may be a name of the Hub: no test asks the world for it.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

from tests.fixtures import warm

if not torch.cuda.is_available():
    # Triton reads this when a kernel is decorated: it must stand before any test imports the Triton layer.
    os.environ.setdefault("TRITON_INTERPRET", "1")
warm.install()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    warm.state.kind = "mopd" if item.get_closest_marker("vllm") is None else "vllm"

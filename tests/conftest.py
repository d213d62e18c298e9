"""Settings of the whole test run."""

from __future__ import annotations

import os

import torch

from tests.fixtures import warm

if not torch.cuda.is_available():
    # Triton reads this when a kernel is decorated: it must stand before any test imports the Triton layer.
    os.environ.setdefault("TRITON_INTERPRET", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # a thread for each core in each of several processes would wait for the others
    torch.set_num_threads(1)
warm.install()

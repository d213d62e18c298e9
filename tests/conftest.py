"""Settings of the whole test run."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    # Triton reads this when a kernel is decorated: it must stand before any test imports the Triton layer.
    os.environ.setdefault("TRITON_INTERPRET", "1")

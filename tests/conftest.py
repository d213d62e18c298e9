"""Settings of the whole test run."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads this when a kernel is decorated: it must stand before any test imports the Triton layer.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(tryfirst=True)  # before the plugin reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """``make test`` runs two files at a time (``--dist loadgroup``), but only one of those that start vLLM or Ray."""
    heavy = {item.path for item in items if any(item.iter_markers("vllm")) or any(item.iter_markers("ray"))}
    for item in items:
        item.add_marker(pytest.mark.xdist_group("engines" if item.path in heavy else str(item.path)))

"""What ranks do over NCCL alone, on a machine without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from mopd.student.weights import _to_wire, _wire_device


def test_messages_are_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL moves device memory alone: that of the rank's GPU, also beside gloo."""
    group: Any = None
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for backend, device in (("nccl", "cuda:3"), ("cpu:gloo,cuda:nccl", "cuda:3"), ("gloo", "cpu")):
        monkeypatch.setattr(dist, "get_backend", lambda _, backend=backend: backend)
        assert _wire_device(group) == torch.device(device)
    assert _to_wire(torch.ones(2, dtype=torch.bfloat16).t(), group).dtype == torch.uint8

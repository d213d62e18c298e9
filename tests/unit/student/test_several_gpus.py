"""What ranks do over NCCL alone, on a machine without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from mopd.student.schedule import Neighbours
from mopd.student.weights import _to_wire, _wire_device


def test_neighbours_tell_shapes_as_megatron_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """With virtual stages; else they come from the plan."""
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(P2PCommunicator, "__init__", lambda *args, **options: None)
    monkeypatch.setattr(P2PCommunicator, "_communicate_shapes", lambda self, *args: seen.append(args) or "megatron's")
    group: Any = None
    shapes = [(4, 1, 8), (5, 1, 8)]
    assert Neighbours(group, None, shapes, is_interleaved=True)._communicate_shapes("n", "p", True, False) == (
        "megatron's"
    )
    assert Neighbours(group, None, shapes, is_interleaved=False)._communicate_shapes("n", "p", True, True) == (
        (4, 1, 8),
        (4, 1, 8),
    )
    assert seen == [("n", "p", True, False)]


def test_messages_are_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL moves device memory alone: that of the rank's GPU, also beside gloo."""
    group: Any = None
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for backend, device in (("nccl", "cuda:3"), ("cpu:gloo,cuda:nccl", "cuda:3"), ("gloo", "cpu")):
        monkeypatch.setattr(dist, "get_backend", lambda _, backend=backend: backend)
        assert _wire_device(group) == torch.device(device)
    assert _to_wire(torch.ones(2, dtype=torch.bfloat16).t(), group).dtype == torch.uint8

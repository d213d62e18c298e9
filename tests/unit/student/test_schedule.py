"""What a pipeline stage knows of the messages that come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from mopd.student.schedule import Neighbours

NAMES = {(rows, 1, 8): name for rows, name in ((4, "a"), (5, "b"), (6, "c"), (7, "d"))}


@pytest.mark.parametrize(
    ("rank", "num_chunks", "from_previous", "from_next"),
    [
        (1, 1, "abcd", "abcd"),
        (0, 2, "abcd", "ababcdcd"),
        (1, 2, "ababcdcd", "ababcdcd"),
        (2, 2, "ababcdcd", "abcd"),
        (0, 3, "ababcdcd", "abababcdcdcd"),
    ],
)
def test_shapes_come_in_the_schedules_order(
    rank: int, num_chunks: int, from_previous: str, from_next: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Micro-batches of four shapes, two of them at a time through each chunk."""
    monkeypatch.setattr(P2PCommunicator, "__init__", lambda *args: None)
    group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: 3)
    config = SimpleNamespace(microbatch_group_size_per_vp_stage=2)
    stage = Neighbours(group, config, list(NAMES), num_chunks=num_chunks)
    ways = [(True, False)] * len(from_previous), [(False, True)] * len(from_next)
    found = [
        "".join(NAMES[next(filter(None, stage._communicate_shapes(None, None, *way)))] for way in one) for one in ways
    ]
    assert found == [from_previous, from_next]
    with pytest.raises(StopIteration):
        stage._communicate_shapes(None, None, True, False)

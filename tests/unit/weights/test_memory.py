"""Handles of a sender's memory: only what a sender may have made is opened, and nothing is left behind."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from mopd.weights.memory import SharedMemory, open_memory
from tests.unit.weights.members import CPU, members, metas_of


def test_nothing_of_the_memory_is_left() -> None:
    def num_maps() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:mopd-weights")

    before = num_maps()
    with members(metas_of({"a": torch.zeros(99)}), 3, is_mapped=True):
        assert num_maps() > before
        assert not [name for name in os.listdir("/dev/shm") if "mopd" in name]
    gc.collect()
    assert num_maps() <= before


@pytest.mark.parametrize("handle", ["", "[]", "{}", "[3]", "[" * 5000])
def test_what_is_no_handle_of_a_sender_is_refused(handle: str) -> None:
    with pytest.raises(ValueError, match="the sender's memory cannot be opened"):
        open_memory(handle, 0, CPU)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"pid": True}, "are not numbers"),
        ({"pid": ".."}, "are not numbers"),
        ({"pid": 2**40}, "No such file"),
        ({"descriptor": -1}, "are not numbers"),
        ({"descriptor": 0}, "/fd/0 is another file"),
        ({"num_bytes": 16.0}, "are not numbers"),
        ({"num_bytes": 0}, "are not numbers"),
        ({"num_bytes": 2**40}, ""),
    ],
)
def test_a_handle_is_of_memory_that_a_sender_may_have(changes: dict[str, Any], problem: str) -> None:
    memory = SharedMemory(4096, CPU)
    (handle,) = json.loads(memory.handles(1))
    with pytest.raises(ValueError, match=f"the sender's memory cannot be opened: .*{problem}"):
        open_memory(json.dumps([handle | changes]), 0, CPU)
    memory.close()

"""Handles of a sender's memory: only what a sender may have made is opened, and nothing is left behind."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from mopd.weights import memory
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
    owned = SharedMemory(4096, CPU)
    (handle,) = json.loads(owned.handles(1))
    with pytest.raises(ValueError, match=f"the sender's memory cannot be opened: .*{problem}"):
        open_memory(json.dumps([handle | changes]), 0, CPU)
    owned.close()


def test_a_handle_that_cuda_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's errors are RuntimeErrors of several lines; an engine's worker must not end for one."""

    def refuse(*unread: Any) -> None:
        raise RuntimeError("CUDA error: invalid resource handle\nCUDA kernel errors might be asynchronously reported")

    monkeypatch.setattr(memory, "_open_cuda", refuse)
    with pytest.raises(ValueError, match=r"cannot be opened: CUDA error: invalid resource handle$"):
        open_memory(json.dumps([{"gpu": "0", "handle": []}]), 0, torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("settings", "written"),
    [
        ("", []),
        ("max_split_size_mb:64", []),
        ("expandable_segments:False", []),
        ("max_split_size_mb:64,expandable_segments:True", ["max_split_size_mb:64,expandable_segments:False"]),
        ("expandable_segments: true,backend:native", ["expandable_segments:False,backend:native"]),
    ],
)
@pytest.mark.parametrize("is_old", [False, True])
def test_memory_that_others_open_is_no_expandable_segment(
    settings: str, written: list[str], is_old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch is told before the allocation, and after it, by the settings that it was started with."""
    told: list[str] = []
    if is_old:
        for word in ("get", "set"):
            monkeypatch.delattr(torch._C, f"_accelerator_{word}AllocatorSettings")
        snapshot = {"allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": settings}}
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: snapshot)
        monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", told.append)
    else:
        monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: settings)
        monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    during: list[list[str]] = []
    monkeypatch.setattr(torch, "empty", lambda *sizes, **options: during.append([*told]) or torch.zeros(sizes))
    SharedMemory(16, torch.device("cuda", 0))
    assert during == [written] and told == [*written, *([settings] if written else [])]

"""GPUs that are not well, as CUDA and nvidia-smi show them: on a CPU by stand-ins of both."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from mopd.launch.checks import facts

SOUND = "GPU-a, 0, No, No\nGPU-b, 0, No, No\nGPU-z, 5, Yes, Yes\n"
"""The third is another job's."""


@pytest.mark.parametrize(
    ("counters", "free", "flipped", "says"),
    [
        (SOUND, 80, False, []),
        ("GPU-a, [N/A], [N/A], [N/A]\nGPU-b, 0, 0, 0\n", 80, False, []),
        ("No devices were found", 80, False, []),
        (SOUND.replace("GPU-b, 0", "GPU-b, 3"), 80, False, ["GPU 1: uncorrected memory errors .*total 3"]),
        (SOUND.replace("a, 0, No", "a, 0, Yes"), 80, False, ["GPU 0: rows .* wait for a reset"]),
        (SOUND, 60, False, ["GPU 0: 60.0 of 80.0 GiB are free", "GPU 1: 60.0"]),
        (SOUND, 80, True, ["GPU 0: 1 of 4096 elements of a product are wrong", "GPU 1: 1 of"]),
    ],
)
def test_what_is_not_well(
    monkeypatch: pytest.MonkeyPatch, counters: str, free: int, flipped: bool, says: list[str]
) -> None:
    def product(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        found = torch.matmul(one, other)
        found[1, 2] += 128 if flipped else 0
        return found

    monkeypatch.setattr(facts, "PRODUCT_SIZE", 64)
    monkeypatch.setattr(facts, "_query", lambda: counters)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid="ab"[number]))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch, "device", lambda *_: "cpu")
    monkeypatch.setattr(torch.Tensor, "__matmul__", product)
    found = list(facts.gpu_problems())
    assert len(found) == len(says)
    for line, pattern in zip(found, says, strict=True):
        assert re.search(pattern, line), line


def test_one_that_fell_off_the_bus_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(number: int) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure\nmore")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lost)
    (line,) = facts.gpu_problems()
    assert line.startswith("GPU 0: CUDA error: unspecified launch failure: reset it")

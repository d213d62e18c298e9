from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from mopd.student import cpu_shim

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the shim does nothing with CUDA")


def test_cuda_devices_become_the_cpu_inside_only() -> None:
    with cpu_shim.activate():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.zeros(2).to("cuda:0").device.type == "cpu"
        assert torch.zeros(2).to(device=torch.device("cuda", 0), dtype=torch.float16).dtype == torch.float16
        assert torch.zeros(2).cuda().device.type == "cpu"
        assert torch.zeros(2, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
        assert torch.zeros(2).type(torch.int64).dtype == torch.int64
        assert torch.empty(2, device=torch.cuda.current_device()).device.type == "cpu"
    assert torch.zeros(2).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")


def test_nesting_keeps_the_outer_one() -> None:
    with cpu_shim.activate():
        with cpu_shim.activate():
            pass
        assert torch.zeros(1, device="cuda").device.type == "cpu"


def test_each_thread_enters_for_itself() -> None:
    seen: list[str] = []

    def work() -> None:
        try:
            torch.zeros(1, device="cuda")
        except (AssertionError, RuntimeError):
            seen.append("refused")
        with cpu_shim.activate():
            seen.append(torch.zeros(1, device="cuda").device.type)

    with cpu_shim.activate():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(timeout=60)
    assert seen == ["refused", "cpu"]


def test_as_a_decorator_in_another_thread() -> None:
    @cpu_shim.activate()
    def device() -> str:
        return torch.zeros(1, device="cuda").device.type

    assert asyncio.run(asyncio.to_thread(device)) == "cpu"

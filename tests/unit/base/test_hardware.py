"""What a machine is said to have: the driver's list, what CUDA_VISIBLE_DEVICES leaves of it, and this one."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from mopd.base import hardware
from mopd.base.hardware import MIB, Hardware, read_query, shown_gpus, this_hardware

LISTED = "0, GPU-aaaa-1, 81559\n1, GPU-bbbb-2, 81559\n2, GPU-bcbc-3, [N/A]\n"
GPUS = [("GPU-aaaa-1", 81559 * MIB), ("GPU-bbbb-2", 81559 * MIB), ("GPU-bcbc-3", 0)]
FULL = 81559 * MIB


def test_the_drivers_list() -> None:
    assert read_query(LISTED) == GPUS
    assert read_query("No devices were found\n") == []


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, (FULL, FULL, 0)),
        ("", ()),
        ("-1", ()),
        ("1", (FULL,)),
        ("2,0", (0, FULL)),
        ("0,7,1", (FULL,)),  # CUDA stops at the first that is not there
        ("GPU-aaaa", (FULL,)),
        ("GPU-b", ()),  # of two
        ("MIG-1234,MIG-5678", (0, 0)),
    ],
)
def test_what_is_visible(visible: str | None, expected: tuple[int, ...]) -> None:
    assert shown_gpus(GPUS, visible) == expected


def test_gpus_without_a_torch_for_them_are_none() -> None:
    assert Hardware(gpu_memory_bytes=(FULL,)).without_cuda == "this torch is a CPU build"
    assert Hardware(torch_cuda="13.0").without_cuda == "no GPU"
    assert Hardware(gpu_memory_bytes=(FULL,), torch_cuda="13.0").without_cuda == ""


def test_this_machine_as_torch_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = this_hardware()
    assert found.torch_cuda == torch.version.cuda
    assert found.num_gpus == torch.cuda.device_count()
    assert 0 < found.free_memory_bytes <= psutil.virtual_memory().total
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert this_hardware().num_gpus == 0


def test_a_containers_memory_without_files_that_were_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They count as used, up to the limit: after a checkpoint was read nothing would be free."""
    monkeypatch.setattr(hardware, "CGROUP", tmp_path)
    unlimited = this_hardware().free_memory_bytes
    (tmp_path / "memory.max").write_text(f"{64 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{60 * MIB}\n")
    assert this_hardware().free_memory_bytes == 4 * MIB
    (tmp_path / "memory.stat").write_text(f"anon 7\ninactive_file {50 * MIB}\nactive_file 9\n")
    assert this_hardware().free_memory_bytes == 54 * MIB
    (tmp_path / "memory.max").write_text("max\n")
    assert this_hardware().free_memory_bytes > unlimited / 2

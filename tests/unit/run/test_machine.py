"""Versions of what chooses or computes a rank's numbers are told, so that nodes can compare them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import mopd
from mopd.run.machine import describe_machine, kinds_of_gpus, package_versions

OURS = [
    ("apex", "apex"),
    ("flash_attn", "flash-attn"),
    ("Pillow", "pillow"),
    ("transformer_engine_cu12", "transformer-engine-cu12"),
    ("nvidia_cudnn_cu12", "nvidia-cudnn-cu12"),
    ("nvidia-cublas", "nvidia-cublas"),
    ("grouped_gemm", "grouped-gemm"),
]
"""Name as it is written in an environment -> as it is told."""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages that is searched first."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("written", "told"), OURS)
def test_another_version_is_another_fact(site: Path, written: str, told: str) -> None:
    before = package_versions()
    for version in ("98.1", "99.0"):
        folder = site / f"{written.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {written}\nVersion: {version}\n")
        sys.path_importer_cache.pop(str(site), None)
        assert package_versions() == before | {told: version}
        (folder / "METADATA").unlink()
        folder.rmdir()


@pytest.mark.parametrize("name", ["fused_weight_gradient_mlp_cuda", "amp_C", "flashattn_hopper"])
def test_an_apex_with_another_kernel_is_another_fact(site: Path, name: str) -> None:
    before = package_versions()
    (site / f"{name}.py").touch()
    assert package_versions() == before | {f"module {name}": "present"}


def test_libraries_of_cuda_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch says; of a build for CPUs there are none."""
    assert not {"CUDA", "cuDNN", "NCCL"} & set(package_versions()) or torch.version.cuda is not None
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    told = package_versions()
    assert (told["CUDA"], told["cuDNN"], told["NCCL"]) == ("12.9", "91002", "2.27.3")


def test_ranks_have_the_first_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind once; a GPU that is a replica's does not count."""
    gpus = ["H100", "H100", "A100"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: gpus[number])
    assert kinds_of_gpus(2) == "H100"
    assert kinds_of_gpus(3) == kinds_of_gpus(8) == "A100, H100"
    assert describe_machine()["gpus"] == gpus
    gpus.clear()
    assert kinds_of_gpus(2) == "none"


def test_the_source_of_mopd_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two checkouts of one version differ."""
    monkeypatch.setattr(mopd, "__file__", str(tmp_path / "__init__.py"))
    told = set()
    for text in ("a = 1", "a = 2"):
        (tmp_path / "one.py").write_text(text)
        told.add(package_versions()["mopd"])
    assert len(told) == 2

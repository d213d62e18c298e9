"""What a run runs on, kept in its folder for its report and compared between its nodes: hardware and packages, no name
of a host or folder."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

import mopd
from mopd.hardware import driver_version

PACKAGES = (
    "megatron-core",
    "transformers",
    "transformer-engine",
    "triton",
    "vllm",
    "ray",
    "numpy",
)
"""Those that decide numbers or speed, beside torch; an absent one is left out."""


def describe_machine() -> dict[str, Any]:
    """Content of ``machine.json``: ``gpus`` (names), ``cpu``, ``num_cores``, ``memory_gib`` of this machine, and the
    versions of ``packages``."""
    return {
        "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
        "cpu": _cpu_name(),
        "num_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "packages": _packages(),
    }


def package_versions() -> dict[str, str]:
    """Package -> version, as nodes compare them; ``mopd`` with a hash of its source, and the GPUs' ``driver``."""
    driver = {"driver": version} if (version := driver_version()) is not None else {}
    return _packages() | {"mopd": f"{mopd.__version__} ({_hash_of_source()})"} | driver


def kinds_of_gpus(num_ranks: int) -> str:
    """Names of the GPUs that ``num_ranks`` trainer ranks take on this machine, each once."""
    names = {torch.cuda.get_device_name(number) for number in range(min(num_ranks, torch.cuda.device_count()))}
    return ", ".join(sorted(names)) or "none"


def _packages() -> dict[str, str]:
    packages = {"mopd": mopd.__version__, "python": platform.python_version(), "torch": torch.__version__}
    for name in PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # an optional part
            continue
    return packages


def _hash_of_source() -> str:
    """Two checkouts of one version may differ."""
    root = Path(mopd.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:8]


def _cpu_name() -> str:
    """``AMD EPYC 9B14``; empty where the system does not say."""
    if not os.path.isfile("/proc/cpuinfo"):
        return platform.processor()
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()

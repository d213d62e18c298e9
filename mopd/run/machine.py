"""What a run runs on, kept in its folder for its report: hardware and packages, no name of a host or folder."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

import psutil
import torch

from mopd import __version__

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
    packages = {"mopd": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for name in PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # an optional part
            continue
    return {
        "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
        "cpu": _cpu_name(),
        "num_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "packages": packages,
    }


def _cpu_name() -> str:
    """``AMD EPYC 9B14``; empty where the system does not say."""
    if not os.path.isfile("/proc/cpuinfo"):
        return platform.processor()
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()

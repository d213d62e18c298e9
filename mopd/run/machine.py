"""The hardware and packages that a run uses, kept in its folder for its report and compared between its nodes. No name
of a host or folder is among them."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

import mopd
from mopd.base.hardware import driver_version

PACKAGES = (
    "megatron-core", "transformers", "transformer-engine", "apex", "flash-attn", "flash-attn-3", "triton", "vllm",
    "ray", "numpy", "torchvision", "pillow",
)  # fmt: skip
"""Packages that decide numbers or speed, beside torch. Ranks with a vision tower make their own pixels, by torchvision
and Pillow."""
_COMPARED_TOO = re.compile(
    r"transformer-engine-|flash-attn|flash-linear-attention$|flash-mla$|flashinfer|causal-conv1d$|mamba-ssm$|deep-ep$|"
    r"emerging-optimizers$|fast-hadamard-transform$|grouped-gemm$|nv-grouped-gemm$|einops$|"
    r"nvidia-(cublas|cudnn|cufft|curand|cusolver|cusparse|cuda-(runtime|nvrtc|cupti)|nccl|nvjitlink|nvshmem|cutlass)"
)
"""Further packages by normalized name: what Megatron and TransformerEngine use where it is installed, and the libraries
that come with torch, which a package may replace by others."""
_EXTENSIONS = (
    "amp_C", "fused_layer_norm_cuda", "fast_layer_norm", "fused_weight_gradient_mlp_cuda",
    "scaled_masked_softmax_cuda", "scaled_softmax_cuda", "scaled_upper_triang_masked_softmax_cuda", "flash_attn",
    "flash_attn_3", "flashattn_hopper",
)  # fmt: skip
"""Modules whose presence chooses kernels in Megatron: an ``apex`` of one version is built with or without them."""


def describe_machine() -> dict[str, Any]:
    """Return the content of ``machine.json``: ``gpus`` (names), ``cpu``, ``num_cores``, ``memory_gib`` of this machine,
    and the versions of ``packages``."""
    return {
        "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
        "cpu": _cpu_name(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "packages": _packages(),
    }


def package_versions() -> dict[str, str]:
    """Return package or library -> version, as nodes compare them: what chooses or computes a rank's numbers. ``mopd``
    comes with a hash of its source; what is absent is left out."""
    extensions = {f"module {name}": "present" for name in _EXTENSIONS if importlib.util.find_spec(name) is not None}
    driver = {"driver": version} if (version := driver_version()) is not None else {}
    own = {"mopd": f"{mopd.__version__} ({_hash_of_source()})"}
    return _packages() | _further_packages() | extensions | _cuda_libraries() | own | driver


def kinds_of_gpus(num_ranks: int) -> str:
    """Return the names of the GPUs that ``num_ranks`` trainer ranks take on this machine, each once."""
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


def _further_packages() -> dict[str, str]:
    found: dict[str, str] = {}
    for one in metadata.distributions():
        # An interrupted installation leaves folders without a name.
        name = re.sub(r"[-_.]+", "-", one.metadata["Name"] or "").lower()
        if _COMPARED_TOO.match(name):
            found.setdefault(name, one.version)  # the first on the path is the one that is imported
    return found


def _cuda_libraries() -> dict[str, str]:
    """Return versions of CUDA as torch was built for it, of cuDNN and NCCL as they are loaded; empty on a CPU build."""
    if torch.version.cuda is None:
        return {}
    found = {"CUDA": torch.version.cuda, "cuDNN": str(torch.backends.cudnn.version())}
    if torch.distributed.is_nccl_available():
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _hash_of_source() -> str:
    """Hash the package's source: two checkouts of one version may differ."""
    root = Path(mopd.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:8]


def _cpu_name() -> str:
    """Return the CPU's name (``AMD EPYC 9B14``); empty where the system has none."""
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        return next(names, platform.processor())

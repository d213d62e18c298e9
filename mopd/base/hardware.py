"""Hardware and GPU software of this machine, found without torch; ``auto`` values follow it
(``config/machine/auto.py``)."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from mopd.base.text import file_name

QUERY = ("nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")
QUERY_TIMEOUT_S = 30.0
"""Seconds for ``QUERY``: a driver that no process holds awake takes some seconds to answer."""
DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")
DRIVER_VERSION = Path("/proc/driver/nvidia/version")
CGROUP = Path("/sys/fs/cgroup")
MIB = 2**20
NODE_NAME = "MOPD_NODE_NAME"
"""Environment variable: another name for this machine, as where two of its launchers stand for two nodes."""


def node_name() -> str:
    """``NODE`` in ``RUN/logs/NODE/ROLE.log``, fit for a file name: Slurm's name of the node, else the host's without
    its domain."""
    given = os.environ.get(NODE_NAME) or os.environ.get("SLURMD_NODENAME")
    return file_name(given or socket.gethostname().partition(".")[0] or "localhost")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """Hardware of one machine that a process can use."""

    gpu_memory_bytes: tuple[int, ...] = ()
    """Memory of each GPU that CUDA_VISIBLE_DEVICES shows, by number; 0 if unknown."""
    torch_cuda: str | None = None
    """CUDA version of the installed torch; ``None`` for a CPU build."""
    driver_cuda: str | None = None
    """Newest CUDA version that the driver can run, by nvidia-smi; ``None`` if it does not say."""
    vllm: str | None = None
    """Version of the installed vLLM; ``None`` also for a CPU build."""
    free_memory_bytes: int = 0
    """Host memory that processes could get now."""

    @property
    def num_gpus(self) -> int:
        """Number of GPUs that torch can use."""
        return len(self.gpu_memory_bytes) if self.torch_cuda is not None else 0

    @property
    def without_cuda(self) -> str:
        """Reason why there is no CUDA; empty if there is."""
        if self.num_gpus:
            return ""
        return "no GPU" if not self.gpu_memory_bytes else "this torch is a CPU build"


def this_hardware() -> Hardware:
    """Describe the hardware that this process can use."""
    return Hardware(
        gpu_memory_bytes=shown_gpus(_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")),
        torch_cuda=_torch_cuda(),
        driver_cuda=_driver_cuda(),
        vllm=_vllm(),
        free_memory_bytes=free_memory_bytes(),
    )


def driver_version() -> str | None:
    """Return the version of the NVIDIA kernel module, such as ``570.86.15``; ``None`` without one."""
    if not DRIVER_VERSION.is_file():
        return None
    found = re.search(r"\d+\.\d+(\.\d+)?", DRIVER_VERSION.read_text(errors="replace"))
    return None if found is None else found[0]


def free_memory_bytes() -> int:
    """Return the host memory that processes could get now: the machine's, or what the container's limit leaves."""
    return int(min([psutil.virtual_memory().available, *_free_in_container()]))


def shown_gpus(gpus: list[tuple[str, int]], visible: str | None) -> tuple[int, ...]:
    """Return the memory in bytes of the GPUs that ``visible`` (CUDA_VISIBLE_DEVICES) shows, in its order.

    ``gpus`` are (uuid, memory) by index. As in CUDA, an entry that names none ends the list.
    """
    if visible is None:
        return tuple(memory for _, memory in gpus)
    shown = []
    for entry in filter(None, (part.strip() for part in visible.split(","))):
        if entry.startswith("MIG-"):
            shown.append(0)  # a part of a GPU: its memory is unknown
            continue
        by_number = entry.isdecimal() and int(entry) < len(gpus)
        named = [gpus[int(entry)]] if by_number else [gpu for gpu in gpus if gpu[0].startswith(entry)]
        if len(named) != 1:
            break
        shown.append(named[0][1])
    return tuple(shown)


def _gpus() -> list[tuple[str, int]]:
    """Return (uuid, memory in bytes) of every GPU of the driver, by index."""
    if shutil.which(QUERY[0]) is None:
        return [("", 0) for _ in DRIVER_GPUS.iterdir()] if DRIVER_GPUS.is_dir() else []
    return read_query(_told_by(QUERY))


def _driver_cuda() -> str | None:
    """Return the CUDA version in the head of nvidia-smi's table."""
    if shutil.which(QUERY[0]) is None:
        return None
    found = re.search(r"CUDA Version\s*:\s*(\d+\.\d+)", _told_by(QUERY[:1]))
    return None if found is None else found[1]


def _told_by(command: tuple[str, ...]) -> str:
    """Return what nvidia-smi prints; nothing where it fails or hangs, as such a driver serves torch no better."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def read_query(text: str) -> list[tuple[str, int]]:
    """Return (uuid, memory in bytes) by index, from the output of ``QUERY``."""
    found = re.findall(r"^\s*(\d+)\s*,\s*(\S+)\s*,\s*(\d+|\S.*)$", text, re.MULTILINE)
    return [(uuid, int(mib) * MIB if mib.isdecimal() else 0) for _, uuid, mib in found]


def _free_in_container() -> list[int]:
    """Return what the container's own limit leaves, if it has one (cgroup v2).

    Files that were read count as used; inactive ones are released as soon as memory is needed.
    """
    limit, used, parts = (CGROUP / f"memory.{name}" for name in ("max", "current", "stat"))
    if not limit.is_file() or not used.is_file() or not limit.read_text().strip().isdecimal():
        return []
    found = re.search(r"^inactive_file (\d+)$", parts.read_text() if parts.is_file() else "", re.MULTILINE)
    held = int(used.read_text()) - (int(found[1]) if found else 0)
    return [max(0, int(limit.read_text()) - held)]


def _torch_cuda() -> str | None:
    """Return torch's CUDA version from the file in which torch keeps it: importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name("version.py")
    text = path.read_text(errors="replace") if path.is_file() else ""
    match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match[1] if match else None


def _vllm() -> str | None:
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return None
    return None if version.endswith("+cpu") else version


def give_back_freed_memory() -> None:
    """Return to the system what this process has freed: glibc would keep the most that there ever was, and more with
    every large copy."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # other C libraries keep less, and have no such call
        trim(0)

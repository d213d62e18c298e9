"""Run a command on emulated GPUs: what asks for CUDA runs as on a GPU, with the CPU's kernels in the host's memory.

    python -m tests.emulated_gpu.start --gpus 2 -- python -m pytest tests/parity/student/test_layouts.py

Shown so: branches for CUDA run; tensors are where they must be; each rank and thread has its own device; the numbers
are the CPU's. Not shown: speed, waits between streams, kernels that are compiled. Triton is hidden, so that losses take
the chunked layer; with ``--triton`` its interpreter runs the kernels, a hundred times as slowly.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def missing() -> str | None:
    """Return why there can be no emulated GPUs here, if so."""
    if torch.version.cuda is not None:
        return f"torch {torch.__version__} has devices of its own: take a CPU build"
    return None if shutil.which("g++") else "no g++ to build them: apt-get install g++"


def library() -> Path:
    """Return the compiled devices, built by ``g++`` for this torch where they are not yet.

    Raises:
        subprocess.CalledProcessError: the compiler refused; its words are on the error stream.
    """
    source = HERE / "device.cpp"
    digest = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    path = ROOT / "build" / "emulated_gpu" / f"device-{digest}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        home = Path(torch.__file__).parent
        part = path.with_suffix(f".{os.getpid()}")
        headers = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
        libraries = [f"-L{home / 'lib'}", f"-Wl,-rpath,{home / 'lib'}", "-ltorch_cpu", "-lc10"]
        command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", str(source), "-o", str(part), *headers, *libraries]
        subprocess.run(command, check=True, timeout=300)
        part.rename(path)
    return path


def environment(num_gpus: int, *, has_triton: bool = False) -> dict[str, str]:
    """Return this process's environment with which a Python process, and those that it starts, have ``num_gpus``."""
    hidden = ("CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET")
    paths = [str(HERE / "hook"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    own = {name: value for name, value in os.environ.items() if name not in hidden}
    return {
        **own,
        **({"TRITON_INTERPRET": "1"} if has_triton else {}),
        "EMULATED_GPUS": str(num_gpus),
        "EMULATED_GPU_LIBRARY": str(library()),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1, choices=range(1, 9), help="number of devices (default: 1)")
    parser.add_argument("--triton", action="store_true", help="let Triton's interpreter run the kernels")
    parser.add_argument("command", nargs="+", help="what to run, after --")
    options = parser.parse_args(argv)
    if why := missing():
        parser.error(why)
    return subprocess.run(
        options.command, env=environment(options.gpus, has_triton=options.triton), check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())

"""Starts a job on N ranks and returns what rank 0 wrote. One start runs many layouts: starting is the dear part."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("ranks.py")


def run_ranks(
    num_ranks: int,
    job: dict[str, Any],
    folder: Path,
    *,
    timeout_s: float = 1500,
    script: Path = SCRIPT,
    within: Sequence[str] = (),
) -> dict[str, Any]:
    """Run ``script`` with ``job`` (JSON) on ``num_ranks`` processes; returns its results by case name.

    ``within``: words before the command. ``timeout_s`` is for a busy machine: ranks that hang end at the deadline of a
    collective.
    """
    folder.mkdir(parents=True, exist_ok=True)
    job_path, out_path = folder / "job.json", folder / "out.json"
    job_path.write_text(json.dumps({**job, "out": str(out_path)}))
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command = [*within, *torchrun, "--nproc-per-node", str(num_ranks), str(script), str(job_path)]
    root = Path(__file__).parents[3]
    paths = [os.environ.get("PYTHONPATH", ""), str(root)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    results: dict[str, Any] = json.loads(out_path.read_text())
    return results

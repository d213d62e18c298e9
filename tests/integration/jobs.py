"""Jobs of Slurm that tests start, and what these leave in the run folder."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from mopd.report.run_files import RunFiles

JOB_S = 450.0


def ended(process: subprocess.Popen[str], *, timeout_s: float = JOB_S) -> tuple[int, str, str]:
    """Exit code, output and errors."""
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, output, errors


def job_logs(run_dir: Path) -> str:
    return "".join(f"== {path}\n{path.read_text(errors='replace')}" for path in sorted(run_dir.glob("logs/*/*.log")))


def until(is_so: Callable[[], bool], *, timeout_s: float = 150.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.2)


def num_steps(run_dir: Path) -> int:
    """Steps that the run has done; 0 before it has begun."""
    return len(RunFiles(run_dir).steps())


def job_id(run_dir: Path) -> str:
    return str(json.loads((run_dir / "job" / "job.json").read_text())["id"])


def replica_pids(run_dir: Path, key: str) -> dict[str, int]:
    """Node -> process of the server of a group that registered there last."""
    files = sorted((run_dir / "replicas").glob(f"{key}.*.json"), key=lambda path: path.stat().st_mtime)
    return {file["host"]: file["pid"] for file in map(json.loads, (path.read_text() for path in files))}

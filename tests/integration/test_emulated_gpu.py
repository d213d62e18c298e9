"""Branches for CUDA on emulated devices: what a machine without a GPU can show of them (make emulated-gpu: more)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulated_gpu.start import ROOT, environment, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")


def run(num_gpus: int, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment(num_gpus),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_the_devices_are_as_apart_as_gpus() -> None:
    said = run(2, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "tests/emulated_gpu/on_devices.py")
    assert "18 passed" in said


def test_the_student_on_a_gpu_is_the_students_on_the_cpu(tmp_path: Path) -> None:
    """The first stage of the GPU check that trains: bf16 on the device beside fp32 on the CPU, host optimizer states,
    a checkpoint and a resumption."""
    out = tmp_path / "student.json"
    run(1, "tools/gpu_student.py", "--stages", "student", "--out", str(out))
    (stage,) = json.loads(out.read_text())["stages"]
    assert stage["status"] == "passed" and len(stage["checks"]) == 11
    assert stage["figures"]["tested"]["device"] == "Emulated GPU"

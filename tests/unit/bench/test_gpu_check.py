"""tools/gpu_check.sh, as far as a machine without a GPU goes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[3] / "tools" / "gpu_check.sh"


def check(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(SCRIPT), *options], capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_says_what_is_missing(tmp_path: Path) -> None:
    done = check("--out", str(tmp_path), "--python", sys.executable)
    assert done.returncode == 2
    assert done.stderr.startswith("gpu_check: error: ") and len(done.stderr.splitlines()) == 1
    assert "sees no CUDA device" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--time-limit", "soon"], "--time-limit is 'soon': set whole seconds above 0"),
        (["--python", "no-such-python"], "--python: 'no-such-python' is not there: name an interpreter"),
        (["--fast"], "unknown option '--fast'"),
    ],
)
def test_refuses(options: list[str], line: str, tmp_path: Path) -> None:
    done = check("--out", str(tmp_path), *options)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"gpu_check: error: {line}"


STAND_IN = """\
#!/usr/bin/env bash
# Stands in for the interpreter of a GPU machine: answers the probe, notes every other call.
if [ "$1" = -c ]; then echo "NVIDIA H100, torch" >&2; echo nvidia-h100; exit 0; fi
echo "$@" >>"$(dirname "$0")/calls"
if [ "$2" = mopd.bench.losses ]; then
    while [ $# -gt 0 ]; do [ "$1" = --output ] && echo '{}' >"$2"; shift; done
    exit BENCHMARK
fi
case "$*" in *tests/gpu*) exit GPU_TESTS ;; *) exit LOSS_TESTS ;; esac
"""


@pytest.mark.parametrize(
    ("codes", "expected"), [((0, 0, 0), 0), ((1, 0, 0), 1), ((0, 1, 0), 1), ((0, 0, 1), 1), ((0, 124, 0), 1)]
)
def test_goes_through_all_steps(codes: tuple[int, int, int], expected: int, tmp_path: Path) -> None:
    """A failure is kept until the end and stops nothing."""
    text = STAND_IN
    for name, code in zip(("GPU_TESTS", "BENCHMARK", "LOSS_TESTS"), codes, strict=True):
        text = text.replace(name, str(code))
    python = tmp_path / "python"
    python.write_text(text)
    python.chmod(0o755)
    done = check("--python", str(python), "--out", str(tmp_path / "out"), "--time-limit", "200", "--shapes", "8,9,1")
    assert done.returncode == expected, done.stderr
    gpu, bench, loss, student = (tmp_path / "calls").read_text().splitlines()
    assert gpu.startswith("-m pytest ") and gpu.endswith(" tests/gpu")
    assert "--device cuda --shapes 8,9,1 --tp-shard 1 8" in bench
    assert 100 <= int(bench.split("--time-limit ")[1].split()[0]) <= 160
    assert "tests/parity/losses tests/unit/losses" in loss
    assert student.startswith("tools/gpu_student.py --time-limit ") and student.endswith("-student.json")
    (result,) = (tmp_path / "out").glob("*.json")
    assert result.name.startswith("nvidia-h100-20")
    assert str(result) in done.stdout


def test_help() -> None:
    done = check("--help")
    assert done.returncode == 0
    assert "--time-limit SECONDS" in done.stdout

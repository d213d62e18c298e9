"""tools/gpu_check.sh, as far as a machine without a GPU goes."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from tools import gpu_rows, gpu_student

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
        (["--stages", "speed"], "--stages names 'speed': choose among first,kernels,goals,benchmark,losses,student"),
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
case "$*" in *gpu_rows*) exec PYTHON "$@" ;; *gpu_student*) exit 0 ;; esac
case "$*" in *test_kernels.py*) exit KERNELS ;; *tests/gpu*) exit GOALS ;; esac
exit LOSSES
"""
STAGES = ["first", "kernels", "goals", "benchmark", "losses", "student"]


def stand_in(folder: Path, **codes: int) -> Path:
    text = STAND_IN.replace("PYTHON", sys.executable)
    for name in ("KERNELS", "GOALS", "BENCHMARK", "LOSSES"):
        text = text.replace(f"exit {name}", f"exit {codes.get(name.lower(), 0)}")
    python = folder / "python"
    python.write_text(text)
    python.chmod(0o755)
    return python


@pytest.mark.parametrize(
    ("codes", "expected"), [({}, 0), *(({name: 1}, 1) for name in STAGES[1:5]), ({"benchmark": 124}, 1)]
)
def test_goes_through_all_stages(codes: dict[str, int], expected: int, tmp_path: Path) -> None:
    """A failure is kept until the end and stops nothing."""
    python = stand_in(tmp_path, **codes)
    done = check("--python", str(python), "--out", str(tmp_path / "out"), "--time-limit", "200", "--shapes", "8,9,1")
    assert done.returncode == expected, done.stderr
    first, kernels, goals, bench, losses, student, _ = (tmp_path / "calls").read_text().splitlines()
    assert first.startswith("tools/gpu_student.py --stages quickstart --time-limit 4")
    assert kernels.startswith("-m pytest ") and "tests/gpu/test_kernels.py" in kernels
    assert "tests/gpu --ignore-glob=*test_kernels*" in goals
    assert "--device cuda --shapes 8,9,1 --tp-shard 1 8" in bench
    assert 40 <= int(bench.split("--time-limit ")[1].split()[0]) <= 60
    assert "tests/parity/losses tests/unit/losses" in losses
    assert student.startswith("tools/gpu_student.py --stages student,families,") and student.endswith("-student.json")
    asked = {stage for call in (first, student) for stage in call.split("--stages ")[1].split()[0].split(",")}
    assert asked == set(gpu_student.STAGES)
    (result,) = (tmp_path / "out").glob("*.json")
    assert result.name.startswith("nvidia-h100-20")
    said = [line.split(":")[0] for line in done.stdout.splitlines() if ": passed" in line or ": FAILED" in line]
    assert said == [f"== {name}" for name in STAGES]
    assert str(result.with_suffix("")) in done.stdout


def test_every_loss_test_stands_in_one_stage(tmp_path: Path) -> None:
    check("--python", str(stand_in(tmp_path)), "--out", str(tmp_path / "out"))
    _, kernels, goals, _, losses, *_ = (tmp_path / "calls").read_text().splitlines()
    root = SCRIPT.parents[1]
    listed = {root / word for word in kernels.split() if word.endswith(".py")}
    for call, folders in ((goals, ("gpu",)), (losses, ("parity/losses", "unit/losses"))):
        patterns = [word.split("=")[1] for word in call.split() if word.startswith("--ignore-glob=")]
        tests = [path for folder in folders for path in (root / "tests" / folder).glob("test_*.py")]
        left = {path for path in tests if not any(path.match(pattern) for pattern in patterns)}
        assert left and not left & listed
        listed |= left
    folders = ("gpu", "parity/losses", "unit/losses")
    assert listed == {path for folder in folders for path in (root / "tests" / folder).glob("test_*.py")}


def test_chosen_stages_and_no_time(tmp_path: Path) -> None:
    python = str(stand_in(tmp_path))
    done = check("--python", python, "--out", str(tmp_path / "out"), "--stages", "losses,kernels")
    assert done.returncode == 0
    assert len((tmp_path / "calls").read_text().splitlines()) == 3
    assert "== benchmark: skipped, not among --stages" in done.stdout
    assert done.stdout.index("== kernels: passed") < done.stdout.index("== losses: passed")
    (tmp_path / "calls").unlink()
    done = check("--python", python, "--out", str(tmp_path / "out"), "--time-limit", "10")
    assert done.returncode == 0 and "s of the time limit are left for it" in done.stdout


def test_lists_its_stages_and_options_without_a_gpu() -> None:
    listed, helped = check("--list"), check("--help")
    assert listed.returncode == helped.returncode == 0 and "--time-limit SECONDS" in helped.stdout
    assert [line.split()[0] for line in listed.stdout.splitlines()] == STAGES


def test_wheels_come_in_pieces(tmp_path: Path) -> None:
    """Joined in order, seen by what runs, gone afterwards; a piece that is missing is one line."""
    wheel, pieces = "large_one-1.0-py3-none-any.whl", tmp_path / "pieces"
    pieces.mkdir()
    with zipfile.ZipFile(tmp_path / wheel, "w") as archive:
        archive.writestr("large_one.py", "print('seen')")
        archive.writestr("large_one-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: large-one\nVersion: 1.0\n")
        archive.writestr(
            "large_one-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("large_one-1.0.dist-info/RECORD", "")
    content = (tmp_path / wheel).read_bytes()
    for number, start in enumerate(range(0, len(content), 300)):
        (pieces / f"{wheel}.a{chr(97 + number)}").write_bytes(content[start : start + 300])
    python = tmp_path / "python"
    python.write_text(f"""#!/usr/bin/env bash
case "$*" in *"-m pip"*) exec {sys.executable} "$@" ;; -c*) echo NVIDIA >&2; echo gpu; exit 0 ;; esac
exec {sys.executable} -c "import large_one"
""")
    python.chmod(0o755)
    options = ["--python", str(python), "--out", str(tmp_path / "out"), "--stages", "losses", "--wheels", str(pieces)]
    done = check(*options)
    assert done.returncode == 0 and "seen" in done.stdout, done.stderr
    (pieces / f"{wheel}.ab").unlink()
    done = check(*options)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "--wheels: " in done.stderr and done.stderr.endswith("bring whole wheels, every piece of them\n")


def test_says_which_rows_of_the_page_it_can_fill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every row names a place that the tool knows."""
    owed = gpu_rows.rows(gpu_rows.PAGE.read_text())
    assert {place for _, place in owed} - set(gpu_rows.LOGS) <= set(gpu_student.STAGES)
    results = tmp_path / "gpu-2026-01-01"
    gpu_rows.main(str(results))
    assert f"0 of {len(owed)} rows" in capsys.readouterr().out
    Path(f"{results}-goals.log").write_text("4 passed, 1 skipped in 9 s")
    stages = [
        {"name": "training", "figures": {"x": 1}},
        {"name": "scoring", "figures": {}, "reason": "no time is left"},
    ]
    Path(f"{results}-student.json").write_text(json.dumps({"stages": stages}))
    gpu_rows.main(str(results))
    said = capsys.readouterr().out
    assert f"{len(owed) - 1} of {len(owed)} rows" in said and said.count("   no ") == 1
    assert "(scoring: no time is left)" in said

"""tools/gpu_student.py, as far as a machine without a GPU goes: fp32 beside fp32, through the same processes."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mopd.base.hardware import Hardware
from mopd.config.load import load_recipe
from mopd.launch.preparing import settled
from tools import gpu_student
from tools.gpu_stage import ROOT, Stage, start, wait
from tools.gpu_student import compare, main, run_stage

STEP = {"loss": 2.0, "grad_norm": 3.0}
SEEN: dict[str, Any] = {
    "dtype": "bfloat16",
    "logprobs": [-1.0, -2.0],
    "steps": [dict(STEP) for _ in range(4)],
    "resumed": [dict(STEP) for _ in range(2)],
    "resumed_on_host": [dict(STEP) for _ in range(2)],
    "saved_equals_loaded": True,
    "changed": True,
    "resumed_equals_uninterrupted": True,
}
ANGLES = {"decoder.weight": 1e-4}


def broken(tested: dict[str, Any], angles: dict[str, float] = ANGLES, *, is_exact: bool = False) -> list[str]:
    return [check.name for check in compare(SEEN, tested, angles, is_exact=is_exact) if not check.ok]


def test_equal_results_pass() -> None:
    for is_exact in (False, True):
        assert broken(copy.deepcopy(SEEN), is_exact=is_exact) == []
    checks = compare(SEEN, SEEN, ANGLES, is_exact=True)
    assert len(checks) == 11
    json.dumps([dataclasses.asdict(check) for check in checks], allow_nan=False)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda seen: seen["steps"][0].update(loss=2.1), "loss of step 1"),
        (lambda seen: seen["steps"][1].update(loss=math.nan), "loss of step 2"),
        (lambda seen: seen["steps"][1].update(grad_norm=3.2), "grad_norm of step 2"),
        (lambda seen: seen["logprobs"].__setitem__(0, -1.2), "log-probs, mean difference"),
        (lambda seen: seen["resumed"][1].update(loss=2.02), "losses after resuming"),
        (lambda seen: seen["resumed_on_host"][1].update(loss=2.02), "the same with optimizer states in host memory"),
        (lambda seen: seen.update(saved_equals_loaded=False), "saved_equals_loaded"),
        (lambda seen: seen.update(changed=False), "changed"),
    ],
)
def test_each_difference_is_seen(change: Callable[[dict[str, Any]], None], name: str) -> None:
    tested = copy.deepcopy(SEEN)
    change(tested)
    assert broken(tested) == [name]


def test_one_wrong_gradient_is_seen() -> None:
    assert broken(SEEN, {**ANGLES, "bias": 0.2}) == ["gradient angle, worst tensor (bias)"]


def test_a_resumed_run_on_a_cpu_is_exact() -> None:
    tested = copy.deepcopy(SEEN)
    tested["resumed"][0]["loss"] += 1e-9
    tested["resumed_equals_uninterrupted"] = False
    assert broken(tested) == []
    assert broken(tested, is_exact=True) == ["losses after resuming", "resumed_equals_uninterrupted"]


@pytest.mark.long
@pytest.mark.slow
def test_the_stages_that_run_on_this_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "result.json"
    monkeypatch.setattr(gpu_student, "FAMILIES", (gpu_student.SEEING,))
    options = ["--device", "cpu", "--stages", "student,families,ipc", "--time-limit", "550", "--out", str(out)]
    assert main(options) == 0, capsys.readouterr().out
    result = json.loads(out.read_text())
    stage, families, ipc = result["stages"]
    assert (families["status"], len(families["checks"])) == ("passed", 12)
    assert (result["device"], stage["name"], stage["status"]) == ("cpu", "student", "passed")
    assert (ipc["name"], ipc["status"], len(ipc["checks"])) == ("ipc", "passed", 2)
    assert len(stage["checks"]) == 12 and all(check["ok"] for check in stage["checks"])
    assert stage["figures"]["tested"]["steps"][0]["grad_norm"] > 0


def test_the_quickstart_is_set_to_one_rank_with_engines_in_its_process(tmp_path: Path) -> None:
    settings = gpu_student.quickstart_settings(tmp_path / "assets", tmp_path / "run")
    recipe = settled(load_recipe(ROOT / "recipes" / "quickstart.yaml", settings), Hardware()).recipe
    assert recipe.student.parallel.world_size == 1
    assert recipe.schedule.steps == gpu_student.QUICKSTART_STEPS
    groups = [recipe.rollout, *recipe.teachers.values()]
    assert {(group.placement.type, group.engine.type) for group in groups} == {("in_process", "torch")}
    assert all(str(tmp_path) in path for path in (recipe.run_dir, recipe.student.model, *recipe.data.train))


def test_a_stage_that_cannot_run_is_skipped_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = run_stage("student", "cpu", "float32", tmp_path, time.monotonic() - 1)
    assert (late.status, late.reason) == ("skipped", "no time is left: raise --time-limit")
    monkeypatch.setattr(gpu_student, "STUDENT_NEEDS", ("torch", "no_such_package", "no_such.core"))
    lacking = run_stage("student", "cpu", "float32", tmp_path, time.monotonic() + 60)
    assert (lacking.status, lacking.reason) == ("skipped", "this interpreter lacks no_such_package, no_such.core")


def test_children_see_the_packages_that_were_brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``gpu_check.sh --wheels`` puts them on PYTHONPATH; Megatron is among them."""
    (tmp_path / "brought.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    wait(start([sys.executable, "-c", "import brought, tools.gpu_stage"], "cpu"), "a child", time.monotonic() + 60)


@pytest.mark.parametrize("name", ["training", "scoring"])
def test_full_size_is_for_a_gpu(name: str, tmp_path: Path) -> None:
    seen = run_stage(name, "cpu", "float32", tmp_path, time.monotonic() + 60)
    assert (seen.status, seen.reason) == ("skipped", "qwen3-1.7b is for a GPU")


@pytest.mark.parametrize(
    ("code", "is_met", "status"), [(0, True, "passed"), (1, False, "failed"), (2, True, "failed"), (0, False, "failed")]
)
def test_what_the_bench_measured_is_kept(
    code: int, is_met: bool, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that prints figures as ``mopd bench`` does: exit code 1 is a goal that is missed, 2 an error."""
    figures = {"speed_up": 2.0, "is_met": is_met}
    script = f"import sys; print({json.dumps(json.dumps(figures))}); print('mopd: error: it broke', file=sys.stderr)"
    start = gpu_student.start  # type: ignore[attr-defined]
    monkeypatch.setattr(
        gpu_student,
        "start",
        lambda command, device, stdout: start(
            [sys.executable, "-c", f"{script}; sys.exit({code})"], device, stdout=stdout
        ),
    )
    seen = run_stage("training", "cuda", "bfloat16", tmp_path, time.monotonic() + 60)
    assert seen.status == status
    assert seen.figures == (figures if code < 2 else {})
    assert ("it broke" in seen.reason) == (code == 2)


def test_a_child_that_breaks_fails_its_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stage(device: str, dtype: str, work: Path, stage: Stage, deadline: float) -> None:
        command = ["python3", "-c", "raise SystemExit('mopd: error: it broke')"]
        wait(start(command, device), "the child", deadline)

    monkeypatch.setitem(gpu_student.STAGES, "student", stage)
    seen = run_stage("student", "cpu", "float32", tmp_path, time.monotonic() + 60)
    assert seen.status == "failed"
    assert seen.reason == "the child ended with exit code 1: ...mopd: error: it broke"


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
@pytest.mark.parametrize(
    ("options", "line"),
    [
        ([], "sees no CUDA device"),
        (["--device", "cpu", "--stages", "student,nonsense"], "name some of quickstart, student, families"),
        (["--device", "cpu", "--time-limit", "nan"], "set seconds above 0"),
    ],
)
def test_wrong_options(options: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(options)
    assert ended.value.code == 2
    assert line in capsys.readouterr().err

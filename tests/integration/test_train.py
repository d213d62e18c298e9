"""The main job through the command line: train, what it leaves behind, and what reads it."""

from __future__ import annotations

import contextlib
import json
import shlex
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from mopd.cli.main import main
from mopd.report.run_files import RunFiles
from tests.fixtures import slurm, warm
from tests.integration.world import ANSWERS, TIMEOUT_S, World, mopd, read_metrics, read_validation, start_mopd

pytestmark = [pytest.mark.slow, pytest.mark.multirank]

STEPS = 20
SHORT_S = 20.0
"""A deadline that no collective of such a small student needs, however busy the machine is."""
LATE_S = 1.6 * SHORT_S
"""More than a rank without signs of life of rank 0 would wait."""


@pytest.fixture(scope="module")
def slow_start(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """A run whose engines start late; it waits for them beside this file's other tests."""
    folder = tmp_path_factory.mktemp("slow")
    slow = folder / "slow_python"
    slow.write_text(f'#!/bin/sh\nsleep {LATE_S}\nexec {shlex.quote(sys.executable)} "$@"\n')
    slow.chmod(0o755)
    recipe = world.write_recipe(
        folder / "run",
        teacher_defaults={"placement": {"type": "local"}},
        rollout={"max_response_length": 4, "placement": {"type": "local", "python": str(slow)}},
        schedule={"steps": 3, "prompts_per_step": 4, "wait_timeout_s": SHORT_S},
        validation__every_steps=3,
        checkpoint__every_steps=3,
    )
    process = start_mopd("train", recipe)
    yield process
    process.kill()
    process.communicate()


@pytest.fixture(scope="module")
def run_dir(world: World, slow_start: object, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train") / "run"
    recipe = world.write_recipe(
        folder,
        schedule__steps=STEPS,
        validation__every_steps=10,
        checkpoint={"every_steps": 10, "export_hf_every_steps": 10},
        student__optimizer={"lr": 5e-3},
        metrics__tensorboard=True,
    )
    # as a user starts it, imports and all: where there is Slurm, its job is
    with warm.cold() if slurm.why_not() else contextlib.nullcontext():
        done = mopd("train", recipe)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_student_learns_from_both_teachers(run_dir: Path) -> None:
    lines = read_metrics(run_dir)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for domain in ANSWERS:
        last_losses = [line[f"loss/{domain}"] for line in lines[-5:]]  # of four samples each
        assert sum(last_losses) / len(last_losses) < 0.2 * lines[0][f"loss/{domain}"]
    first, *_, last = read_validation(run_dir)
    assert first["rewards"] == {"left": 0.0, "right": 0.0}
    assert last["rewards"] == {"left": 1.0, "right": 1.0}


def test_metrics_are_per_domain(run_dir: Path) -> None:
    line = read_metrics(run_dir)[1]  # step 2 is a diagnostic step
    for domain in ANSWERS:
        for name in (
            "loss",
            "kl_k1",
            "kl_k3",
            "teacher_mass",
            "student_mass",
            "clamped_share",
            "entropy",
            "topk_overlap",
        ):
            assert f"{name}/{domain}" in line
        assert line[f"num_samples/{domain}"] == 4
        assert 0 < line[f"teacher_mass/{domain}"] <= 1
        assert line[f"kl_k3/{domain}"] >= 0
    total = sum(line[f"num_tokens/{d}"] * line[f"loss/{d}"] for d in ANSWERS)
    assert line["loss"] == pytest.approx(total / sum(line[f"num_tokens/{d}"] for d in ANSWERS), rel=1e-6)


def test_report(run_dir: Path) -> None:
    report = json.loads((run_dir / "report.json").read_text())
    assert report["steps"] == STEPS
    assert report["train_tokens_per_s"] > 0
    for domain in ANSWERS:
        entry = report["domains"][domain]
        assert entry["before"] == 0.0
        assert entry["after"] == entry["teacher"] == 1.0
        assert entry["headroom_recovery"] == 1.0
    html = (run_dir / "report.html").read_text()
    assert "http://" not in html.replace("http://www.w3.org", "")
    assert "https://" not in html
    assert "Not finished" not in html and str(run_dir) not in html.split("<h2>Recipe</h2>")[0]
    machine = json.loads((run_dir / "machine.json").read_text())
    assert machine["packages"]["torch"] == torch.__version__ and machine["num_cores"] >= 1
    assert machine["cpu"] in html and socket.gethostname() not in json.dumps(machine)
    assert mopd("report", run_dir).returncode == 0


def test_phases_are_all_of_the_steps_time(run_dir: Path) -> None:
    """And what stands beside the phases is little: no part of a step is left untimed."""
    lines = RunFiles(run_dir).steps()
    phases = json.loads((run_dir / "report.json").read_text())["phases"]
    assert {"wait_batch", "pack", "forward_backward", "optim_step"} <= set(phases)
    assert sum(phase["share"] for phase in phases.values()) == pytest.approx(1)
    whole = sum(line["timing/step_s"] for line in lines)
    assert sum(phase["mean_s"] for phase in phases.values()) * len(lines) == pytest.approx(whole)
    for phase in set(phases) - {"other"}:
        assert phases[phase]["mean_s"] * len(lines) == pytest.approx(sum(line[f"timing/{phase}_s"] for line in lines))
    assert phases["other"]["share"] >= 0
    others = [
        1 - sum(line[f"timing/{name}_s"] for name in set(phases) - {"other"}) / line["timing/step_s"] for line in lines
    ]
    assert statistics.median(others) < 0.2


def test_the_teachers_answers_are_kept_and_shown(run_dir: Path) -> None:
    kept = json.loads((run_dir / "headroom.json").read_text())
    for domain, answer in ANSWERS.items():
        assert [row["response"] for row in kept[domain]["examples"]] == [answer] * len(kept[domain]["examples"]) != []
        assert all(row["reward"] == 1.0 for row in kept[domain]["examples"])
    assert (run_dir / "report.html").read_text().count('data-label="teacher" class="right"') >= len(ANSWERS)


def test_generate_answers_as_the_run_learned(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the export and of the last checkpoint; the prompt is rendered as the run renders its own."""
    for model in (run_dir, run_dir / "checkpoints" / f"step_{STEPS:08d}"):
        arguments = (str(model), "left 7", "right 7", "--temperature", "0", "--max-new-tokens", "4", "--json")
        assert main(["generate", *arguments]) == 0
        assert [one["response"] for one in json.loads(capsys.readouterr().out)] == [*ANSWERS.values()]


def test_exports_on_the_way_are_of_their_steps(run_dir: Path) -> None:
    """The result is that of the best validation, and was exported after it too."""
    exports = {path.name: path / "model.safetensors" for path in (run_dir / "hf_steps").iterdir()}
    assert sorted(exports) == [f"step_{step:08d}" for step in range(10, STEPS + 1, 10)]
    assert len({path.read_bytes() for path in exports.values()}) == len(exports)
    lines = [line for line in read_validation(run_dir) if line["step"]]
    best = max(lines, key=lambda line: (sum(line["rewards"].values()), -line["step"]))["step"]
    for path in (run_dir / "hf").iterdir():
        assert (run_dir / "hf_steps" / f"step_{best:08d}" / path.name).read_bytes() == path.read_bytes()


def test_eval_reads_folder_and_checkpoint(run_dir: Path, world: World) -> None:
    recipe = world.write_recipe(run_dir.parent / "again")
    last = read_validation(run_dir)[-1]["rewards"]
    for model in (["--model", run_dir / "hf"], ["--checkpoint", run_dir / "checkpoints" / f"step_{STEPS:08d}"]):
        done = mopd("eval", recipe, *model, "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["rewards"] == last


def test_checkpoint_converts_to_hugging_face(run_dir: Path, world: World, tmp_path: Path) -> None:
    out = tmp_path / "hf"
    done = mopd("convert", "megatron-to-hf", run_dir / "checkpoints" / f"step_{STEPS:08d}", out)
    assert done.returncode == 0, done.stderr
    exported = AutoModelForCausalLM.from_pretrained(out)
    source = AutoModelForCausalLM.from_pretrained(world.student)
    assert exported.state_dict().keys() == source.state_dict().keys()
    assert any(not torch.equal(a, b) for a, b in zip(exported.parameters(), source.parameters(), strict=True))


@pytest.mark.long
def test_validation_consumes_no_training_randomness(run_dir: Path, world: World, tmp_path: Path) -> None:
    other = tmp_path / "run"
    recipe = world.write_recipe(
        other,
        schedule__steps=STEPS,
        validation={"every_steps": 3, "temperature": 1.0},
        checkpoint__every_steps=STEPS,
        checkpoint__keep_best=False,
        student__optimizer={"lr": 5e-3},
        preflight__require_better_teacher=False,
    )
    done = mopd("train", recipe)
    assert done.returncode == 0, done.stderr
    assert read_metrics(other) == read_metrics(run_dir)


def test_rank_0_may_wait_longer_than_one_wait(slow_start: subprocess.Popen[str]) -> None:
    """Engines take longer to start than the deadline with its quarter's grace, and the other rank waits for rank 0
    meanwhile."""
    _, errors = slow_start.communicate(timeout=TIMEOUT_S)
    assert slow_start.returncode == 0, errors

"""Whole runs whose teachers and rollout are servers: they train, survive deaths, and stop clearly when they cannot."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from mopd.config.groups import TorchEngineConfig
from mopd.engines.torch.engine import TorchEngine
from tests.fixtures.servers import running_server
from tests.integration.groups import is_alive
from tests.integration.world import ANSWERS, World, mopd, read_metrics, read_validation, start_mopd, write_prompts

pytestmark = [pytest.mark.slow, pytest.mark.multirank]

STEPS = 16
LOCAL = {"type": "local", "startup_timeout_s": 120.0, "num_threads": 1}


def overrides(placement: dict[str, Any], *, teacher_replicas: int) -> dict[str, Any]:
    return {
        "teacher_defaults": {"placement": placement, "replicas": teacher_replicas},
        "rollout": {"max_response_length": 4, "placement": placement},
        "student__parallel": {"tensor_model_parallel_size": 1},
        "schedule__steps": STEPS,
        "student__optimizer": {"lr": 5e-3},
        "checkpoint__every_steps": STEPS,
        "validation__every_steps": STEPS,
    }


def servers(run_dir: Path, key: str) -> list[int]:
    """Processes that have served a replica, by its log: one ready line for each life."""
    (log,) = list((run_dir / "logs").glob(f"*/{key}.log")) or [run_dir]
    lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
    return [json.loads(line)["pid"] for line in lines if line.startswith("{")]


def wait_for_step(run: subprocess.Popen[str], run_dir: Path, step: int, *, timeout_s: float = 200.0) -> None:
    deadline = time.monotonic() + timeout_s
    metrics = run_dir / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text(encoding="utf-8").splitlines()) < step:
        assert run.poll() is None and time.monotonic() < deadline, run.communicate()
        time.sleep(0.02)


def test_deaths_in_the_middle_of_a_run(world: World, tmp_path: Path) -> None:
    """One of two replicas of a teacher, and the only rollout replica."""
    run_dir = tmp_path / "run"
    recipe = world.write_recipe(run_dir, **overrides(LOCAL, teacher_replicas=2), teachers__right__replicas=1)
    run = start_mopd("train", recipe)
    wait_for_step(run, run_dir, 2)
    os.kill(servers(run_dir, "teachers.left.1")[0], signal.SIGKILL)
    os.kill(servers(run_dir, "rollout.0")[0], signal.SIGKILL)
    _, errors = run.communicate(timeout=300)
    assert run.returncode == 0, errors
    assert "rollout.0 was killed by SIGKILL" in errors and "rollout.0 works again, restart 1 of 3" in errors
    lines = read_metrics(run_dir)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        assert [line[f"num_samples/{domain}"] for domain in ANSWERS] == [4, 4]
    for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[1:]:  # step 1: preflight too
        numbers = json.loads(line)
        assert [numbers[f"teachers/samples/{name}"] for name in ANSWERS] == [4, 4]
        assert numbers["rollout/samples"] == 8
    assert read_validation(run_dir)[-1]["rewards"] == {"left": 1.0, "right": 1.0}
    assert len(servers(run_dir, "rollout.0")) == 2
    everyone = [pid for path in (run_dir / "logs").glob("*/*.log") for pid in servers(run_dir, path.stem)]
    assert len(everyone) >= 5 and not any(is_alive(pid) for pid in everyone)


def test_a_group_that_is_gone_stops_the_run_in_one_line(world: World, tmp_path: Path) -> None:
    """Its replica cannot come back, as its model was replaced meanwhile."""
    run_dir, model = tmp_path / "run", tmp_path / "right"
    shutil.copytree(world.teachers["right"], model)
    recipe = world.write_recipe(run_dir, **overrides(LOCAL, teacher_replicas=1), teachers__right__model=str(model))
    run = start_mopd("train", recipe)
    wait_for_step(run, run_dir, 1)
    shutil.copy(world.teachers["left"] / "model.safetensors", model)
    os.kill(servers(run_dir, "teachers.right.0")[0], signal.SIGKILL)
    _, errors = run.communicate(timeout=120)
    assert run.returncode == 69, errors
    last = errors.splitlines()[-1]
    assert last.startswith("mopd: error: ")
    for part in ("right", "no replica is left (right.0 is gone", f"{model} is not the model any more"):
        assert part in last
    assert "right.0 was killed by SIGKILL" in errors
    everyone = [pid for path in (run_dir / "logs").glob("*/*.log") for pid in servers(run_dir, path.stem)]
    assert len(everyone) == 4 and not any(is_alive(pid) for pid in everyone)


def test_samples_that_a_teacher_refuses_are_replaced_or_end_the_run(world: World, tmp_path: Path) -> None:
    """Its server takes prompts of two digits with the longest response, and not those of three."""
    short, long, validation = (tmp_path / f"{name}.parquet" for name in ("short", "long", "validation"))
    write_prompts(short, num_rows=60, start=10)
    write_prompts(long, num_rows=20, start=100)
    write_prompts(validation, num_rows=8, start=80)
    longest = prompt_length(world, "left 10") + 4
    engine = TorchEngine.from_pretrained(world.teachers["left"], TorchEngineConfig(dtype="float32"))
    with running_server(engine, limits={"max_tokens_per_request": longest, "max_queued_tokens": 4096}) as server:
        keys = {
            "data__train": [str(short), str(long)],
            "data__validation": [str(validation)],
            "teachers__left__placement": {"type": "external", "urls": [server.url]},
            "teachers__left__routing": {"max_tokens_per_request": longest},
            "student__parallel": {"tensor_model_parallel_size": 1},
            "student__optimizer__lr": 1e-6,
        }
        replaced = mopd("train", world.write_recipe(tmp_path / "replaced", on_failure="replace", **keys))
        stopped = mopd("train", world.write_recipe(tmp_path / "stopped", **keys))
    assert replaced.returncode == 0, replaced.stderr
    lines = read_metrics(tmp_path / "replaced")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line["num_samples/left"] == line["num_samples/right"] == 4 for line in lines)
    assert all(line["replaced_samples/right"] == 0 for line in lines)
    counted = sum(line["replaced_samples/left"] for line in lines)
    assert 0 < counted == replaced.stderr.count("of domain 'left' is replaced: teachers.left: ")
    assert stopped.returncode == 2
    last = stopped.stderr.splitlines()[-1]
    assert re.search(r"teachers\.left did not score samples \d+ of domain 'left': .*413.*on_failure: replace$", last), (
        last
    )


def prompt_length(world: World, text: str) -> int:
    tokenizer = AutoTokenizer.from_pretrained(world.student)
    messages = [{"role": "user", "content": text}]
    return len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


@pytest.mark.vllm
@pytest.mark.parametrize("placement", ["local", pytest.param("in_process", marks=pytest.mark.long)])
def test_the_vllm_recipe(world: World, tmp_path: Path, placement: str) -> None:
    """``recipes/two_teachers_vllm_cpu.yaml`` with smaller models and fewer steps; its teachers' scores are those of a
    transformers forward wherever they run, or in one place of their own continuations."""
    run_dir = tmp_path / "run"
    models = {f"teachers.{name}.model": world.teachers[domain] for name, domain in RENAMED.items()}
    models |= {f"teachers.{name}.domains": f"[{domain}]" for name, domain in RENAMED.items()}
    sets = {
        "run_dir": run_dir,
        "student.model": world.student,
        **models,
        "data.train": f"[{world.train}]",
        "data.validation": f"[{world.validation}]",
        "student.optimizer.lr_warmup_steps": 1,
        "data.max_prompt_length": 32,
        "rollout.max_response_length": 4,
        "loss.top_k": 8,
        "schedule.steps": 3,
        "schedule.prompts_per_step": 8,
        "validation.every_steps": 3,
        "checkpoint.every_steps": 3,
    }
    # A teacher's vLLM is in the place of the test; the rollout's is a server of this machine, as the recipe has it.
    sets["teachers.reversal.placement"] = f"{{type: {placement}}}"
    for group in ["teachers.sorting"] + ["rollout"] * (placement == "in_process"):  # more would only take time
        sets |= {f"{group}.engine": "{type: torch}", f"{group}.placement": "{type: in_process}"}
    if placement == "in_process":
        sets["preflight.compare_with_transformers"] = "false"
    arguments = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    done = mopd("train", "recipes/two_teachers_vllm_cpu.yaml", *arguments)
    assert done.returncode == 0, done.stderr
    lines = read_metrics(run_dir)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[-1]["loss"] < lines[0]["loss"]
    parity = json.loads((run_dir / "parity.json").read_text(encoding="utf-8"))
    if placement == "in_process":
        assert done.stderr.count("equal what its own greedy continuations report") == len(RENAMED), done.stderr
    else:
        assert set(parity) == set(RENAMED)
    assert all(teacher["max_difference"] < 1e-4 for teacher in parity.values())
    assert (run_dir / "hf" / "model.safetensors").is_file()


RENAMED = {"reversal": "left", "sorting": "right"}
"""Teacher of the recipe -> domain of the small world."""

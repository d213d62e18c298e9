"""The mistakes of a first day on a cluster: each is made, and told in one line with its cure."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from mopd.cli import main as cli
from tests.fixtures.tiny_models import CHARACTERS, make_tokenizer
from tests.integration.groups import make_models
from tests.integration.world import REPOSITORY, TIMEOUT_S, World, environment, write_prompts

STATIC = ("check", "RECIPE", "--static")
NVIDIA_SMI = """#!/bin/sh
case "$*" in
  *--query-gpu=*) echo "0, GPU-aaaa-1, 81559" ;;
  *) echo "| NVIDIA-SMI 470.57    Driver Version: 470.57    CUDA Version: 11.4 |" ;;
esac
"""
"""What a machine with one GPU answers, of a driver that no torch of today takes."""


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """What somebody does, and the line that says so."""

    keys: dict[str, Any] = field(default_factory=dict)
    command: tuple[str, ...] = STATIC
    prepare: Callable[[World, pytest.MonkeyPatch], dict[str, Any]] | None = None
    """Does what the recipe does not; returns further keys."""
    says: tuple[str, ...]
    """Parts of the line, in this order; the last is the cure."""


def typo(world: World, _: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"teachers__left__model": f"{world.teachers['left']}t"}


def other_tokenizer(world: World, _: pytest.MonkeyPatch) -> dict[str, Any]:
    make_tokenizer(world.teachers["left"], characters=CHARACTERS[::-1])
    return {}


def torch_without_cuda(world: World, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    (world.folder / "nvidia-smi").write_text(NVIDIA_SMI)
    (world.folder / "nvidia-smi").chmod(0o755)
    patch.setenv("PATH", str(world.folder), prepend=os.pathsep)
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return {}


def no_wandb_key(world: World, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    (world.folder / "site" / "wandb").mkdir(parents=True)
    (world.folder / "site" / "wandb" / "__init__.py").touch()
    patch.syspath_prepend(str(world.folder / "site"))
    patch.setenv("HOME", str(world.folder))
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "NETRC"):
        patch.delenv(name, raising=False)
    return {}


def unreachable_wandb(world: World, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The package's own error and call, of a stand-in: no server of Weights & Biases is near a test."""
    (world.folder / "site" / "wandb").mkdir(parents=True)
    words = "class Error(Exception): pass\ndef login(*, verify): raise Error('Failed to verify credentials')\n"
    (world.folder / "site" / "wandb" / "__init__.py").write_text(words)
    patch.setenv("PYTHONPATH", f"{world.folder / 'site'}:{REPOSITORY}")
    patch.setenv("WANDB_API_KEY", "0" * 40)
    patch.delenv("WANDB_MODE", raising=False)
    return {}


def no_hub_token(_: World, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    patch.delenv("HF_TOKEN", raising=False)
    return {}


def no_slurm(world: World, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    patch.setenv("PATH", str(world.folder))
    return {}


def old_vllm(world: World, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    for name in ("vllm", "vllm-0.6.6.dist-info"):
        (world.folder / "site" / name).mkdir(parents=True)
    (world.folder / "site" / "vllm" / "__init__.py").write_text('__version__ = "0.6.6"\n')
    (world.folder / "site" / "vllm-0.6.6.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.6.6\n")
    patch.setenv("PYTHONPATH", f"{world.folder / 'site'}:{REPOSITORY}")
    return {}


WITHOUT_RANKS = {"placement": {"type": "local"}}
MISTAKES = {
    "a path with a typo": Mistake(prepare=typo, says=("teachers.left.model: ", " is not here and ", ": correct it")),
    "a misspelt key": Mistake(keys={"schedule__step": 6}, says=("unknown key 'schedule.step'", "'steps'")),
    "longer samples than the model takes": Mistake(
        keys={"data__max_prompt_length": 300}, says=("data.max_prompt_length 300", "exceeds the 256 positions", "lower")
    ),
    "a prompt limit below the chat template": Mistake(
        keys={"data__max_prompt_length": 2},
        says=("data.max_prompt_length: 2 tokens", "chat template takes", "raise it"),
    ),
    "a teacher of another family": Mistake(
        prepare=other_tokenizer,
        says=("teachers.left.model: ", "do not share a tokenizer", "choose a teacher with the student's tokenizer"),
    ),
    "a domain that no teacher answers for": Mistake(
        keys={"teachers__right__domains": ["law"]},
        says=("no teacher answers for domain 'right'", "teachers.<name>.domains"),
    ),
    "a layout that does not divide the model": Mistake(
        keys={"student__parallel": {"tensor_model_parallel_size": 3}},
        says=("student.parallel.tensor_model_parallel_size 3 does not divide", ""),
    ),
    "a torch for another CUDA": Mistake(
        prepare=torch_without_cuda,
        says=(
            "1 GPUs are shown here, and this torch is ",
            "a CPU build" if torch.version.cuda is None else "the driver takes CUDA 11.4",
            "install",
        ),
    ),
    "an interpreter that is not there": Mistake(
        keys={"teachers__left__placement": {"type": "local", "python": "/opt/none/bin/python"}},
        says=("teachers.left.placement.python: '/opt/none/bin/python' does not exist on ", ""),
    ),
    "Weights & Biases without a key": Mistake(
        keys={"metrics__wandb": {"project": "mine"}},
        prepare=no_wandb_key,
        says=("metrics.wandb: there is no key for Weights & Biases here: ", "metrics.wandb.mode: offline"),
    ),
    "an upload without a token": Mistake(
        keys={"checkpoint__push_to_hub": {"repo": "me/student"}},
        prepare=no_hub_token,
        says=("checkpoint.push_to_hub: HF_TOKEN is not set here: ", "export a token that may write"),
    ),
    "nodes on which nothing runs": Mistake(
        keys={"slurm": {"nodes": 3, "student_nodes": 1, "gpus_per_node": 8}, "teacher_defaults": WITHOUT_RANKS},
        command=("slurm", "RECIPE", "--dry-run"),
        says=("slurm.nodes", "nothing would run on ", "registered"),
    ),
    "no login node": Mistake(
        keys={
            "slurm": {"nodes": 2, "student_nodes": 2, "gpus_per_node": 0},
            "student__parallel": {"tensor_model_parallel_size": 2},
        },
        command=("slurm", "RECIPE"),
        prepare=no_slurm,
        says=("sbatch is not on this machine: ", "--dry-run"),
    ),
    "a port that is taken": Mistake(
        command=("train", "RECIPE", "--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "127.0.0.1:PORT"),
        says=("--rdzv-endpoint", "cannot be listened on here (", "Address already in use", ""),
    ),
    "a network interface that is not there": Mistake(
        keys={"weight_sync": {"type": "collective", "interface": "nope0"}, "rollout__placement": {"type": "local"}},
        command=("train", "RECIPE"),
        says=("weight_sync.interface is 'nope0'", "has no IPv4 address", "set it to one of "),
    ),
    "Weights & Biases without network, or with a key that its server refuses": Mistake(
        keys={"metrics__wandb": {"project": "mine"}},
        command=("train", "RECIPE"),
        prepare=unreachable_wandb,
        says=("metrics.wandb: Failed to verify credentials: ", "wandb login", "metrics.wandb.mode: offline"),
    ),
    "a vLLM that is too old": Mistake(
        keys={"teacher_defaults": {"engine": {"type": "vllm"}, **WITHOUT_RANKS}},
        command=("serve", "RECIPE", "--teacher", "left", "--port", "0"),
        prepare=old_vllm,
        says=("vLLM cannot be used by ", "version there: 0.6.6", "placement.python"),
    ),
}
"""What goes wrong -> what is done."""


@pytest.fixture
def models(tmp_path: Path) -> World:
    made = make_models(tmp_path / "world")
    write_prompts(made.train, num_rows=8, start=0)
    write_prompts(made.validation, num_rows=4, start=10)
    return made


def told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and errors: of this process, where the command starts none and listens nowhere."""
    if arguments[0] in ("check", "slurm"):
        return cli.main(arguments), capsys.readouterr().err
    command = [sys.executable, "-m", "mopd", *arguments]
    done = subprocess.run(command, env=environment_here(), capture_output=True, text=True, timeout=TIMEOUT_S)
    return done.returncode, done.stderr


def environment_here() -> dict[str, str]:
    own = environment()
    return {**own, "PYTHONPATH": os.environ.get("PYTHONPATH") or own["PYTHONPATH"]}


@pytest.mark.parametrize("name", MISTAKES)
def test_each_is_one_line_with_its_cure(
    models: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    mistake = MISTAKES[name]
    keys = {"student__parallel": {"tensor_model_parallel_size": 1}} | mistake.keys
    keys |= mistake.prepare(models, monkeypatch) if mistake.prepare is not None else {}
    recipe = models.write_recipe(tmp_path / "run", **keys)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, errors = told([w.replace("RECIPE", str(recipe)).replace("PORT", port) for w in mistake.command], capsys)
    (line,) = [line for line in errors.splitlines() if line.startswith("mopd: error: ")]
    assert code == 2 and "Traceback" not in errors, errors
    for part in mistake.says:
        place = line.find(part)
        assert place >= 0, f"{part!r} is not in: {line}"
    assert not (tmp_path / "run").exists()

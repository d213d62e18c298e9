"""What is missing on disk is named before any rank starts."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mopd.base.hardware import Hardware
from mopd.base.types import UserError
from mopd.config.load import Loaded, load_recipe
from mopd.launch.checks.inputs import check_cuda, check_inputs, check_interface, check_machine, check_world_size
from tests.fixtures.recipe import RECIPE

Load = Callable[..., Loaded]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load the small recipe, all of whose files exist."""
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(RECIPE)
    for folder in ("models/student", "models/math"):
        Path(folder).mkdir(parents=True)
        Path(folder, "config.json").write_text("{}")
    for file in ("train.jsonl", "validation.jsonl", "reward.py"):
        Path(file).write_text("{}\n")
    return lambda *overrides: load_recipe("recipe.yaml", overrides)


def test_complete_inputs_pass(load: Load) -> None:
    check_inputs(load("rewards.default={type: custom, path: reward.py, function: f}"))


def test_a_node_without_rank_0_needs_what_its_ranks_read(load: Load) -> None:
    """Data, teachers and rewards are node 0's; a student that sees images reads those of the prompts."""
    elsewhere = load(
        "teachers.math.model=/none",
        "data.train=[none.jsonl]",
        "data.validation=[none.jsonl]",
        "rewards.default={type: custom, path: none.py, function: f}",
    )
    check_inputs(elsewhere, is_first=False)
    with pytest.raises(UserError, match=r"teachers\.math\.model: folder '/none' does not exist"):
        check_inputs(elsewhere)
    with pytest.raises(UserError, match=r"student\.model: folder 'models/none' does not exist"):
        check_inputs(load("student.model=models/none"), is_first=False)
    Path("models/student/config.json").write_text('{"model_type": "qwen3_vl"}')
    with pytest.raises(UserError, match=r"data\.train: file 'none\.jsonl' does not exist"):
        check_inputs(elsewhere, is_first=False)


def test_a_working_directory_of_two_lines_is_refused(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load()
    Path("a\nb").mkdir()
    monkeypatch.chdir("a\nb")
    with pytest.raises(UserError, match=r"/a\\nb: the working directory holds a control character: rename it"):
        check_inputs(loaded)


@pytest.mark.parametrize(
    ("hardware", "line"),
    [
        (Hardware(gpu_memory_bytes=(2**30,) * 8), "8 GPUs are shown here, and this torch is a CPU build: install one"),
        (
            Hardware(gpu_memory_bytes=(2**30,), torch_cuda="13.0", driver_cuda="12.4"),
            "this torch is built for CUDA 13.0, the driver takes CUDA 12.4 (nvidia-smi): install a newer driver or a "
            "torch for CUDA 12, or export CUDA_VISIBLE_DEVICES= to stay on the CPU",
        ),
    ],
)
def test_gpus_that_this_torch_cannot_use_are_no_silent_cpu(hardware: Hardware, line: str) -> None:
    with pytest.raises(UserError, match=re.escape(line)):
        check_cuda(hardware)
    check_cuda(replace(hardware, gpu_memory_bytes=()))
    check_cuda(replace(hardware, torch_cuda="12.9", driver_cuda="12.4"))  # minor versions of one major go together
    check_cuda(replace(hardware, torch_cuda="13.0", driver_cuda=None))


def test_a_missing_wandb_is_one_line(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if "site-packages" not in entry])
    with pytest.raises(UserError, match=r"metrics\.wandb .* pip install 'mopd\[wandb\]'"):
        check_inputs(load("metrics.wandb.project=mine"))
    check_inputs(load())


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("student.model=models/none", "student.model: folder 'models/none' does not exist"),
        ("student.model=.", "student.model: folder '.' has no config.json"),
        ("teachers.math.model=/none", "teachers.math.model: folder '/none' does not exist: check the path"),
        ("data.train=[train.jsonl, none.jsonl]", "data.train: file 'none.jsonl' does not exist"),
        ("data.validation=[empty.jsonl]", "data.validation: file 'empty.jsonl' is empty"),
        (f"student.model={'x' * 300}", "student.model: folder 'xxx"),
        (f"data.train=[{'x' * 300}]", "data.train: file 'xxx"),
        ("data.train=[pipe]", "data.train: file 'pipe' is no regular file"),
        ("data.train=[loop]", "data.train: file 'loop' does not exist"),
        ("data.chat_template=none.jinja", "data.chat_template: file 'none.jinja' does not exist"),
        (
            "teachers.math.placement={type: local, python: none/bin/python}",
            "teachers.math.placement.python: 'none/bin/python' does not exist on ",
        ),
        (
            "rollout.placement={type: local, python: train.jsonl}",
            "rollout.placement.python: 'train.jsonl' cannot be run on ",
        ),
        ("rewards.math={type: custom, path: none.py, function: f}", "rewards.math.path: file 'none.py' does not exist"),
        ("rewards.math={type: json_schema, path: none.json}", "rewards.math.path: file 'none.json' does not exist"),
    ],
)
def test_missing_inputs_are_named(load: Load, override: str, line: str) -> None:
    Path("empty.jsonl").touch()
    Path("loop").symlink_to("loop")
    os.mkfifo("pipe")
    with pytest.raises(UserError) as caught:
        check_inputs(load(override))
    assert str(caught.value).startswith(f"recipe.yaml (override): {line}")
    assert "\n" not in str(caught.value)


def test_an_interface_that_is_not_there_is_one_line(load: Load) -> None:
    check_interface(load(), "weight_sync")
    check_interface(load("weight_sync={type: collective, interface: lo}", "slurm.interface=lo"), "slurm")
    loaded = load("weight_sync={type: collective, interface: nope0}", "slurm.interface=nope1")
    for section, name in (("weight_sync", "nope0"), ("slurm", "nope1")):
        line = rf"^recipe\.yaml \(override\): {section}\.interface is '{name}', which has no IPv4 .* one of .*\blo\b"
        with pytest.raises(UserError, match=line):
            check_interface(loaded, section)


def test_ranks_that_one_machine_cannot_hold(load: Load) -> None:
    check_machine(load("student.parallel.pipeline_model_parallel_size=64"))
    with pytest.raises(UserError, match=r"student\.parallel: 60000 ranks on this machine of \d+ cores, where \d+ are"):
        check_machine(load("student.parallel.pipeline_model_parallel_size=60000"))
    with pytest.raises(UserError, match=r"student\.parallel: 6 ranks cannot be shared out evenly over --nnodes 4"):
        check_machine(load("student.parallel.pipeline_model_parallel_size=6"), 4)


def test_world_size(load: Load) -> None:
    loaded = load("student.parallel={tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2}")
    check_world_size(loaded, 4)
    with pytest.raises(UserError, match=r"needs 4 ranks, torchrun started 6: .* a multiple of 4 ranks"):
        check_world_size(loaded, 6)
    with pytest.raises(
        UserError, match=r"needs 4 ranks, torchrun started 8: .* set student.parallel.data_parallel_size to 2"
    ):
        check_world_size(loaded, 8)
    with pytest.raises(UserError, match=r"a multiple of 4 ranks"):
        check_world_size(loaded, 2)

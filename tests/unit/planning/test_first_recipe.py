"""The recipe that ``mopd init`` writes loads, names the domains of the data, and passes the static checks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mopd.base.hardware import Hardware
from mopd.base.types import UserError
from mopd.cli import main as cli
from mopd.config.load import load_recipe
from mopd.planning.first_recipe import first_recipe, read_names

GSM8K = {"question": "1 + 1?", "answer": "They are two.\n#### 2"}
MBPP = {"text": "Double it.", "test_list": ["assert f(1) == 2"], "test_setup_code": ""}
VERL = {"data_source": "law", "prompt": "Who?", "reward_model": {"ground_truth": "me"}}
ARGUMENTS = [
    "--student", "models/student", "--teacher", "math=models/math", "--teacher", "code=models/code",
    "--train", "gsm8k_train.jsonl", "mbpp_train.jsonl",
    "--validation", "gsm8k_test.jsonl", "mbpp_test.jsonl",
]  # fmt: skip


def write(path: str, rows: Sequence[Mapping[str, Any]]) -> None:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_config: dict[str, Any]) -> Path:
    """Data and models (config.json alone) in the current folder."""
    monkeypatch.chdir(tmp_path)
    for split in ("train", "test"):
        write(f"gsm8k_{split}.jsonl", [GSM8K] * 5)
        write(f"mbpp_{split}.jsonl", [MBPP] * 3)
    write("law.jsonl", [VERL, {**VERL, "data_source": "tax"}])
    for name in ("student", "math", "code"):
        Path("models", name).mkdir(parents=True)
        Path("models", name, "config.json").write_text(json.dumps(tiny_config))
    return tmp_path


@pytest.fixture(scope="module")
def tiny_config() -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32,
        "num_key_value_heads": 2, "intermediate_size": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "rope_theta": 1e4, "tie_word_embeddings": False,
    }  # fmt: skip


def names(*, teachers: Sequence[str] = ("math=m", "code=c"), domains: Sequence[str] = (), train: Sequence[str]) -> Any:
    return read_names("s", teachers, domains, train=train, validation=[], run_dir="runs/one")


def test_the_recipe_loads_and_names_what_the_data_have() -> None:
    assert cli.main(["init", *ARGUMENTS, "--output", "mine.yaml"]) == 0
    recipe = load_recipe("mine.yaml").recipe
    domains = {name: teacher.domains for name, teacher in recipe.teachers.items()}
    assert domains == {"math": ("gsm8k",), "code": ("mbpp",)}
    assert {domain: reward.type for domain, reward in recipe.rewards.items()} == {"gsm8k": "math", "mbpp": "code"}
    files = [(file.columns, file.domain) for file in recipe.data.files(recipe.data.train)]
    assert files == [("gsm8k", "gsm8k"), ("mbpp", "mbpp")]
    assert recipe.validation is not None


def test_init_into_check_is_quick_and_needs_no_torch(tmp_path: Path) -> None:
    """The two commands in a pipe, as a user types them; few modules are loaded, with room."""
    code = "import sys; from mopd.cli import main as cli; code = cli.main(sys.argv[1:]); "
    code += "heavy = {'torch', 'transformers', 'megatron'} & set(sys.modules); "
    code += "print(sorted(heavy), len(sys.modules), file=sys.stderr); sys.exit(code)"
    run = partial(subprocess.run, capture_output=True, text=True, timeout=60)
    first = run([sys.executable, "-c", code, "init", *ARGUMENTS])
    second = run([sys.executable, "-c", code, "check", "--static"], input=first.stdout)
    assert first.returncode == second.returncode == 0, first.stderr + second.stdout + second.stderr
    for done in (first, second):
        heavy, num_modules = done.stderr.split()
        assert heavy == "[]" and int(num_modules) < 800
    assert "rewards of the domains" in second.stdout


def test_a_file_that_is_there_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text("mine")
    assert cli.main(["init", *ARGUMENTS, "--output", "mine.yaml"]) == 2
    assert "mine.yaml: is there already" in capsys.readouterr().err
    assert Path("mine.yaml").read_text() == "mine"


def test_gpus_are_left_for_rollout_and_teachers() -> None:
    text = first_recipe(
        names(train=["gsm8k_train.jsonl", "mbpp_train.jsonl"]),
        Hardware(gpu_memory_bytes=(80 * 2**30,) * 8, torch_cuda="12.8"),
    )
    Path("r.yaml").write_text(text)
    recipe = load_recipe("r.yaml").recipe
    assert recipe.student.parallel.data_parallel_size == 4  # of 8: one for the rollout, one for each teacher
    assert recipe.validation is None and not recipe.rewards


def test_names_that_yaml_would_read_otherwise_come_through() -> None:
    write("odd.jsonl", [{**VERL, "data_source": name} for name in ("yes", "1: 2", "# x", "openai/gsm8k", "default")])
    text = first_recipe(names(teachers=["one=a: b"], train=["odd.jsonl"]), Hardware())
    Path("r.yaml").write_text(text)
    (teacher,) = load_recipe("r.yaml").recipe.teachers.values()
    assert sorted(teacher.domains) == ["# x", "1: 2", "default", "openai/gsm8k", "yes"] and teacher.model == "a: b"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"train": ["law.jsonl"]}, "--domains TEACHER=DOMAIN,DOMAIN"),
        ({"train": ["law.jsonl"], "domains": ["math=law"]}, "not clear: 'tax', 'code'"),
        ({"train": ["law.jsonl"], "domains": ["math=law,none"]}, "no row of 'none'"),
        ({"train": ["law.jsonl"], "domains": ["other=law"]}, "no --teacher has that name"),
        ({"train": ["none.jsonl"]}, "none.jsonl: does not exist"),
        ({"train": ["law.csv"]}, "law.csv"),
        ({"train": ["law.jsonl"], "teachers": ["math"]}, "write --teacher NAME=MODEL"),
        ({"train": ["law.jsonl"], "teachers": ["a=b", "a=c"]}, "--teacher names 'a' twice"),
    ],
)
def test_what_is_not_clear_is_one_line(given: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as caught:
        first_recipe(names(**given), Hardware())
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_columns_that_nobody_knows() -> None:
    write("odd.jsonl", [{"input": "x", "output": "y"}])
    with pytest.raises(UserError, match="no shipped mapping fits its columns 'input', 'output'"):
        first_recipe(names(train=["odd.jsonl"]), Hardware())

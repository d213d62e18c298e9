"""The recipe that ``mopd init`` writes loads, names the domains of the data, and passes the static checks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mopd.base.types import UserError
from mopd.cli import main as cli
from mopd.config.load import load_recipe
from mopd.config.student import LORA_LR, LoraConfig
from mopd.planning.first_recipe import Layout, first_recipe, read_names

GSM8K = {"question": "1 + 1?", "answer": "They are two.\n#### 2"}
MBPP = {"text": "Double it.", "test_list": ["assert f(1) == 2"], "test_setup_code": ""}
VERL = {"data_source": "law", "prompt": "Who?", "reward_model": {"ground_truth": "me"}}
ROOT = Path(__file__).parents[3]
LAYOUT = Layout(keys={}, reason="one rank")
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
        "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64,
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


def test_a_student_with_adapters() -> None:
    assert cli.main(["init", *ARGUMENTS, "--lora", "--output", "lora.yaml"]) == 0
    student = load_recipe("lora.yaml").recipe.student
    assert student.lora == LoraConfig(rank=32) and student.optimizer.lr == LORA_LR


def test_limits_of_small_models(tiny_config: dict[str, Any]) -> None:
    """A teacher's positions count too; of ids the student's."""
    Path("models/math/config.json").write_text(json.dumps(tiny_config | {"max_position_embeddings": 129}))
    Path("models/student/config.json").write_text(json.dumps(tiny_config | {"vocab_size": 30}))
    assert cli.main(["init", *ARGUMENTS, "--output", "small.yaml"]) == 0
    recipe = load_recipe("small.yaml").recipe
    assert (recipe.data.max_prompt_length, recipe.rollout.max_response_length, recipe.loss.top_k) == (64, 64, 30)
    assert cli.main(["check", "--static", "small.yaml"]) == 0
    assert cli.main(["check", "--static", "small.yaml", "loss.top_k=31"]) == 2


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


SIZES: dict[str, tuple[str, dict[str, int], int]] = {
    "Qwen3-0.6B": ("Qwen3-1.7B", {"hidden_size": 1024, "intermediate_size": 3072}, 1),
    "Qwen3-1.7B": ("Qwen3-1.7B", {}, 1),
    "Qwen3-4B": ("Qwen3-4B", {}, 1),
    "Qwen3-8B": ("Qwen3-8B", {}, 1),
    "Qwen3-14B": ("Qwen3-8B", {
        "num_hidden_layers": 40, "hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 40,
    }, 1),
    "Qwen3-32B": ("Qwen3-32B", {}, 1),
    "Qwen2.5-32B": ("Qwen2.5-32B-Instruct", {}, 1),
    "Qwen2.5-VL-7B": ("Qwen2.5-VL-7B-Instruct", {}, 1),
    "Qwen3-30B-A3B": ("Qwen3-30B-A3B", {}, 1),
    "Qwen2.5-7B": ("Qwen2.5-Coder-7B", {}, 1),
    "Qwen2.5-72B": ("Qwen2.5-Coder-7B", {
        "num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 29568, "num_attention_heads": 64,
        "num_key_value_heads": 8,
    }, 2),
    "Qwen3-235B-A22B": ("Qwen3-235B-A22B", {}, 8),
}  # fmt: skip
"""Student -> config that is shipped, what differs from it, and nodes of eight H100 that hold it."""


@pytest.mark.parametrize("student", SIZES)
def test_what_it_lays_out_fits(student: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan of the recipe has no problem, and its step is what the recipe says of itself."""
    shipped, changes, nodes = SIZES[student]
    config = json.loads((ROOT / "recipes" / "models" / shipped / "config.json").read_text())
    Path("configs", student).mkdir(parents=True)
    Path("configs", student, "config.json").write_text(json.dumps({**config, **changes}))
    gpus = ["--gpu", "h100", "--nodes", str(nodes), "--configs", "configs"]
    names = ["--student", f"Qwen/{student}", "--teacher", "one=" + str(ROOT / "recipes" / "models" / "Qwen3-8B")]
    assert cli.main(["init", *names, "--train", "gsm8k_train.jsonl", *gpus, "--slurm", "--output", "r.yaml"]) == 0
    recipe = load_recipe("r.yaml").recipe
    assert recipe.slurm is not None and recipe.slurm.nodes == nodes
    capsys.readouterr()
    assert cli.main(["plan", "r.yaml", *gpus, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["problems"] == []
    used = {(one["node"], gpu) for one in plan["places"] for gpu in one["gpus"]}
    assert 4 < len(used) <= 8 * nodes
    said = re.search(r"plan --suggest: (\S+) s a step, .* has (\S+) of 75.7 GiB", Path("r.yaml").read_text())
    assert said is not None
    assert float(said[1]) == pytest.approx(plan["times"]["step_s"], rel=0.03)
    fullest = max(one["num_bytes"] for one in [*plan["ranks"], *plan["replicas"].values()])
    assert float(said[2]) == pytest.approx(fullest / 2**30, abs=0.1)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--gpu", "h100"], "'Some/Model' is no folder here and not in the Hub's cache: give --configs DIR"),
        (["--gpu", "h100x"], "--gpu 'h100x': it is none of"),
        (["--nodes", "2"], "this machine has none: name them with --gpu"),
        (["--slurm"], "this machine has none: name them with --gpu"),
    ],
)
def test_gpus_that_cannot_be_laid_out(options: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is written."""
    names = ["--student", "Some/Model", "--teacher", "one=Some/Model", "--train", "gsm8k_train.jsonl"]
    assert cli.main(["init", *names, *options, "--output", "r.yaml"]) == 2
    error = capsys.readouterr().err
    assert line in error and error.count("\n") == 1 and "mopd-init-" not in error
    assert not Path("r.yaml").exists()


def test_names_that_yaml_would_read_otherwise_come_through() -> None:
    write("odd.jsonl", [{**VERL, "data_source": name} for name in ("yes", "1: 2", "# x", "openai/gsm8k", "default")])
    text = first_recipe(names(teachers=["one=a: b"], train=["odd.jsonl"]), LAYOUT)
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
        first_recipe(names(**given), LAYOUT)
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_columns_that_nobody_knows() -> None:
    write("odd.jsonl", [{"input": "x", "output": "y"}])
    known = "no shipped mapping fits its columns 'input', 'output': rename them, or write data.train"
    with pytest.raises(UserError, match=known):
        first_recipe(names(train=["odd.jsonl"]), LAYOUT)

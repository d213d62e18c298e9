"""The command line: light to import, one line per user error, exit codes."""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mopd.base.hardware import this_hardware
from mopd.cli.completion import parts_of
from mopd.cli.main import _parser, main
from mopd.cli.main import parse as parse_words
from mopd.config.load import load_recipe
from mopd.launch.preparing import settled
from tests.fixtures.recipe import RECIPE

ROOT = Path(__file__).parents[3]
HEAVY = ("torch", "megatron", "ray", "vllm", "transformers", "numpy", "pyarrow", "rich")


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The small recipe in the current directory; its models and data do not exist."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    Path("recipe.yaml").write_text(RECIPE)
    Path("models").mkdir()
    return "recipe.yaml"


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["config", "recipe.yaml"], ["train", "recipe.yaml"], ["serve", "recipe.yaml", "--teacher", "math"]],
)
def test_answers_without_heavy_imports(recipe: str, arguments: list[str]) -> None:
    """``train`` and ``serve`` refuse a missing model here, before anything heavy is imported."""
    code = (
        "import sys\nfrom mopd.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, timeout=60)
    assert done.stderr.splitlines()[-1] == "[]"


def test_the_package_is_the_program_and_nothing_runs_where_it_is_only_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As by ``python -m mopd``; and as by a process that Python starts for a checkpoint, which imports it again."""
    from mopd import __main__ as program

    assert capsys.readouterr().out == ""
    monkeypatch.setattr(sys, "argv", ["mopd", "--help"])
    assert runpy.run_path(str(program.__file__), run_name="__mp_main__")["main"] is main
    assert capsys.readouterr().out == ""
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(program.__file__), run_name="__main__")
    assert ended.value.code == 0 and "usage: mopd" in capsys.readouterr().out


def parsers(parser: argparse.ArgumentParser, *path: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command with its parts, by the words that call it."""
    for name, nested in parts_of(parser).items():
        yield " ".join(("mopd", *path, name)), nested
        yield from parsers(nested, *path, name)


ALL = dict(parsers(_parser()))


def test_help_lists_every_command_in_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    listed = [line.split()[0] for line in out.splitlines() if re.match(r"    [a-z]+  ", line)]
    assert listed == list(parts_of(_parser())) and {"train", "convert", "bench"} < set(listed)
    assert re.findall(r"^  ([a-z]+):$", out, re.M) == ["prepare", "run", "inspect", "models", "develop"]


@pytest.mark.parametrize("call", ALL)
def test_every_help_has_an_example_and_its_defaults(call: str) -> None:
    """An option with a value tells its default; the override as an option is not shown."""
    parser = ALL[call]
    assert re.search(rf"^(examples?:)?\s*(torchrun .* -m )?{call}\b", parser.epilog or "", re.M)
    assert "--set" not in parser.format_help()
    valued = [action for action in parser._actions if action.nargs != 0 and action.option_strings]
    told = [action for action in valued if action.default not in (None, [], argparse.SUPPRESS)]
    assert [action.option_strings for action in told if "default" not in (action.help or "")] == []


def test_bench_without_a_name_lists_the_benches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    out = capsys.readouterr().out
    for name in ("losses", "teachers", "data_plane", "pipeline", "student", "weights"):
        assert re.search(rf"^    {name}\s+\w+\W+\w+", out, re.M)


def test_resume_auto_is_one_word_or_two() -> None:
    """Of `--resume` alone the next word is no value."""
    assert parse("train", "r.yaml", "--resume=auto", "seed=1") == parse("train", "r.yaml", "--resume", "auto", "seed=1")
    assert parse("train", "--resume", "auto", "r.yaml", "seed=1").resume_auto
    plain = parse("train", "r.yaml", "--resume", "seed=1")
    assert plain.resume and not plain.resume_auto and plain.set == ["seed=1"]


def parse(*words: str) -> argparse.Namespace:
    args = parse_words(words)
    del args.parser
    return args


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["tr"], ["train"]),
        (["train", "--res"], ["--resume"]),
        (["train", "my.yaml", "--no"], ["--node-rank"]),
        (["train", ""], []),
        (["bench", "te"], ["teachers"]),
        (["bench", "teachers", "--pa"], ["--pairs"]),
        (["convert", "merge"], ["merge", "merge-lora"]),
        (["completion", "--"], ["--help"]),
    ],
    ids=lambda words: " ".join(words),
)
def test_bash_completes(typed: list[str], offered: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    words = " ".join(f"'{word}'" for word in ["mopd", *typed])
    asked = f"COMP_WORDS=({words}); COMP_CWORD={len(typed)}; _mopd; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    command = ["bash", "--norc", "-c", script + asked]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert (done.stdout.split(), done.stderr) == (offered, "")
    assert main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out == f"autoload -U +X bashcompinit && bashcompinit\n{script}"


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_config_prints_what_loads_back(recipe: str, form: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["--set", "seed=5", "--set", "loss.type=k2"]
    assert main(["config", recipe, *overrides, *form]) == 0
    Path("printed.yaml").write_text(capsys.readouterr().out)
    expected = settled(load_recipe(recipe, ["seed=5", "loss.type=k2"]), this_hardware())
    assert load_recipe("printed.yaml").recipe == expected.recipe


@pytest.mark.parametrize(
    "words",
    [
        ["seed=7", "schedule.steps=9"],
        ["seed=7", "--json", "schedule.steps=9"],
        ["--set", "seed=7", "schedule.steps=9"],
        ["--json", "--set", "seed=7", "--set", "schedule.steps=9"],
    ],
)
def test_overrides_stand_anywhere_behind_the_recipe(
    recipe: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", recipe, *words]) == 0
    out = capsys.readouterr().out
    assert ('"seed": 7' in out and '"steps": 9' in out) if "--json" in words else "seed: 7  # override" in out


@pytest.mark.parametrize("words", [["--sed=1"], ["seed"], ["--json", "seed"], ["=1"]])
def test_what_is_no_override_is_refused(recipe: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["config", recipe, *words])
    except SystemExit as ended:
        code = ended.code
    assert code == 2 and "error:" in capsys.readouterr().err


def test_config_diff(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("other.yaml").write_text(f"base: {recipe}\nseed: 3\nschedule: {{steps: 9}}\n")
    assert main(["config", recipe, "--diff", "other.yaml"]) == 0
    assert capsys.readouterr().out == "seed: 0 -> 3\nschedule.steps: 3 -> 9\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["config", "none.yaml"], "recipe 'none.yaml' does not exist: check the path"),
        (["config", "recipe.yaml", "--diff", "none.yaml"], "recipe 'none.yaml' does not exist: check the path"),
        (
            ["config", "recipe.yaml", "--set", "sed=1"],
            "recipe.yaml (override): unknown key 'sed'; did you mean 'seed'?",
        ),
        (["config", "/dev/zero"], "recipe /dev/zero: not a regular file"),
        (["serve", "recipe.yaml", "--rollout", "--set", "run_dir=[[[["], "override run_dir=[[[[: not readable as YAML"),
        (
            ["train", "recipe.yaml", "--set", "student.parallel.pipeline_model_parallel_size=60000"],
            "recipe.yaml: student",
        ),
        (["train", "recipe.yaml"], "recipe.yaml:3: student.model: folder 'models/student' does not exist"),
        (["eval", "recipe.yaml"], "recipe.yaml:3: student.model: folder"),
        (["serve", "none.json"], "recipe 'none.json' does not exist: check the path"),
        (["serve", "recipe.yaml"], "serve recipe.yaml: a recipe has several engines, an engine file has one: name --t"),
        (["serve", "recipe.yaml", "--teacher", "maths"], "--teacher maths: the recipe has no such teacher; it has"),
        (["serve", "recipe.yaml", "--teacher", "math"], "recipe.yaml:6: teachers.math.model: folder"),
        (["serve", "recipe.yaml", "--rollout"], "recipe.yaml:3: student.model: folder"),
        (["serve", "recipe.yaml", "--rollout", "--replica", "1"], "--replica 1: rollout has 1 replicas, numbered"),
        (["report", "runs/none"], "'runs/none' holds no run"),
        (["convert", "hf-to-megatron", "none", "out"], "convert: folder 'none' does not exist"),
        (["convert", "megatron-to-hf", "none", "out"], "none: no such folder; give the folder of a Megatron-Core"),
    ],
)
def test_user_errors_are_one_line(
    recipe: str, arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"mopd: error: {line}")
    assert captured.err.count("\n") == 1
    assert [entry.name for entry in Path().iterdir() if entry.name not in ("other.yaml", "models")] == ["recipe.yaml"]


NO_NAME = "a\nmopd: error: b"


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", NO_NAME], ["config", "x.yaml", f"run_dir={json.dumps(NO_NAME)}"],
        ["config", "x.yaml", "--diff", NO_NAME],
        ["stop", NO_NAME], ["status", NO_NAME], ["logs", NO_NAME], ["report", NO_NAME], ["compare", "a", NO_NAME],
        ["serve", "x.yaml", "--teacher", NO_NAME], ["serve", "x.yaml", "--rollout", "--register", NO_NAME],
        ["eval", "x.yaml", "--model", NO_NAME], ["generate", NO_NAME, "two\nlines"], ["slurm", NO_NAME],
        ["convert", "hf-to-megatron", NO_NAME, "b"], ["convert", "inspect", NO_NAME],
        ["init", "--student", "a", "--teacher", f"b={NO_NAME}", "--train", "c"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_paths_and_names_hold_no_control_characters(
    recipe: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([recipe if word == "x.yaml" else word for word in arguments]) == 2
    said = capsys.readouterr().err
    assert "a\\nmopd: error: b" in said and "holds a control character, such as a line end" in said
    assert said.count("\n") == 1


def test_used_run_folder_is_refused_before_ranks_start(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("models/student", "models/math", "runs/one"):
        Path(folder).mkdir(parents=True)
        Path(folder, "config.json").write_text("{}")
    for file in ("train.jsonl", "validation.jsonl"):
        Path(file).write_text("{}\n")
    assert main(["train", recipe]) == 2
    assert "recipe.yaml:1: run_dir: 'runs/one' is not empty" in capsys.readouterr().err
    assert main(["train", recipe, "--resume"]) == 2
    assert "holds no run to resume" in capsys.readouterr().err


def test_closed_pipe_is_no_traceback(recipe: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = f"set -o pipefail; {sys.executable} -m mopd config {recipe} | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout == "#"
    assert done.stderr == ""


@pytest.mark.parametrize("form", ["", "--json"])
def test_config_reads_back_from_a_terminal_without_unicode(recipe: str, form: str) -> None:
    command = f"{sys.executable} -m mopd config {recipe} {form} --set run_dir=é😀 > printed.yaml"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "1"}
    subprocess.run(["bash", "-c", command], env=environment, check=True, timeout=60)
    assert Path("printed.yaml").read_bytes().isascii()
    assert load_recipe("printed.yaml").recipe.run_dir == "é😀"


@pytest.mark.parametrize(("redirected", "code", "line"), [("<&- >&-", 0, ""), (">/dev/full", 2, "No space left")])
def test_standard_output_that_takes_nothing(recipe: str, redirected: str, code: int, line: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = ["bash", "-c", f"{sys.executable} -m mopd config {recipe} {redirected}"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == code
    assert line in done.stderr and done.stderr.count("\n") == bool(line)


@pytest.mark.multirank
def test_raw_torchrun_with_another_world_size(recipe: str, tmp_path: Path) -> None:
    """Every rank sees the error; one tells, before torchrun's report."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "-m", "mopd", "train", recipe], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode != 0
    assert done.stderr.count("needs 1 ranks, torchrun started 2") == 1
    assert "mopd: error: recipe.yaml: student.parallel: tensor_model_parallel_size 1 x" in done.stderr
    assert "mopd.base.types.UserError" not in done.stderr


def test_keyboard_interrupt(recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mopd.cli.config.load_recipe", interrupted)
    assert main(["config", recipe]) == 130
    assert capsys.readouterr().err == "mopd: interrupted\n"

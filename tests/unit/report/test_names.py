"""A domain's or teacher's name is shown as it is, wherever it goes, and nothing in it acts on what shows it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mopd.base.metrics import StepMetrics
from mopd.base.text import file_name, json_lines, one_line, visible
from mopd.base.types import UserError
from mopd.cli import convert
from mopd.cli.main import main
from mopd.config.load import dump, load_recipe
from mopd.orchestrator import evaluation
from mopd.orchestrator.validation import ValidationResult
from mopd.report.build import build_report, print_summary
from mopd.report.sinks import LiveProgress, PlainProgress, Sinks
from mopd.report.terminal import LogFormatter
from tests.unit.report.conftest import RECIPE, shown, terminal, write_lines
from tests.unit.report.test_page import Page

NAMES = {
    "closing tag": "math[/hard]",
    "style": "code[python]",
    "bold": "[bold red]x[/]",
    "emoji code": ":smile:",
    "clear screen": "a\x1b[2Jb",
    "set title": "\x1b]0;x\x07",
    "C1 escape": "a\x9b31mb",
    "new line": "one\ntwo",
    "backspaces": "abc\x08\x08\x08xyz",
    "null": "a\x00b",
    "right to left": "a\u202etxt.b",
    "line separator": "a\u2028b",
    "slash": "open/maths/1",
    "up": "../../etc/passwd",
    "script": "<script>alert(1)</script>",
    "attribute": "\" onload='alert(1)' x=\"",
    "template": "{{ 7 * 7 }}{% raw %}",
    "entity": "&lt;&#27;",
    "format": "%s {name} {0}",
    "letters": "数学 é 👩‍🔬",
    "spaces": " a  b ",
    "metric": "kl_k1",
    "room": "teachers/samples/x",
}
CASES = pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
ACTING = set(map(chr, [*range(32), *range(127, 160), 0x2028, 0x2029, 0x202E])) - {"\n"}


def plain(text: str) -> str:
    """With single spaces: tables may break and fill lines."""
    return " ".join(text.split())


def run_with(name: str, root: Path) -> Path:
    root.mkdir()
    recipe = root / "given.yaml"
    recipe.write_text(RECIPE)
    (root / "recipe.yaml").write_text(dump(load_recipe(recipe)))
    record = {"loss": 1.0, f"kl_k1/{name}": 0.5, f"loss/{name}": 0.5, "timing/step_s": 1.0}
    group = {f"teachers/{metric}/{name}": 1.0 for metric in ("samples", "tokens", "busy_s", "replicas", "replicas_up")}
    write_lines(root / "metrics.jsonl", [{"step": step, **record, **group} for step in (1, 2)])
    example = {"prompt": name, "response": name, "ground_truth": name, "reward": 1.0}
    validation = {"rewards": {name: 0.5}, "examples": {name: [example]}, "wall_s": 1.0}
    write_lines(root / "validation.jsonl", [{"step": step, **validation} for step in (0, 2)])
    (root / "headroom.json").write_text(json.dumps({name: {"teacher": 1.0}}))
    return root


@pytest.fixture(scope="module")
def usual_page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    run = run_with("math", tmp_path_factory.mktemp("usual") / "run")
    build_report(run)
    return Page((run / "report.html").read_text())


def attributes(page: Page) -> set[tuple[str, str]]:
    """Every tag with the name of each of its attributes."""
    return {(tag, name) for tag, attrs in page.tags for name in ("", *attrs)}


@CASES
def test_report(tmp_path: Path, name: str, usual_page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_with(name, tmp_path / "run")
    report = build_report(run)
    assert list(report.domains) == [name] and json.loads((run / "report.json").read_text())["domains"].keys() == {name}
    console = terminal()
    print_summary(report, console)
    assert plain(visible(name)) in plain(shown(console)) and not set(shown(console)) & ACTING
    html = (run / "report.html").read_text()
    page = Page(html)
    assert attributes(page) == attributes(usual_page)
    assert plain(visible(name, keep="\n\t")) in plain(" ".join(page.texts)) and not set(html) & (ACTING - {"\t"})
    assert main(["report", str(run), "--json"]) == 0
    text = capsys.readouterr().out
    assert json.loads(text)["domains"].keys() == {name} and not set(text) & ACTING


@CASES
def test_progress(name: str) -> None:
    values = {"loss": 1.0, f"kl_k1/{name}": 0.5, f"kl_floor/{name}": 0.0, "timing/step_s": 1.0}
    group = ("replicas", "replicas_up", "tokens_per_s", "breaker", "retries")
    values |= {f"teachers/{metric}/{name}": 1.0 for metric in group}
    metrics = StepMetrics(step=1, values=values)
    console = terminal()
    lines = PlainProgress(console, 2, 0)
    lines.log(metrics)
    lines.log_validation(1, {name: 0.5})
    live = LiveProgress(terminal(), 2, 0, {name: 0.5})
    live.log(metrics)
    live.close()
    console.print(live._draw())
    assert plain(shown(console)).count(plain(visible(name))) >= 4 and not set(shown(console)) & ACTING


@CASES
def test_tensorboard(tmp_path: Path, recipe_file: Path, name: str) -> None:
    sinks = Sinks(load_recipe(recipe_file).recipe, tmp_path, resume_step=None, console=terminal())
    sinks.log(StepMetrics(step=1, values={"loss": 1.0, f"kl_k1/{name}": 0.5}))
    sinks.log_validation(1, {name: 0.25})
    sinks.close()
    tags = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tags()["scalars"]
    assert sorted(tags) == sorted(["loss", f"kl_k1/{visible(name)}", f"reward/{visible(name)}"])


@CASES
def test_commands_that_print_tables(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = ValidationResult(
        rewards={name: 0.5},
        num_samples={name: 1},
        truncated_share={name: 0.0},
        extracted_share={name: 1.0},
        examples={},
    )
    evaluation.print_result(result, title=name, as_json=False)
    convert._print({"source": name, "files": [{"name": name, "bytes": 1}]}, as_json=False)
    out = capsys.readouterr().out
    assert plain(out).count(plain(visible(name))) >= 4 and not set(out) & ACTING
    convert._print({"source": name}, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"source": name}


@CASES
def test_messages(name: str) -> None:
    assert set(one_line(UserError(f"teachers.{name}: wrong"))).isdisjoint(ACTING | {"\n"})
    record = logging.LogRecord("mopd", logging.INFO, "x.py", 1, "domain %s", (name,), None)
    assert set(LogFormatter().format(record)).isdisjoint(ACTING)
    text = json_lines({name: [name]})
    assert json.loads(text) == {name: [name]} and set(text).isdisjoint(ACTING)


def test_an_error_without_words_is_named_by_its_type() -> None:
    assert one_line(AssertionError()) == "AssertionError"


def test_file_names_stay_apart_and_below() -> None:
    names = [*NAMES.values(), ".", "..", ".hidden", "a%2Fb", "a/b", "half\ud800", "x" * 500, "x" * 501, "é" * 200]
    files = [file_name(name) for name in names]
    assert len(set(files)) == len(files)
    for file in files:
        assert (
            "/" not in file and not file.startswith(".") and len(file) <= 200 and file.isascii() and file.isprintable()
        )
    assert file_name("teachers.math-2_b") == "teachers.math-2_b"

"""A domain's or teacher's name is shown as it is, wherever it goes, and nothing in it acts on what shows it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mopd.base.metrics import StepMetrics
from mopd.base.text import file_name, json_lines, one_line, visible
from mopd.base.types import UserError
from mopd.cli import convert
from mopd.cli.main import main
from mopd.config.load import dump, load_recipe
from mopd.orchestrator.tasks import evaluation
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


def run_with(names: Iterable[str], root: Path) -> Path:
    """A run with these domains and teachers."""
    root.mkdir()
    recipe = root / "given.yaml"
    recipe.write_text(RECIPE)
    (root / "recipe.yaml").write_text(dump(load_recipe(recipe)))
    record, counted = {"loss": 1.0, "timing/step_s": 1.0}, ("samples", "tokens", "busy_s", "replicas", "replicas_up")
    validation: dict[str, Any] = {"rewards": dict.fromkeys(names, 0.5), "examples": {}, "wall_s": 1.0}
    for name in names:
        record |= {f"kl_k1/{name}": 0.5, f"loss/{name}": 0.5}
        record |= {f"teachers/{metric}/{name}": 1.0 for metric in counted}
        validation["examples"][name] = [{"prompt": name, "response": name, "ground_truth": name, "reward": 1.0}]
    write_lines(root / "metrics.jsonl", [{"step": step, **record} for step in (1, 2)])
    write_lines(root / "validation.jsonl", [{"step": step, **validation} for step in (0, 2)])
    (root / "headroom.json").write_text(json.dumps({name: {"teacher": 1.0} for name in names}))
    return root


def attributes(page: Page) -> set[tuple[str, str]]:
    """Every tag with the name of each of its attributes."""
    return {(tag, name) for tag, attrs in page.tags for name in ("", *attrs)}


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All names in one run; its page has the tags and attributes of one with as many usual names."""
    usual = run_with([f"math{number}" for number in range(len(NAMES))], tmp_path / "usual")
    build_report(usual)
    run = run_with(NAMES.values(), tmp_path / "run")
    report = build_report(run)
    assert list(report.domains) == sorted(NAMES.values())
    assert json.loads((run / "report.json").read_text())["domains"].keys() == {*NAMES.values()}
    console = terminal()
    print_summary(report, console)
    html = (run / "report.html").read_text()
    page, told = Page(html), plain(shown(console))
    assert attributes(page) == attributes(Page((usual / "report.html").read_text()))
    assert not set(shown(console)) & ACTING and not set(html) & (ACTING - {"\t"})
    for name in NAMES.values():
        assert plain(visible(name)) in told
        assert plain(visible(name, keep="\n\t")) in plain(" ".join(page.texts))
    assert main(["report", str(run), "--json"]) == 0
    text = capsys.readouterr().out
    assert json.loads(text)["domains"].keys() == {*NAMES.values()} and not set(text) & ACTING


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


def test_tensorboard(tmp_path: Path, recipe_file: Path) -> None:
    sinks = Sinks(load_recipe(recipe_file).recipe, tmp_path, resume_step=None, console=terminal())
    sinks.log(StepMetrics(step=1, values={"loss": 1.0, **{f"kl_k1/{name}": 0.5 for name in NAMES.values()}}))
    sinks.log_validation(1, dict.fromkeys(NAMES.values(), 0.25))
    sinks.close()
    tags = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tags()["scalars"]
    rooms = ("kl_k1", "reward")
    assert sorted(tags) == sorted(["loss", *(f"{room}/{visible(name)}" for room in rooms for name in NAMES.values())])


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

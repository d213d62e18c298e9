"""Runs side by side: as text, as JSON, as a page."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from mopd.cli.main import main
from mopd.report.compare import LAST, print_comparison, read_runs
from mopd.report.terminal import Terminal
from tests.fixtures.runs import DOMAINS, STEPS, make_run, step_record


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("runs")
    return [make_run(root / f"run_{i}", lr=f"{i + 1}e-6", speed=1 + i) for i in range(4)]


def test_numbers_and_differences(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(runs[0]), str(runs[2]), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told["runs"]) == ["run_0", "run_2"]
    assert told["recipe_differences"] == {"student.optimizer.lr": {"run_0": 1e-6, "run_2": 3e-6}}
    first, second = told["runs"].values()
    assert (first["steps"], first["planned_steps"], first["best_step"]) == (STEPS, STEPS, STEPS)
    domain = first["domains"][DOMAINS[0]]
    assert (domain["before"], domain["after"], domain["last"], domain["teacher"]) == (0.25, 0.625, 0.625, 0.75)
    assert domain["headroom_recovery"] == pytest.approx(0.75)
    last = [step_record(step)["loss"] for step in range(STEPS - LAST + 1, STEPS + 1)]
    assert first["loss"] == pytest.approx(sum(last) / LAST)
    assert second["loss"] < first["loss"] and second["domains"]["own"]["kl"] < first["domains"]["own"]["kl"]
    assert first["step_s"] == 2.25


def test_a_difference_within_noise_is_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first two differ in 1 prompt of 100; the third misses 20 more; the fourth was asked other prompts."""
    runs = []
    for name, right, asked in (("a", 80, "x"), ("b", 79, "x"), ("c", 60, "x"), ("d", 79, "y")):
        runs.append(make_run(tmp_path / name))
        lines = (runs[-1] / "validation.jsonl").read_text().splitlines()
        last = json.loads(lines[-1]) | {"rewards": {"own": right / 100}, "prompts": {"own": asked}}
        last["scores"] = {"own": [1.0] * right + [0.0] * (100 - right)}
        (runs[-1] / "validation.jsonl").write_text("\n".join((*lines[:-1], json.dumps(last))) + "\n")
    assert main(["compare", *map(str, runs), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["behind_best"]
    assert told["mean"] == told["domains"]["own"]
    a, b, c, d = told["domains"]["own"].values()
    assert a == {"value": 0.0, "interval": None}
    assert b["value"] == d["value"] == pytest.approx(-0.01)
    assert -0.035 < b["interval"][0] < -0.02 and b["interval"][1] == 0.0  # prompt by prompt
    assert d["interval"][0] < -0.09 and d["interval"][1] > 0.07  # other prompts: twice the spread of one run
    assert c["interval"][1] < -0.1
    out = io.StringIO()
    print_comparison(read_runs(runs), Terminal(file=out, width=200))
    text = " ".join(out.getvalue().split())
    assert "best │ -0.010 [-0.03, +0.00] within noise │ -0.200 [-0.28, -0.12] │" in text


def test_the_table_fits_80_columns_however_many_runs(runs: list[Path]) -> None:
    out = io.StringIO()
    print_comparison(read_runs(runs), Terminal(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in out.getvalue()
    for text in ("run_0", "run_3", "400 of 400", "75%", "student.optimizer.lr", "1e-06", "4e-06", "0.625"):
        assert text in out.getvalue()


def test_runs_of_one_name_are_told_by_their_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(make_run(tmp_path / side / "run")) for side in ("a", "b")]
    assert main(["compare", *paths, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told["runs"]) == paths and told["recipe_differences"] == {}


def test_a_run_that_has_only_just_begun_has_no_numbers(runs: list[Path], tmp_path: Path) -> None:
    begun = make_run(tmp_path / "begun")
    for name in ("metrics.jsonl", "validation.jsonl", "headroom.json"):
        (begun / name).unlink()
    page = tmp_path / "page.html"
    assert main(["compare", str(runs[0]), str(begun), "--html", str(page)]) == 0
    assert "0 of 400" in page.read_text() and "–" in page.read_text()


@pytest.mark.parametrize(
    ("names", "line"),
    [
        (["run_0"], "compare: 1 runs: name 2 to 16"),
        (["run_0", "../{}/run_0"], "is named twice: name different runs"),
        (["run_0", "absent"], "holds no run"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    runs: list[Path], names: list[str], line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    root = runs[0].parent
    page = tmp_path / "page.html"
    paths = [str(root / name.format(root.name)) for name in names]
    assert main(["compare", *paths, "--html", str(page)]) == 2
    told = capsys.readouterr()
    assert told.out == "" and line in told.err and told.err.count("\n") == 1
    assert not page.exists()


def test_comparing_needs_no_torch(runs: list[Path]) -> None:
    code = f"import sys\nfrom mopd.cli.main import main\nmain(['compare', *{list(map(str, runs))!r}])\n"
    code += "print('torch' in sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stderr == "False\n"

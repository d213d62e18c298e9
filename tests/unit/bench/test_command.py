"""``mopd bench losses`` from the outside: one small run for all tests, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mopd.bench.losses import command, results
from mopd.bench.losses.contenders import BASELINE
from mopd.bench.losses.plan import QUICK, ROWS, VOCABS, add_arguments
from mopd.bench.losses.results import BenchReport, CaseResult, Row
from mopd.cli import main
from tests.unit.bench.test_measure import CASE

ROOT = Path(__file__).parents[3]
SMALL = ["bench", "losses", "--device", "cpu", "--repeats", "2"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run over two small shapes and an LM head; leaves out.json, stdout.json and plot.svg."""
    folder = tmp_path_factory.mktemp("bench")
    options = ["--shapes", "32,600,4", "32,600,1", "--heads", "32,600,4,48", "--json"]
    outputs = ["--output", str(folder / "out.json"), "--plot", str(folder / "plot.svg")]
    command = [sys.executable, "-m", "mopd", *SMALL, *options, *outputs]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    (folder / "stdout.json").write_text(done.stdout)
    return folder


def cases(files: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((files / "out.json").read_text())["cases"]
    return found


def rows_of(case: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["name"], row["loss"]): row for row in case["rows"]}


def test_file_and_output_agree(files: Path) -> None:
    assert (files / "out.json").read_text() == (files / "stdout.json").read_text()
    report = json.loads((files / "out.json").read_text())
    assert report["complete"] and report["not_reached"] == []
    assert report["command"].startswith("mopd bench losses --device cpu")
    assert report["machine"]["torch"] == torch.__version__


def test_headline_shape_comes_first_then_heads(files: Path) -> None:
    assert [(c["case"]["k"], c["case"]["hidden"]) for c in cases(files)] == [(4, None), (4, 48), (1, None)]


def test_ours_beside_the_others(files: Path) -> None:
    by_k, heads, one = (rows_of(case) for case in cases(files))
    for name in ("chunked", "chunked, overwrite_input"):
        row = by_k[name, "bucket"]
        assert row["status"] == "measured" and row["rounds"] == 2
        assert row["errors"]["scaled"] < 2e-6
        assert row["speedup"] == pytest.approx(by_k[BASELINE, "bucket"]["total_ms"] / row["total_ms"])
    assert by_k["triton", "bucket"]["status"] == "not available"
    assert {name for name, _ in by_k} >= {"ghost-token style", "verl style", "verl style, diagnostics"}
    assert ("NeMo-RL style, over K", "renormalized") in by_k and ("NeMo-RL style, over K", "renormalized") not in one
    assert one["torch cross entropy", "cross entropy"]["status"] == "measured"
    compiled = by_k["eager under torch.compile", "bucket"]
    assert compiled["status"] == "measured" or compiled["reason"]
    fused = [row for (name, _), row in heads.items() if name == "linear_loss"]
    assert fused and all(row["status"] == "measured" for row in fused)
    assert all(max(row["errors"].values()) < 1e-4 for row in fused)


def test_every_row_has_numbers_or_a_reason(files: Path) -> None:
    for case in cases(files):
        for row in case["rows"]:
            if row["status"] == "measured":
                assert 0 < row["forward_ms"] < row["total_ms"]
                assert row["total_ms_range"][0] <= row["total_ms"] <= row["total_ms_range"][1]
                assert row["extra_bytes"] >= 0 and row["floor_share"] > 0
            else:
                assert row["status"] == "not available" and row["reason"]


def test_plot(files: Path) -> None:
    drawn = (files / "plot.svg").read_text()
    assert drawn.lstrip().startswith("<?xml") and len(drawn) > 10_000


def test_table_with_and_without_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        Row(name="one", group="ours", loss="x", status="measured", forward_ms=1.234, total_ms=456.7, rounds=2),
        Row(name="two", group="released", loss="x", status="not available", reason="not installed"),
    ]
    result = CaseResult(case=CASE, baseline="one", floor="copy", floor_ms=45.67, copy_gb_per_s=9.0, rows=rows)
    result.finish()
    results.table(result)
    rich = capsys.readouterr().out
    monkeypatch.setattr(results, "find_spec", lambda name: None)
    results.table(result)
    plain = capsys.readouterr().out
    for text in (rich, plain):
        assert "T=24 V=700 K=6 float32" in text
        assert "1.23" in text and "457" in text and "10 %" in text and "1.00x" in text
        assert "two (x): not available: not installed" in text


def test_failed_row_fails_the_command() -> None:
    result = CaseResult(case=CASE, baseline="one", floor="copy")
    result.rows = [Row(name="one", group="ours", loss="x", status="failed", reason="RuntimeError: no such kernel")]
    report = BenchReport(machine={}, date="2026-01-01", command="", repeats=1, cases=[result])
    assert report.failures == ["T=24 V=700 K=6 float32: one (x): RuntimeError: no such kernel"]
    result.rows[0].errors = {"relative": float("nan")}
    assert json.loads(report.to_json())["cases"][0]["rows"][0]["errors"] == {"relative": None}


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--shapes", "512,151936"], "--shapes: '512,151936' is not T,V,K: write 3 numbers above 0, as 512,151936,64"),
        (["--heads", "8,9,1,x"], "--heads: '8,9,1,x' is not T,V,K,H: write 4 numbers above 0, as 512,151936,64,256"),
        (["--shapes", "8,9,10"], "--shapes: K=10 exceeds the 9 columns of a shard: set K lower"),
        (["--shapes", "8,90,10", "--tp-shard", "10"], "--shapes: K=10 exceeds the 9 columns of a shard: set K lower"),
        (["--repeats", "0"], "--repeats is 0: set 1 or more"),
        (["--tp-shard", "0"], "--tp-shard is 0: set 1 or more"),
        (["--time-limit", "0"], "--time-limit is 0.0: set seconds above 0"),
        (["--output", "none/x.json"], "--output: folder 'none' does not exist: make it"),
        (["--plot", "x.gif"], "--plot is 'x.gif': end the name with .png, .svg or .pdf"),
        (["--tune"], "--tune measures Triton kernels: it needs a CUDA device"),
    ],
)
def test_user_errors(options: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "losses", "--device", "cpu", *options]) == 2
    assert capsys.readouterr().err == f"mopd: error: {line}\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_missing_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--device", "cuda"]) == 2
    assert "sees no CUDA device: set --device cpu" in capsys.readouterr().err


def test_grid_begins_with_the_headline() -> None:
    import argparse

    from mopd.bench.losses.plan import make_cases

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for device in ("cpu", "cuda"):
        cases = make_cases(parser.parse_args(["--tp-shard", "1", "8"]), device=device)
        first, second, third = cases[:3]
        assert (first.rows, first.vocab, first.k, first.tp_shard) == (ROWS[device][0], VOCABS[0], 64, 1)
        assert second.tp_shard == 8 and second.columns == 18_992
        assert third.hidden is not None
        grid = {(c.rows, c.vocab, c.k) for c in cases if c.hidden is None}
        assert len(grid) == len(ROWS[device]) * 3 * 4
        quick = make_cases(parser.parse_args(["--quick"]), device=device)
        assert [(c.rows, c.vocab, c.k) for c in quick if c.hidden is None] == list(QUICK[device])


def test_needs_torch_only() -> None:
    """A bare GPU machine has neither rich nor matplotlib, transformers, yaml or Megatron."""
    heavy = ("rich", "matplotlib", "transformers", "yaml", "megatron", "numpy.testing", "pyarrow")
    code = f"import sys, mopd.bench.losses; print([name for name in {heavy} if name in sys.modules])"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout == "[]\n", done.stderr

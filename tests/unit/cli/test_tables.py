"""Tables fit a terminal of 80 columns with nothing left out, and each has its ``--json``."""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable
from pathlib import Path

import pytest

from mopd.base.metrics import StepMetrics
from mopd.bench.harness import Comparison, rows
from mopd.bench.losses.cases import Case
from mopd.bench.losses.command import COLUMNS, Row, figures
from mopd.bench.pipeline import COLUMNS as PIPELINE_COLUMNS
from mopd.cli import convert
from mopd.cli import main as cli
from mopd.orchestrator.preflight import showing
from mopd.orchestrator.preflight.checks import Check  # type: ignore[attr-defined]
from mopd.orchestrator.tasks import evaluation
from mopd.orchestrator.validation import ValidationResult
from mopd.report.build import build_report, print_summary
from mopd.report.sinks import LiveProgress
from mopd.report.terminal import Terminal
from tests.fixtures.runs import DOMAINS, make_run, step_record

WIDTH = 80
WITHOUT_TABLES = {"completion", "serve", "init", "logs", "slurm", "stop"}
DOMAIN = DOMAINS[1]


def losses(folder: Path) -> None:
    case = Case(rows=8192, vocab=151_936, k=64, dtype="bfloat16")
    made = []
    for name, loss in (("NeMo-RL style, full normalisation", "renormalized teacher"), ("mopd chunked", "truncated")):
        made.append(Row(name=name, group="ours", loss=loss, forward_s=[1.2345], total_s=[12.3456]))
        made[-1].extra_bytes, made[-1].error = 5 * 2**30, 3.4e-7
    Comparison(title=case.title, columns=COLUMNS, rows=figures(case, made, made[0].name, 12.34)).show()


def pipeline(folder: Path) -> None:
    run = {
        **dict.fromkeys(("mean_step_s", "bound_s", "ratio", "mix_deviation"), 123.456),
        "refused": 12345,
        "percent": "10 20 30 40",
        "bytes_per_sample": 12345.6,
    }
    name = "n = 4, whole steps"
    Comparison(title="slow_trainer", columns=PIPELINE_COLUMNS, rows=[{"name": name, **run}]).show()


def teachers(folder: Path) -> None:
    seconds = {"bare": [1.0, 1.1], "path": [1.1, 1.2]}
    made = rows(seconds, "bare", lambda name, median_s: {"tokens_per_s": 1e6 / median_s})
    columns = {"s": "median_s:.3f", "tokens/s": "tokens_per_s:,.0f", "x bare": "ratio:.3f"}
    Comparison(title="vllm, 1,000,000 tokens", columns=columns, rows=made).show()


def validation(folder: Path) -> None:
    shares = dict.fromkeys(DOMAINS, 0.125)
    counts = dict.fromkeys(DOMAINS, 123456)
    result = ValidationResult(
        rewards=shares, num_samples=counts, truncated_share=shares, extracted_share=shares, examples={}
    )
    evaluation.print_result(result, title="models/a-folder-with-a-long-name/" * 4, as_json=False)


def summary(folder: Path) -> None:
    print_summary(build_report(make_run(folder / "run")))


def progress(folder: Path) -> None:
    live = LiveProgress(Terminal(file=io.StringIO()), 400, 0, dict.fromkeys(DOMAINS, 0.5))
    live.log(StepMetrics(step=10, values={**step_record(10), f"kl_floor/{DOMAIN}": 1e-7}))
    live.close()
    Terminal(width=WIDTH).print(live._draw())


def checks(folder: Path) -> None:
    detail = f"teachers.{DOMAIN} does not beat the student on its own domain {DOMAIN!r}: teacher 0.125, student 0.25"
    showing._print_table([Check(f"reward of a-teacher-with-a-long-name on {DOMAIN}", "failed", detail)])


def tensors(folder: Path) -> None:
    row = {"name": "model.layers.27.mlp.experts.127.gate_up_proj.weight", "dtype": "bfloat16", "shape": [2048, 768]}
    convert._print({"family": "qwen3_moe", "tensors": [row]}, as_json=False)


LAST = {
    losses: "3.4e-07",
    pipeline: "12346",
    teachers: "1.095",
    validation: "12%",
    summary: "failures",
    progress: "0.500",
    checks: "student 0.25",
    tensors: "768]",
}
"""What stands last in a table, and would be cut off first."""


@pytest.mark.parametrize("prints", LAST)
def test_80_columns_are_enough(
    prints: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    prints(tmp_path)
    text = capsys.readouterr().out
    assert "…" not in text and LAST[prints] in text
    assert [line for line in text.splitlines() if len(line.rstrip()) > WIDTH] == []


def parsers(parser: argparse.ArgumentParser, name: str) -> dict[str, argparse.ArgumentParser]:
    """Every command, those below others included."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        return {name: parser}
    return {k: v for key, sub in below[0].choices.items() for k, v in parsers(sub, f"{name} {key}".strip()).items()}


def test_every_command_with_a_table_prints_json() -> None:
    found = parsers(cli._parser(), "")
    assert len(found) > 15
    without = {name for name, parser in found.items() if "--json" not in parser.format_help()}
    assert without == WITHOUT_TABLES & set(found)

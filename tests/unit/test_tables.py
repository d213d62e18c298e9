"""Tables fit a terminal of 80 columns with nothing left out, and each has its ``--json``."""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable
from pathlib import Path

import pytest

from mopd import cli
from mopd.bench.losses.plan import Case
from mopd.bench.losses.results import CaseResult, Row, table
from mopd.bench.teachers.command import show
from mopd.bench.teachers.makespan import Makespan
from mopd.bench.teachers.path import Decode, Throughput
from mopd.commands import check, convert, eval
from mopd.metrics import StepMetrics
from mopd.preflight.checks import Check
from mopd.report.build import build_report, print_summary
from mopd.report.progress import LiveProgress
from mopd.report.terminal import Terminal
from mopd.run.validation import ValidationResult
from tests.fixtures.runs import DOMAINS, make_run, step_record

WIDTH = 80
WITHOUT_TABLES = {"serve", "init", "logs", "slurm", "stop"}
DOMAIN = DOMAINS[1]


def losses(folder: Path) -> None:
    case = Case(rows=8192, vocab=151_936, k=64, dtype="bfloat16", hidden=4096)
    result = CaseResult(
        case=case, baseline="eager log-softmax and gather", floor="read and write the logits once", floor_ms=12.34
    )
    errors = {"hidden": 1.2e-7, "weight": 3.4e-7}
    for name, loss in (("eager log-softmax and gather", "topk_forward_kl"), ("mopd chunked", "topk_reverse_kl")):
        row = Row(name=name, group="ours", loss=loss, status="measured", forward_ms=1234.5, total_ms=12345.6)
        row.extra_bytes, row.errors = 5 * 2**30, errors
        result.rows.append(row)
    result.finish()
    table(result)


def teachers(folder: Path) -> None:
    made = Throughput(
        engine="vllm", num_weights=10**9, num_sequences=64, num_tokens=10**6, num_rows=10**6, top_k=64,
        bare_s=(1.0, 1.1), path_s=(1.1, 1.2), answer_bytes_per_row=512.0, prompt_bytes_share=0.0, others_cores=0.0,
    )  # fmt: skip
    decode = Decode(rows=10**6, top_k=64, binary_s=0.01, lists_s=1.0, json_s=2.0, json_bytes=1, binary_bytes=1)
    show(
        made,
        decode,
        Makespan(token_aware_median=1.0, token_aware_worst=1.1, count_based_median=1.5, count_based_worst=2.0),
    )


def validation(folder: Path) -> None:
    shares = dict.fromkeys(DOMAINS, 0.125)
    counts = dict.fromkeys(DOMAINS, 123456)
    result = ValidationResult(
        rewards=shares, num_samples=counts, truncated_share=shares, extracted_share=shares, examples={}
    )
    eval._print(result, title="models/a-folder-with-a-long-name/" * 4, as_json=False)


def summary(folder: Path) -> None:
    print_summary(build_report(make_run(folder / "run")))


def progress(folder: Path) -> None:
    live = LiveProgress(Terminal(file=io.StringIO()), 400, 0, dict.fromkeys(DOMAINS, 0.5))
    live.log(StepMetrics(step=10, values={**step_record(10), f"kl_floor/{DOMAIN}": 1e-7}))
    live.close()
    Terminal(width=WIDTH).print(live._draw())


def checks(folder: Path) -> None:
    detail = f"teachers.{DOMAIN} does not beat the student on its own domain {DOMAIN!r}: teacher 0.125, student 0.25"
    check._print_table([Check(f"reward of a-teacher-with-a-long-name on {DOMAIN}", "failed", detail)])


def tensors(folder: Path) -> None:
    row = {"name": "model.layers.27.mlp.experts.127.gate_up_proj.weight", "dtype": "bfloat16", "shape": [2048, 768]}
    convert._print({"family": "qwen3_moe", "tensors": [row]}, as_json=False)


LAST = {
    losses: "3.4e-07",
    teachers: "<= 1.1",
    validation: "12%",
    summary: "failures",
    progress: "0.500",
    checks: "student 0.25",
    tensors: "768]",
}
"""What stands last in a table, and would be cut off first."""


@pytest.mark.parametrize("prints", LAST)
def test_80_columns_are_enough(
    prints: Callable[[Path], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
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

"""``mopd bench losses`` from the outside: one small run for all tests, and what it refuses."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mopd.bench.losses import command
from mopd.bench.losses.cases import QUICK, ROWS, VOCABS, add_arguments, make_cases
from mopd.bench.losses.contenders import BASELINE, Contender
from mopd.cli.main import main

ROOT = Path(__file__).parents[3]
SMALL = ["bench", "losses", "--device", "cpu", "--repeats", "2"]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON of a run over two small shapes and an LM head. Compiling would take most of the time."""
    output = tmp_path_factory.mktemp("bench") / "out.json"
    options = ["--shapes", "32,600,4", "32,600,1", "--heads", "32,600,4,48", "--json", "--output", str(output)]
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(torch, "compile", lambda function, **_: function)
        assert main([*SMALL, *options]) == 0
    assert printed.getvalue() == output.read_text()
    found: dict[str, Any] = json.loads(printed.getvalue())
    return found


def rows_of(part: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["name"], row["loss"]): row for row in part["rows"]}


def test_headline_shape_comes_first_then_heads(result: dict[str, Any]) -> None:
    assert result["command"].startswith("mopd bench losses --device cpu") and result["not_reached"] == []
    assert [(c["case"]["k"], c["case"]["hidden"]) for c in result["parts"]] == [(4, None), (4, 48), (1, None)]


def test_ours_beside_the_others(result: dict[str, Any]) -> None:
    by_k, heads, one = map(rows_of, result["parts"])
    for part in result["parts"]:
        for row in part["rows"]:
            if row["status"] == "measured":
                assert 0 < row["forward_ms"] < row["total_ms"]
                assert row["extra_bytes"] >= 0 and row["floor_share"] > 0
            else:
                assert row["status"] == "not available" and row["reason"]
    for name in ("chunked", "chunked, overwrite_input"):
        row = by_k[name, "bucket"]
        assert row["status"] == "measured" and len(row["total_s"]) == 2 and row["error"] < 1e-4
        assert row["speedup"] == pytest.approx(by_k[BASELINE, "bucket"]["total_ms"] / row["total_ms"])
    triton = by_k["triton", "bucket"]
    assert triton["status"] == "not available" and "needs a CUDA device" in triton["reason"]
    assert {name for name, _ in by_k} >= {"ghost-token style", "verl style, diagnostics"}
    assert ("NeMo-RL style, over K", "renormalized") in by_k and ("NeMo-RL style, over K", "renormalized") not in one
    for payload in ("topk", "student_topk", "union", "topk, tail sampled", "sampled"):
        loss = "k2" if payload == "sampled" else "reverse KL"
        row = by_k[f"payload {payload}", loss]
        assert row["status"] == "measured" and row["error"] < 1e-4, row
    fused = [row for (name, _), row in heads.items() if name == "linear_loss"]
    assert len(fused) == 1 and all(row["status"] == "measured" for row in fused)
    full = [row for (_, loss), row in heads.items() if loss == "full KL"]
    assert len(full) == 2 and all(row["status"] == "measured" for row in full)


def test_a_failed_row_fails_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(inputs: object) -> list[Contender]:
        def forward() -> torch.Tensor:
            raise RuntimeError("no such kernel")

        leaf = torch.ones(3, requires_grad=True)
        return [Contender(name="one", group="ours", loss="x", forward=forward, leaves=(leaf,))]

    monkeypatch.setattr(command, "logits_contenders", broken)
    assert main([*SMALL, "--shapes", "24,700,6"]) == 1
    err = capsys.readouterr().err
    assert "failed: T=24 V=700 K=6 float32: one (x): RuntimeError: no such kernel" in err


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
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for device in ("cpu", "cuda"):
        cases = make_cases(parser.parse_args(["--tp-shard", "1", "8"]), device=device)
        first, second, third = cases[:3]
        assert (first.rows, first.vocab, first.k, first.tp_shard) == (ROWS[device][0], VOCABS[0], 64, 1)
        assert second.tp_shard == 8 and second.columns == 18_992
        assert third.hidden is not None
        grid = {(c.rows, c.vocab, c.k) for c in cases if c.hidden is None}
        assert len(grid) == len(ROWS[device]) * 3 * 3
        quick = make_cases(parser.parse_args(["--quick"]), device=device)
        assert [(c.rows, c.vocab, c.k) for c in quick if c.hidden is None] == list(QUICK[device])


def test_needs_torch_only() -> None:
    """A bare GPU machine has neither rich nor psutil, transformers, yaml or Megatron."""
    heavy = ("rich", "psutil", "transformers", "yaml", "megatron", "numpy.testing", "pyarrow")
    code = f"import sys, mopd.bench.losses.command; print([name for name in {heavy} if name in sys.modules])"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout == "[]\n", done.stderr

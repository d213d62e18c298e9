"""The benchmark on a CUDA device: its instruments, and what the losses must reach there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mopd.bench.clock import Clock, copy_rate, peak_bytes
from mopd.bench.losses import command
from mopd.bench.losses.cases import Case
from mopd.bench.losses.command import Row, measure
from mopd.bench.losses.contenders import head_baseline, head_contenders, logits_contenders
from mopd.bench.losses.inputs import make_head_inputs, make_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
GPU = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
FASTEST = "triton, overwrite_input"
VERL, NEMO_RL = "verl style, diagnostics", "NeMo-RL style, full normalisation"


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")


def test_clock_leaves_out_its_head_start(device: torch.device) -> None:
    clock = Clock(device)
    for _ in range(3):
        clock.start()
        clock.mark()
        torch.cuda._sleep(20_000_000)
        clock.mark()
        nothing, asleep = clock.stop()
    assert nothing < 1e-3 < 5e-3 < asleep < 0.1


def test_peak_counts_what_lives_at_once(device: torch.device) -> None:
    kept = torch.ones(1 << 20, device=device)

    def work() -> None:
        first = kept + 1
        second = first + 1
        del first
        del second

    assert peak_bytes(work, device) == 2 * kept.nbytes


def test_copy_rate_is_that_of_memory(device: torch.device) -> None:
    source, clock = torch.ones(1 << 28, device=device), Clock(device)
    rates = sorted(copy_rate(source, clock) for _ in range(5))
    assert 50e9 < rates[2] < 20e12


def test_small_run(tmp_path: Path, device: torch.device) -> None:
    output = tmp_path / "out.json"
    shapes = ["--shapes", "256,20000,16", "200,5003,1", "--heads", "256,20000,16,64"]
    assert command.main(["--device", "cuda", "--repeats", "2", "--output", str(output), *shapes]) == 0
    for part in json.loads(output.read_text())["parts"]:
        for row in part["rows"]:
            if row["group"] == "ours":
                assert row["status"] == "measured", row
                assert row["error"] < 0.02 if part["case"]["hidden"] is None else row["error"] is None, row
            elif row["status"] != "measured":
                assert row["reason"]


def test_overwriting_needs_no_memory_of_the_logits_size(device: torch.device) -> None:
    case = Case(rows=2048, vocab=128_256, k=64, dtype="bfloat16")
    rows, _ = timed(case, device, {FASTEST}, repeats=1)
    assert all(row.extra_bytes is not None and row.extra_bytes < 0.02 * 2 * 2048 * 128_256 for row in rows)


@pytest.mark.skipif("H100" not in GPU, reason="no H100")
@pytest.mark.parametrize(("tp_shard", "limit_ms"), [(1, 2.9), (8, 0.37)])
def test_headline_on_an_h100(tp_shard: int, limit_ms: float, device: torch.device) -> None:
    case = Case(rows=8192, vocab=151_936, k=64, dtype="bfloat16", tp_shard=tp_shard)
    rows, rate = timed(case, device, {FASTEST, VERL, NEMO_RL}, repeats=20)
    total = {row.name: row.total_ms for row in rows if row.loss != "renormalized"}
    ours, verl, nemo_rl = (total[name] for name in (FASTEST, VERL, NEMO_RL))
    assert ours is not None and verl is not None and nemo_rl is not None and rate is not None
    floor_ms = 1000 * 6 * case.rows * case.columns / rate
    assert (floor_ms / ours >= 0.85, ours <= limit_ms) == (True, True), f"{ours} ms, floor {floor_ms} ms"
    assert verl / ours >= 10 and nemo_rl / ours >= 10, total


@pytest.mark.skipif("H100" not in GPU, reason="no H100")
def test_fused_head_on_an_h100(device: torch.device) -> None:
    """At most 1.3 times as slow as products and loss with all logits in memory, with about a tenth of that memory."""
    case = Case(rows=8192, vocab=151_936, k=64, hidden=4096, dtype="bfloat16")
    entries = head_contenders(make_head_inputs(case, device))
    wanted = [e for e in entries if e.loss == "bucket" and e.group == "ours"]
    rows, _, _ = measure(wanted, device=device, repeats=5)
    plain, *fused = rows
    assert plain.name == head_baseline(device) and plain.total_ms is not None and plain.extra_bytes is not None
    best = min(fused, key=lambda row: row.total_ms or float("inf"))
    assert best.total_ms is not None and best.total_ms <= 1.3 * plain.total_ms, rows
    assert best.extra_bytes is not None and best.extra_bytes <= 0.15 * plain.extra_bytes, rows


def timed(case: Case, device: torch.device, names: set[str], repeats: int) -> tuple[list[Row], float | None]:
    """Rows of the named contenders."""
    inputs = make_inputs(case, device)
    entries = [entry for entry in logits_contenders(inputs) if entry.name in names]
    rows, rate, _ = measure(entries, device=device, repeats=repeats, copied=inputs.logits)
    assert all(row.status == "measured" for row in rows), rows
    return rows, rate

"""The table of launch parameters, and that every kernel compiles for a GPU without spilling or narrow loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mopd.losses.triton import table
from mopd.losses.triton.table import ANY_DEVICE
from mopd.losses.triton.tuning import tune

LAUNCH = table.Launch(1024, 4, 1)


def entry(width: int, k: int, rows: int, device: str = ANY_DEVICE, dtype: str = "bfloat16") -> table.Entry:
    return table.Entry(width, dtype, k, rows, device, LAUNCH, 1, LAUNCH)


ENTRIES = [entry(151_936, 64, 8192), entry(18_992, 64, 8192), entry(151_936, 512, 8192), entry(151_936, 64, 64)]


@pytest.mark.parametrize(
    ("width", "k", "rows", "expected"),
    [
        (151_936, 64, 8192, 0),
        (128_256, 100, 16_384, 0),
        (16_000, 1, 4096, 1),
        (150_000, 300, 8192, 2),
        (1 << 17, 64, 1, 3),
    ],
)
def test_lookup_takes_the_nearest_bucket(width: int, k: int, rows: int, expected: int) -> None:
    assert table.lookup(width, torch.bfloat16, k, rows, "some GPU", ENTRIES) == ENTRIES[expected]


def test_a_device_with_entries_of_its_own_uses_only_those() -> None:
    own = entry(4096, 1, 1, device="some GPU")
    assert table.lookup(151_936, torch.bfloat16, 64, 8192, "some GPU", [*ENTRIES, own]) == own
    assert table.lookup(151_936, torch.bfloat16, 64, 8192, "another", [*ENTRIES, own]) == ENTRIES[0]


def test_missing_dtype_and_broken_tables_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no entry for float16 on 'some GPU'"):
        table.lookup(4096, torch.float16, 1, 1, "some GPU", ENTRIES)
    path = tmp_path / "table.json"
    path.write_text('{"entries": [{"width": 1}]}')
    with pytest.raises(ValueError, match="does not fit"):
        table.load_table(path)
    with pytest.raises(ValueError, match="device is cpu"):
        tune("cpu", [(1, 1, 1)], [torch.bfloat16])


def test_saving_and_merging(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    better = replace(ENTRIES[1], splits=4)
    table.save_table(table.merge(ENTRIES, [better, entry(64, 1, 1)]), path)
    loaded = table.load_table(path)
    assert len(loaded) == 5 and better in loaded and ENTRIES[1] not in loaded
    assert table.merge(loaded, []) == loaded


def test_the_shipped_table_serves_every_type_and_fits_the_kernels() -> None:
    entries = table.load_table()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for width in (1000, 18_992, 151_936):
            table.lookup(width, dtype, 64, 8192, "no such GPU", entries)
    for e in entries:
        for launch in (e.stats, e.dense):
            lanes = 32 * launch.warps
            assert launch.block & (launch.block - 1) == 0 and 4 <= launch.block // lanes <= 32
        assert e.stats.stages in (1, 2) and e.dense.stages == 1 and e.splits * e.stats.block <= 2 * e.width


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen", "fp32"])
def test_kernels_compile_for_hopper(case: str, tmp_path: Path) -> None:
    """No GPU needed: Triton brings ptxas. The padded vocabulary ends in the middle of a tile."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.unit.losses.compile_kernels", "--case", case]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert {report["kernel"] for report in reports} == {
        "select_kernel", "stats_kernel", "loss_kernel", "dense_kernel", "fixup_kernel", "logprobs_kernel",
        "gather_gradient_kernel",
    }  # fmt: skip
    for report in reports:
        assert report["spilled_bytes"] == 0, report
        if report["kernel"] in ("stats_kernel", "dense_kernel"):
            assert report["registers"] * 32 * report["warps"] <= 65_536 // 3, report  # three programs fit a processor
            assert report["widths"]["ld128"] >= 2, report
        if report["kernel"] == "dense_kernel":
            assert report["widths"].keys() & {"st16", "st32", "st64"} == set(), report

"""The table of launch parameters, and that every kernel compiles for a GPU without spilling or narrow loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from mopd.losses.triton import table
from mopd.losses.triton.table import ANY_DEVICE
from mopd.losses.triton.tuning import tune

LAUNCH = table.Launch(1024, 4, 1)


def entry(width: int, rows: int, device: str = ANY_DEVICE, dtype: str = "bfloat16") -> table.Entry:
    return table.Entry(width, dtype, rows, device, LAUNCH, 1, LAUNCH)


ENTRIES = [entry(151_936, 8192), entry(18_992, 8192), entry(151_936, 64)]


@pytest.mark.parametrize(
    ("width", "rows", "expected"), [(151_936, 8192, 0), (128_256, 16_384, 0), (16_000, 4096, 1), (1 << 17, 1, 2)]
)
def test_lookup_takes_the_nearest_bucket(width: int, rows: int, expected: int) -> None:
    assert table.lookup(width, torch.bfloat16, rows, "some GPU", ENTRIES) == ENTRIES[expected]


def test_a_device_with_entries_of_its_own_uses_only_those() -> None:
    own = entry(4096, 1, device="some GPU")
    assert table.lookup(151_936, torch.bfloat16, 8192, "some GPU", [*ENTRIES, own]) == own
    assert table.lookup(151_936, torch.bfloat16, 8192, "another", [*ENTRIES, own]) == ENTRIES[0]


def test_missing_dtype_and_broken_tables_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no entry for float16 on 'some GPU'"):
        table.lookup(4096, torch.float16, 1, "some GPU", ENTRIES)
    path = tmp_path / "table.json"
    path.write_text('{"entries": [{"width": 1}]}')
    with pytest.raises(ValueError, match="does not fit"):
        table.load_table(path)
    with pytest.raises(ValueError, match="device is cpu"):
        tune("cpu", [(1, 1)], [torch.bfloat16])


def test_saving_and_merging(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    better = replace(ENTRIES[1], splits=4)
    table.save_table(table.merge(ENTRIES, [better, entry(64, 1)]), path)
    loaded = table.load_table(path)
    assert len(loaded) == 4 and better in loaded and ENTRIES[1] not in loaded
    assert table.merge(loaded, []) == loaded


def test_the_shipped_table_serves_every_type_and_fits_the_kernels() -> None:
    entries = table.load_table()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for width in (1000, 18_992, 151_936):
            table.lookup(width, dtype, 8192, "no such GPU", entries)
    for e in entries:
        for launch in (e.stats, e.dense):
            bytes_of_a_lane = launch.block * getattr(torch, e.dtype).itemsize // (32 * launch.warps)
            assert launch.block & (launch.block - 1) == 0 and 16 <= bytes_of_a_lane <= 128
        assert e.stats.stages in (1, 2) and e.dense.stages == 1
        assert e.splits * e.stats.block * e.stats.stages <= 2 * e.width


COMPILED = {
    "qwen": "", "task": "loss_kernel,fixup_kernel", "full": "", "mixed": "",
    **dict.fromkeys(("shard", "odd", "fp32"), "stats_kernel,neighbours_kernel,dense_kernel"),
}  # fmt: skip
"""Case -> its kernels that are looked at; all of them where none is named."""


Code = dict[str, dict[str, Any]]
"""Kernel -> what ``compile_kernels`` prints of it."""


@pytest.fixture(scope="module")
def machine_code(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Code]:
    """Compiles a case once. No GPU needed: Triton brings ptxas and nvdisasm."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("kernels"))

    @cache
    def of(case: str) -> Code:
        command = [sys.executable, "-m", "tests.unit.losses.compile_kernels", "--case", f"{case}:{COMPILED[case]}"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
        assert done.returncode == 0, done.stderr
        return {report["kernel"]: report for report in map(json.loads, done.stdout.splitlines())}

    return of


LONG_CASES = [case if case == "qwen" else pytest.param(case, marks=pytest.mark.long) for case in COMPILED]


@pytest.mark.parametrize("case", LONG_CASES)
def test_no_kernel_spills(machine_code: Callable[[str], Code], case: str) -> None:
    """And three programs of those that read the logits fit a processor."""
    assert len(machine_code(case)) >= 2
    for report in machine_code(case).values():
        assert report["spilled_bytes"] == 0, report
        if report["kernel"] in ("stats_kernel", "dense_kernel"):
            assert report["registers"] * 32 * report["warps"] <= 65_536 // 3, report


def issued(code: Code, columns: int, k: int) -> tuple[float, float]:
    """Instructions that a warp issues for 32 columns in bf16: of the statistics' loop, and of a whole row.

    Counted in the machine code: the loop's instructions over the columns that one round of it takes; for the row as
    many rounds as it needs, all that stands outside of the loop, and what ``neighbours_kernel`` issues for k ids, some
    two of which lie in one group.
    """
    stats, ids = code["stats_kernel"], code["neighbours_kernel"]
    (loop,) = (loop for loop in stats["loops"] if loop["exp2"])
    assert loop["wide_loads"] == stats["constants"]["AHEAD"] and loop["barriers"] == 0, loop
    per_round = stats["constants"]["BLOCK"] * stats["constants"]["AHEAD"]
    rounds = -(-(columns + 8) // per_round)
    row = (rounds * loop["instructions"] + stats["instructions"] - loop["instructions"]) * stats["warps"]
    inner, chunk = ids["loops"] if len(ids["loops"]) == 2 else (ids["loops"][0], None)
    if chunk is None:
        beside = ids["instructions"] + inner["instructions"]
    else:
        beside = ids["instructions"] - chunk["instructions"]
        beside += -(-k // 32) * (chunk["instructions"] + inner["instructions"])
    return loop["instructions"] / (per_round / (32 * stats["warps"])), 32 * (row + beside) / columns


def test_kernels_compile_for_hopper(machine_code: Callable[[str], Code]) -> None:
    """The padded vocabulary ends in the middle of a tile."""
    code = machine_code("qwen")
    assert code.keys() == {
        "select_kernel", "neighbours_kernel", "stats_kernel", "loss_kernel", "dense_kernel", "fixup_kernel",
        "logprobs_kernel", "gather_gradient_kernel",
    }  # fmt: skip
    loop, row = issued(code, 151_936, 64)
    assert loop <= 9 and row <= 10.5, (loop, row)
    assert code["stats_kernel"]["widths"].keys() & {"ld16", "ld64"} == set()
    assert code["dense_kernel"]["widths"]["ld128"] >= 2 and code["dense_kernel"]["widths"]["st128"] >= 2


@pytest.mark.long
@pytest.mark.parametrize("case", ["shard", "odd", "fp32"])
def test_every_width_is_read_by_16_bytes(machine_code: Callable[[str], Code], case: str) -> None:
    """A shard, rows that begin anywhere, fp32: the passes over the logits load and store whole groups at once."""
    code = machine_code(case)
    assert code["stats_kernel"]["widths"].keys() & {"ld16", "ld64"} == set()
    assert code["stats_kernel"]["widths"]["ld128"] >= 2
    assert code["dense_kernel"]["widths"]["ld128"] >= 2 and code["dense_kernel"]["widths"]["st128"] >= 2
    if case == "shard":  # all ids of the row in it
        loop, row = issued(code, 19_072, 64)
        assert loop <= 9 and row <= 10.5, (loop, row)
    elif case == "odd":
        loop, row = issued(code, 151_665, 512)
        assert loop <= 9 and row <= 14, (loop, row)


@pytest.mark.long
@pytest.mark.parametrize("case", ["full", "mixed"])
def test_full_vocabulary_kernels_compile_for_hopper(machine_code: Callable[[str], Code], case: str) -> None:
    code = machine_code(case)
    names = {"first_kernel", "gradient_kernel"} | ({"second_kernel"} if case == "mixed" else set())
    assert code.keys() == names
    for kernel in code.values():
        assert kernel["widths"].keys() & {"ld16", "ld64"} == set() and kernel["widths"]["ld128"] >= 2

"""The harness: who runs when, how ratios and goals come about, and the forms of a result."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch

from mopd.bench import harness
from mopd.bench.harness import (
    BenchReport,
    Comparison,
    Others,
    at_least,
    at_most,
    is_disturbed,
    ratio,
    rounds,
    rows,
    timed,
)

SECONDS = {"one": [2.0, 3.0, 9.0], "two": [2.0, 2.0, 2.0]}


def report(**more: object) -> BenchReport:
    return BenchReport(
        benchmark="b", arguments=["mopd", "bench", "b"], as_json=True, device=torch.device("cpu"), **more
    )  # type: ignore[arg-type]


def test_every_round_begins_with_another_contender() -> None:
    assert ["".join(order) for order in rounds("abc", 4)] == ["abc", "bca", "cab", "abc"]
    order: list[str] = []
    found = timed({name: lambda name=name: order.append(name) for name in "ab"}, 2)  # type: ignore[misc]
    assert "".join(order) == "abba" and {name: len(times) for name, times in found.items()} == {"a": 2, "b": 2}


def test_ratios_are_medians_of_rounds() -> None:
    """Of the same round: the ratio of the medians would be 1.5 as well, that of sums 2.3."""
    assert ratio(SECONDS, "one", "two") == 1.5 and ratio({"a": [1.0, 8.0], "b": [2.0, 2.0]}, "a", "b") == 2.25
    one, two = rows(SECONDS, "two", lambda name, median_s: {"rate": 6 / median_s})
    assert one == {
        "name": "one",
        "median_s": 3.0,
        "range_s": (2.0, 9.0),
        "ratio": 1.5,
        "seconds": [2, 3, 9],
        "rate": 2.0,
    }
    assert (two["ratio"], two["rate"]) == (1.0, 3.0)


def test_goals_decide_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    part = Comparison(title="t", columns={}, rows=[])
    for goals, code in (
        ({"a": at_most(1.3, 1.3), "b": at_least(0.7, 0.7)}, 0),
        ({"a": at_most(1.31, 1.3)}, 1),
        ({"b": at_least(0.69, 0.7)}, 1),
        ({"b": at_least(math.nan, 0.7)}, 1),
        ({"a": at_most(math.nan, 0.7)}, 1),
    ):
        told = report()
        told.add(part, goals)
        assert told.finish() == code
        assert json.loads(capsys.readouterr().out)["is_met"] is (code == 0)
    told = report(failures=["failed: it broke"])
    assert told.finish() == 1
    assert "failed: it broke" in capsys.readouterr().err


def test_json_is_strict_and_the_file_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = report(output=tmp_path / "out.json")
    told.add(Comparison(title="t", columns={}, rows=[{"name": "x", "error": math.nan}], facts={"size": 3}))
    assert json.loads((tmp_path / "out.json").read_text())["parts"]
    told.finish()
    text = capsys.readouterr().out
    assert (tmp_path / "out.json").read_text() == text
    tree = json.loads(text)
    assert tree["parts"] == [{"title": "t", "size": 3, "rows": [{"name": "x", "error": None}]}]
    assert tree["machine"]["torch"] == torch.__version__ and tree["command"] == "mopd bench b"


def test_a_table_holds_its_figures_and_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    columns = {"a long heading": "a:.2f", "share": "b:.0%", "loss": "loss:"} | {
        f"column {i}": "a:,.1f" for i in range(5)
    }
    name = "a contender with a name of many words that has to go on"
    row = {"name": name, "a": 1234.5678, "b": 0.5, "loss": "two words"}
    Comparison(title="T", columns=columns, rows=[row, {"name": "two"}], remarks=["why " * 40]).show()
    text = capsys.readouterr().out
    assert "1234.57" in text and "50%" in text and "1,234.6" in text and " goes " not in text
    assert all(word in text for word in name.split())
    assert max(map(len, text.splitlines())) <= 80


def test_goals_and_disturbance_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    told = report(others_cores=1e9)
    told.as_json = False
    told.add(Comparison(title="t", columns={}, rows=[]), {"of_bare": at_least(0.4, 0.7), "bytes": at_most(3, 4)})
    assert told.finish() == 1
    out = capsys.readouterr().out
    assert "of_bare: 0.4, goal >= 0.7: missed" in out and "bytes: 3, goal <= 4: met" in out and "measure again" in out


def test_what_other_processes_take_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Busy time of the cores (idle and waiting left out) less that of this process, over wall-clock time."""
    second, now_s = os.sysconf("SC_CLK_TCK"), [0.0]
    statistics = tmp_path / "stat"
    monkeypatch.setattr(harness, "STATISTICS", statistics)
    monkeypatch.setattr(harness.time, "monotonic", lambda: now_s[0])  # type: ignore[attr-defined]
    monkeypatch.setattr(os, "cpu_count", lambda: 1000)
    statistics.write_text("cpu  0 0 0 0 0 0 0 0 0 0\ncpu0 0\n")
    own_s = [3.0]
    others = Others(lambda: own_s[0])
    own_s[0], now_s[0], busy = 3.2, 0.5, 2 * second
    statistics.write_text(f"cpu  {busy} {busy} {busy} {50 * second} {50 * second} {busy} {busy} {busy} 7 7\ncpu0 0\n")
    assert others.cores() == pytest.approx((12 - 0.2) / 0.5)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)  # ticks of a short time may seem to hold more
    assert others.cores() == 4
    statistics.unlink()
    assert Others().cores() is None
    assert [is_disturbed(cores) for cores in (None, 0.0, 0.41)] == [False, False, True]

"""``mopd bench weights``: real servers and a small student; what is counted is right, whatever the times are."""

from __future__ import annotations

import gc
import json
import os

import pytest
import torch

from mopd.bench.processes import HostPeaks
from mopd.bench.weights import ADAPTER, BARE, HTTP, MIB, WHOLE, Updates, bare_broadcast, result
from mopd.cli.main import main

WAY = "collective"


def test_both_ways_bring_the_same_weights_and_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Servers that answer otherwise after one way than after the other would be an error."""
    options = ["--mb", "12", "--replicas", "1", "--bucket-mib", "1", "--rounds", "1", "--rank", "4", "--json"]
    assert main(["bench", "weights", *options]) in (0, 1)
    told = json.loads(capsys.readouterr().out)
    part, of_adapter = told["parts"]
    assert 11e6 < part["num_bytes"] < 13e6
    assert {row["name"]: len(row["seconds"]) for row in part["rows"]} == {BARE: 1, WAY: 1, HTTP: 1}
    assert all(row["median_s"] > 0 for row in part["rows"])
    assert part["phases"]["timing/weights_update_s"] > 0
    assert part["extra_bytes"].keys() == {WAY, HTTP}
    assert all(found.keys() == {"sender", "orchestrator", "receiver"} for found in part["extra_bytes"].values())
    assert {row["name"] for row in of_adapter["rows"]} == {WHOLE, ADAPTER}
    assert of_adapter["num_bytes"][ADAPTER] < of_adapter["num_bytes"][WHOLE] / 20
    goals = {"of_bare_broadcast", "over_http", "extra_buckets"}
    assert {name.split("/")[1] for name in told["goals"]} == goals


def test_impossible_numbers_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "weights", "--mb", "500", "0"]) == 2
    assert "--mb is 0: set 1 to 100000" in capsys.readouterr().err


def test_peaks_see_what_is_freed_again() -> None:
    gc.collect()  # what other tests left behind is not released meanwhile
    peaks = HostPeaks({"own": os.getpid()})
    torch.ones(64 * MIB, dtype=torch.uint8)
    assert 60 * MIB < peaks.extra_bytes()["own"] < 80 * MIB


def test_goals_are_medians_of_ratios() -> None:
    updates = Updates.__new__(Updates)
    updates.phases = [{"timing/weights_gather_s": 0.5}]
    updates.extra_bytes = {WAY: {"sender": MIB, "receiver": 2 * MIB}, HTTP: {"sender": 10**9, "receiver": 10**9}}
    facts = {"way": WAY, "num_bytes": 10**9, "num_replicas": 1, "bucket_bytes": MIB}
    seconds = {BARE: [1.0, 1.0, 8.0], WAY: [2.0, 1.0, 10.0], HTTP: [8.0, 4.0, 10.0]}
    _, goals = result(seconds, facts, updates)
    assert {name.split("/")[1]: (goal["value"], goal["is_met"]) for name, goal in goals.items()} == {
        "of_bare_broadcast": (0.8, True),
        "over_http": (4.0, True),
        "extra_buckets": (2.0, True),
    }
    _, goals = result({**seconds, WAY: [4.0, 2.0, 20.0]}, facts, updates)
    assert [goal["is_met"] for goal in goals.values()] == [False, False, True]


def test_the_reference_allocates_nothing_while_it_is_timed() -> None:
    """Its buckets are there before. The peak beyond them is less than a tenth of one, however many bytes travel."""
    bucket = 64 * MIB
    with bare_broadcast(4 * bucket, bucket, 1, torch.device("cpu")) as send:
        send()
        gc.collect()
        peaks = HostPeaks({"own": os.getpid()})
        send()
        assert peaks.extra_bytes()["own"] < bucket / 10

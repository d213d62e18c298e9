"""``mopd bench weights``: real servers and a small student; what is counted is right, whatever the times are."""

from __future__ import annotations

import gc
import json
import os
from dataclasses import replace

import pytest
import torch

from mopd.bench.weights.bare import bare_broadcast
from mopd.bench.weights.command import goals, show
from mopd.bench.weights.measure import BARE, HTTP, MIB, WeightContest
from mopd.bench.weights.memory import HostPeaks
from mopd.cli import main

WAY = "collective"


def test_both_ways_bring_the_same_weights_and_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Servers that answer otherwise after one way than after the other would be an error."""
    options = ["--mb", "12", "--replicas", "1", "--stages", "2", "--bucket-mib", "1", "--rounds", "1", "--json"]
    assert main(["bench", "weights", *options]) in (0, 1)
    (told,) = json.loads(capsys.readouterr().out)
    assert 11e6 < told["num_bytes"] < 13e6
    assert {way: len(times) for way, times in told["seconds"].items()} == {BARE: 1, WAY: 1, HTTP: 1}
    assert all(seconds > 0 for seconds in told["median_s"].values())
    assert told["phases"]["timing/weights_update_s"] > 0
    assert told["extra_bytes"].keys() == {WAY, HTTP}
    assert told["extra_bytes"][WAY].keys() == {"sender", "orchestrator", "receiver"}
    assert len(told["claim_s"]) == 1 and told["claim_s"][0] > 0
    assert told["goals"].keys() == {"of_bare_broadcast", "over_http", "extra_buckets", "claim_s"}


def test_impossible_numbers_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "weights", "--mb", "500", "0"]) == 2
    assert "--mb is 0: set 1 to 100000" in capsys.readouterr().err


def test_peaks_see_what_is_freed_again() -> None:
    gc.collect()  # what other tests left behind is not released meanwhile
    peaks = HostPeaks({"own": os.getpid()})
    torch.ones(64 * MIB, dtype=torch.uint8)
    assert 60 * MIB < peaks.extra_bytes()["own"] < 80 * MIB


def test_goals_are_medians_of_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    contest = WeightContest(
        way=WAY,
        num_bytes=10**9,
        num_replicas=1,
        num_stages=1,
        bucket_bytes=MIB,
        seconds={BARE: [1.0, 1.0, 8.0], WAY: [2.0, 1.0, 10.0], HTTP: [8.0, 4.0, 10.0]},
        phases={"timing/weights_gather_s": 0.5},
        extra_bytes={WAY: {"sender": MIB, "receiver": 2 * MIB}, HTTP: {"sender": 10**9, "receiver": 10**9}},
        claim_s=[0.01, 0.02, 9.0],
        others_cores=None,
    )
    found = {name: (goal["value"], goal["is_met"]) for name, goal in goals(contest).items()}
    assert found == {
        "of_bare_broadcast": (0.8, True),
        "over_http": (4.0, True),
        "extra_buckets": (2.0, True),
        "claim_s": (0.02, True),
    }
    slower = replace(contest, seconds={**contest.seconds, WAY: [4.0, 2.0, 20.0]}, claim_s=[0.01, 0.06, 0.07])
    assert [goal["is_met"] for goal in goals(slower).values()] == [False, False, True, False]
    show([slower])
    assert "of_bare_broadcast: 0.40, goal >= 0.7: missed" in capsys.readouterr().out


def test_the_reference_allocates_nothing_while_it_is_timed() -> None:
    """Its buckets are there before. The peak beyond them is less than a tenth of one, however many bytes travel."""
    bucket = 64 * MIB
    with bare_broadcast(4 * bucket, bucket, 1, torch.device("cpu")) as send:
        send()
        gc.collect()
        peaks = HostPeaks({"own": os.getpid()})
        send()
        assert peaks.extra_bytes()["own"] < bucket / 10

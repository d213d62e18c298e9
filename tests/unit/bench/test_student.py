"""``mopd bench student``: real steps on few samples; what is counted is right, whatever the times are."""

from __future__ import annotations

import json

import pytest
import torch

from mopd.bench.student import command
from mopd.bench.student.command import report, show
from mopd.bench.student.full_size import measure_sizes
from mopd.bench.student.inputs import SHAPE, mixed_lengths, toy_lengths
from mopd.bench.student.measure import Contest, imbalance
from mopd.cli import main


def contest(name: str, **seconds: list[float]) -> Contest:
    return Contest(name=name, num_tokens=100, seconds={key.replace("_", " "): value for key, value in seconds.items()})


def test_real_steps_compute_the_same_and_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Contenders whose loss or gradient norm differ would raise."""
    monkeypatch.setattr(command, "QUICK_SAMPLES", 4)
    assert main(["bench", "student", "--quick", "--rounds", "2", "--json"]) in (0, 1)
    told = json.loads(capsys.readouterr().out)
    toy, mixed = told["contests"]
    assert toy["num_tokens"] == sum(prompt + response for prompt, response in toy_lengths())
    assert mixed["num_tokens"] == sum(mixed_lengths(4, low=64, high=4096))
    assert {name: len(times) for name, times in toy["seconds"].items()} == dict.fromkeys(
        ("student", "student, padded", "plain PyTorch"), 2
    )
    assert len(mixed["seconds"]) == 3 and all(time > 0 for times in mixed["seconds"].values() for time in times)
    assert told["goals"].keys() == {"student_over_plain", "packed_over_padded", "imbalance"}


def test_goals_are_medians_of_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    toy = contest("toy", student=[2.0, 3.0, 9.0], plain_PyTorch=[2.0, 2.0, 2.0])
    mixed = Contest(name="mixed", num_tokens=100, seconds={"packed": [1.0, 1.0], "padded, as drawn": [1.0, 3.0]})
    found = report(toy, mixed, {"packed": 1.04, "dealt in turn": 1.4}, None)
    values = {name: (goal["value"], goal["is_met"]) for name, goal in found["goals"].items()}
    assert values == {
        "student_over_plain": (1.5, False), "packed_over_padded": (2.0, True), "imbalance": (1.04, True)
    }  # fmt: skip
    show(toy, mixed, found)
    assert "goal <= 1.3: missed" in capsys.readouterr().out


def test_ranks_are_balanced() -> None:
    """Four data-parallel ranks on log-normal lengths from 64 to 4,096 tokens."""
    ranks = imbalance(command.DEALT_SAMPLES)
    assert ranks["packed"] <= 1.05 and ranks["dealt in turn"] > 1.3


def test_a_shape_beside_transformers_own_model() -> None:
    """On a CPU and small; both must compute the same, in two forward passes each."""
    shape = {**SHAPE, "vocab_size": 64}
    found = measure_sizes("small", shape, [(4, 12)] * 4, dtype="float32", per_forward=2, rounds=1)
    assert found.trained.keys() == {"student", "transformers"} and found.num_tokens == 64
    for trained in found.trained.values():
        assert trained.tokens_per_s > 0 and trained.share_of_peak is None and trained.peak_gib is None
    assert not found.is_met  # nobody knows this device's peak


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
@pytest.mark.parametrize(("size", "line"), [("qwen3-1.7b", "needs a CUDA device"), ("gpt", "choose among qwen3-1.7b")])
def test_sizes_that_cannot_be_measured(size: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "student", "--size", size]) == 2
    assert line in capsys.readouterr().err


def test_no_rounds_are_refused() -> None:
    assert main(["bench", "student", "--rounds", "0"]) == 2

"""``mopd bench student``: real steps on few samples; what is counted is right, whatever the times are."""

from __future__ import annotations

import json

import pytest
import torch

from mopd.bench import student
from mopd.bench.models import TOY
from mopd.bench.student import contest, measure_size, mixed_lengths, toy_lengths
from mopd.cli.main import main


def test_real_steps_compute_the_same_and_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Contenders whose loss or gradient norm differ would raise."""
    for name, value in {"QUICK_SAMPLES": 4, "LONGEST": 512, "MAX_TOKENS": 1024}.items():
        monkeypatch.setattr(student, name, value)
    assert main(["bench", "student", "--quick", "--rounds", "2", "--json"]) in (0, 1)
    told = json.loads(capsys.readouterr().out)
    toy, mixed = told["parts"]
    assert toy["num_tokens"] == sum(map(sum, toy_lengths()))
    assert mixed["num_tokens"] == sum(map(sum, mixed_lengths(4)))
    assert {row["name"]: len(row["seconds"]) for row in toy["rows"]} == dict.fromkeys(
        ("student", "student, padded", "plain PyTorch"), 2
    )
    assert len(mixed["rows"]) == 3 and all(row["median_s"] > 0 for row in mixed["rows"])
    assert told["goals"].keys() == {"student_over_plain", "packed_over_padded"}


def test_contenders_that_compute_otherwise_are_refused() -> None:
    makers = {"one": lambda: lambda: (1.0, 2.0), "other": lambda: lambda: (1.0, 2.001)}
    with pytest.raises(RuntimeError, match="other has"):
        contest(makers, torch.device("cpu"), 1)


def test_a_shape_beside_transformers_own_model() -> None:
    """On a CPU and small; both must compute the same, in two forward passes each."""
    shape = {**TOY, "vocab_size": 64}
    part, goals = measure_size("small", shape, [(4, 12)] * 4, dtype="float32", per_forward=2, count=1)
    assert [row["name"] for row in part.rows] == ["student", "transformers"] and part.facts["num_tokens"] == 64
    for row in part.rows:
        assert row["tokens_per_s"] > 0 and row["peak_gib"] is None
    assert not goals["share_of_peak"]["is_met"]  # nobody knows this device's peak


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
@pytest.mark.parametrize(("size", "line"), [("qwen3-1.7b", "needs a CUDA device"), ("gpt", "choose among qwen3-1.7b")])
def test_sizes_that_cannot_be_measured(size: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "student", "--size", size]) == 2
    assert line in capsys.readouterr().err


def test_no_rounds_are_refused() -> None:
    assert main(["bench", "student", "--rounds", "0"]) == 2

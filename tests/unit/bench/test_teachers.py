"""``mopd bench teachers`` on the torch engine: the whole path runs, and what it reports is what happened."""

from __future__ import annotations

import json
import os

import pytest
import torch

from mopd.bench import teachers
from mopd.bench.models import TOY
from mopd.bench.teachers import measure_size
from mopd.cli.main import main


def test_the_whole_path_beside_the_bare_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A smaller model than the one that is measured in earnest."""
    small = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    monkeypatch.setattr(teachers, "MODEL", {**teachers.MODEL, **small})
    options = ["--engine", "torch", "--pairs", "2", "--sequences", "6", "--top-k", "8", "--json"]
    code = main(["bench", "teachers", *options])
    told = json.loads(capsys.readouterr().out)
    (part,), goals = told["parts"], told["goals"]
    assert {row["name"]: len(row["seconds"]) for row in part["rows"]} == {"bare": 2, "path": 2}
    assert part["num_rows"] == part["num_tokens"] - 6 * teachers.PROMPT_LENGTH
    answer = goals["answer_bytes_per_token"]
    assert 8 * 8 + 4 < answer["value"] < 8 * 8 + 4 + 400 / part["num_rows"]  # nothing of it belongs to prompts
    assert answer["at_most"] == 8 * 8 + 32 and answer["is_met"]
    bare, path = part["rows"]
    assert bare["ratio"] == 1 and goals["throughput"]["at_least"] == 0.85
    assert 0 <= told["others_cores"] <= (os.cpu_count() or 1)
    assert code == (0 if goals["throughput"]["value"] >= 0.85 else 1) and path["tokens_per_s"] > 0


def test_impossible_options_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "teachers", "--pairs", "0"]) == 2
    assert capsys.readouterr().err == "mopd: error: --pairs is 0: set 1 or more\n"


def test_scoring_beside_a_bare_forward_pass() -> None:
    """On a CPU and small; what needs a GPU is refused."""
    part = measure_size("small", TOY, [16] * 5, dtype="float32", top_k=8, prompt=4)
    engine, forward = part.rows
    assert part.facts["num_tokens"] == 80 and forward["ratio"] == 1
    assert engine["tokens_per_s"] == pytest.approx(80 / engine["median_s"])
    if not torch.cuda.is_available():
        assert main(["bench", "teachers", "--size", "qwen3-1.7b"]) == 2

"""``mopd bench teachers`` on the torch engine: the whole path runs, and what it reports is what happened."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
import torch

from mopd.bench.student.inputs import SHAPE
from mopd.bench.teachers import path
from mopd.bench.teachers.full_size import measure_scoring
from mopd.bench.teachers.path import NUM_ROWS, Decode, Throughput, make_answer, measure_decode
from mopd.cli import main
from mopd.wire.messages import encode

GOOD = Throughput(
    engine="vllm",
    num_weights=1,
    num_sequences=2,
    num_tokens=20,
    num_rows=10,
    top_k=64,
    bare_s=(1.0, 9.0, 2.0),
    path_s=(1.0, 10.0, 1.0),
    answer_bytes_per_row=520.0,
    prompt_bytes_share=0.0,
    others_cores=0.1,
)
FAST = Decode(rows=8192, top_k=64, binary_s=1.0, lists_s=10.0, json_s=15.0, json_bytes=900, binary_bytes=500)


def test_answers_are_small_and_become_tensors_fast() -> None:
    decode = measure_decode(64)
    assert decode.binary_bytes == len(encode(make_answer(64))) <= GOOD.payload_goal * NUM_ROWS
    assert decode.speedup > 1 and decode.json_s > decode.lists_s  # whether the goal is met is the machine's affair


def test_the_goal_of_decoding_counts() -> None:
    """Against lists without the parsing of JSON; it is met at its limit."""
    assert FAST.speedup == FAST.goal == 10 and FAST.is_met
    assert not replace(FAST, lists_s=9.9).is_met and not replace(FAST, binary_s=1.1).is_met
    assert replace(FAST, json_s=0.0).is_met


@pytest.mark.parametrize(
    "change", [{"path_s": (1.2, 11.0, 9.0)}, {"answer_bytes_per_row": 545.0}, {"prompt_bytes_share": 0.01}]
)
def test_each_goal_counts(change: dict[str, object]) -> None:
    assert GOOD.ratios == [1.0, 0.9, 2.0] and GOOD.median_ratio == 1.0 and GOOD.is_met
    assert not replace(GOOD, **change).is_met  # type: ignore[arg-type]


def test_the_whole_path_on_the_torch_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    monkeypatch.setattr(path, "MODEL", small)
    code = main(
        ["bench", "teachers", "--engine", "torch", "--pairs", "2", "--sequences", "6", "--top-k", "8", "--json"]
    )
    shown = json.loads(capsys.readouterr().out)
    throughput = shown["throughput"]
    assert len(throughput["ratios"]) == 2 and all(ratio > 0 for ratio in throughput["ratios"])
    assert throughput["num_rows"] == throughput["num_tokens"] - 6 * path.PROMPT_LENGTH
    rows = throughput["num_rows"]
    assert 8 * 8 + 4 < throughput["answer_bytes_per_row"] < 8 * 8 + 4 + 400 / rows
    assert throughput["prompt_bytes_share"] == 0
    assert 0 <= throughput["others_cores"] <= (os.cpu_count() or 1)
    assert shown["makespan"]["is_met"]
    assert code == (0 if all(part["is_met"] for part in shown.values()) else 1)


def test_impossible_options_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "teachers", "--pairs", "0"]) == 2
    assert capsys.readouterr().err == "mopd: error: --pairs is 0: set 1 or more\n"


def test_scoring_beside_a_bare_forward_pass() -> None:
    """On a CPU and small; what needs a GPU is refused."""
    scored = measure_scoring("small", SHAPE, [16] * 5, 4, dtype="float32", top_k=8, rounds=2)
    assert (scored.num_tokens, len(scored.engine_s), len(scored.forward_s)) == (80, 2, 2)
    slower = replace(scored, num_tokens=100, engine_s=(1.0, 2.0, 4.0), forward_s=(1.0, 1.0, 1.0)).tree()
    assert (slower["ratio"], slower["engine_tokens_per_s"], slower["forward_tokens_per_s"]) == (0.5, 50.0, 100.0)
    if not torch.cuda.is_available():
        assert main(["bench", "teachers", "--size", "qwen3-1.7b"]) == 2

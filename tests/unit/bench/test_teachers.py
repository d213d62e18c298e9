"""``mopd bench teachers`` on the torch engine: the whole path runs, and what it reports is what happened."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mopd.bench import teachers
from mopd.bench.models import TOY
from mopd.bench.teachers import measure_size
from mopd.cli.main import main
from mopd.config.groups import TorchEngineConfig, VllmEngineConfig
from mopd.engines.torch.engine import TorchEngine


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
    payloads = ("topk", "sampled", "student_topk", "union", "hidden")
    assert {row["name"]: len(row["seconds"]) for row in part["rows"]} == dict.fromkeys(("bare", *payloads), 2)
    carried = {row["name"]: row["row_bytes"] for row in part["rows"]}
    for payload, numbers in (("topk", 16), ("student_topk", 16), ("union", 32)):  # k = 8: ids and log-probs
        assert carried[payload] - carried["sampled"] == pytest.approx(4 * numbers, rel=0.02)
    assert carried["hidden"] - carried["sampled"] == pytest.approx(2 * small["hidden_size"], rel=0.02)
    assert part["num_rows"] == part["num_tokens"] - 6 * teachers.PROMPT_LENGTH
    answer = goals["answer_bytes_per_token"]
    assert 8 * 8 + 4 < answer["value"] < 8 * 8 + 4 + 400 / part["num_rows"]  # nothing of it belongs to prompts
    assert answer["at_most"] == 8 * 8 + 32 and answer["is_met"]
    bare, path, *_ = part["rows"]
    assert bare["ratio"] == 1 and goals["throughput"]["at_least"] == 0.85
    assert 0 <= told["others_cores"] <= (os.cpu_count() or 1)
    assert code == (0 if goals["throughput"]["value"] >= 0.85 else 1) and path["tokens_per_s"] > 0


def test_two_adapters_on_one_server_beside_merged_folders(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    monkeypatch.setattr(teachers, "MODEL", {**teachers.MODEL, **small})
    options = ["--engine", "torch", "--pairs", "2", "--sequences", "3", "--top-k", "8", "--json"]
    assert main(["bench", "teachers", "--adapter-rank", "4", *options]) == 0
    told = json.loads(capsys.readouterr().out)
    (part,) = told["parts"]
    shared, apart = part["rows"]
    assert apart["ratio"] == 1 and {len(row["seconds"]) for row in (shared, apart)} == {2}
    assert shared["tokens_per_s"] == pytest.approx(part["num_tokens"] / shared["median_s"])
    assert 0 < shared["memory_mib"] < apart["memory_mib"]  # a process less
    assert 0 < told["goals"]["error_nats"]["value"] < 1e-3  # other numbers, of the same adapters


def test_impossible_options_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "teachers", "--pairs", "0"]) == 2
    assert capsys.readouterr().err == "mopd: error: --pairs is 0: set 1 or more\n"
    assert main(["bench", "teachers", "--adapter-rank", "0"]) == 2
    assert capsys.readouterr().err == "mopd: error: --adapter-rank is 0: set 1 or more\n"
    assert main(["bench", "teachers", "--adapter-rank", "8", "--size", "qwen3-1.7b"]) == 2
    assert "--size qwen3-1.7b and --adapter-rank 8 measure different things" in capsys.readouterr().err


def test_scoring_beside_a_bare_forward_pass() -> None:
    """On a CPU and small; what needs a GPU is refused."""
    part = measure_size("small", TOY, [16] * 5, dtype="float32", top_k=8, prompt=4)
    engine, forward = part.rows
    assert part.facts["num_tokens"] == 80 and forward["ratio"] == 1
    assert engine["tokens_per_s"] == pytest.approx(80 / engine["median_s"])
    if not torch.cuda.is_available():
        assert main(["bench", "teachers", "--size", "qwen3-1.7b"]) == 2


def test_both_sides_are_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[str] = []

    def load(model: Path, cfg: TorchEngineConfig, device: str) -> Any:
        devices.append(device)
        return SimpleNamespace(score=print)

    async def open_bare() -> None:
        async with teachers._bare(Path(), TorchEngineConfig(), {}):
            pass

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(TorchEngine, "from_pretrained", load)
    asyncio.run(open_bare())
    config = teachers._engine_config("vllm")
    assert isinstance(config, VllmEngineConfig)
    assert (devices, config.dtype, config.enforce_eager) == (["cuda"], "bfloat16", False)

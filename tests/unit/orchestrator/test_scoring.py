"""``mopd score``, on real models in this process: what it keeps is what a teacher's folder says, and is kept once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mopd.base.files.records import Records
from mopd.cli.main import main
from mopd.config.groups import TorchEngineConfig
from mopd.engines.interface import ToScore
from mopd.engines.replicas.interface import RouterLimits
from mopd.engines.replicas.router import Router
from mopd.engines.torch.engine import TorchEngine
from mopd.orchestrator.kept.samples import StoredSamples
from tests.fixtures.tiny_models import FP32_FORWARD_ATOL, make_hf_model, make_tokenizer

TEXTS = [
    {"prompt": f"{word} {i}", "response": f"ab {i}", "domain": word} for i in range(20) for word in ("left", "right")
]
Score = Callable[..., tuple[int, list[str], Any]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for i, name in enumerate(("student", "left", "right")):
        make_tokenizer(make_hf_model(folder / name, seed=i))
    return folder


@pytest.fixture
def score(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Score:
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TEXTS))
    recipe = {
        "run_dir": str(tmp_path / "run"),
        "student": {"model": str(models / "student"), "optimizer": {"lr": 1e-3}},
        "teachers": {name: {"model": str(models / name), "domains": [name]} for name in ("left", "right")},
        "data": {
            "train": [{"path": str(tmp_path / "texts.jsonl"), "columns": {"prompt": "prompt", "domain": "domain"}}],
            "scored": [str(tmp_path / "samples")],
            "scores_cache": str(tmp_path / "scores"),
            "max_prompt_length": 16,
        },
        "rollout": {"max_response_length": 4},
        "loss": {"top_k": 4},
        "schedule": {"steps": 2, "prompts_per_step": 4, "on_policy_fraction": 0},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))

    def run(*arguments: str) -> tuple[int, list[str], Any]:
        code = main(["score", str(tmp_path / "recipe.yaml"), "--json", *arguments])
        captured = capsys.readouterr()
        lines = [line for line in captured.err.splitlines() if line.startswith("mopd: error")]
        return code, lines, json.loads(captured.out) if code == 0 else None

    return run


def test_texts_are_scored_once_by_their_domains_teachers(score: Score, models: Path, tmp_path: Path) -> None:
    code, lines, first = score("--texts", str(tmp_path / "texts.jsonl"))
    assert code == 0, lines
    assert (first["prompts"], first["scores_found_share"]) == (40, 0.0)
    code, _, again = score()
    assert (
        code == 0 and again["scores_found_share"] == 1.0 and again["scores_cache_bytes"] == first["scores_cache_bytes"]
    )
    stored = StoredSamples([tmp_path / "samples"], samples_per_prompt=1)
    assert sorted(stored.domains) == ["left"] * 20 + ["right"] * 20 and stored.domains[:20] != ["left"] * 20
    kept = [arrays["token_logprobs"] for _, arrays in Records(tmp_path / "scores").items()]
    assert len(kept) == 40
    for number, domain in enumerate(stored.domains[:4]):
        ((meta, own),) = stored.read(number)
        assert meta.response_length == 4 and meta.truncated == (own["tokens"][-1] != 2)
        engine = TorchEngine.from_pretrained(models / domain, TorchEngineConfig(dtype="float32"))
        (wanted,) = asyncio.run(engine.score(ToScore([own["tokens"]], [meta.prompt_length], top_k=4, temperature=1.0)))
        distances = [(torch.from_numpy(row) - wanted.token_logprobs).abs().max().item() for row in kept]
        assert min(distances) < FP32_FORWARD_ATOL, "some record is this sample's"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["data.scores_cache=null"], "mopd score writes into data.scores_cache, which is absent"),
        (["data.scored=[]", "schedule.on_policy_fraction=null"], "mopd score reads data.scored, which is empty"),
        ([], "samples holds no samples: name the folder samples of a run"),
        (["--texts", "TEXTS", "rollout.samples_per_prompt=2"], "rollout.samples_per_prompt is 2: name one, and set 1"),
        (["--texts", "EMPTY"], "column 'response' holds no text"),
        (["--texts", "TEXTS", "teachers.left.domains=[law]"], "no teacher answers for domain 'left'"),
        (["--texts", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_what_cannot_be_scored_is_one_line(score: Score, tmp_path: Path, arguments: list[str], line: str) -> None:
    (tmp_path / "empty.jsonl").write_text(json.dumps({**TEXTS[0], "response": ""}) + "\n")
    files = {"TEXTS": str(tmp_path / "texts.jsonl"), "EMPTY": str(tmp_path / "empty.jsonl")}
    code, lines, _ = score(*(files.get(argument, argument) for argument in arguments))
    assert code == 2 and len(lines) == 1 and line in lines[0]
    assert not (tmp_path / "scores").exists()


def test_texts_do_not_join_what_is_there(score: Score, tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "mine").touch()
    code, lines, _ = score("--texts", str(tmp_path / "texts.jsonl"))
    assert code == 2 and "samples (data.scored) is not empty: leave --texts out, or name another" in lines[0]


def test_a_teacher_that_is_not_its_folder_keeps_nothing(
    score: Score, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = TorchEngine.score

    async def shifted(self: TorchEngine, asked: ToScore) -> Any:
        return await real(self, replace(asked, tokens=[own.roll(1) for own in asked.tokens]))

    monkeypatch.setattr(TorchEngine, "score", shifted)
    assert Router.__init__.__kwdefaults__ is not None
    monkeypatch.setitem(Router.__init__.__kwdefaults__, "limits", RouterLimits(breaker_reset_s=0.1))
    code, lines, _ = score("--texts", str(tmp_path / "texts.jsonl"))
    assert code == 2 and "the scores are not this teacher's; check teachers.left" in lines[0]
    assert not (tmp_path / "scores").exists()

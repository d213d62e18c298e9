"""What travels to a replica's process: everything that it needs, nothing else, and back unchanged."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mopd.base.hardware import Hardware
from mopd.base.types import UserError
from mopd.config.groups import TorchEngineConfig, VllmEngineConfig
from mopd.config.load import Loaded, load_recipe
from mopd.launch.preparing import settled
from mopd.placement.engine_file import is_engine_file, read_engine_file, rollout_file, teacher_file
from mopd.placement.engine_loading import load_engine
from tests.fixtures.recipe import RECIPE

Load = Callable[..., Loaded]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(RECIPE)

    def with_overrides(*overrides: str) -> Loaded:
        return settled(load_recipe("recipe.yaml", overrides), Hardware())

    return with_overrides


VLLM = ("teachers.math.engine.type=vllm", "teachers.math.engine.max_scoring_tokens=999999")
VLLM += ("rollout.engine.type=vllm", "rollout.engine.max_num_batched_tokens=4096")


@pytest.mark.parametrize("overrides", [(), VLLM])
def test_a_file_comes_back_as_it_was(load: Load, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    recipe = load("teachers.math.replicas=2", *overrides).recipe
    for file in (teacher_file(recipe, "math", 1), rollout_file(recipe)):
        file.write(tmp_path / "engine.json")
        assert is_engine_file(tmp_path / "engine.json")
        assert read_engine_file(tmp_path / "engine.json") == file
        assert isinstance(file.engine, VllmEngineConfig if overrides else TorchEngineConfig)
    assert not is_engine_file("recipe.yaml") and not is_engine_file("none")


def test_what_follows_from_the_recipe(load: Load, tmp_path: Path) -> None:
    overrides = ("teachers.math.routing.max_tokens_per_request=7", "teachers.math.routing.max_inflight_tokens=500")
    recipe = load("teachers.math.replicas=2", *VLLM, *overrides, "rollout.temperature=0.5").recipe
    longest = recipe.data.max_prompt_length + recipe.rollout.max_response_length
    file = teacher_file(recipe, "math", 1)
    assert (file.role, file.name, file.label) == ("teacher", "math", "math/1")
    assert file.model == str(tmp_path / recipe.teachers["math"].model)
    assert file.max_logprobs == recipe.loss.top_k
    assert file.max_tokens_per_request == longest  # one sample is never cut
    assert file.max_queued_tokens == 1000
    assert isinstance(file.engine, VllmEngineConfig) and file.engine.max_model_len == longest
    rollout = rollout_file(recipe)
    assert (rollout.role, rollout.model) == ("rollout", str(tmp_path / recipe.student.model))
    assert (rollout.temperature, rollout.is_exact) == (0.5, True)
    cuts = (("top_p", 0.9), ("top_k", 5), ("min_p", 0.1), ("presence_penalty", 1), ("repetition_penalty", 2))
    assert not any(rollout_file(load(*VLLM, f"rollout.{name}={value}").recipe).is_exact for name, value in cuts)
    text = json.dumps(file.to_json())
    assert "run_dir" not in text and recipe.student.model not in text


def test_an_unknown_teacher(load: Load) -> None:
    with pytest.raises(UserError, match="--teacher maths: the recipe has no such teacher; it has math"):
        teacher_file(load().recipe, "maths")


def test_a_vllm_that_cannot_be_used_is_one_line(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absent, too old or of another CUDA: each is an ImportError."""
    file = teacher_file(
        load("teachers.math.engine={type: vllm, dtype: float32, kv_cache_memory_bytes: 1}").recipe, "math"
    )
    monkeypatch.setitem(sys.modules, "mopd.engines.vllm.engine", None)
    with pytest.raises(
        UserError, match=r"vLLM cannot be used by \S+ \(version there: .*: install there what mopd\[vllm\]"
    ):
        asyncio.run(load_engine(file, "cpu"))


DAMAGED: dict[str, tuple[dict[str, object], str]] = {
    "another format": ({"format": "mopd engine 0"}, "format is not 'mopd engine 1'"),
    "no format": ({"format": None}, "format is not"),
    "unknown engine": ({"engine": {"type": "other"}}, "engine.type: unknown type 'other'"),
    "no engine": ({"engine": None}, "engine: expected a section, got null"),
    "surplus key": ({"surplus": 1}, "unknown key 'surplus'"),
    "control characters": ({"name": "a\x1b"}, "holds a control character"),
    "path": ({"model": "a\0b"}, "model: 'a\\x00b' holds a NUL character"),
    "negative": ({"replica": -1}, "replica is -1: set 0 or more"),
    "zero": ({"max_tokens_per_request": 0}, "max_tokens_per_request is 0: set 1 or more"),
    "large": ({"max_logprobs": 2**62}, "max_logprobs is 4611686018427387904: set at most"),
    "no number": ({"request_timeout_s": float("nan")}, "NaN is no JSON number"),
    "endless": ({"startup_timeout_s": 1e9}, "startup_timeout_s is 1000000000.0: set 0.001 to 2000000 seconds"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file(load: Load, tmp_path: Path, case: str) -> None:
    change, line = DAMAGED[case]
    path = tmp_path / "engine.json"
    path.write_text(json.dumps({**teacher_file(load().recipe, "math").to_json(), **change}))
    with pytest.raises(UserError) as caught:
        read_engine_file(path)
    assert str(caught.value).startswith(f"{path}: is no engine file of this mopd (")
    assert line in str(caught.value) and str(caught.value).endswith(": let mopd write it anew")
    assert "\n" not in str(caught.value)


def test_what_is_no_engine_file(load: Load, tmp_path: Path) -> None:
    """A recipe that speaks of engine files is a recipe; nothing is waited for."""
    load()
    path = tmp_path / "file"
    for text in ("[]", "{", "", "[" * 10_000):
        path.write_text(text)
        with pytest.raises(UserError, match="is no engine file of this mopd"):
            read_engine_file(path)
    path.write_text("# mopd engine 1, by hand\n" + RECIPE)
    os.mkfifo(tmp_path / "pipe")
    for name in ("file", "pipe", "/dev/zero", ".", "x" * 300, "a\0b"):
        assert not is_engine_file(name)

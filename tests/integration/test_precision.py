"""``mopd check --beside``: what a teacher's low precision costs, with real vLLM on a CPU."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.fixtures.quantised import quantise_int8
from tests.fixtures.tiny_models import CHARACTERS, make_hf_model, make_tokenizer
from tests.integration.world import World, mopd

pytestmark = [pytest.mark.slow, pytest.mark.multirank]
ONE_RANK = {"tensor_model_parallel_size": 1}
VLLM = {
    "type": "vllm", "dtype": "bfloat16", "kv_cache_memory_bytes": 32 * 2**20, "enforce_eager": True,
}  # fmt: skip


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
def test_an_int8_teacher_costs_more_than_a_plain_one(world: World, tmp_path: Path) -> None:
    """Random weights, whose distributions are far from certain; both answer by the same engine."""
    random = make_hf_model(tmp_path / "plain", "qwen3", seed=8)
    make_tokenizer(random)
    teachers = {
        "left": {"model": str(quantise_int8(random, tmp_path / "int8")), "domains": ["left"]},
        "right": {"model": str(random), "domains": ["right"]},
    }
    placed = {"engine": VLLM, "placement": {"type": "local", "num_threads": 1}}
    recipe = world.write_recipe(
        tmp_path / "run", student__parallel=ONE_RANK, teacher_defaults=placed, teachers=teachers,
        preflight__require_better_teacher=False,
    )  # fmt: skip
    plain = [f"--beside={domain}={random}" for domain in teachers]
    done = mopd("check", recipe, *plain, "--json")
    assert done.returncode == 0, done.stderr
    found = {check["name"]: check for check in json.loads(done.stdout)}
    int8, bf16 = (found[f"precision of {domain}"] for domain in teachers)
    assert bf16["status"] == int8["status"] == "ok", (int8, bf16)
    assert 0 <= bf16["numbers"]["kl"] < int8["numbers"]["kl"] < int8["numbers"]["limit"]
    assert bf16["numbers"]["mean_difference"] < int8["numbers"]["mean_difference"] < int8["numbers"]["max_difference"]
    assert bf16["numbers"]["same_top1"] >= int8["numbers"]["same_top1"] > 0.8
    assert int8["numbers"]["limit"] == pytest.approx(0.1 * int8["numbers"]["student_kl"])


def test_a_folder_of_another_teacher_is_a_warning(world: World, tmp_path: Path) -> None:
    recipe = world.write_recipe(tmp_path / "run", student__parallel=ONE_RANK)
    done = mopd("check", recipe, f"--beside=left={world.teachers['right']}", "--json")
    assert done.returncode == 0, done.stderr
    found = {check["name"]: check for check in json.loads(done.stdout)}
    own = found["precision of left"]
    assert own["status"] == "warning" and own["numbers"]["kl"] > own["numbers"]["limit"]
    assert "precision of right" not in found


def test_what_cannot_be_compared_is_one_line(world: World, tmp_path: Path) -> None:
    recipe = world.write_recipe(tmp_path / "run", student__parallel=ONE_RANK)
    wide = make_hf_model(tmp_path / "wide", "qwen3", vocab_size=70)
    make_tokenizer(wide)
    other = make_hf_model(tmp_path / "other", "qwen3")
    make_tokenizer(other, characters=CHARACTERS[::-1])
    int8 = quantise_int8(world.teachers["left"], tmp_path / "int8")
    cases = {
        (f"--beside=left={int8}",): "'quantization_config': quantised weights are not supported; use the unquantised",
        ("--beside=math=x",): "--beside math: the recipe has no such teacher (it has 'left', 'right')",
        ("--beside=left=absent",): "--beside left: folder 'absent' does not exist",
        (f"--beside=left={wide}",): "has a vocabulary of 70 and teachers.left.model",
        (f"--beside=left={other}",): "do not share a tokenizer",
        ("--beside=left",): "--beside 'left': write NAME=FOLDER",
        ("--beside=left=a", "--beside=left=b"): "--beside names 'left' twice",
        ("--beside=left=a", "--static"): "--static does not: leave one out",
    }
    for words, line in cases.items():
        done = mopd("check", recipe, *words)
        assert done.returncode == 2 and line in done.stderr, (words, done.stderr)
        assert done.stderr.count("mopd: error:") == 1 and "Traceback" not in done.stderr

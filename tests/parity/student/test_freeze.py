"""A student of which ``student.freeze`` names parts.

Invariant: three supervised steps are those of plain PyTorch on transformers' model whose same weights want no gradient
(1e-5), at TP2 with sequence parallelism and full recompute, and over two stages that share a tied embedding; frozen
parts come out as they went in, bit for bit; a checkpoint goes on at another layout; engines get them once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mopd.conversion.models.frozen import constant_names
from mopd.conversion.models.reading import read_dims
from mopd.planning.memory.shards import student_shard
from tests.fixtures.tiny_models import make_hf_model
from tests.parity.student import weight_cases
from tests.parity.student.harness import run_ranks
from tests.parity.student.ranks import make_recipe
from tests.parity.student.test_families import LAYOUTS, STEPS, supervised
from tests.parity.student.test_layouts import assert_same_step
from tests.parity.student.test_weights import check

pytestmark = [pytest.mark.multirank, pytest.mark.slow]

Results = dict[str, Any]
FROZEN = {"tied": ["embeddings"], "experts": ["router", "expert_bias", "embeddings", "output_layer"]}
ENDS = {"tied": ("embed_tokens.weight",), "experts": ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")}
"""Of the names of frozen weights that transformers' model would train."""
STUDENTS = {"tied": LAYOUTS["pp2"], "experts": LAYOUTS["recompute"]}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("freeze")
    made = {"tied": "qwen3", "experts": "glm4_moe"}
    return {name: make_hf_model(folder / name, own, tie_word_embeddings=name == "tied") for name, own in made.items()}


@pytest.fixture(scope="module")
def cases(models: dict[str, Path]) -> dict[str, Results]:
    own = {name: {"model": str(folder), "frozen": FROZEN[name]} for name, folder in models.items()}
    cases: dict[str, Results] = {name: {**layout, **STEPS, **own[name]} for name, layout in STUDENTS.items()}
    cases["experts"]["save_hf"] = str(models["experts"].with_name("exported"))
    saved = {**own["experts"], "steps_after": 1}
    folder = str(models["experts"].with_name("checkpoint"))
    cases["save"] = {**LAYOUTS["tp2_sp"], **saved, "steps": 1, "save": folder}
    cases["load"] = {**LAYOUTS["pp2"], **saved, "load": folder}
    return cases


@pytest.fixture(scope="module")
def ranks(cases: dict[str, Results], tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_ranks(2, {"model": "unused", "cases": cases}, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", STUDENTS)
def test_steps_equal_plain_pytorch(ranks: Results, models: dict[str, Path], name: str) -> None:
    steps = ranks[name]["steps"]
    expected = supervised(models[name], tuple(step["lr"] for step in steps), ENDS[name])
    assert expected != supervised(models[name], tuple(step["lr"] for step in steps))
    for step, (loss, norm) in zip(steps, expected, strict=True):
        assert step["weighted_loss/math"] + step["weighted_loss/code"] == pytest.approx(loss, rel=1e-5)
        assert step["exact_grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("name", STUDENTS)
def test_frozen_parts_have_no_gradient_and_a_plan_knows(
    ranks: Results, cases: dict[str, Results], models: dict[str, Path], name: str
) -> None:
    student = make_recipe(str(models[name]), cases[name]).student
    planned = student_shard(read_dims(models[name]), student, 0)
    assert ranks[name]["num_trained"] == sum(planned.trained("tower")) < planned.num_weights


def test_an_export_has_their_bits(ranks: Results, cases: dict[str, Results], models: dict[str, Path]) -> None:
    assert ranks["experts"]["steps"]
    exported, before = (
        load_file(models["experts"].with_name(name) / "model.safetensors") for name in ("exported", "experts")
    )
    student = make_recipe(str(models["experts"]), cases["experts"]).student
    constants = constant_names(read_dims(models["experts"]), student)
    assert {name for name in before if torch.equal(exported[name], before[name])} == constants
    assert len(constants) == 4  # one layer of two has experts


def test_a_checkpoint_goes_on_at_another_layout(ranks: Results) -> None:
    saved, loaded = ranks["save"], ranks["load"]
    assert loaded["loaded_hash"] == saved["saved_hash"] != saved["hash"]
    assert_same_step(loaded["steps_after"][0], saved["steps_after"][0])


@pytest.mark.long
def test_engines_follow(models: dict[str, Path], tmp_path: Path) -> None:
    case = {**weight_cases.case_of(str(models["tied"]), "pp2"), "frozen": FROZEN["tied"]}
    found = run_ranks(2, {"model": "unused", "cases": {"sends": case}}, tmp_path)["sends"]
    check(found)
    assert found["num_constants"] == 1

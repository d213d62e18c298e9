"""Parts of a model that ``student.freeze`` can name. What freezing does: ``tests/parity/student/test_freeze.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from mopd.base.types import UserError
from mopd.config.student import FrozenPart, LoraConfig, MoeConfig, ParallelConfig, StudentConfig
from mopd.conversion.models.frozen import check_freeze, constant_names
from mopd.conversion.models.reading import read_dims
from mopd.planning.memory.shards import update_bytes
from mopd.planning.updates import pieces
from tests.fixtures.tiny_models import make_hf_model

ALL: tuple[FrozenPart, ...] = ("embeddings", "output_layer", "router", "expert_bias")


def student(folder: Path, *freeze: FrozenPart) -> StudentConfig:
    return StudentConfig(model=str(folder), dtype="float32", freeze=freeze)


def test_a_plan_leaves_out_what_does_not_travel(tmp_path: Path) -> None:
    """DeepSeek-V3 has every part; its vocabulary is no multiple of 128."""
    dims = read_dims(make_hf_model(tmp_path, "deepseek_v3", tie_word_embeddings=False))
    check_freeze(dims, student(tmp_path, *ALL))
    assert constant_names(dims, student(tmp_path, *ALL)) == {
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
    }
    assert constant_names(dims, student(tmp_path)) == frozenset()
    frozen = 2 * dims.vocab_size * 64 + 8 * 64 + 8
    assert update_bytes(dims, student(tmp_path)) - update_bytes(dims, student(tmp_path, *ALL)) == 4 * frozen
    every, some = (pieces(dims, ParallelConfig(), "tower", 4, 2**20, 2**20, parts) for parts in ((), ALL))
    assert every.tensors - some.tensors == 4


@pytest.mark.parametrize(
    ("family", "part", "line"),
    [
        (
            "qwen3",
            "router",
            "names router, which this model of model_type qwen3 does not have: .* embeddings$",
        ),
        ("qwen3", "output_layer", "model_type qwen3, whose head is its embedding, does not have"),
        ("qwen3_moe", "expert_bias", "names expert_bias, .* name some of embeddings, router$"),
    ],
)
def test_parts_that_are_not_there_are_refused(tmp_path: Path, family: str, part: FrozenPart, line: str) -> None:
    with pytest.raises(UserError, match=line):
        check_freeze(read_dims(make_hf_model(tmp_path, family)), student(tmp_path, part))


def test_keys_that_contradict_are_refused() -> None:
    with pytest.raises(ValueError, match="freeze names router beside lora, which freezes all"):
        StudentConfig(model="unused", lora=LoraConfig(), freeze=("router",))
    with pytest.raises(ValueError, match=r"freeze names expert_bias and moe.moe_router_bias_update_rate is 0.1"):
        StudentConfig(model="unused", freeze=("expert_bias",), moe=MoeConfig(moe_router_bias_update_rate=0.1))

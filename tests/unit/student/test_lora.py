"""What ``student.lora`` refuses, in one line each, and what a plan counts of it. That its numbers are right:
``tests/parity/student/test_lora.py``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mopd.base.types import UserError
from mopd.config.student import LoraConfig, MoeConfig, OptimizerConfig, ParallelConfig, StudentConfig
from mopd.conversion.models.adapted import adapted_modules, check_lora, target_names
from mopd.conversion.models.reading import read_dims
from mopd.planning.memory import shards
from mopd.student import cpu_shim
from mopd.student.model.gpt import build_chunks
from mopd.student.model.lora import add_adapters, all_factors
from mopd.student.parallel import Layout
from mopd.student.weights import adapter_tensors, rows_by_local_name
from tests.fixtures.adapters import ALPHA, RANK, random_adapter, write_adapter
from tests.fixtures.tiny_models import make_hf_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_model(tmp_path_factory.mktemp("lora") / "base", "qwen3")


@pytest.fixture(scope="module")
def adapter(base: Path) -> Path:
    return write_adapter(base.parent / "adapter", random_adapter(base, 1))


def attach(base: Path, layout: Layout, **keys: Any) -> list[Any]:
    """Return the factors of a student with adapters."""
    student = StudentConfig(model=str(base), dtype="float32", lora=LoraConfig(**{"rank": RANK, "alpha": ALPHA, **keys}))
    dims = read_dims(base)
    with cpu_shim.activate():
        chunks = build_chunks(student, dims, layout)
        rows = [rows_by_local_name(chunk, dims, layout) for chunk in chunks]
        add_adapters(chunks, rows, student, dims, layout, seed=0)
    return list(all_factors(chunks))


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"target_modules": ("q_proj", "lm_head")}, "head and embedding keep their weights"),
        ({"target_modules": ("embed_tokens",)}, "head and embedding keep their weights"),
        ({"target_modules": ("query",)}, "'query', which is no linear layer of model_type qwen3"),
        ({"rank": 4, "alpha": 8}, "student.lora.rank and student.lora.path .* differ: 4 and 8"),
        ({"alpha": 4}, "student.lora.alpha and student.lora.path .* differ: 4 and 16"),
        ({"target_modules": ("q_proj",)}, "student.lora.target_modules lacks 'model.layers.0"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(
    base: Path, adapter: Path, layout: Layout, keys: dict[str, Any], line: str
) -> None:
    with pytest.raises(UserError, match=line) as caught:
        attach(base, layout, path=str(adapter), **keys)
    assert "\n" not in str(caught.value)


def test_an_adapter_of_another_base_is_refused(base: Path, layout: Layout, tmp_path: Path) -> None:
    other = make_hf_model(tmp_path / "other", "qwen3", ffn_size=64)
    path = write_adapter(tmp_path / "adapter", random_adapter(other, 1))
    with pytest.raises(UserError, match="name the adapter's own base"):
        attach(base, layout, path=str(path))


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (
            {"lora": LoraConfig(), "moe": MoeConfig(moe_router_bias_update_rate=0.1)},
            "moe_router_bias_update_rate is 0.1",
        ),
        ({"optimizer": OptimizerConfig(min_lr=2e-6)}, "optimizer.min_lr 2e-06 is above optimizer.lr 1e-06"),
    ],
)
def test_keys_that_contradict_are_refused(keys: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        StudentConfig(model="unused", **keys)


def test_learning_rates_have_defaults_of_their_own() -> None:
    own = StudentConfig(model="unused")
    assert (own.peak_lr, replace(own, lora=LoraConfig()).peak_lr) == (1e-6, 1e-5)
    assert replace(own, lora=LoraConfig(), optimizer=OptimizerConfig(lr=3e-4)).peak_lr == 3e-4


def test_factors_are_those_that_are_told_and_planned(base: Path, layout: Layout) -> None:
    factors, config, dims = attach(base, layout), LoraConfig(rank=RANK, alpha=ALPHA), read_dims(base)
    told = dict(adapter_tensors(dims, config))
    assert {factor.name: tuple(factor.own.shape) for factor in factors} == told
    numel = sum(factor.own.numel() for factor in factors)
    assert numel == shards.adapter_weights(dims, config)
    student = StudentConfig(model=str(base), dtype="bfloat16", lora=config)
    sizes = shards.tensor_bytes(shards.student_shard(dims, student, 0), student)
    assert (sizes["gradients"], sizes["optimizer"]) == (4 * numel, 12 * numel)
    assert sizes["weights"] == 2 * (shards.shard(dims, ParallelConfig(), 0).num_weights + numel)
    assert all(bool(factor.own.any()) == (".lora_A." in factor.name) for factor in factors)


def test_some_layers_have_adapters(base: Path, layout: Layout) -> None:
    factors = attach(base, layout, target_modules=("q_proj", "v_proj", "down_proj"))
    assert {factor.name.split(".")[-3] for factor in factors} == {"q_proj", "v_proj", "down_proj"}
    assert len(factors) == 2 * 3 * 2


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_routers_have_none(tmp_path: Path, family: str) -> None:
    dims = read_dims(make_hf_model(tmp_path, family))
    assert not {"gate", "router", "lm_head", "embed_tokens"} & {*target_names(dims, "all_linear")}
    assert all(json.dumps(own.module).count("norm") == 0 for own in adapted_modules(dims, "all_linear"))


@pytest.mark.parametrize(
    ("family", "tp", "line"),
    [
        ("gemma3_text", 1, "model_type gemma3_text norm what attention and MLP return"),
        ("qwen3_next", 1, "model_type qwen3_next have gated delta nets"),
        ("phi3", 1, "model_type phi3 are merged in its checkpoints"),
        ("qwen3", 4, "tensor_model_parallel_size is 4 beside student.lora, and the model has 2 key/value heads"),
    ],
)
def test_layers_that_adapters_would_not_stand_beside_are_refused(
    tmp_path: Path, family: str, tp: int, line: str
) -> None:
    dims = read_dims(make_hf_model(tmp_path / family, family))
    parallel = ParallelConfig(tensor_model_parallel_size=tp)
    student = StudentConfig(model=str(tmp_path / family), parallel=parallel, lora=LoraConfig(rank=RANK))
    with pytest.raises(UserError, match=line):
        check_lora(dims, student)


@pytest.mark.parametrize("family", ["seed_oss", "glm4_moe", "deepseek_v3", "mixtral", "minimax_m2"])
def test_layers_like_others_are_taken(tmp_path: Path, family: str) -> None:
    dims = read_dims(make_hf_model(tmp_path / family, family))
    check_lora(dims, StudentConfig(model=str(tmp_path / family), lora=LoraConfig(rank=RANK)))

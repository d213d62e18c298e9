from __future__ import annotations

import re
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from mopd.base.types import UserError
from mopd.config.student import MoeConfig, ParallelConfig, StudentConfig, VisionConfig
from mopd.conversion.models.dims import MlaDims, ModelDims, MoeDims
from mopd.conversion.models.reading import read_dims
from mopd.conversion.models.stages import Stages
from mopd.student import cpu_shim
from mopd.student.model import config as model_config
from mopd.student.model.config import (
    TRANSFORMER_ENGINE,
    check_attention,
    check_fp8,
    transformer_config,
    uses_transformer_engine,
)
from mopd.student.model.gpt import build_model
from mopd.student.parallel import Layout
from tests.fixtures import engine_stand_in as stand_in
from tests.fixtures.vision import make_vision_model

DIMS = ModelDims(
    family="qwen3", num_layers=4, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, num_query_groups=2,
    head_dim=32, vocab_size=45, max_positions=256, rotary_base=10000.0, norm_epsilon=1e-6, tied_embeddings=True,
    qk_norm=True, qkv_bias=False,
)  # fmt: skip


EXPERTS = MoeDims(
    num_experts=4, experts_per_token=2, ffn_hidden_size=48, shared_ffn_hidden_size=0, layers=(True,) * 4,
    score_function="softmax", normalized=True, scaling_factor=1.0, num_groups=None, group_topk=None, expert_bias=False,
    router_fp32=False,
)  # fmt: skip


DEEPSEEK = replace(
    DIMS, mla=MlaDims(q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
)


LATENT = MlaDims(q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24)


def test_fp8_takes_dense_models_of_fitting_widths() -> None:
    fp8 = {"megatron_overrides": {"fp8": "hybrid", "fp8_recipe": "tensorwise"}}
    check_fp8(student(**fp8), DIMS, 1)
    check_fp8(student(**fp8), DIMS, 2)
    for dims, tp_size, part in (
        (DIMS, 4, "intermediate_size is 24 on a tensor-parallel rank, no multiple of 16"),
        (replace(DIMS, hidden_size=72), 1, "hidden_size is 72"),
        (replace(DIMS, moe=EXPERTS), 1, "dense text models alone"),
    ):
        with pytest.raises(UserError, match=part):
            check_fp8(student(**fp8), dims, tp_size)
    with pytest.raises(UserError, match="set it to bfloat16"):
        check_fp8(student(dtype="float32", **fp8), DIMS, 1)
    with pytest.raises(UserError, match=r"without fp8_recipe .* set fp8_recipe: tensorwise beside it"):
        check_fp8(student(megatron_overrides={"fp8": "hybrid"}), DIMS, 1)


def student(**keys: Any) -> StudentConfig:
    return StudentConfig(model="unused", **{"dtype": "bfloat16", **keys})


def test_a_field_that_mopd_sets_is_refused(layout: Layout) -> None:
    with pytest.raises(
        UserError, match=r"student.megatron_overrides.num_layers: mopd sets this field from student.model"
    ):
        transformer_config(student(megatron_overrides={"num_layers": 2}), DIMS, layout)
    with pytest.raises(UserError, match=r"recompute_granularity: student.recompute sets this field"):
        overrides = {"recompute_granularity": "full"}
        transformer_config(student(megatron_overrides=overrides, recompute="selective"), DIMS, layout)


def test_a_value_that_megatron_refuses_is_one_line(layout: Layout) -> None:
    overrides = {"recompute_granularity": "selective", "recompute_method": "uniform", "recompute_num_layers": 2}
    with pytest.raises(UserError, match=r"student.megatron_overrides .* Megatron refuses: ") as error:
        transformer_config(student(megatron_overrides=overrides), DIMS, layout)
    assert "\n" not in str(error.value)


def test_chunks_of_recomputed_layers_divide_a_stage(layout: Layout) -> None:
    """Megatron would run past the last layer, or never end."""
    overrides = {"recompute_granularity": "full", "recompute_method": "uniform"}
    for number in (1, 2, 4):
        given = student(megatron_overrides={**overrides, "recompute_num_layers": number})
        assert transformer_config(given, DIMS, layout).recompute_num_layers == number
    for number, message in ((3, "3 does not divide the 4 layers"), (8, "8 does not divide"), (0, "0 is not a whole")):
        with pytest.raises(UserError, match=f"student.megatron_overrides.recompute_num_layers: {message}"):
            transformer_config(student(megatron_overrides={**overrides, "recompute_num_layers": number}), DIMS, layout)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_transformer_engine_without_cuda_is_refused() -> None:
    with pytest.raises(UserError, match=r"student.transformer_impl is 'transformer_engine' but .* missing"):
        uses_transformer_engine(student(transformer_impl="transformer_engine"), DIMS)
    assert not uses_transformer_engine(student(transformer_impl="auto"), DIMS)


@pytest.mark.parametrize(
    ("keys", "dims", "sizes", "message"),
    [
        ({}, replace(DIMS, moe=EXPERTS), {"tp_size": 2}, "set student.parallel.sequence_parallel: true"),
        ({}, replace(DIMS, mla=LATENT), {"tp_size": 2}, "has latent attention: set student.parallel.sequence_parallel"),
        (
            {},
            replace(DIMS, mla=LATENT, moe=EXPERTS),
            {"tp_size": 2},
            "tensor_model_parallel_size is 2 and the model has experts and latent attention: set",
        ),
        ({"moe": MoeConfig(moe_z_loss_coeff=0.1)}, DIMS, {}, "student.moe is set but model_type qwen3 has no experts"),
        (
            {
                "moe": MoeConfig(moe_router_load_balancing_type="seq_aux_loss"),
                "megatron_overrides": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
            },
            replace(DIMS, moe=EXPERTS),
            {},
            "which packed sequences do not allow: set student.recompute: full",
        ),
        ({"moe": MoeConfig(moe_grouped_gemm=True)}, replace(DIMS, moe=EXPERTS), {}, "moe_grouped_gemm is true but"),
        ({}, replace(DIMS, moe=EXPERTS), {"ep_size": 3}, "expert_model_parallel_size 3 does not divide"),
        ({}, DIMS, {"ep_size": 2}, "expert_model_parallel_size is 2 but model_type qwen3 has no experts"),
    ],
)
def test_what_experts_and_latent_attention_need_is_one_line(
    layout: Layout, keys: dict[str, Any], dims: ModelDims, sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(UserError, match=message) as error:
        transformer_config(student(**keys), dims, replace(layout, **sizes))
    assert "\n" not in str(error.value)


def test_experts_must_fit_the_ranks_of_a_stage() -> None:
    assert (
        ParallelConfig(tensor_model_parallel_size=2, data_parallel_size=2, expert_model_parallel_size=2).expert_ranks
        == 4
    )
    assert ParallelConfig(data_parallel_size=4, expert_model_parallel_size=2).world_size == 4
    with pytest.raises(
        ValueError, match="expert_model_parallel_size 2 x expert_tensor_parallel_size 2 does not divide"
    ):
        ParallelConfig(tensor_model_parallel_size=2, expert_model_parallel_size=2)


def test_a_section_about_vision_needs_a_tower(layout: Layout) -> None:
    with pytest.raises(UserError, match=r"student.vision is set but model_type qwen3 has no vision"):
        transformer_config(student(vision=VisionConfig(freeze="none")), DIMS, layout)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ((1, 2, None, None), "virtual_pipeline_model_parallel_size is 2 but pipeline_model_parallel_size is 1: set"),
        ((1, 1, None, 3), "num_layers_in_last_pipeline_stage is 3 but pipeline_model_parallel_size is 1: set"),
        ((2, 1, 3, 3), "are both set but pipeline_model_parallel_size is 2, so that each follows from the other"),
        ((2, 0, None, None), "virtual_pipeline_model_parallel_size"),
        ((2, 1, None, 0), "num_layers_in_last_pipeline_stage"),
    ],
)
def test_stages_that_a_recipe_cannot_have(keys: tuple[int | None, ...], line: str) -> None:
    names = [field.name for field in fields(Stages)]
    with pytest.raises(ValueError, match=line):
        ParallelConfig(**dict(zip(names, keys, strict=True)))  # type: ignore[arg-type]


def test_chunks_of_a_stage(layout: Layout) -> None:
    parallel = ParallelConfig(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    virtual, dims = replace(layout, pp_size=2, vp_size=2), replace(DIMS, num_layers=8)
    config = transformer_config(student(parallel=parallel), dims, virtual)
    assert (config.virtual_pipeline_model_parallel_size, config.microbatch_group_size_per_vp_stage) == (2, 2)
    assert config.batch_p2p_comm and not config.overlap_p2p_comm
    with pytest.raises(UserError, match=r"virtual_pipeline_model_parallel_size 2 does not divide the 3 layers of"):
        transformer_config(student(parallel=parallel), replace(DIMS, num_layers=6), virtual)
    for overrides, line in (
        ({"batch_p2p_comm": False}, "batch_p2p_comm: false with student.parallel.virtual_pipeline"),
        (
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 4},
            "recompute_num_layers: 4 does not divide the 2 layers of a chunk of a pipeline stage",
        ),
    ):
        with pytest.raises(UserError, match=line):
            transformer_config(student(parallel=parallel, megatron_overrides=overrides), dims, virtual)


def test_stages_of_unequal_length(layout: Layout) -> None:
    given = {"parallel": ParallelConfig(pipeline_model_parallel_size=2, num_layers_in_first_pipeline_stage=1)}
    config = transformer_config(student(**given), DIMS, replace(layout, pp_size=2))
    assert config.num_layers_in_first_pipeline_stage == 1
    overrides = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 3}
    with pytest.raises(UserError, match=r"recompute_num_layers: 3 does not divide the 1 layers"):
        transformer_config(student(**given, megatron_overrides=overrides), DIMS, replace(layout, pp_size=2))


def test_what_transformer_engine_cannot_is_refused(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine that has it."""
    monkeypatch.setattr(
        model_config, "uses_transformer_engine", lambda student, dims: student.transformer_impl != "local"
    )
    seeing = read_dims(make_vision_model(tmp_path / "seeing"))
    with pytest.raises(
        UserError, match=r"context_parallel_size is 2 and model_type qwen2_5_vl sees images: set student.tr"
    ):
        transformer_config(student(), seeing, replace(layout, cp_size=2))


DETERMINISTIC = {"megatron_overrides": {"deterministic_mode": True}}


@pytest.mark.parametrize(
    ("keys", "dims", "length", "capability", "line"),
    [
        ({}, DIMS, 8192, (9, 0), None),
        ({"dtype": "float32", "packing": False}, DIMS, 4096, (9, 0), None),
        ({"dtype": "float32", "packing": False}, DIMS, 4097, (9, 0), "padded sequences of up to 4097 tokens"),
        ({"dtype": "float32"}, DIMS, 64, (9, 0), r"float32, packed .* local, or student.dtype: bfloat16"),
        ({}, DEEPSEEK, 8192, (9, 0), None),
        ({}, DEEPSEEK, 8192, (8, 0), "heads of 192 and 128 channels: set student.transformer_impl: local"),
        ({}, DIMS, 8192, (12, 0), "packed sequences of up to 8192 tokens"),
        ({"packing": False}, DIMS, 8192, (12, 0), None),
        ({"dtype": "float32", "transformer_impl": "local"}, DEEPSEEK, 8192, (8, 0), None),
        ({"packing": False}, DIMS, 8192, (8, 0), None),
        ({"packing": False, **DETERMINISTIC}, DIMS, 8192, (8, 0), "padded sequences of up to 8192 tokens"),
        ({"packing": False, **DETERMINISTIC}, DIMS, 8192, (9, 0), None),
    ],
)
def test_attention_without_a_kernel_is_refused(
    keys: dict[str, Any], dims: ModelDims, length: int, capability: tuple[int, int], line: str | None, layout: Layout,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """TransformerEngine is asked, which knows the GPU."""
    utils = "transformer_engine.pytorch.attention.dot_product_attention.utils"
    monkeypatch.setitem(sys.modules, utils, stand_in)  # type: ignore[arg-type]
    monkeypatch.setattr(stand_in, "CAPABILITY", list(capability))
    monkeypatch.setattr(
        model_config, "uses_transformer_engine", lambda student, dims: student.transformer_impl != "local"
    )
    if line is None:
        check_attention(student(**keys), dims, layout, max_length=length)
        return
    with pytest.raises(UserError, match=line) as error:
        check_attention(student(**keys), dims, layout, max_length=length)
    assert "\n" not in str(error.value)


def test_a_variable_of_transformer_engine_that_megatron_refuses_is_one_line(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron sets these itself, and stops where a user's value is another."""
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    with pytest.raises(UserError, match="NVTE_FUSED_ATTN set to 0, but expected 1") as error, cpu_shim.activate():
        build_model(student(), DIMS, layout)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("version", "is_taken"),
    [("2.8.0", False), ("2.9.0+abc", True), ("2.12.0+5671fd36", True), ("2.13.0.dev0", False), ("2.15.0", False)],
)
def test_another_version_of_transformer_engine_is_refused(
    version: str, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_config, "HAVE_TE", True)
    monkeypatch.setattr(model_config, "get_te_version", lambda: Version(version))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not uses_transformer_engine(student(transformer_impl="local"), DIMS)
    if is_taken:
        assert uses_transformer_engine(student(), DIMS)
        return
    with pytest.raises(UserError, match=rf"{re.escape(version)} is installed, .* >=2.9,<2.13: install one .* local$"):
        uses_transformer_engine(student(), DIMS)


def test_a_transformer_engine_of_another_torch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron takes it for absent, and the layers would be local ones in silence."""
    (package := tmp_path / "transformer_engine" / "pytorch").mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text("raise ImportError('te.so: undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not uses_transformer_engine(student(transformer_impl="local"), DIMS)
    for impl in ("auto", "transformer_engine"):
        with pytest.raises(
            UserError, match=r"cannot be imported \(.*undefined symbol: _ZN3c10\): install one that was"
        ):
            uses_transformer_engine(student(transformer_impl=impl), DIMS)
    del sys.modules["transformer_engine"]


def test_all_files_name_the_same_versions_of_transformer_engine() -> None:
    root = Path(__file__).parents[3]
    for name in ("pyproject.toml", "docker/Dockerfile.gpu"):
        assert TRANSFORMER_ENGINE in (root / name).read_text(), name


def test_context_parallel_ranks_are_ranks_of_a_stage() -> None:
    parallel = ParallelConfig(tensor_model_parallel_size=2, context_parallel_size=3, data_parallel_size=2)
    assert (parallel.world_size, parallel.ranks_per_stage, parallel.num_copies) == (12, 12, 6)
    assert ParallelConfig(context_parallel_size=4, expert_model_parallel_size=4).world_size == 4
    with pytest.raises(ValueError, match="x context_parallel_size 3 x data_parallel_size 1: set"):
        ParallelConfig(context_parallel_size=3, expert_model_parallel_size=2)

"""Plans of teachers whose weights are quantised, in their checkpoint or by their engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mopd.base.types import UserError
from mopd.cli.main import main
from mopd.conversion.models.reading import read_dims
from mopd.planning.memory.shards import total_weights
from mopd.planning.memory.stored import stored_format, weights_bytes
from tests.unit.planning.test_plan import CONFIGS, ONE_NODE

GIB = 2**30
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_act": "silu",
    "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4,
    "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280, "attention_bias": False,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
}  # fmt: skip
"""Config of DeepSeek-V3 and R1 as they are published."""
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
INT4 = {
    "quant_method": "compressed-tensors", "ignore": ["lm_head", "re:.*self_attn.*"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
}  # fmt: skip


def made(folder: Path, config: dict[str, Any], quantisation: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}))
    return folder


def qwen(name: str) -> dict[str, Any]:
    return dict(json.loads((Path(CONFIGS) / name / "config.json").read_text()))


def planned(capsys: pytest.CaptureFixture[str], *arguments: str, gpu: str = "h200") -> Any:
    command = ["plan", ONE_NODE, "--gpu", gpu, "--configs", CONFIGS, "--nodes", "2", "--json"]
    large = ["teachers.math.placement={type: registered}", "teachers.math.engine.tensor_parallel_size=8"]
    assert main([*command, *large, *arguments]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_a_checkpoint_in_fp8_is_planned_as_it_is_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Eight GPUs hold DeepSeek-V3 as it is published, and not in bf16; what a step of few tokens reads is half."""
    folder = made(tmp_path / "V3", DEEPSEEK_V3, DEEPSEEK_V3["quantization_config"])
    keys = [f"teachers.math.model={folder}", "teachers.math.engine.gpu_memory_utilization=0.88"]
    own = planned(capsys, *keys)["replicas"]["teachers.math"]
    assert own["parts"]["weights"] / GIB == pytest.approx(78.4, abs=0.1) and own["stored"] == "fp8"
    assert own["weight_bytes"] == pytest.approx(1.0, abs=0.01)
    plain = made(tmp_path / "plain", DEEPSEEK_V3, None)
    command = ["plan", ONE_NODE, "--gpu", "h200", "--nodes", "2", "--configs", CONFIGS, keys[1]]
    keys = ["teachers.math.placement={type: registered}", "teachers.math.engine.tensor_parallel_size=8"]
    assert main([*command, *keys, f"teachers.math.model={plain}"]) == 2
    assert "teachers.math.engine.tensor_parallel_size: 8: weights (156.2 GiB on each GPU)" in capsys.readouterr().err


def test_what_the_engine_quantises_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """Its weights, and the keys and values of its cache."""
    extra = "teachers.math.engine.extra={{quantization: {}, kv_cache_dtype: {}}}"
    before, after = (
        planned(capsys, extra.format(*ways), gpu="h100")["replicas"]["teachers.math"]
        for ways in (("null", "auto"), ("fp8", "fp8_e4m3"))
    )
    assert 0.5 < after["parts"]["weights"] / before["parts"]["weights"] < 0.6
    assert (before["number_bytes"], after["number_bytes"]) == (2, 1)
    assert after["cache_tokens"] > 2 * before["cache_tokens"]


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("quantization: experts_int8", "engine.extra: quantization 'experts_int8': a plan knows the bytes of fp8"),
        ("kv_cache_dtype: nvfp4", "engine.extra: kv_cache_dtype 'nvfp4': a plan knows auto"),
    ],
)
def test_what_a_plan_does_not_know_of_an_engine_is_one_line(
    key: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", ONE_NODE, "--gpu", "h100", "--configs", CONFIGS]
    assert main([*command, f"teachers.math.engine.extra={{{key}}}"]) == 2
    error = capsys.readouterr().err
    assert f"teachers.math.{line}" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("model", "quantisation", "size", "kept"),
    [
        ("Qwen3-8B", {"quant_method": "fp8", "weight_block_size": [128, 128]}, 1 + 4 / 128**2, 0),
        ("Qwen3-8B", AWQ, 0.5 + 2.5 / 128, 0),
        ("Qwen3-8B", {"quant_method": "gptq", "bits": 8, "group_size": -1}, 1, 0),
        ("Qwen3-8B", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5625, 0),
        ("Qwen3-8B", {"quant_method": "bitsandbytes", "load_in_4bit": True}, 0.515625, 0),
        ("Qwen3-8B", INT4, 0.5625, 36 * (2 * 4096 + 2 * 1024) * 4096),
        ("Qwen3-8B", {**AWQ, "modules_to_not_convert": ["model.layers.0", "gate_proj"]}, 0.5 + 2.5 / 128,
         (2 * 4096 + 2 * 1024) * 4096 + (36 + 2) * 12288 * 4096),
        ("Qwen3-30B-A3B", {"quant_method": "mxfp4"}, 0.53125, 48 * (2 * 4096 + 2 * 512) * 2048),
    ],
)  # fmt: skip
def test_bytes_of_a_format(model: str, quantisation: dict[str, Any], size: float, kept: int, tmp_path: Path) -> None:
    """Matrices of the layers, less ``kept`` weights of them that stay as they are."""
    folder = made(tmp_path / model, qwen(model), quantisation)
    dims = read_dims(folder, takes_quantised=True)
    tables = (1 if dims.tied_embeddings else 2) * dims.vocab_size * dims.hidden_size
    router = 0 if dims.moe is None else dims.num_layers * dims.moe.num_experts * dims.hidden_size
    norms = dims.num_layers * (2 * dims.hidden_size + 2 * dims.head_dim) + dims.hidden_size
    others = tables + router + norms + kept
    expected = (total_weights(dims) - others) * size + 2 * others
    assert weights_bytes(dims, 2, stored_format(folder)) == round(expected)


@pytest.mark.parametrize(
    ("quantisation", "line"),
    [
        ({"quant_method": "aqlm"}, "'quantization_config.quant_method'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "is no block of rows and columns"),
        ({"quant_method": "awq"}, "'quantization_config.w_bit'"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "names no group"),
        ({**INT4, "ignore": ["re:("]}, "is no regular expression"),
    ],
)
def test_a_format_whose_bytes_nobody_knows(quantisation: dict[str, Any], line: str, tmp_path: Path) -> None:
    folder = made(tmp_path / "model", qwen("Qwen3-8B"), quantisation)
    with pytest.raises(UserError) as caught:
        stored_format(folder)
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_only_an_engine_reads_quantised_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The student's are refused, by a plan and by the static checks; a teacher's pass both."""
    folder = made(tmp_path / "Qwen3-8B-AWQ", qwen("Qwen3-8B"), AWQ)
    command = ["plan", ONE_NODE, "--gpu", "h100", "--configs", CONFIGS]
    assert main([*command, f"student.model={folder}"]) == 2
    assert "'quantization_config': quantised weights are not supported" in capsys.readouterr().err
    checked = {}
    for key in ("student", "teachers.math"):
        main(["check", ONE_NODE, "--static", "--json", f"{key}.model={folder}"])
        lines = [line for line in capsys.readouterr().out.splitlines() if "quantised weights" in line]
        checked[key] = bool(lines)
    assert checked == {"student": True, "teachers.math": False}

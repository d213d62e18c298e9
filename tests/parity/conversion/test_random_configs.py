"""Random configs of every family: what is read computes what transformers computes, what is refused is refused by key.

``make families`` draws 50 of each family, ``make test`` a few of all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.utils import logging

from mopd.base.types import UserError
from mopd.conversion.models.config_keys import CONFIG_FILE
from tests.fixtures.tiny_models import FAMILIES, make_hf_model
from tests.parity.conversion.test_logits import VOCAB_SIZE, YARN, both_logits, layout

__all__ = ["layout"]

NUM_CONFIGS = 50 if os.environ.get("MOPD_FAMILIES") == "all" else 2
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    YARN,
    YARN | {"factor": 1.5, "beta_fast": 8.0, "beta_slow": 2.0},
    YARN | {"attention_factor": 1.2},
    YARN | {"truncate": False},
    {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "dynamic", "factor": 2.0},
]  # fmt: skip
DELTA = {
    "linear_num_value_heads": [2, 4, 6], "linear_key_head_dim": [8, 20], "linear_value_head_dim": [12, 16],
    "linear_conv_kernel_dim": [2, 4], "full_attention_interval": [1, 2, 3],
}  # fmt: skip
EXPERTS = {"num_experts": [2, 6], "num_experts_per_tok": [1, 2], "moe_intermediate_size": [16, 40]}
CHOICES: dict[str, dict[str, list[Any]]] = {
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": [True, False], "decoder_sparse_step": [1, 2]},
    "qwen3_next": {**DELTA, **EXPERTS, "norm_topk_prob": [True, False], "decoder_sparse_step": [1, 2]},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **EXPERTS},
    "mixtral": {"num_local_experts": [2, 5], "num_experts_per_tok": [1, 2]},
    "deepseek_v2": {"q_lora_rank": [None, 24], "v_head_dim": [16, 40], "norm_topk_prob": [True, False]},
    "deepseek_v3": {
        "q_lora_rank": [None, 24], "n_group": [1, 2, 4], "topk_group": [1, 2], "num_experts_per_tok": [2, 4],
        "first_k_dense_replace": [0, 1], "n_shared_experts": [1, 2],
    },
    "glm4_moe": {
        "use_qk_norm": [True, False], "attention_bias": [True, False], "n_shared_experts": [1, 2],
        "num_experts_per_tok": [1, 2, 3], "first_k_dense_replace": [0, 1], "norm_topk_prob": [True, False],
    },
    "seed_oss": {"attention_bias": [True, False], "attention_out_bias": [False, True], "mlp_bias": [False, True]},
    "phi3": {"sliding_window": [None, 8]},
    "gemma3_text": {
        "sliding_window": [3, 30], "sliding_window_pattern": [1, 2, 4], "query_pre_attn_scalar": [8, 20],
        "attention_bias": [False, False, True], "final_logit_softcapping": [None, None, 30.0],
    },
    "gpt_oss": {
        "num_local_experts": [3, 5], "num_experts_per_tok": [2, 3, 1], "sliding_window": [3, 30],
        "attention_bias": [*[True] * 5, False], "swiglu_limit": [*[7.0] * 5, 1.0], "swiglu_alpha": [*[1.702] * 5, 1.0],
        "layer_types": [None, ["full_attention", "sliding_attention", "full_attention"], ["full_attention"] * 3],
    },
    "olmo3": {
        "sliding_window": [3, 30], "attention_bias": [False, False, True],
        "layer_types": [None, ["full_attention", "sliding_attention", "full_attention"], ["full_attention"] * 3],
    },
    "minimax_m2": {
        "num_local_experts": [3, 5], "num_experts_per_tok": [2, 3, 1], "rotary_dim": [4, 8],
        "use_qk_norm": [*[True] * 5, False], "shared_intermediate_size": [*[0] * 5, 8],
    },
    "mistral": {"sliding_window": [None, 8]},
    "llama": {"attention_bias": [False, True], "mlp_bias": [False, True]},
    "qwen3": {"attention_bias": [False, True]},
}  # fmt: skip
"""Keys of a family beside those of all, and their values."""
ROPES = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), SCALINGS[:2]),
    "phi3": SCALINGS[:1],
    "deepseek_v2": [SCALINGS[0], *SCALINGS[2:5]],
    "deepseek_v3": [SCALINGS[0], *SCALINGS[2:5]],
}
"""Of families that have not all."""


@st.composite
def configs(draw: st.DrawFn, family: str) -> dict[str, Any]:
    heads = draw(st.sampled_from([2, 4, 6]))
    groups = (
        heads if family.startswith("deepseek") else draw(st.sampled_from([n for n in (1, 2, 3, 6) if heads % n == 0]))
    )
    keys = {
        "num_heads": heads, "num_kv_heads": groups, "hidden_size": heads * draw(st.sampled_from([8, 12, 20])),
        "head_dim": draw(st.sampled_from([8, 24])), "ffn_size": draw(st.sampled_from([20, 56])),
        "num_layers": draw(st.integers(2, 3)), "tie_word_embeddings": draw(st.booleans()),
    }  # fmt: skip
    rope = {"rope_theta": draw(st.sampled_from([10000.0, 5e5]))} | draw(st.sampled_from(ROPES.get(family, SCALINGS)))
    if draw(st.integers(0, 5)) == 5:
        rope["partial_rotary_factor"] = draw(st.sampled_from([0.5, 1.0]))
    own = {key: draw(st.sampled_from(values)) for key, values in CHOICES.get(family, {}).items()}
    if own.get("layer_types"):
        own["layer_types"] = own["layer_types"][: keys["num_layers"]]
    if family in ("gemma3_text", "olmo3"):
        rope = {"full_attention": rope, "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}}
    return keys | own | {"rope_parameters": rope}


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


@pytest.mark.parametrize("family", FAMILIES)
def test_random_configs(family: str, layout: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    seen = {"read": 0, "refused": 0}

    @settings(
        max_examples=NUM_CONFIGS, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(configs(family))
    def check(keys: dict[str, Any]) -> None:
        folder = tmp_path_factory.mktemp(family)
        make_hf_model(folder, family, vocab_size=VOCAB_SIZE, **keys)
        try:
            found, expected = both_logits(folder, layout)
        except UserError as error:
            assert str(error).startswith(f"{folder / CONFIG_FILE}: '"), error
            assert "\n" not in str(error)
            seen["refused"] += 1
            return
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
        seen["read"] += 1

    check()
    assert seen["read"] >= NUM_CONFIGS // 10, seen

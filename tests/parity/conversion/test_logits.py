"""A converted checkpoint computes what transformers computes: fp32 logits within 1e-4, every family and kind of rope.

A round trip cannot see a mistake that load and export share (q and k swapped twice, a wrong rotary base): this can.
One rank; other layouts are compared with this one in ``tests/parity/student``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from mopd.config.student import ParallelConfig, StudentConfig
from mopd.conversion.hf.reader import HfReader
from mopd.conversion.models.reading import read_dims
from mopd.student import cpu_shim, parallel
from mopd.student.model.gpt import build_model
from mopd.student.weights import load_hf_into
from tests.fixtures.tiny_models import FAMILIES, make_hf_model

B, S, VOCAB_SIZE = 2, 23, 61
ROPE = {"rope_type": "default", "rope_theta": 500000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16}
OLMO_ROPES = {"sliding_attention": ROPE, "full_attention": YARN}
LLAMA_3_ON_THE_WAY = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.5, "high_freq_factor": 6.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
"""Constants of its own, with wavelengths on either side and between."""


@pytest.fixture(scope="module")
def layout() -> Iterator[parallel.Layout]:
    yield parallel.initialize(ParallelConfig(), timeout_s=60, seed=0)
    parallel.destroy()
    dist.destroy_process_group()


def both_logits(folder: Path, layout: parallel.Layout, *, num_tokens: int = S) -> tuple[Tensor, Tensor]:
    """Megatron's and transformers' logits [B, S, V] of the same random tokens."""
    dims = read_dims(folder)
    tokens = torch.randint(VOCAB_SIZE, (B, num_tokens), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(num_tokens).expand(B, num_tokens)
    with cpu_shim.activate(), torch.no_grad():
        model = build_model(StudentConfig(model=str(folder), dtype="float32"), dims, layout)
        for parameter in model.parameters():
            parameter.fill_(float("nan"))  # what the load forgets must not pass for loaded
        load_hf_into([model], HfReader(folder), dims, layout)
        logits = model(tokens, positions)[..., :VOCAB_SIZE]
    with torch.no_grad():
        # transformers keeps no cache of a model whose layers are all gated delta nets.
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens, use_cache=False).logits
    assert expected.std() > 0.5, "logits too flat to tell anything"
    return logits, expected


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family: str, tied: bool, layout: parallel.Layout, tmp_path: Path):
    epsilon = 1e-6 if family.startswith("deepseek") else 1e-5
    folder = make_hf_model(
        tmp_path, family, vocab_size=VOCAB_SIZE, tie_word_embeddings=tied, rope_parameters=ROPE, rms_norm_eps=epsilon
    )
    logits, expected = both_logits(folder, layout)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 1}),
        ("qwen3_moe", {"mlp_only_layers": [1], "num_hidden_layers": 3}),
        ("qwen3_moe", {"decoder_sparse_step": 2}),
        ("deepseek_v2", {"q_lora_rank": 48}),
        ("deepseek_v2", {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}),
        ("deepseek_v2", {"first_k_dense_replace": 0}),
        ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 16.0}}),
        ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}}),
        ("deepseek_v3", {"rope_parameters": YARN}),
        ("deepseek_v3", {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
        ("deepseek_v3", {"v_head_dim": 40}),
        ("glm4_moe", {"use_qk_norm": False, "attention_bias": False}),
        ("glm4_moe", {"rope_parameters": ROPE | {"partial_rotary_factor": 0.25}}),
        ("phi3", {"rope_parameters": ROPE | {"partial_rotary_factor": 0.75}}),
        ("seed_oss", {"attention_bias": False, "rope_parameters": ROPE | {"rope_type": "linear", "factor": 4.0}}),
        ("qwen3_moe", {"rope_parameters": YARN}),
        ("qwen2", {"rope_parameters": YARN | {"truncate": False, "beta_fast": 16.0}}),
        ("llama", {"rope_parameters": YARN | {"attention_factor": 0.7}}),
        ("mistral", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}}),
        ("llama", {"rope_parameters": LLAMA_3_ON_THE_WAY}),
        ("olmo3", {"rope_parameters": OLMO_ROPES, "num_layers": 4, "num_kv_heads": 4}),
        ("gemma3_text", {"rope_parameters": OLMO_ROPES}),
        ("gpt_oss", {"rope_parameters": YARN | {"truncate": False}, "layer_types": ["full_attention"] * 2}),
    ],
)
def test_variants_of_a_family(family: str, keys: dict[str, Any], layout: parallel.Layout, tmp_path: Path):
    """Routers, latent attention and YaRN in all the forms that a config may ask for."""
    folder = make_hf_model(tmp_path, family, vocab_size=VOCAB_SIZE, **{"rope_parameters": ROPE} | keys)
    logits, expected = both_logits(folder, layout)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_rope(factor: float, layout: parallel.Layout, tmp_path: Path):
    """At 300 tokens the scaled wavelengths (beyond 2048 tokens) differ from the plain ones in the logits."""
    constants = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    scaled = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, **constants}
    keys = {"vocab_size": VOCAB_SIZE, "max_positions": 512}
    logits, expected = both_logits(
        make_hf_model(tmp_path / "scaled", "llama", rope_parameters=scaled, **keys), layout, num_tokens=300
    )
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    _, plain = both_logits(
        make_hf_model(tmp_path / "plain", "llama", rope_parameters=ROPE, **keys), layout, num_tokens=300
    )
    assert (plain - expected).abs().max() > 1e-2

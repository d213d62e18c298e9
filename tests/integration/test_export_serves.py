"""The exported folder gives the log-probs of the Megatron model it came from, in transformers and in real vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mopd.cli.convert_verify import LogitsProbe, logits_of
from mopd.conversion.jobs import streaming
from mopd.conversion.jobs.contents import open_checkpoint
from mopd.conversion.torch_dist.plan import TargetLayout
from tests.fixtures.tiny_models import make_hf_model, make_tokenizer
from tests.unit.conversion.jobs import run_job

FAMILIES: dict[str, dict[str, int]] = {"qwen3": {}, "qwen3_moe": {}}
"""Families, and what vLLM's attention on a CPU wants: heads of 32 channels. Not glm4_moe, which vLLM computes wrongly
there, from transformers' own folder too, nor minimax_m2, for which it has no router; gated delta nets are in
``test_delta.py``, in bf16."""
if os.environ.get("MOPD_FAMILIES") == "all":
    FAMILIES |= {"seed_oss": {}, "phi3": {"hidden_size": 128}, "gemma3_text": {}, "olmo3": {"num_layers": 4}}
    FAMILIES |= {"gpt_oss": {"tie_word_embeddings": False}}  # vLLM ties none of this family
TOKENS = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 40, 41, 7, 7]])
VLLM = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
}  # fmt: skip

pytestmark = [pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A distributed checkpoint and its export for each family."""
    folder = tmp_path_factory.mktemp("serves")
    for family, sizes in FAMILIES.items():
        source = make_hf_model(folder / f"{family}-source", family, vocab_size=61, **sizes)
        make_tokenizer(source)
        layout = TargetLayout(tensor_model_parallel_size=2, expert_tensor_parallel_size=1 if family == "gpt_oss" else 2)
        run_job(streaming.hf_to_megatron(source, folder / f"{family}-megatron", layout))
        run_job(streaming.megatron_to_hf(folder / f"{family}-megatron", folder / family))
    return folder


def megatron_logprobs(folder: Path, family: str) -> Tensor:
    """Log-prob of each token but the first."""
    return chosen(logits_of(open_checkpoint(folder / f"{family}-megatron"), LogitsProbe(tokens=TOKENS)))


def chosen(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1)[0, :-1].gather(1, TOKENS[0, 1:, None])[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers(folder: Path, family: str) -> None:
    served = chosen(logits_of(open_checkpoint(folder / family), LogitsProbe(tokens=TOKENS)))
    torch.testing.assert_close(served, megatron_logprobs(folder, family), atol=1e-4, rtol=0)


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
def test_vllm(folder: Path) -> None:
    script = Path(__file__).with_name("vllm_scores.py")
    tokens = " ".join(map(str, TOKENS[0].tolist()))
    done = subprocess.run(
        [sys.executable, script, tokens, *(str(folder / family) for family in FAMILIES)],
        capture_output=True, text=True, env={**os.environ, **VLLM}, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line.removeprefix("SCORES ") for line in done.stdout.splitlines() if line.startswith("SCORES ")]
    assert len(lines) == len(FAMILIES)
    farthest = {
        family: float((torch.tensor(json.loads(line)) - megatron_logprobs(folder, family)).abs().max())
        for family, line in zip(FAMILIES, lines, strict=True)
    }
    assert all(far < 1e-4 for far in farthest.values()), farthest

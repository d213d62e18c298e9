"""Layers of stages and chunks: Megatron's own, and what cannot be cut in one line."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from mopd.conversion.models.stages import Stages

CUTS = {
    "one": (5, Stages()),
    "even": (8, Stages(pipeline_model_parallel_size=4)),
    "first": (10, Stages(pipeline_model_parallel_size=4, num_layers_in_first_pipeline_stage=1)),
    "last": (10, Stages(pipeline_model_parallel_size=4, num_layers_in_last_pipeline_stage=1)),
    "both": (
        94,
        Stages(
            pipeline_model_parallel_size=8, num_layers_in_first_pipeline_stage=11, num_layers_in_last_pipeline_stage=11
        ),
    ),
    "DeepSeek-V3": (61, Stages(pipeline_model_parallel_size=2, num_layers_in_last_pipeline_stage=30)),
    "virtual": (8, Stages(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)),
    "virtual first": (
        10,
        Stages(
            pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, num_layers_in_first_pipeline_stage=4
        ),
    ),
    "virtual last": (
        33,
        Stages(
            pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=3, num_layers_in_last_pipeline_stage=6
        ),
    ),
    "virtual both": (
        24,
        Stages(
            pipeline_model_parallel_size=4,
            virtual_pipeline_model_parallel_size=2,
            num_layers_in_first_pipeline_stage=4,
            num_layers_in_last_pipeline_stage=4,
        ),
    ),
}


@pytest.mark.parametrize("name", CUTS)
def test_layers_are_megatrons(name: str):
    num_layers, stages = CUTS[name]
    assert not stages.problem(num_layers, str)
    chunks = stages.virtual_pipeline_model_parallel_size
    fields = {**asdict(stages), "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None}
    config = TransformerConfig(num_layers=num_layers, hidden_size=8, num_attention_heads=1, pipeline_dtype=1, **fields)
    for rank, own in enumerate(stages.layers(num_layers)):
        assert len(own) == chunks
        for chunk, layers in enumerate(own):
            at = {"vp_stage": chunk if chunks > 1 else None, "pp_rank": rank}
            start = get_transformer_layer_offset(config, **at)
            assert layers == range(start, start + get_num_layers_to_build(config, **at))
            assert all(stages.stage_of(layer, num_layers) == rank for layer in layers)


@pytest.mark.parametrize(
    ("num_layers", "keys", "line"),
    [
        (61, (2, 1, None, None), "pp 2 does not divide the model's 61 layers: set it to a divisor of 61, or last"),
        (
            61,
            (2, 1, None, 61),
            "last 61 leaves 0 of the model's 61 layers, which the other 1 stages do not share evenly",
        ),
        (
            61,
            (4, 1, 14, 14),
            "first 14 and last 14 leaves 33 of the model's 61 layers, which the other 2 stages do not",
        ),
        (61, (2, 3, None, 30), "vp 3 does not divide the 31 layers of pipeline stage 0: set it to a divisor of 31"),
        (8, (2, 3, None, None), "vp 3 does not divide the 4 layers of pipeline stage 0: set it to a divisor of 4"),
    ],
)
def test_what_cannot_be_cut(num_layers: int, keys: tuple[int | None, ...], line: str):
    names = list(asdict(Stages()))
    short = dict(zip(names, ("pp", "vp", "first", "last"), strict=True))
    problem = Stages(**dict(zip(names, keys, strict=True))).problem(num_layers, short.__getitem__)  # type: ignore[arg-type]
    assert line in problem and "\n" not in problem

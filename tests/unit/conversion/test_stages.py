"""Layers of stages and chunks: Megatron's own, and what cannot be cut in one line."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from mopd.conversion.models.stages import Stages

Keys = tuple[int, int, int | None, int | None]
"""Stages, chunks of each, layers of the first and of the last."""
CUTS: dict[str, tuple[int, Keys]] = {
    "one": (5, (1, 1, None, None)),
    "even": (8, (4, 1, None, None)),
    "first": (10, (4, 1, 1, None)),
    "last": (10, (4, 1, None, 1)),
    "both": (94, (8, 1, 11, 11)),
    "DeepSeek-V3": (61, (2, 1, None, 30)),
    "virtual": (8, (2, 2, None, None)),
    "virtual first": (10, (2, 2, 4, None)),
    "virtual last": (33, (4, 3, None, 6)),
    "virtual both": (24, (4, 2, 4, 4)),
}


def stages_with(keys: Keys) -> Stages:
    return Stages(**dict(zip(asdict(Stages()), keys, strict=True)))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CUTS)
def test_layers_are_megatrons(name: str):
    num_layers, keys = CUTS[name]
    stages = stages_with(keys)
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
        (61, (2, 1, None, 61), "last 61 leaves 0 of the model's 61 layers, which the other 1 stages do not share"),
        (61, (4, 1, 14, 14), "first 14 and last 14 leaves 33 of the model's 61 layers, which the other 2 stages"),
        (61, (2, 3, None, 30), "vp 3 does not divide the 31 layers of pipeline stage 0: set it to a divisor of 31"),
        (8, (2, 3, None, None), "vp 3 does not divide the 4 layers of pipeline stage 0: set it to a divisor of 4"),
    ],
)
def test_what_cannot_be_cut(num_layers: int, keys: Keys, line: str):
    short = dict(zip(asdict(Stages()), ("pp", "vp", "first", "last"), strict=True))
    problem = stages_with(keys).problem(num_layers, short.__getitem__)
    assert line in problem and "\n" not in problem

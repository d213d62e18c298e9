"""The name tables say where Megatron's own checkpoint of a real model keeps each parameter, in what shape, and what
else its loader asks for where TransformerEngine's layers load it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

from mopd.config.student import StudentConfig
from mopd.conversion.models import families
from mopd.conversion.models.reading import read_dims
from mopd.conversion.torch_dist.plan import TargetLayout, extra_state_keys, padded_shape, sharded_key
from mopd.conversion.torch_dist.writer import CONTENT
from mopd.student import cpu_shim
from mopd.student.model.gpt import build_model
from mopd.student.parallel import Layout
from tests.fixtures.tiny_models import FAMILIES, make_hf_model
from tests.fixtures.vision import VISION_FAMILIES, make_vision_model

ROOT = Path(__file__).parents[3]
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in (*FAMILIES, *VISION_FAMILIES)),
    ("qwen3_moe", {"decoder_sparse_step": 2}),
    ("deepseek_v2", {"first_k_dense_replace": 0, "q_lora_rank": 48}),
]
LOCAL = ("gemma3_text", "gpt_oss", "minimax_m2", "olmo3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Families whose layers are never TransformerEngine's."""


def make_model(parent: Path, family: str, keys: dict[str, Any]) -> Path:
    make = make_vision_model if family in VISION_FAMILIES else make_hf_model
    return make(parent, family, tie_word_embeddings=False, **keys)


@pytest.mark.parametrize(("family", "keys"), VARIANTS)
def test_keys_and_shapes_are_megatrons(family: str, keys: dict[str, Any], layout: Layout, tmp_path: Path) -> None:
    folder = make_model(tmp_path, family, keys)
    dims = read_dims(folder)
    with cpu_shim.activate():
        model = build_model(StudentConfig(model=str(folder), dtype="float32"), dims, layout)
        state = model.sharded_state_dict(metadata=dict(CONTENT))
        apply_factories(state)
    tensors, _ = extract_matching_values(state, lambda value: isinstance(value, ShardedTensor), True)
    found = {tensor.key: tensor.global_shape for tensor in _leaves(tensors)}
    expected: dict[str, tuple[int, ...]] = {}
    positions = set()
    for placed in families.all_params(dims):
        place = sharded_key(placed, dims)
        shape = (*place.stacked, *padded_shape(placed, dims, TargetLayout()))
        assert expected.setdefault(place.key, shape) == shape
        assert len(place.index) == len(place.stacked)
        assert all(index < size for index, size in zip(place.index, place.stacked, strict=True))
        positions.add((place.key, place.index))
    assert found == expected
    assert len(positions) == len(list(families.all_params(dims))), "two parameters share a place"


def test_a_conversion_holds_all_that_transformer_engine_asks_for(tmp_path: Path) -> None:
    """Objects too: a standalone norm of TransformerEngine 2 has an extra state. Older versions of Megatron ask for its
    attention's as well."""
    loaded = [variant for variant in VARIANTS if variant[0] not in LOCAL]  # the others' layers never are its
    folders = [make_model(tmp_path / str(number), *variant) for number, variant in enumerate(loaded)]
    command = [sys.executable, "-W", "ignore", "-m", "tests.fixtures.asked_keys", *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    for folder, asked in zip(folders, json.loads(done.stdout.splitlines()[-1]), strict=True):
        dims = read_dims(folder)
        places = [sharded_key(placed, dims) for placed in families.all_params(dims)]
        written = {place.key for place in places} | set(extra_state_keys(places))
        assert {key for key in written if "core_attention" not in key} == set(asked)


def _leaves(tree: Any) -> list[ShardedTensor]:
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in _leaves(value)]
    if isinstance(tree, list):
        return [leaf for value in tree for leaf in _leaves(value)]
    return [tree]

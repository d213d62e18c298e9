"""A stream of checkpoint tensors fills an engine's model, whatever transformers calls its own parameters."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from mopd.config.groups import TorchEngineConfig
from mopd.conversion.hf.reader import HfReader
from mopd.engines.interface import ToScore, WeightsLost
from mopd.engines.torch.engine import TorchEngine
from mopd.engines.torch.loading import load_model, weight_slots
from tests.fixtures.tiny_models import FAMILIES, make_hf_model
from tests.fixtures.vision import VISION_FAMILIES, make_vision_model


@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_weights_are_those_of_the_folder(family: str, tmp_path: Path):
    folder, reader = make_hf_model(tmp_path, family), HfReader(tmp_path)
    expected = load_model(folder, "float32", torch.device("cpu"))
    assert weight_slots(expected).keys() == reader.names
    engine = TorchEngine.empty(folder, TorchEngineConfig(dtype="float32"))
    with pytest.raises(WeightsLost, match="no weights"):
        asyncio.run(engine.score(ToScore([torch.tensor([4, 5])], [1], top_k=1, temperature=1.0)))
    asyncio.run(engine.load_weights(((name, reader.read(name)) for name in sorted(reader.names)), 3))
    assert engine.weight_version == 3
    state, wanted = engine.model.state_dict(), expected.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_slots_have_the_names_of_the_checkpoint(family: str, tmp_path: Path):
    """Flat or nested, whichever the family is written in."""
    engine = TorchEngine.empty(make_vision_model(tmp_path, family), TorchEngineConfig(dtype="float32"))
    assert engine.weight_slots.keys() == HfReader(tmp_path).names

"""One tiny model, a teacher's server that all tests of this folder share, and engines behind a gate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

from mopd.config.groups import TorchEngineConfig
from mopd.engines.torch.engine import TorchEngine
from tests.fixtures.servers import GatedEngine, RunningServer, running_server
from tests.fixtures.tiny_models import make_hf_model, make_tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_hf_model(tmp_path_factory.mktemp("served"))
    make_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def local(folder: Path) -> TorchEngine:
    """The same model in this process, to compare with."""
    return TorchEngine.from_pretrained(folder, TorchEngineConfig(dtype="float32"))


@pytest.fixture(scope="session")
def weights(local: TorchEngine) -> dict[str, Tensor]:
    """Its weights."""
    return dict(local.model.named_parameters())


@pytest.fixture
def engine(folder: Path) -> TorchEngine:
    """Another one, to serve."""
    return TorchEngine.from_pretrained(folder, TorchEngineConfig(dtype="float32"))


@pytest.fixture
def gated(folder: Path) -> Iterator[GatedEngine]:
    """Gate open; opened again at the end, so that a server can end."""
    engine = GatedEngine.from_pretrained(folder, TorchEngineConfig(dtype="float32"))
    assert isinstance(engine, GatedEngine)
    yield engine.arm()
    engine.gate.set()


@pytest.fixture(scope="module")
def teacher(folder: Path) -> Iterator[RunningServer]:
    """A teacher's server with text prompts and hashes."""
    engine = TorchEngine.from_pretrained(folder, TorchEngineConfig(dtype="float32"))
    hashes = {"config_sha256": "c", "weights_sha256": "w", "tokenizer_sha256": "t"}
    with running_server(engine, manifest=hashes) as running:
        yield running

"""A tiny student, an engine that has its weights, and two rollout servers that have none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from mopd.config.groups import TorchEngineConfig
from mopd.engines.torch.engine import TorchEngine
from tests.fixtures.servers import RunningServer, running_server
from tests.fixtures.tiny_models import make_hf_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def source(folder: Path) -> TorchEngine:
    return TorchEngine.from_pretrained(folder, TorchEngineConfig(dtype="float32"))


@pytest.fixture
def servers(folder: Path) -> Iterator[list[RunningServer]]:
    with contextlib.ExitStack() as stack:
        engines = [TorchEngine.empty(folder, TorchEngineConfig(dtype="float32")) for _ in range(2)]
        yield [stack.enter_context(running_server(engine, "rollout")) for engine in engines]

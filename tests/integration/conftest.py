"""One small world for all integration tests; each test gets run folders of its own."""

from __future__ import annotations

import pytest

from tests.integration.groups import make_models
from tests.integration.world import World, build_world


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Random weights, which no test may change; no data."""
    return make_models(tmp_path_factory.mktemp("models"))

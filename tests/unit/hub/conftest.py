"""A Hub on the loopback interface and an empty cache for the library in this process."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

from tests.fixtures.hub import LoopbackHub, hub_environment, loopback_hub


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    """The library reads its variables when it is imported."""
    with loopback_hub() as hub:
        for key, value in hub_environment(hub, home).items():
            monkeypatch.setenv(key, value)
        importlib.reload(constants)
        yield hub
        monkeypatch.undo()
        importlib.reload(constants)
        close_session()

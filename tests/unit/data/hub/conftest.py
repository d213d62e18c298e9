"""A Hub on the loopback interface and an empty cache for the library in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.hub import LoopbackHub, hub_of_this_process


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LoopbackHub]:
    with hub_of_this_process(tmp_path / "home") as hub:
        yield hub

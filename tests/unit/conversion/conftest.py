"""Conversions in this process are no rank's, whatever its environment says."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)

"""Where rank 0 has those that make samples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mopd.producer import leading


@pytest.mark.parametrize("has_in_process_engines", [False, True])
def test_samples_are_made_beside_rank_0_unless_engines_run_in_it(
    has_in_process_engines: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe: Any = SimpleNamespace(has_in_process_engines=has_in_process_engines)
    monkeypatch.setattr(leading, "lead", lambda *args: "here")
    monkeypatch.setattr(leading, "_lead_beside", lambda *args: "beside")
    unused: Any = None
    assert leading.lead_training(recipe, unused, unused) == ("here" if has_in_process_engines else "beside")

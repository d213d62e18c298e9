"""Weights on their way to a torch engine, where the way fails."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mopd.engines.interface import WeightsLost
from mopd.engines.torch import engine as incoming
from mopd.engines.torch.engine import TorchIncoming
from mopd.weights.group import TransferFailed


def fail(*args: Any, **kwargs: Any) -> None:
    raise TransferFailed("the sender has gone")


def test_what_fails_on_the_way_is_lost_weights_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = SimpleNamespace(name="rollout.0", weight_slots={"w": torch.zeros(1)})
    to_it, order = TorchIncoming(engine), SimpleNamespace()
    monkeypatch.setattr(incoming, "Receiver", fail)
    with pytest.raises(WeightsLost, match=r"^rollout\.0: the sender has gone$"):
        asyncio.run(to_it.join(order, 0, []))  # type: ignore[arg-type]
    with pytest.raises(WeightsLost, match=r"^rollout\.0 is in no group$"):
        asyncio.run(to_it.receive(1, verify=False, patience_s=1.0, ready=print))
    monkeypatch.setattr(incoming, "Receiver", lambda *args, **kwargs: SimpleNamespace(tensors=fail))
    asyncio.run(to_it.join(order, 0, []))  # type: ignore[arg-type]
    with pytest.raises(WeightsLost, match=r"^rollout\.0: the sender has gone$"):
        asyncio.run(to_it.receive(1, verify=False, patience_s=1.0, ready=lambda: None))

"""How new student weights reach the rollout engine. Knows names and tensors, not Megatron."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor


class WeightSync(Protocol):
    """Publishes one version of the student's weights to every rollout replica."""

    async def publish(self, weights: Iterable[tuple[str, Tensor]], weight_version: int) -> None:
        """Returns when every replica answers with ``weight_version``."""
        ...

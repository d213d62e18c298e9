"""Weight sync to engines of this process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor


class WeightReceiver(Protocol):
    """What a rollout engine must offer (``Generator`` of the engines does)."""

    weight_version: int

    async def load_weights(self, weights: Iterable[tuple[str, Tensor]], weight_version: int) -> None:
        """Replace all weights; raises if a name or shape does not match or a weight is missing."""
        ...


class InProcessWeightSync:
    """Implements ``WeightSync``: hands the stream to each generator in turn.

    A generator holds the whole set before it replaces a weight; several share one set, as the stream can be read once.
    """

    def __init__(self, generators: Sequence[WeightReceiver]) -> None:
        if not generators:
            raise ValueError("weight sync needs at least one generator")
        self._generators = list(generators)

    async def publish(self, weights: Iterable[tuple[str, Tensor]], weight_version: int) -> None:
        """See ``WeightSync.publish``; ``RuntimeError`` if a generator does not answer with ``weight_version``."""
        source = weights if len(self._generators) == 1 else list(weights)
        for generator in self._generators:
            await generator.load_weights(source, weight_version)
            if generator.weight_version != weight_version:
                raise RuntimeError(
                    f"a rollout replica answers with weights {generator.weight_version} after {weight_version} was sent"
                )

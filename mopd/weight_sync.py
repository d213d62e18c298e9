"""How new student weights reach the rollout engines. Knows names and tensors, not Megatron."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from mopd.wire.push import WeightTarget, push_weights

logger = logging.getLogger(__name__)


class WeightSync(Protocol):
    """Publishes one version of the student's weights to every rollout replica."""

    async def publish(self, weights: Iterable[tuple[str, Tensor]], weight_version: int) -> None:
        """Returns when every replica answers with ``weight_version``."""
        ...


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


class HttpWeightSync:
    """Implements ``WeightSync``: streams to all replicas at once, in chunks of at most 64 MiB, one chunk in memory.

    A replica that fails in the middle is left behind with its old weights, or none: it answers no request for the new
    version (``StaleWeights``) until a later ``publish`` reaches it. That is logged and shown in ``failures``.
    """

    def __init__(self, replicas: Sequence[WeightTarget]) -> None:
        """``ValueError`` for no replica."""
        if not replicas:
            raise ValueError("weight sync needs at least one replica")
        self.replicas = list(replicas)
        """May be changed between two calls of ``publish``: a restarted replica is another object."""
        self.failures: dict[str, Exception] = {}
        """Name -> error of the replicas that the last ``publish`` left behind."""

    async def publish(self, weights: Iterable[tuple[str, Tensor]], weight_version: int) -> None:
        """Returns when every replica that can answer serves ``weight_version``; raises the first replica's error when
        none does. The stream is always read to its end."""
        errors = await push_weights(self.replicas, weights, weight_version)
        self.failures = {
            replica.name: error for replica, error in zip(self.replicas, errors, strict=True) if error is not None
        }
        for name, error in self.failures.items():
            logger.warning("rollout replica %s did not take weights %d: %s", name, weight_version, error)
        if len(self.failures) == len(self.replicas):
            raise next(iter(self.failures.values()))

"""Exponential moving averages of the student's weights, for teachers that are the student (``refresh: {ema: …}``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
)
from torch import Tensor


class Averages:
    """One average in fp32 of each trained weight of this rank, for each decay; data-parallel ranks hold equal ones.

    An average begins as the weights that it is made with; each ``update`` makes it ``decay * average + (1 - decay) *
    weight``. What no gradient trains is not averaged.
    """

    def __init__(self, decays: Sequence[float], models: Sequence[torch.nn.Module]) -> None:
        """Set up from the weights as they are. ``models``: this rank's chunks."""
        self._weights = [weight for model in models for weight in model.parameters() if weight.requires_grad]
        self._by_decay = {
            decay: [weight.detach().to(torch.float32, copy=True) for weight in self._weights] for decay in decays
        }

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights after a step in. They must be complete."""
        for decay, averages in self._by_decay.items():
            for average, weight in zip(averages, self._weights, strict=True):
                average.lerp_(weight.float(), 1 - decay)

    def of(self, decay: float) -> dict[int, Tensor]:
        """Return the averages by ``id`` of their weights."""
        return dict(zip(map(id, self._weights), self._by_decay[decay], strict=True))

    def sharded(self, model: dict[str, Any]) -> dict[str, Any]:
        """Return the averages as Megatron's sharded tensors, made after those of the weights in ``model``."""
        of_weights = get_param_id_to_sharded_param_map(model, iter(self._weights))
        return {
            str(decay): {
                str(number): make_sharded_optimizer_tensor(of_weights[number], average, f"averages.{decay}")
                for number, average in enumerate(averages)
                if number in of_weights  # a tied head is the embedding
            }
            for decay, averages in self._by_decay.items()
        }

    @torch.no_grad()
    def load(self, loaded: Mapping[str, Any]) -> None:
        """Take over the tensors that were read into the places of ``sharded``."""
        for decay, averages in self._by_decay.items():
            for number, tensor in loaded[str(decay)].items():
                averages[int(number)].copy_(tensor)

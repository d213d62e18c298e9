"""Ways of tokens through the experts of a transformers model.

Shapes: B rows, S tokens of a row, P longest prompt, N new tokens at most, E layers with experts, C experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mopd.base.types import RouteShape, UserError
from mopd.engines.interface import ROUTE_DTYPES


class RouteRecorder:
    """Notes the experts that the routers of a model choose during ``recording``, for the rows of one batch."""

    def __init__(self, model: nn.Module, shape: RouteShape, size: int, num_tokens: int, *, name: str) -> None:
        """``size``: B. ``num_tokens``: P + N. ``name`` (the checkpoint folder) stands in the error.

        Raises:
            UserError: the model has another number of layers with experts than ``shape``.
        """
        self._experts = [module for own, module in model.named_modules() if own.rpartition(".")[2] == "experts"]
        if len(self._experts) != shape.num_layers:
            raise UserError(
                f"{name}: has {len(self._experts)} layers with experts, and routes of {shape.num_layers} are asked "
                "for: set rollout.replay_routes: false, or serve the student's model"
            )
        dims, dtype = (size, num_tokens, shape.num_layers, shape.num_choices), ROUTE_DTYPES[shape.item_bytes]
        self._chosen = torch.zeros(dims, dtype=dtype, device=next(model.parameters()).device)
        self.rows = torch.arange(size)
        """Rows that the next forward computes."""
        self._width = self._start = self._stop = 0

    @contextmanager
    def recording(self) -> Iterator[RouteRecorder]:
        """Note what passes through the experts meanwhile; gives the recorder."""

        def note(number: int, inputs: tuple[Any, ...]) -> None:
            chosen = inputs[1].view(len(self.rows), -1, inputs[1].shape[-1])  # hidden states, choices, their weights
            if number == 0:  # a forward begins, behind the one before
                self._start, self._stop = self._stop, self._stop + chosen.shape[1]
                self._width = self._width or self._stop
            self._chosen[self.rows, self._start : self._stop, number] = chosen.to(self._chosen.dtype)

        hooks = [
            experts.register_forward_pre_hook(lambda module, inputs, number=number: note(number, inputs))
            for number, experts in enumerate(self._experts)
        ]
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()

    def of(self, row: int, prompt_length: int) -> Tensor:
        """Return ``Generation.routes`` of a row, whose prompt is padded on the left to P, as far as it has come."""
        return self._chosen[row, max(0, self._width - prompt_length) : self._stop].cpu()

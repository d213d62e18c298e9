"""Weights of the student that get no gradient, and so no place in Megatron's buffers and no optimizer states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mopd.config.student import StudentConfig
from mopd.conversion.models.families import Placed
from mopd.conversion.models.frozen import is_frozen


def freeze(chunks: Sequence[nn.Module], rows: Sequence[Mapping[str, Placed]], student: StudentConfig) -> None:
    """Freeze what ``student.freeze`` names. The chunks are bare. ``rows``: of each chunk the table rows by the names of
    its parameters."""
    for chunk, by_name in zip(chunks, rows, strict=True):
        for name, weight in chunk.named_parameters():
            if is_frozen(by_name[name].param, student):
                weight.requires_grad_(False)
    if "embeddings" in student.freeze:
        let_gradients_through(chunks)


def let_gradients_through(chunks: Sequence[nn.Module]) -> None:
    """Mark what frozen embeddings return as in need of a gradient: a recomputed layer whose input needs none gives its
    own weights none."""
    for chunk in chunks:
        embedding: Any = getattr(chunk, "embedding", None)
        if embedding is not None:
            embedding.register_forward_hook(_with_gradient)


def _with_gradient(embedding: Any, inputs: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output

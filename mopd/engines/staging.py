"""Staging of new weights: each is checked before any of them replaces an old one.

A refused update changes nothing: the engine goes on answering with its old weights.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from mopd.base.files.writing import writing
from mopd.base.types import NonFiniteError
from mopd.weights.receiving import Fit

_FILE_BYTES = 2**28


def checked_weights(
    weights: Iterable[tuple[str, Tensor]], slots: Mapping[str, Tensor], *, name: str
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights unchanged, each one checked as it passes.

    Args:
        slots: the model's weights, for their names, shapes and dtypes.
        name: the model's, for messages.

    Raises:
        ValueError: the stream is not exactly the weights of ``slots``; a missing one is known at its end.
        NonFiniteError: a value is NaN or infinite, or becomes so in the slot's dtype: every answer would be NaN.
    """
    fit = Fit(slots, name=name)
    for weight, tensor in weights:
        fit.take(weight, tensor.dtype, tensor.shape)
        _require_finite(weight, tensor.detach(), slots[weight].dtype, name)
        yield weight, tensor
    if fit.missing:
        raise ValueError(f"{len(fit.missing)} weights of {name} did not arrive, among them {min(fit.missing)!r}")


def hold_weights(
    weights: Iterable[tuple[str, Tensor]], slots: Mapping[str, Tensor], *, name: str
) -> Collection[tuple[str, Tensor]]:
    """Return all checked weights.

    A stream is copied into the slots' dtypes, since its sender may reuse the memory. A collection, whose tensors all
    exist, is only checked. Raises as ``checked_weights``.
    """
    checked = checked_weights(weights, slots, name=name)
    if isinstance(weights, Collection):
        for _ in checked:
            pass
        return weights
    return [(weight, tensor.detach().to(slots[weight].dtype, copy=True)) for weight, tensor in checked]


class StagedFiles(NamedTuple):
    """Files of new weights for an engine's worker processes, and the number of tensors in them."""

    paths: list[str]
    num_tensors: int


async def stage_weights(
    weights: Iterable[tuple[str, Tensor]], slots: Mapping[str, Tensor], folder: Path, *, name: str
) -> StagedFiles:
    """Write checked ``weights`` into ``folder`` as files of about 256 MiB, for an engine whose model lives in other
    processes. Raises as ``checked_weights``."""
    paths: list[str] = []
    part: dict[str, Tensor] = {}

    async def write() -> None:
        paths.append(str(folder / f"{len(paths):05}.safetensors"))
        with writing(paths[-1]):
            await asyncio.to_thread(save_file, part, paths[-1])
        part.clear()

    checked = checked_weights(weights, slots, name=name)
    while passed := await asyncio.to_thread(lambda: list(itertools.islice(checked, 1))):
        ((weight, tensor),) = passed
        # a copy: the file format refuses tensors that share memory, and the sender may reuse its buffer
        part[weight] = tensor.detach().to("cpu", copy=True).contiguous()
        if sum(staged.nbytes for staged in part.values()) >= _FILE_BYTES:
            await write()
    if part:
        await write()
    return StagedFiles(paths, len(slots))


def _require_finite(weight: str, tensor: Tensor, dtype: torch.dtype, name: str) -> None:
    if not (tensor.is_floating_point() and dtype.is_floating_point and tensor.numel()):
        return
    cast = tensor.to(dtype)
    if all(bound.isfinite() for bound in torch.aminmax(cast)):  # one pass without a mask: NaN is both bounds
        return
    bad = ~cast.isfinite()
    place = bad.nonzero()[0].tolist()
    given = tensor[tuple(place)].item()
    raise NonFiniteError(
        f"weight {weight!r} has {int(bad.sum())} values that are NaN or infinite in {str(dtype)[6:]} (the first, "
        f"{given:g}, at {place}): {name} keeps its old weights; go back to a checkpoint before the damage and lower "
        "the learning rate"
    )

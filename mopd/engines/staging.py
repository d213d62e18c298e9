"""A stream of weights as checked safetensors files, for engines whose model lives in other processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

_FILE_BYTES = 2**28


async def stage_weights(
    weights: Iterable[tuple[str, Tensor]], shapes: Mapping[str, torch.Size], folder: Path, *, name: str
) -> list[str]:
    """Write ``weights`` into ``folder`` as files of about 256 MiB; returns their paths.

    ``ValueError`` if the stream is not exactly the weights of ``shapes``; ``name`` (the model) stands in the message.
    """
    waiting = set(shapes)
    paths: list[str] = []
    part: dict[str, Tensor] = {}

    async def write() -> None:
        paths.append(str(folder / f"{len(paths):05}.safetensors"))
        await asyncio.to_thread(save_file, part, paths[-1])
        part.clear()

    for weight, tensor in weights:
        if weight not in shapes:
            raise ValueError(f"weight {weight!r} does not exist in {name}")
        if weight not in waiting:
            raise ValueError(f"weight {weight!r} arrives twice for {name}")
        if tensor.shape != shapes[weight]:
            raise ValueError(f"weight {weight!r} has shape {list(tensor.shape)}, {name} needs {list(shapes[weight])}")
        waiting.remove(weight)
        # a copy: the file format refuses tensors that share memory, and the sender may reuse its buffer
        part[weight] = tensor.detach().to("cpu", copy=True).contiguous()
        if sum(staged.nbytes for staged in part.values()) >= _FILE_BYTES:
            await write()
    if waiting:
        raise ValueError(f"{len(waiting)} weights of {name} did not arrive, among them {min(waiting)!r}")
    if part:
        await write()
    return paths

"""Experts of checkpoints that keep all of a layer in one tensor, as gpt-oss does. The name tables have tensors of each
expert, as other families' checkpoints do, and these functions lead from one to the other:

    stored                     of expert e                                          shape
    gate_up_proj [E, H, 2F]    gate_up_proj.e.gate, gate_up_proj.e.up               [F, H]
    gate_up_proj_bias [E, 2F]  gate_up_proj_bias.e.gate, gate_up_proj_bias.e.up     [F]
    down_proj [E, F, H]        down_proj.e.down                                     [H, F]
    down_proj_bias [E, H]      down_proj_bias.e.down                                [H]

Gate and up take turns. Released checkpoints have the weights in MXFP4: ``_blocks`` uint8 [E, rows, columns / 32, 16]
with two numbers in a byte, and ``_scales`` uint8 [E, rows, columns / 32]. Such numbers are exact in bfloat16.

Letters: E experts, H channels, F width of an expert.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from mopd.conversion.models.config_keys import MAX_COUNT

_ROWS = {"gate": slice(0, None, 2), "up": slice(1, None, 2), "down": slice(None)}
_PARTS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
_STORED = re.compile(r"(.*\.mlp\.experts\.)(gate_up_proj|down_proj)(_bias|_blocks|)")
_PART = re.compile(r"(.*\.mlp\.experts\.(?:gate_up|down)_proj(?:_bias)?)\.(\d{1,5})\.(gate|up|down)")
_NUM_DIMS = {"": 3, "_bias": 2, "_blocks": 4}
_BLOCK = 32
"""Numbers that share a scale."""
_HALVES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the eight codes of a number without its sign, which is the fourth bit."""


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """One expert's tensor inside a stored one."""

    stored: str
    expert: int
    part: str
    shape: tuple[int, ...]
    scales: str = ""
    """Name of the scales, if the stored one is MXFP4."""

    def of(self, read: Callable[[str], Tensor]) -> Tensor:
        """Return the tensor, a view where it is not MXFP4; ``read`` returns a stored one."""
        stored = read(self.stored)
        if not self.scales:
            return view_of(stored, self.expert, self.part)
        rows = _ROWS[self.part]
        return from_mxfp4(stored[self.expert, rows], read(self.scales)[self.expert, rows])


def expert_parts(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, ExpertPart]:
    """Return the tensors of each expert, by name, that a checkpoint with tensors of such ``shapes`` keeps stacked; none
    of another family's, or of shapes that are not theirs."""
    found: dict[str, ExpertPart] = {}
    for stored, shape in shapes.items():
        name = _STORED.fullmatch(stored)
        if name is None or f"{name[1]}gate_up_proj_bias" not in shapes or len(shape) != _NUM_DIMS[name[3]]:
            continue
        scales, parts = f"{name[1]}{name[2]}_scales" if name[3] == "_blocks" else "", _PARTS[name[2]]
        if scales and (shapes.get(scales) != shape[:-1] or 2 * shape[-1] != _BLOCK):
            continue
        own = (shape[1], shape[2] * _BLOCK) if scales else shape[:0:-1]
        if not prod(shape) or shape[0] > MAX_COUNT or own[0] % len(parts):
            continue
        for expert in range(shape[0]):
            for part in parts:
                logical = f"{stored.removesuffix('_blocks')}.{expert}.{part}"
                found[logical] = ExpertPart(stored, expert, part, (own[0] // len(parts), *own[1:]), scales)
    return found


def view_of(stacked: Tensor, expert: int, part: str) -> Tensor:
    """Return one expert's part of a stacked tensor (or bias) as a view."""
    own = stacked[expert]
    return (own.T if own.dim() == 2 else own)[_ROWS[part]]


def split(name: str, stacked: Tensor) -> dict[str, Tensor]:
    """Return the views of every expert by name."""
    parts = parts_of(name)
    return {f"{name}.{e}.{part}": view_of(stacked, e, part) for e in range(len(stacked)) for part in parts}


def parts_of(stored: str) -> tuple[str, ...]:
    """Return the tensors of each expert in a stored one."""
    return _PARTS[stored.rpartition(".")[2].removesuffix("_bias")]


def stored_name(name: str) -> str | None:
    """Return the name of the stored tensor that an expert's belongs to; ``None`` for all other names."""
    found = _PART.fullmatch(name)
    return None if found is None else found[1]


def stacked_shape(name: str, shape: tuple[int, ...], num_experts: int) -> tuple[int, ...]:
    """Return the shape of the stored tensor to which expert's tensor ``name`` of such a ``shape`` belongs."""
    rows = shape[0] * (1 if name.endswith(".down") else 2)
    return (num_experts, *reversed((rows, *shape[1:])))


def put(stacked: Tensor, name: str, tensor: Tensor) -> None:
    """Write an expert's tensor to its place."""
    found = _PART.fullmatch(name)
    assert found is not None
    view_of(stacked, int(found[2]), found[3]).copy_(tensor)


def restacked(tensors: Iterable[tuple[str, Tensor]], num_experts: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors as checkpoints store them: a stacked one as soon as all its parts have come, others at once.

    Raises:
        ValueError: parts are missing at the end.
    """
    held: dict[str, tuple[Tensor, set[str]]] = {}
    for name, tensor in tensors:
        stored = stored_name(name)
        if stored is None:
            yield name, tensor
            continue
        if stored not in held:
            held[stored] = tensor.new_empty(stacked_shape(name, tuple(tensor.shape), num_experts)), set()
        stacked, seen = held[stored]
        put(stacked, name, tensor)
        seen.add(name)
        if len(seen) == num_experts * len(parts_of(stored)):
            del held[stored]
            yield stored, stacked
    if held:
        raise ValueError(f"tensors of some experts are missing: {min(held)}")


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers of ``blocks`` [..., n, 16], the low half of a byte first, times 2 ** (scale - 127) of
    ``scales`` [..., n], as bfloat16 [..., 32 n]."""
    values = torch.tensor([*_HALVES, *(-value for value in _HALVES)])
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    numbers = torch.ldexp(values[codes.int()], scales.int()[..., None] - 127)
    return numbers.flatten(-2).to(torch.bfloat16)

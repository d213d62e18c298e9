"""Launch parameters of the streaming kernels, from a table that is shipped with the package.

No autotuner runs inside a training step: it would time destructive kernels on live data, differ between the ranks of
one group, and break CUDA graphs. ``tuning`` measures on scratch tensors; ``save_table`` writes its results.

An entry is for a width (columns of one rank), a dtype, a number of rows and a device; a lookup takes the nearest entry,
by powers of two, among those of its dtype and device (``any`` if the device has none). The number of ids matters to
neither of the kernels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

TABLE = Path(__file__).with_name("tuning.json")
ANY_DEVICE = "any"


@dataclass(frozen=True)
class Launch:
    """Launch parameters of one kernel: columns of a tile, warps of a program, tiles that are loaded ahead."""

    block: int
    warps: int
    stages: int
    """1 or 2 for ``stats``, which works on that many tiles together; ``dense`` has one tile a program, and 1."""


@dataclass(frozen=True)
class Entry:
    """Launch parameters for one bucket."""

    width: int
    dtype: str
    rows: int
    device: str
    stats: Launch
    splits: int
    """Programs that share a row in the statistics pass; more than 1 if there are too few rows to fill the device."""
    dense: Launch


def load_table(path: Path = TABLE) -> list[Entry]:
    """Read a table. Raise ValueError if a field is missing or unknown."""
    entries = []
    for raw in json.loads(path.read_text())["entries"]:
        try:
            launches = {name: Launch(**raw[name]) for name in ("stats", "dense")}
            entries.append(Entry(**{**raw, **launches}))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}: entry {raw} does not fit: {error}") from error
    return entries


def save_table(entries: Iterable[Entry], path: Path = TABLE) -> None:
    """Write a table, one entry a line."""
    lines = ",\n  ".join(json.dumps(asdict(entry)) for entry in entries)
    path.write_text(f'{{"entries": [\n  {lines}\n]}}\n')


def merge(old: Iterable[Entry], new: Iterable[Entry]) -> list[Entry]:
    """Return ``old`` with entries of the same bucket replaced by ``new``, sorted."""

    def bucket(e: Entry) -> tuple[str, str, int, int]:
        return (e.device, e.dtype, e.width, e.rows)

    table = {bucket(e): e for e in old} | {bucket(e): e for e in new}
    return [table[key] for key in sorted(table)]


def lookup(width: int, dtype: torch.dtype, rows: int, device: str, entries: Sequence[Entry]) -> Entry:
    """Return the nearest entry. Raise ValueError if the table has none for the dtype.

    ``width`` must be the same on all ranks of a group (the mean shard), since ``splits`` shapes what they exchange.
    """
    name = str(dtype).removeprefix("torch.")
    known = [e for e in entries if e.dtype == name]
    usable = [e for e in known if e.device == device] or [e for e in known if e.device == ANY_DEVICE]
    if not usable:
        raise ValueError(f"the tuning table has no entry for {name} on {device!r} or {ANY_DEVICE!r}: add one")

    def distance(e: Entry) -> float:
        pairs = ((e.width, width), (e.rows, rows))
        return sum(abs(math.log2(max(a, 1)) - math.log2(max(b, 1))) for a, b in pairs)

    return min(usable, key=distance)


@cache
def shipped(width: int, dtype: torch.dtype, rows: int, device: str) -> Entry:
    """Run ``lookup`` in the shipped table; ``rows`` as a power of two keeps this cache small."""
    return lookup(width, dtype, rows, device, load_table())


@cache
def device_name(device: torch.device) -> str:
    """Return the name under which entries of a device are kept."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

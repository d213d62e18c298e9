"""The data plane of one trainer job: tensors by sample id, field by field. Rank 0 holds every field, student ranks
receive copies by broadcast. Consumers name the fields they read; "all" does not exist.

What travels in ``fetch``: one int64 (header size), the header as JSON bytes (dtypes and shapes, or an error), then one
byte tensor per field with all its samples end to end. Nothing is pickled.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.types import Batch, SampleMeta


class LocalDataPlane:
    """Producers put, the controller claims and releases, student ranks fetch.

    A field of a sample is written exactly once; writing it again, or naming an unknown sample or field, raises
    ``KeyError`` with the ids. No sample disappears without ``release`` or ``discard``.

    ``group`` is a CPU (gloo) group over all trainer ranks; its first rank holds the fields, and its timeout is the
    deadline of ``fetch``. ``None``, or a group of one rank, reads directly.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group if group is not None and group.size() > 1 else None
        self.is_holder = self._group is None or self._group.rank() == 0
        self._metas: dict[int, SampleMeta] = {}
        self._fields: dict[int, dict[str, Tensor]] = {}
        self._claimed: set[int] = set()
        self._changed = asyncio.Condition()

    @property
    def num_samples(self) -> int:
        """Samples held now, claimed ones included."""
        return len(self._metas)

    async def put(self, metas: Sequence[SampleMeta], fields: Mapping[str, Sequence[Tensor]]) -> None:
        """Write fields of new samples: ``fields[name][i]`` belongs to ``metas[i]``. All or nothing; kept on the CPU."""
        self._require_holder("put")
        ids = [meta.sample_id for meta in metas]
        _check_lengths(ids, fields)
        existing = sorted({i for i in ids if i in self._metas} | {i for i, n in Counter(ids).items() if n > 1})
        if existing:
            raise KeyError(f"samples {_short(existing)} are put a second time")
        async with self._changed:
            for i, meta in enumerate(metas):
                self._metas[meta.sample_id] = meta
                self._fields[meta.sample_id] = {name: values[i].detach().cpu() for name, values in fields.items()}
            self._changed.notify_all()

    async def update(self, sample_ids: Sequence[int], fields: Mapping[str, Sequence[Tensor]]) -> None:
        """Add fields to samples that exist. All or nothing."""
        self._require_holder("update")
        _check_lengths(sample_ids, fields)
        self._require_samples(sample_ids)
        for name in fields:
            written = [i for i in sample_ids if name in self._fields[i]]
            if written:
                raise KeyError(f"field {name!r} of samples {_short(written)} is written a second time")
        async with self._changed:
            for name, values in fields.items():
                for sample_id, value in zip(sample_ids, values, strict=True):
                    self._fields[sample_id][name] = value.detach().cpu()
            self._changed.notify_all()

    async def get(self, sample_ids: Sequence[int], fields: Sequence[str]) -> dict[str, list[Tensor]]:
        """Read fields on the controller's rank (teachers read tokens with this)."""
        self._require_holder("get")
        return self._read(sample_ids, fields)

    async def claim(self, num_samples: int, fields: Sequence[str], *, timeout_s: float) -> Batch:
        """Wait until ``num_samples`` unclaimed samples have all ``fields``; the lowest ids are claimed first.

        Raises ``TimeoutError`` that says how many samples were ready and which fields the others lacked.
        """
        self._require_holder("claim")
        async with self._changed:
            if len(self._ready(fields)) < num_samples:
                try:
                    await asyncio.wait_for(
                        self._changed.wait_for(lambda: len(self._ready(fields)) >= num_samples), timeout_s
                    )
                except asyncio.TimeoutError:
                    raise TimeoutError(self._describe_wait(num_samples, fields, timeout_s)) from None
            ids = self._ready(fields)[:num_samples]
            self._claimed.update(ids)
            return Batch(samples=tuple(self._metas[i] for i in ids))

    async def release(self, batch: Batch) -> None:
        """Forget a claimed batch; ``KeyError`` for samples that are not claimed."""
        self._require_holder("release")
        foreign = [i for i in batch.sample_ids if i not in self._claimed]
        if foreign:
            raise KeyError(f"samples {_short(foreign)} are released but not claimed")
        for sample_id in batch.sample_ids:
            self._claimed.remove(sample_id)
            del self._metas[sample_id], self._fields[sample_id]

    async def discard(self, sample_ids: Sequence[int]) -> None:
        """Forget samples that nobody claimed: they could not be finished, and whoever calls this counts them.

        ``KeyError`` for samples that are unknown or claimed. All or nothing.
        """
        self._require_holder("discard")
        self._require_samples(sample_ids)
        claimed = [i for i in sample_ids if i in self._claimed]
        if claimed:
            raise KeyError(f"samples {_short(claimed)} are discarded but claimed")
        for sample_id in sample_ids:
            del self._metas[sample_id], self._fields[sample_id]

    def fetch(self, sample_ids: Sequence[int], fields: Sequence[str]) -> dict[str, list[Tensor]]:
        """Read fields on a student rank. Collective: every trainer rank calls it with the same arguments; CPU tensors
        come back in the order of ``sample_ids``. An unknown sample or field raises ``KeyError`` on every rank."""
        if self._group is None:
            return self._read(sample_ids, fields)
        asked: dict[str, Any] = {"sample_ids": list(sample_ids), "fields": list(fields)}
        values: dict[str, list[Tensor]] = {}
        header = asked
        if self.is_holder:
            try:
                values = self._read(sample_ids, fields)
                header = asked | {"layout": {name: _layout(name, tensors) for name, tensors in values.items()}}
            except KeyError as error:
                header = asked | {"error": error.args[0]}
        header = self._broadcast_json(header)
        if "error" in header:
            raise KeyError(header["error"])
        if {name: header[name] for name in asked} != asked:
            raise RuntimeError(
                f"fetch is collective: rank {self._group.rank()} asked for {_short(sample_ids)} {list(fields)}, "
                f"rank 0 for {_short(header['sample_ids'])} {header['fields']}"
            )
        return {name: self._broadcast_field(header["layout"][name], values.get(name)) for name in fields}

    def _broadcast_json(self, value: dict[str, Any]) -> dict[str, Any]:
        payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        size = torch.tensor([payload.numel()], dtype=torch.int64)
        dist.broadcast(size, group_src=0, group=self._group)
        if not self.is_holder:
            payload = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(payload, group_src=0, group=self._group)
        return json.loads(payload.numpy().tobytes())

    def _broadcast_field(self, layout: dict[str, Any], values: list[Tensor] | None) -> list[Tensor]:
        dtype = getattr(torch, layout["dtype"])
        shapes = [torch.Size(shape) for shape in layout["shapes"]]
        counts = [shape.numel() for shape in shapes]
        flat = torch.empty(sum(counts), dtype=dtype) if values is None else torch.cat([v.reshape(-1) for v in values])
        if flat.numel():
            dist.broadcast(flat.view(torch.uint8), group_src=0, group=self._group)
        if values is not None:
            return values
        return [part.view(shape) for part, shape in zip(flat.split(counts), shapes, strict=True)]

    def _read(self, sample_ids: Sequence[int], fields: Sequence[str]) -> dict[str, list[Tensor]]:
        self._require_samples(sample_ids)
        for name in fields:
            missing = [i for i in sample_ids if name not in self._fields[i]]
            if missing:
                raise KeyError(f"field {name!r} does not exist for samples {_short(missing)}")
        return {name: [self._fields[i][name] for i in sample_ids] for name in fields}

    def _ready(self, fields: Sequence[str]) -> list[int]:
        """Unclaimed samples that have all ``fields``, ascending."""
        wanted = set(fields)
        return sorted(i for i, have in self._fields.items() if i not in self._claimed and wanted <= have.keys())

    def _describe_wait(self, num_samples: int, fields: Sequence[str], timeout_s: float) -> str:
        open_ids = [i for i in self._metas if i not in self._claimed]
        lacking = Counter(name for i in open_ids for name in fields if name not in self._fields[i])
        return (
            f"waited {timeout_s:g} s for {num_samples} samples with {', '.join(fields)}: "
            f"{len(self._ready(fields))} ready, {len(open_ids)} unclaimed, {len(self._claimed)} claimed; lacking "
            + (", ".join(f"{name} ({n})" for name, n in sorted(lacking.items())) or "no field")
        )

    def _require_samples(self, sample_ids: Sequence[int]) -> None:
        unknown = [i for i in sample_ids if i not in self._metas]
        if unknown:
            raise KeyError(f"samples {_short(unknown)} are unknown")

    def _require_holder(self, name: str) -> None:
        if not self.is_holder:
            raise RuntimeError(f"LocalDataPlane.{name} runs on the first rank only: other ranks use fetch")


def _check_lengths(sample_ids: Sequence[int], fields: Mapping[str, Sequence[Tensor]]) -> None:
    for name, values in fields.items():
        if len(values) != len(sample_ids):
            raise ValueError(f"field {name!r} has {len(values)} tensors for {len(sample_ids)} samples")


def _layout(name: str, tensors: Sequence[Tensor]) -> dict[str, Any]:
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
    if len(dtypes) > 1:
        raise KeyError(f"field {name!r} mixes dtypes {sorted(dtypes)}")
    return {"dtype": dtypes.pop() if dtypes else "float32", "shapes": [list(tensor.shape) for tensor in tensors]}


def _short(ids: Sequence[int]) -> str:
    """Ids for a message: the first eight and a count."""
    listed = list(ids)
    return str(listed) if len(listed) <= 8 else f"{listed[:8]} and {len(listed) - 8} more"

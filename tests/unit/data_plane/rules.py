"""The rules of every storage: one sequence of calls, and what each returns or raises."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mopd.base.types import Batch, SampleMeta
from mopd.data_plane.interface import Storage
from tests.parity.student.samples import make_samples


def samples() -> tuple[list[SampleMeta], dict[str, list[torch.Tensor]]]:
    metas, fields = make_samples(8, vocab_size=50, top_k=4)
    fields["student_ids"] = [ids.flip(1)[:, ::2] for ids in fields["teacher_ids"]]  # not contiguous
    fields["bf16"] = [(torch.arange(2 * (i + 1)) / 7).bfloat16().view(2, -1).T for i in range(8)]  # not contiguous
    fields["images"] = [torch.arange(8 * (i % 3)).reshape(i % 3, 8) for i in range(8)]  # of some samples none
    fields["same_lengths"] = [torch.full((3,), float("nan") if i == 2 else -0.0) for i in range(8)]
    return metas, fields


async def fill(plane: Storage) -> None:
    """Write as rollout and teachers do: some fields first, the teachers' of half of the samples later."""
    metas, fields = samples()
    early = {name: tensors for name, tensors in fields.items() if not name.startswith("teacher")}
    late = {name: tensors[:4] for name, tensors in fields.items() if name.startswith("teacher")}
    await plane.put(metas, early)
    await plane.update([meta.sample_id for meta in metas[:4]], late)


async def try_rules(plane: Storage) -> list[Any]:
    """Use an empty storage in every way, allowed or not, and leave it empty. Return the order of the fields that are
    read, counts of samples, and the text of every error."""
    metas, fields = samples()
    await fill(plane)
    order = [3, 0, 2]
    got = await plane.get(order, list(fields))
    for name, tensors in got.items():
        for i, tensor in zip(order, tensors, strict=True):
            assert (tensor.dtype, tensor.shape) == (fields[name][i].dtype, fields[name][i].shape), name
            assert torch.equal(tensor.view(torch.uint8), fields[name][i].contiguous().view(torch.uint8)), name
    batch = await plane.claim([3, 1], ["tokens", "teacher_ids"])
    assert batch.samples == (metas[1], metas[3])
    seen: list[Any] = [list(got), plane.num_samples]
    one, new = [torch.zeros(1)], replace(metas[0], sample_id=8)
    for call in (
        plane.put([new, metas[0]], {"tokens": one * 2}),
        plane.put([new, new], {"tokens": one * 2}),
        plane.put([new], {"tokens": []}),
        plane.update([1, 2], {"tokens": one * 2}),
        plane.update([99], {"x": one}),
        plane.get([99, 8], ["tokens"]),
        plane.claim([1, 2], ["tokens"]),
        plane.claim([4, 2], ["teacher_ids"]),
        plane.claim([2, 99], []),
        plane.discard([2, 3]),
        plane.discard([2, 99]),
        plane.release(Batch(samples=(metas[5],))),
    ):
        with pytest.raises((KeyError, ValueError)) as caught:
            await call
        seen.append(caught.value.args[0])
    await plane.release(batch)
    await plane.discard([0])
    for sample in (0, 1, 3):
        with pytest.raises(KeyError, match=rf"samples \[{sample}\] are unknown"):
            await plane.get([sample], ["tokens"])
    await plane.put([metas[1]], {"tokens": [torch.arange(2)]})  # released: the id may come again
    seen += [(await plane.get([1], ["tokens"]))["tokens"][0].tolist(), plane.num_samples]
    await plane.release(await plane.claim([2], ["tokens"]))  # what was refused has left it alone
    await plane.discard([1, 4, 5, 6, 7])
    return [*seen, plane.num_samples]

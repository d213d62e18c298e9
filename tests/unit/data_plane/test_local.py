"""LocalDataPlane: written once, read by name, claimed once, gone when released."""

from __future__ import annotations

import asyncio

import pytest
import torch

from mopd.base.types import Batch, SampleMeta
from mopd.data_plane.local import LocalDataPlane


def meta(sample_id: int, response_length: int = 2) -> SampleMeta:
    return SampleMeta(
        sample_id=sample_id,
        domain="math",
        weight_version=0,
        prompt_length=1,
        response_length=response_length,
        num_loss_tokens=response_length,
    )


def rows(*ids: int) -> list[torch.Tensor]:
    return [torch.arange(i + 1) for i in ids]


def test_put_update_get_round_trip() -> None:
    async def run() -> None:
        plane = LocalDataPlane()
        await plane.put([meta(3), meta(1)], {"tokens": rows(3, 1)})
        await plane.update([1, 3], {"scores": [torch.tensor([0.5]), torch.tensor([1.5])]})
        got = await plane.get([3, 1], ["scores", "tokens"])
        assert list(got) == ["scores", "tokens"]
        assert [t.item() for t in got["scores"]] == [1.5, 0.5]
        assert [t.tolist() for t in got["tokens"]] == [[0, 1, 2, 3], [0, 1]]
        assert plane.num_samples == 2

    asyncio.run(run())


def test_second_write_unknown_sample_and_unknown_field_name_the_ids() -> None:
    async def run() -> None:
        plane = LocalDataPlane()
        await plane.put([meta(5)], {"tokens": rows(5)})
        with pytest.raises(KeyError, match=r"\[5\].*second time"):
            await plane.put([meta(6), meta(5)], {"tokens": rows(6, 5)})
        with pytest.raises(KeyError, match=r"\[6\].*unknown"):  # the refused put left nothing behind
            await plane.get([6], ["tokens"])
        with pytest.raises(KeyError, match=r"\[9\].*second time"):
            await plane.put([meta(9), meta(9)], {"tokens": rows(1, 1)})
        with pytest.raises(KeyError, match=r"'tokens' of samples \[5\]"):
            await plane.update([5], {"tokens": rows(5)})
        with pytest.raises(KeyError, match=r"'scores' does not exist for samples \[5\]"):
            await plane.get([5], ["scores"])
        with pytest.raises(KeyError, match=r"\[7\]"):
            await plane.update([7], {"scores": rows(1)})
        with pytest.raises(ValueError, match="1 tensors for 2 samples"):
            await plane.put([meta(10), meta(11)], {"tokens": rows(1)})

    asyncio.run(run())


def test_release_of_unclaimed_sample_is_refused() -> None:
    async def run() -> None:
        plane = LocalDataPlane()
        await plane.put([meta(0)], {"tokens": rows(0)})
        with pytest.raises(KeyError, match=r"\[0\]"):
            await plane.release(Batch(samples=(meta(0),)))

    asyncio.run(run())


def test_discarded_samples_are_gone_and_claimed_ones_stay() -> None:
    async def run() -> None:
        plane = LocalDataPlane()
        await plane.put([meta(i) for i in (1, 2, 3)], {"tokens": rows(1, 2, 3)})
        await plane.discard([2])
        with pytest.raises(KeyError, match=r"\[2\] are unknown"):
            await plane.discard([1, 2])
        batch = await plane.claim([1, 3], ["tokens"])
        assert batch.sample_ids == (1, 3)  # the refused discard left 1 alone
        with pytest.raises(KeyError, match=r"\[3\] are discarded but claimed"):
            await plane.discard([3])
        await plane.release(batch)
        assert plane.num_samples == 0

    asyncio.run(run())


def test_taken_samples_are_claimed_at_once_or_not_at_all() -> None:
    async def run() -> None:
        plane = LocalDataPlane()
        await plane.put([meta(i) for i in (1, 2, 3)], {"tokens": rows(1, 2, 3)})
        with pytest.raises(KeyError, match=r"\[9\] are unknown"):
            await plane.claim([1, 9], ["tokens"])
        with pytest.raises(KeyError, match=r"'scores' does not exist for samples \[1, 3\]"):
            await plane.claim([1, 3], ["scores"])
        batch = await plane.claim([3, 1], ["tokens"])
        assert batch.samples == (meta(1), meta(3))
        with pytest.raises(KeyError, match=r"\[1\] are claimed a second time"):
            await plane.claim([1, 2], ["tokens"])
        with pytest.raises(KeyError, match=r"\[3\] are discarded but claimed"):
            await plane.discard([3])
        await plane.release(batch)
        assert plane.num_samples == 1
        await plane.claim([2], ["tokens"])  # the refused claim left it alone

    asyncio.run(run())

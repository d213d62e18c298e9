"""From one sender to a chain of receivers, or to those that map its memory: every bit, once, or a failure for all."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from typing import Any

import pytest
import torch
from torch import Tensor

from mopd.base.types import NonFiniteError
from mopd.bench.processes import HostPeaks
from mopd.weights import group as transfer_group
from mopd.weights.carrying import TravellingParts
from mopd.weights.group import GroupOrder
from mopd.weights.parts import TensorMeta, cut_parts
from tests.unit.weights.members import (
    BUCKET,
    DEADLINE_S,
    LARGE,
    SLICE,
    Members,
    Weights,
    assert_all_fail,
    die_in_the_middle,
    members,
    metas_of,
)

MIB = 2**20
SHAPES = {"norm": (5,), "large": (3, 2001), "a": (7, 3), "empty": (0, 4), "b": (1,), "q": (25, 21), "end": (9,)}
FLIPPED = 3
"""Part of which a bit changes on its way."""


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several of each large part, whose last is short. Members that cut otherwise would end their processes."""
    monkeypatch.setattr(transfer_group, "SLICE_BYTES", SLICE)


@pytest.fixture
def weights() -> Weights:
    """Large and small ones in turn, of odd sizes, of several dtypes; one above a bucket."""
    random = torch.Generator().manual_seed(0)
    made = {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}
    return made | {"half": made["large"].bfloat16()[1], "steps": torch.tensor(7), "d": torch.arange(11)}


@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize("num_receivers", [1, 3])
def test_every_bit_arrives_in_each_update(weights: Weights, num_receivers: int, is_mapped: bool) -> None:
    with members(metas_of(weights), num_receivers, is_mapped=is_mapped) as group:
        for factor, verify in ((1, True), (-3, False), (2, True)):
            sent = {name: tensor * factor for name, tensor in weights.items()}
            (told, *found) = (one.result(DEADLINE_S) for one in group.update(sent, verify=verify))
            assert told.num_bytes >= sum(tensor.nbytes for tensor in weights.values())
            for got in found:  # all of it was there at the same time
                assert got.keys() == weights.keys()
                assert all(torch.equal(got[name], tensor) for name, tensor in sent.items())


@pytest.mark.parametrize("is_mapped", [False, True])
def test_values_travel_in_the_smaller_dtype_and_end_in_the_slots(weights: Weights, is_mapped: bool) -> None:
    """From fp32 by bf16 into fp32, with slots that begin between two words and weights that are not contiguous."""
    weights["q"] = weights["q"].t().contiguous().t()
    smaller = {torch.float32: torch.bfloat16}
    metas = [TensorMeta(m.name, smaller.get(m.dtype, m.dtype), m.shape) for m in metas_of(weights)]

    def slots() -> Weights:
        made = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in weights.items()}
        made["large"] = torch.zeros(1 + weights["large"].numel(), dtype=torch.bfloat16)[1:].view(3, -1)
        return made

    with members(metas, 1, slots=slots, is_mapped=is_mapped) as group:
        _, found = (one.result(DEADLINE_S) for one in group.update(weights))
        for meta in metas:
            own = group.slots[0][meta.name]
            assert torch.equal(found[meta.name], weights[meta.name].to(meta.dtype).to(own.dtype)), meta.name


def watched(group: Members) -> list[int]:
    """Addresses of what the sender carries from now on."""
    addresses: list[int] = []
    carry = group.senders[0].carry

    def watch(number: int, buffer: Tensor, sender: int) -> Any:
        addresses.append(buffer.data_ptr())
        return carry(number, buffer, sender)

    group.senders[0].carry = watch  # type: ignore[method-assign]
    return addresses


def test_a_large_tensor_leaves_from_its_own_memory_and_arrives_in_its_slots(weights: Weights) -> None:
    with members(metas_of(weights), 1) as group:
        addresses, given = watched(group), list[str]()
        sending = group.pool.submit(group.send, 0, weights)
        for name, tensor in group.receivers[0].tensors(verify=True, patience_s=DEADLINE_S):
            given.append(name)
            group.slots[0][name].copy_(tensor)
        sending.result(DEADLINE_S)
        assert {weights["large"].data_ptr(), weights["q"].data_ptr()} <= set(addresses)
        assert given == ["norm", "a", "empty", "b", "end", "steps", "d"]
        assert all(torch.equal(group.slots[0][name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("options", [{}, {"checks_values": False}, {"verify": False}])
def test_what_is_no_number_does_not_leave(weights: Weights, value: float, options: dict[str, bool]) -> None:
    weights["q"][-1, -1] = value
    with members(metas_of(weights), 1) as group:
        addresses = watched(group)
        sending, *receiving = group.update(weights, **options)
        with pytest.raises(NonFiniteError, match="'q'"):
            sending.result(DEADLINE_S)
        assert_all_fail(receiving)
        assert weights["q"].data_ptr() not in addresses


def test_values_that_somebody_else_looks_at_are_not_read_and_a_sum_beyond_all_numbers_is_no_fault(
    weights: Weights,
) -> None:
    weights["large"].fill_(3e38)
    with members(metas_of(weights), 1) as group:
        _, found = (one.result(DEADLINE_S) for one in group.update(weights))
        assert torch.equal(found["large"], weights["large"])
        weights["q"][-1, -1] = float("nan")
        _, found = (one.result(DEADLINE_S) for one in group.update(weights, verify=False, checks_values=False))
        assert found["q"][-1, -1].isnan()


@pytest.mark.parametrize("is_verified", [True, False])
def test_a_stream_that_is_not_what_was_announced_ends_it(weights: Weights, is_verified: bool) -> None:
    wrong = (("q", torch.zeros(2), r"shape \[2\] where 'q' of shape"), ("z", weights["q"], "'z' where"))
    for name, made, told in wrong:
        with members(metas_of(weights), 1) as group:
            stream = [(name, made) if own == "q" else (own, tensor) for own, tensor in weights.items()]
            receiving = group.receiving(verify=is_verified)
            with pytest.raises(RuntimeError, match=told):
                group.send(0, weights, stream, verify=is_verified)
            assert_all_fail(receiving)


def test_what_no_step_changes_is_left_out_once_it_came(weights: Weights) -> None:
    with members(metas_of(weights), 3) as group:
        for num_skipped in (0, 2, len(weights) - 1, 0):
            sent = {name: tensor * (2 - num_skipped) for name, tensor in weights.items()}
            _, *found = (one.result(DEADLINE_S) for one in group.update(sent, num_skipped=num_skipped))
            came = list(sent)[num_skipped:]
            assert all(torch.equal(got[name], sent[name]) for got in found for name in came)
            assert [one.num_skipped for one in group.receivers.values()] == [num_skipped] * 3
            assert came == [*found[1]]
    for num_skipped in (2, len(weights), -1, 2**40):
        with members(metas_of(weights), 1) as group:
            receiving = group.receiving()
            group.senders[0].group.tell(num_skipped)
            (told,) = assert_all_fail(receiving)
            assert told == f"{num_skipped} of 10 weights are left out, which never came"


class Flipping:
    """Stands in for a member's process group: a bit of what it sends as part ``FLIPPED`` changes on its way."""

    def __init__(self, inner: Any) -> None:
        self._inner, self._num_sent, self._kept = inner, 0, list[Tensor]()

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
        if self._num_sent == 1 + FLIPPED:  # behind the number of those left out
            tensors = [tensors[0].clone()]
            tensors[0][-1] ^= 8
            self._kept += tensors
        self._num_sent += 1
        return self._inner.send(tensors, to, tag)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_bit_that_changes_on_a_link_is_seen_by_all_behind_it(
    weights: Weights, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_group, "SLICE_BYTES", BUCKET)  # each part is one message
    metas = metas_of(weights)
    with members(metas, 3) as group:
        flipping: Any = group.senders[0].group if rank == 0 else group.receivers[rank - 1]._carrier.group
        flipping._group = Flipping(flipping._group)
        _, *receiving = group.update(weights)
        told = assert_all_fail(receiving[rank:])
        assert told[0] == f"part {FLIPPED} of {len(cut_parts(metas, BUCKET, LARGE))} changed on its way"
        before = [one.exception(DEADLINE_S) for one in receiving[:rank]]
        assert all(error is None or "changed" not in str(error) for error in before)


def test_a_bit_that_changes_in_the_memory_is_seen_by_all(weights: Weights) -> None:
    with members(metas_of(weights), 3, is_mapped=True) as group:

        def flip(number: int) -> None:
            if number == FLIPPED:
                group.senders[0].room(number, 8)[5] ^= 8

        _, *receiving = group.update(weights, on_part=flip)
        assert all(told.startswith(f"part {FLIPPED} of") for told in assert_all_fail(receiving))


def many(num: int = 40) -> list[TensorMeta]:
    """More parts than are on their way at a time; every other one is another sender's."""
    return [TensorMeta(f"w{i}", torch.float32, (800,), i % 2) for i in range(num)]


@pytest.mark.parametrize("victim", [0, 1, 2, 4], ids=["first sender", "sender", "first", "last"])
def test_a_member_that_is_killed_in_the_middle_ends_it_for_all_before_their_deadline(victim: int) -> None:
    metas = many()
    ones = {meta.name: torch.ones(meta.shape) for meta in metas}
    context, started = multiprocessing.get_context("spawn"), list[Any]()

    def bring(order: GroupOrder) -> None:
        started.append(context.Process(target=die_in_the_middle, args=(order, victim, metas, 15), daemon=True))
        started[0].start()

    with members(metas, 3, elsewhere={victim: bring}) as group:
        assert_all_fail(group.update(ones))
        started[0].join(DEADLINE_S)
        assert started[0].exitcode == -signal.SIGKILL


@pytest.mark.parametrize(("silent", "is_mapped"), [(0, False), (2, False), (1, True)])
def test_one_that_is_silent_costs_the_others_no_more_than_the_deadline(silent: int, is_mapped: bool) -> None:
    """The first or last of three receivers, or the one between them; ``DEADLINE_S`` would be beyond the test's time."""
    metas = [TensorMeta(meta.name, meta.dtype, meta.shape) for meta in many()]
    with members(metas, 3, is_mapped=is_mapped) as group:
        group.hurry()
        is_there = group.receivers.pop(silent)
        assert_all_fail(group.update({meta.name: torch.ones(meta.shape) for meta in metas}))
        is_there.close()


def test_a_sender_that_is_silent_costs_the_receivers_their_patience() -> None:
    with members(many(), 3) as group:
        group.hurry()
        assert_all_fail(group.receiving())


def test_who_leaves_ends_its_own_wait_and_that_of_those_behind_it() -> None:
    """Closed by another thread, as a server does that is asked into another group."""
    with members(many(), 3) as group:
        waiting = group.receiving()  # the senders are silent
        group.receivers[1].close()
        assert_all_fail(waiting[1:])
        for sender in group.senders.values():
            sender.group.close()
        assert_all_fail(waiting[:1])


@pytest.mark.parametrize(
    ("large_bytes", "dtype", "num_buckets"),
    [
        (2**40, torch.float32, 4),  # small ones, in buckets
        (1, torch.bfloat16, 4),  # large ones, that are cast on either side
        (1, torch.float32, 0),  # large ones, from memory into memory
    ],
)
def test_two_buckets_at_most_are_held_on_either_side(
    large_bytes: int, dtype: torch.dtype, num_buckets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update is ten buckets: the same tensor ten times, and one slot for all, so that nothing else takes memory. How
    many of the four are full at once hangs on which side is ahead, so only the most is asked for. Between updates none
    is held."""
    monkeypatch.setattr(transfer_group, "SLICE_BYTES", 8 * MIB)
    bucket = 32 * MIB
    shape = (bucket // dtype.itemsize,)
    one, slot = torch.full(shape, 1.0), torch.full(shape, 2.0)
    metas = [TensorMeta(f"w{i}", dtype, shape) for i in range(10)]
    names = [meta.name for meta in metas]
    with members(
        metas, 1, slots=lambda: dict.fromkeys(names, slot), bucket_bytes=bucket, large_bytes=large_bytes
    ) as group:
        gc.collect()
        peaks = HostPeaks({"own": os.getpid()})
        sending = group.pool.submit(group.send, 0, dict.fromkeys(names, one), verify=False)
        for _, tensor in group.receivers[0].tensors(verify=False, patience_s=DEADLINE_S):
            slot.copy_(tensor)
        sending.result(DEADLINE_S)
        assert peaks.extra_bytes()["own"] / bucket < num_buckets + 0.5
        for carrier in (group.senders[0], group.receivers[0]._carrier):
            assert isinstance(carrier, TravellingParts) and not any(map(len, carrier._halves))
        assert torch.equal(slot, one)

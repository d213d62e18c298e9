"""Several senders of one update: in the order of its tensors, each in its turn, and whoever fails ends it for all."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mopd.base.types import NonFiniteError
from mopd.student.sending import WeightSender
from mopd.weights import group as transfer_group
from mopd.weights.group import GroupOrder, TransferFailed
from mopd.weights.parts import TensorMeta, cut_parts, to_json
from tests.fixtures.linked import Sending
from tests.unit.weights.members import (
    BUCKET,
    DEADLINE_S,
    LARGE,
    SLICE,
    Members,
    Weights,
    assert_all_fail,
    members,
    metas_of,
)

SIZES = (0, 1, 5, 21, 333, 999, 1001, 5_003)
"""Values of a tensor: none, some bytes, a slice, above a bucket."""
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.int64, torch.uint8)


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_group, "SLICE_BYTES", SLICE)


def draw(chance: random.Random, num_senders: int) -> tuple[Weights, list[TensorMeta]]:
    """Tensors by chance, some of which are cast, whose senders are anyone."""
    weights, metas = Weights(), list[TensorMeta]()
    for i in range(chance.randrange(8, 30)):
        dtype, size = chance.choice(DTYPES), chance.choice(SIZES)
        shape = (size // 3, 3) if size % 3 == 0 else (size,)
        weights[f"w{i}"] = (100 * torch.rand(shape)).to(dtype)
        smaller = torch.bfloat16 if dtype == torch.float32 and chance.random() < 0.5 else dtype
        metas.append(TensorMeta(f"w{i}", smaller, shape, chance.randrange(num_senders)))
    return weights, metas


@pytest.mark.parametrize("num_receivers", [1, 3])
@pytest.mark.parametrize("num_senders", [2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_every_bit_of_any_sender_arrives_everywhere_in_order(seed: int, num_senders: int, num_receivers: int) -> None:
    chance = random.Random(f"{seed} {num_senders} {num_receivers}")
    torch.manual_seed(seed)
    weights, metas = draw(chance, num_senders)

    def slots() -> Weights:
        return {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in weights.items()}

    with members(metas, num_receivers, slots=slots, num_senders=num_senders) as group:
        for verify, num_skipped in ((True, 0), (False, chance.randrange(len(metas))), (True, chance.randrange(3))):
            left = list[int]()
            futures = group.update(weights, verify=verify, num_skipped=num_skipped, on_part=left.append)
            outcomes = [future.result(DEADLINE_S) for future in futures]
            parts = cut_parts(metas[num_skipped:], BUCKET, LARGE)
            assert left == list(range(len(parts)))  # of all senders together
            assert sum(sent.num_bytes for sent in outcomes[:num_senders]) == sum(part.num_bytes for part in parts)
            for place, found in enumerate(outcomes[num_senders:]):
                for meta in metas[num_skipped:]:
                    travelled = weights[meta.name].to(meta.dtype)
                    own = group.slots[place].get(meta.name, travelled)
                    assert torch.equal(found[meta.name], travelled.to(own.dtype)), (place, meta)
            for tensor in weights.values():
                tensor.mul_(2)


class Late:
    """The stream of a sender, which is at hand once it may go on."""

    def __init__(self, stream: Iterator[tuple[str, Tensor | None]], name: str) -> None:
        self._stream, self._name = stream, name
        self.goes_on = threading.Event()
        self.is_read = threading.Event()
        """Whether it was asked for the tensor ``name``."""
        self.is_drained = False

    def __iter__(self) -> Iterator[tuple[str, Tensor | None]]:
        for name, tensor in self._stream:
            if name == self._name:
                self.is_read.set()
                assert self.goes_on.wait(DEADLINE_S)
            yield name, tensor
        self.is_drained = True


@pytest.fixture
def weights() -> Weights:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(600 + 7 * i, generator=generator) for i, name in enumerate("abcd")}


@pytest.fixture
def two(weights: Weights) -> Iterator[Members]:
    """``a`` and ``c`` are the first sender's, ``b`` and ``d`` another's; there are three receivers."""
    with members(metas_of(weights, (0, 1, 0, 1)), 3) as group:
        yield group


def test_who_has_its_tensors_waits_for_its_turn(two: Members, weights: Weights) -> None:
    """The second sender is late with ``b``: the first has ``c`` at hand and does not send it."""
    left, late = list[str](), Late(two.stream(1, weights), "b")
    reached = Late(two.stream(0, weights), "d")  # what is read behind `c` is read when `c` has left
    reached.goes_on.set()
    sending = two.pool.submit(two.send, 1, weights, late, on_part=lambda number: left.append("abcd"[number]))  # type: ignore[arg-type]
    first = two.pool.submit(two.send, 0, weights, reached, on_part=lambda number: left.append("abcd"[number]))  # type: ignore[arg-type]
    receiving = two.receiving()
    assert late.is_read.wait(DEADLINE_S)
    assert "b" not in left and "c" not in left and not reached.is_read.is_set()
    late.goes_on.set()
    for future in (sending, first, *receiving):
        future.result(DEADLINE_S)  # type: ignore[attr-defined]
    assert left == ["a", "b", "c", "d"]


def test_a_sender_waits_for_those_before_it_less_long_than_its_ranks_for_it(two: Members, weights: Weights) -> None:
    first, other = Late(two.stream(0, weights), "a"), Late(two.stream(1, weights), "")
    sending = two.pool.submit(two.send, 0, weights, first)  # type: ignore[arg-type]
    with pytest.raises(TransferFailed):
        two.send(1, weights, other, longest_turn_s=0.1)  # type: ignore[arg-type]
    assert other.is_drained  # its ranks stay in step
    first.goes_on.set()
    assert_all_fail([sending, *two.receiving()])
    assert first.is_drained


@pytest.mark.parametrize(("name", "sender"), [("a", 0), ("b", 1), ("c", 0), ("d", 1)])
def test_after_a_failure_of_one_nobody_sends_and_all_streams_are_read(
    two: Members, weights: Weights, name: str, sender: int
) -> None:
    weights[name][-1] = float("nan")
    streams: list[Any] = [Late(two.stream(rank, weights), "") for rank in two.senders]
    sending = [two.pool.submit(two.send, rank, weights, streams[rank]) for rank in two.senders]
    others = [*sending, *two.receiving()]
    with pytest.raises(NonFiniteError, match=f"'{name}'"):
        others.pop(sender).result(DEADLINE_S)  # type: ignore[attr-defined]
    assert_all_fail(others)
    assert all(stream.is_drained for stream in streams)


def test_a_stream_with_a_tensor_of_another_sender_is_refused(two: Members, weights: Weights) -> None:
    others = [two.pool.submit(two.send, 1, weights), *two.receiving()]
    with pytest.raises(RuntimeError, match="the stream has 'b', which is sender 1's"):
        two.send(0, weights, weights.items())
    assert_all_fail(others)


def test_ranks_join_send_and_leave_as_they_are_told(weights: Weights) -> None:
    """The first of each of two stages sends; the others help to gather, and say that all is well."""
    metas, places = metas_of(weights, (0, 0, 1, 1)), [(0, 0), (0, 1), (1, 0), (1, 1)]
    names: dict[tuple[int, int], list[str]] = {place: [] for place in places}
    joined: list[Future[bool]] = []

    def rank(pp_rank: int, tp_rank: int) -> WeightSender:
        student = Sending(weights)
        student.layout = SimpleNamespace(copy=0, tp_rank=tp_rank, pp_rank=pp_rank, device=torch.device("cpu"))

        def sender_weights(part: str) -> Iterator[tuple[str, Tensor | None]]:
            for meta in metas:
                names[pp_rank, tp_rank].append(meta.name)
                yield meta.name, weights[meta.name] if (pp_rank, tp_rank) == (meta.sender, 0) else None

        student.sender_weights = sender_weights  # type: ignore[method-assign]
        return WeightSender(student)

    ranks, told = [rank(*place) for place in places], to_json(metas).decode()
    with ThreadPoolExecutor(4) as pool:

        def bring(order: GroupOrder) -> None:
            joined.extend(pool.submit(rank.join, dataclasses.asdict(order), told) for rank in ranks)

        def send() -> list[Future[dict[str, float] | None]]:
            return [pool.submit(rank.send, True, True) for rank in ranks]

        with members(metas, 1, elsewhere={0: bring, 1: lambda order: None}) as group:
            assert all(one.result(DEADLINE_S) for one in joined)
            sending, (receiving,) = send(), group.receiving()
            found = receiving.result(DEADLINE_S)
            assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
            answers = [one.result(DEADLINE_S) for one in sending]
            assert [answer is not None for answer in answers] == [True, False, True, False]
            group.receivers[0].close()
            assert [one.result(DEADLINE_S) for one in send()] == [None] * 4
            assert all(read == 2 * list(weights) for read in names.values())
        for one in ranks:
            one.leave()

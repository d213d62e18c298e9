"""Several senders over real groups: everything arrives in their order, and whoever fails ends it for all."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mopd.base.types import NonFiniteError
from mopd.student.sending import StageSender
from mopd.weights.buckets import TensorMeta, to_json
from mopd.weights.group import GroupOrder, GroupStore, TransferFailed, TransferGroup
from mopd.weights.mapped import open_receiver
from mopd.weights.sending import send
from mopd.weights.stages import SenderSignals, of_sender

BUCKET = 2**20
DEADLINE_S = 900.0
"""Longer than a test may take: whatever waits for it fails."""
Weights = dict[str, Tensor]


class Stage:
    """Stands in for a student's rank: what ``StageSender`` needs of it."""

    def __init__(self, number: int, weights: Weights) -> None:
        self.layout: Any = SimpleNamespace(copy=0, tp_rank=0, pp_rank=number, device=torch.device("cpu"))
        self.constants: frozenset[str] = frozenset()
        self.own = weights
        self.left = 0

    def weights(self, part: str, *, in_place: bool, by_stage: bool) -> Iterator[tuple[str, Tensor]]:
        self.left = len(self.own)
        for item in self.own.items():
            self.left -= 1
            yield item


class Run:
    """Rank 0, one stage more, one receiver, which have met."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        generator = torch.Generator().manual_seed(0)
        names = ("a", "b", "c", "d")
        weights = {name: torch.randn(300 + 70 * i, 1000, generator=generator) for i, name in enumerate(names)}
        self.metas = [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()]
        self.weights, self.pool = weights, pool
        self.first = {name: weights[name] for name in names[:1]}
        self.stage = Stage(1, {name: weights[name] for name in names[1:]})
        store = GroupStore(DEADLINE_S)
        self.order = GroupOrder(
            group_id="g",
            port=store.port,
            world_size=2,
            bucket_bytes=BUCKET,
            timeout_s=DEADLINE_S,
            secret="s",
            shares=(1, 3),
        )
        self.words = SenderSignals(self.order, store)
        self.sender = StageSender(self.stage)
        joined = pool.submit(self.sender.join, dataclasses.asdict(self.order), to_json(self.metas).decode())
        entered = pool.submit(open_receiver, self.order, 1, self.metas, keeps_views=True)
        self.group = TransferGroup(of_sender(self.order, 0), 0, store)
        joined.result(DEADLINE_S)
        self.receiver: Any = entered.result(DEADLINE_S)

    def update(self, number: int) -> tuple[Future[Any], Future[list[tuple[str, Tensor]]]]:
        """The stage's and the receiver's part, under way."""
        receiving = self.pool.submit(lambda: list(self.receiver.tensors(verify=True, patience_s=DEADLINE_S)))
        return self.pool.submit(self.sender.send, number, True, False), receiving

    def send_first(self, number: int) -> None:
        metas = self.metas[:1]
        try:
            send(self.group, metas, iter(self.first.items()), bucket_bytes=BUCKET, verify=True)
        except BaseException:
            self.words.pass_on(number, 1, is_good=False)
            raise
        self.words.pass_on(number, 1, is_good=True)


@pytest.fixture
def run() -> Iterator[Run]:
    with ThreadPoolExecutor(4) as pool:
        met = Run(pool)
        yield met
        met.receiver.close()
        met.group.close()


def test_each_sends_its_own_in_its_turn(run: Run) -> None:
    for number in (1, 2):
        sending, receiving = run.update(number)
        time.sleep(0.05)
        assert not sending.done()  # it is rank 0's turn
        run.send_first(number)
        run.words.wait(number, 2, DEADLINE_S)
        sending.result(DEADLINE_S)
        got = receiving.result(DEADLINE_S)
        assert [name for name, _ in got] == list(run.weights)
        assert all(torch.equal(tensor, run.weights[name]) for name, tensor in got)
        for tensor in run.weights.values():
            tensor.mul_(2)


def test_after_a_failure_of_the_first_nobody_sends(run: Run) -> None:
    run.first["a"][0, 0] = float("nan")
    sending, receiving = run.update(1)
    with pytest.raises(NonFiniteError):
        run.send_first(1)
    sending.result(DEADLINE_S)
    with pytest.raises(TransferFailed):
        receiving.result(DEADLINE_S)
    with pytest.raises(TransferFailed, match="before 2 has failed"):
        run.words.wait(1, 2, DEADLINE_S)
    assert run.stage.left == 0  # its ranks stayed in step


def test_a_value_of_a_later_stage_that_is_no_number_is_an_error_there(run: Run) -> None:
    run.weights["d"][-1, -1] = float("inf")
    sending, receiving = run.update(1)
    run.send_first(1)
    with pytest.raises(NonFiniteError, match="'d'"):
        sending.result(DEADLINE_S)
    with pytest.raises(TransferFailed):
        receiving.result(DEADLINE_S)
    with pytest.raises(TransferFailed):
        run.words.wait(1, 2, DEADLINE_S)


def test_a_receiver_that_goes_ends_it_for_all(run: Run) -> None:
    sending = run.pool.submit(run.sender.send, 1, True, False)
    run.receiver.close()
    with pytest.raises(TransferFailed):
        run.send_first(1)
    sending.result(DEADLINE_S)
    with pytest.raises(TransferFailed):
        run.words.wait(1, 2, DEADLINE_S)


def test_a_meeting_that_is_called_off_ends_for_the_other_senders() -> None:
    store = GroupStore(DEADLINE_S)
    order = GroupOrder(
        group_id="g", port=store.port, world_size=2, bucket_bytes=1, timeout_s=DEADLINE_S, secret="s", shares=(1, 1)
    )
    words, stage = SenderSignals(order, store), Stage(1, {"b": torch.zeros(2)})
    sender, metas = StageSender(stage), [TensorMeta(name, torch.float32, (2,)) for name in "ab"]
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(sender.join, dataclasses.asdict(order), to_json(metas).decode())
        words.call_off()
        joining.result(DEADLINE_S / 2)
        with contextlib.suppress(TransferFailed):
            pool.submit(sender.send, 1, True, False).result(DEADLINE_S / 2)
    assert stage.left == 0


def test_other_tensors_than_ordered_are_refused() -> None:
    order = GroupOrder(group_id="g", port=1, world_size=2, bucket_bytes=1, timeout_s=1.0, secret="s", shares=(2, 1))
    with pytest.raises(ValueError, match=r"2 weights are announced, and \[2, 1\]"):
        open_receiver(order, 1, [TensorMeta(name, torch.float32, (2,)) for name in "ab"], keeps_views=True)


def test_a_stage_waits_for_those_before_it_less_long_than_its_ranks_for_it() -> None:
    store = GroupStore(DEADLINE_S)
    order = GroupOrder(
        group_id="g", port=store.port, world_size=2, bucket_bytes=1, timeout_s=DEADLINE_S, secret="s", shares=(1, 1)
    )
    stage = Stage(1, {"b": torch.zeros(2)})
    sender, metas = StageSender(stage, longest_s=0.1), [TensorMeta(name, torch.float32, (2,)) for name in "ab"]
    with ThreadPoolExecutor(2) as pool:
        joining = pool.submit(sender.join, dataclasses.asdict(order), to_json(metas).decode())
        mine = of_sender(order, 1)
        receiving = pool.submit(TransferGroup, mine, 1)
        joining.result(DEADLINE_S)
        receiving.result(DEADLINE_S)
        pool.submit(sender.send, 1, True, False).result(DEADLINE_S)
    assert stage.left == 0

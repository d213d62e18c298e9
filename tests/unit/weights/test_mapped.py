"""Buckets that are read in the sender's memory: what is read is what was sent, and nothing is left behind.

Sender and receivers are threads here; ``tests/unit/launch/test_transfer.py`` has servers.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mopd.weights.buckets import TensorMeta
from mopd.weights.group import GroupOrder, GroupStore, TransferFailed, TransferGroup
from mopd.weights.mapped import MappedReceiver, mapped_bytes, open_receiver, send_mapped
from mopd.weights.memory import SharedMemory, open_memory

CPU = torch.device("cpu")
BUCKET_BYTES = 4096
DEADLINE_S = 600.0
SHORT_S = 5.0
"""Where somebody waits until it has passed."""
Weights = dict[str, Tensor]


@pytest.fixture
def weights() -> Weights:
    """Smaller and larger than a bucket, of several dtypes, one empty; the last bytes of a piece are not aligned."""
    random = torch.Generator().manual_seed(0)
    shapes = {"a": (7, 3), "large": (37, 101), "b": (5,), "none": (0, 4), "half": (4001,), "c": (30, 30), "d": (11,)}
    made = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    return made | {"half": made["half"].bfloat16(), "d": torch.arange(11)}


class Two:
    """A sender and two receivers, the second of which keeps what it is given."""

    def __init__(self, weights: Weights, *, deadline_s: float = DEADLINE_S) -> None:
        self.deadline_s = deadline_s
        self.metas = [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()]
        self.memory = SharedMemory(mapped_bytes(self.metas, BUCKET_BYTES), CPU)
        store = GroupStore(deadline_s)
        self.order = GroupOrder(
            group_id="two", port=store.port, world_size=3, bucket_bytes=BUCKET_BYTES, timeout_s=deadline_s,
            secret="s", memory=self.memory.handles(2),
        )  # fmt: skip
        self.threads = ThreadPoolExecutor(4)
        self.slots = {"large": torch.zeros_like(weights["large"])}
        meeting = [
            self.threads.submit(open_receiver, self.order, 1, self.metas, keeps_views=False, slots=self.slots),
            self.threads.submit(open_receiver, self.order, 2, self.metas, keeps_views=True),
        ]
        self.group = TransferGroup(self.order, 0, store)
        self.receivers = [ready.result() for ready in meeting]

    def send(self, weights: Weights, on_bucket: Callable[[int], None] = lambda number: None) -> None:
        send_mapped(
            self.group, self.memory, self.metas, iter(weights.items()), bucket_bytes=BUCKET_BYTES, verify=True,
            on_bucket=on_bucket,
        )  # fmt: skip

    def read(self, place: int, pause_s: float = 0.0) -> Weights:
        """All that comes; without ``keeps_views`` copies, made when a bucket's memory would be the next one's."""
        receiver, found = self.receivers[place], {}
        assert isinstance(receiver, MappedReceiver)
        for name, tensor in receiver.tensors(verify=True, patience_s=self.deadline_s):
            time.sleep(pause_s)
            found[name] = tensor if place else tensor.clone()
        return found if place else self.slots | found

    def close(self) -> None:
        self.group.close()
        for receiver in self.receivers:
            receiver.close()
        self.memory.close()
        self.threads.shutdown()


@pytest.fixture
def two(weights: Weights) -> Iterator[Two]:
    made = Two(weights)
    yield made
    made.close()


def test_every_bit_arrives_also_at_one_that_reads_slowly(two: Two, weights: Weights) -> None:
    for factor in (1, -3):
        sent = {name: tensor * factor for name, tensor in weights.items()}
        reading = [two.threads.submit(two.read, 0, 0.02), two.threads.submit(two.read, 1)]
        two.send(sent)
        for found in (ready.result() for ready in reading):  # all of it was there at the same time
            assert {name: tensor.tolist() for name, tensor in found.items()} == {
                name: tensor.tolist() for name, tensor in sent.items()
            }


def test_a_bit_that_changes_is_seen_by_all(two: Two, weights: Weights) -> None:
    def flip(number: int) -> None:
        if number == 3:
            two.memory.buffer[len(two.memory.buffer) // 2 + 5] ^= 8  # part 3 is in the second half

    reading = [two.threads.submit(two.read, place) for place in (0, 1)]
    with pytest.raises(TransferFailed):
        two.send(weights, flip)
    errors = [ready.exception() for ready in reading]
    assert all(isinstance(error, TransferFailed) for error in errors)
    assert any("part 3" in str(error) for error in errors)


def test_one_that_stops_costs_the_others_the_deadline(weights: Weights) -> None:
    two = Two(weights, deadline_s=SHORT_S)
    reading = two.threads.submit(two.read, 0)  # the other one never does
    with pytest.raises(TransferFailed):
        two.send(weights)
    assert isinstance(reading.exception(), TransferFailed)
    two.close()


def test_nothing_of_the_memory_is_left(weights: Weights) -> None:
    def num_maps() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:mopd-weights")

    before = num_maps()
    two = Two(weights)
    assert num_maps() > before
    assert not [name for name in os.listdir("/dev/shm") if "mopd" in name]
    two.close()
    two.receivers.clear()
    gc.collect()
    assert num_maps() <= before


@pytest.mark.parametrize("handle", ["", "[]", "{}", "[3]", "[" * 5000])
def test_what_is_no_handle_of_a_sender_is_refused(handle: str) -> None:
    with pytest.raises(ValueError, match="the sender's memory cannot be opened"):
        open_memory(handle, 0, CPU)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"pid": True}, "are not numbers"),
        ({"pid": ".."}, "are not numbers"),
        ({"pid": 2**40}, "No such file"),
        ({"descriptor": -1}, "are not numbers"),
        ({"descriptor": 0}, "/fd/0 is another file"),
        ({"num_bytes": 16.0}, "are not numbers"),
        ({"num_bytes": 0}, "are not numbers"),
        ({"num_bytes": 2**40}, ""),
    ],
)
def test_a_handle_is_of_memory_that_a_sender_may_have(changes: dict[str, Any], problem: str) -> None:
    memory = SharedMemory(4096, CPU)
    (handle,) = json.loads(memory.handles(1))
    with pytest.raises(ValueError, match=f"the sender's memory cannot be opened: .*{problem}"):
        open_memory(json.dumps([handle | changes]), 0, CPU)
    memory.close()

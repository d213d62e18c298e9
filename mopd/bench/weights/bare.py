"""The reference: a gloo (on CUDA NCCL) broadcast of as many bytes, in processes that do nothing else."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from mopd.bench.weights.student import TIMEOUT_S, forks
from mopd.transfer.group import GroupOrder, GroupStore, Pending, TransferGroup


@contextmanager
def bare_broadcast(
    num_bytes: int, bucket_bytes: int, num_receivers: int, device: torch.device
) -> Iterator[Callable[[], float]]:
    """Seconds until all of so many processes have received so many bytes, from and into two buckets that every process
    allocated and wrote before the time begins."""
    store = GroupStore(TIMEOUT_S)
    order = GroupOrder(
        group_id="bare",
        port=store.port,
        world_size=1 + num_receivers,
        bucket_bytes=bucket_bytes,
        timeout_s=TIMEOUT_S,
        secret="bench",
    )
    context = forks()
    members = []
    for rank in range(1, order.world_size):
        end, other = context.Pipe()
        process = context.Process(target=_receive, args=(order, rank, num_bytes, device.type, other), daemon=True)
        process.start()
        members.append((process, end))
    group = TransferGroup(order, 0, store, device=device)
    buckets = _buckets(group, bucket_bytes)

    def send() -> float:
        started = time.perf_counter()
        for _, end in members:
            end.send(None)
        _broadcast(group, num_bytes, buckets)
        for _, end in members:
            end.recv()
        return time.perf_counter() - started

    try:
        yield send
    finally:
        group.close()
        for process, _ in members:
            process.terminate()
            process.join()


def _receive(order: GroupOrder, rank: int, num_bytes: int, kind: str, end: Connection) -> None:
    """A receiver's whole life."""
    torch.set_num_threads(1)
    group = TransferGroup(order, rank, device=torch.device(f"cuda:{rank}" if kind == "cuda" else kind))
    buckets = _buckets(group, order.bucket_bytes)
    while True:
        end.recv()
        _broadcast(group, num_bytes, buckets)
        end.send(None)


def _buckets(group: TransferGroup, bucket_bytes: int) -> list[Tensor]:
    """Two of [bucket_bytes] uint8, whose pages are there."""
    return [torch.full((bucket_bytes,), number, dtype=torch.uint8, device=group.device) for number in range(2)]


def _broadcast(group: TransferGroup, num_bytes: int, buckets: Sequence[Tensor]) -> None:
    """Two buckets are on their way at a time."""
    flying = deque[Pending]()
    for number, start in enumerate(range(0, num_bytes, len(buckets[0]))):
        if len(flying) == 2:
            flying.popleft().wait()
        flying.append(group.broadcast(buckets[number % 2][: num_bytes - start]))
    for pending in flying:
        pending.wait()

"""What this machine's CPU does in a second, for a plan (``mopd plan --probe``): a few seconds of small measurements.

Everything runs on one thread, as a rank does where ranks share the cores.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch

from mopd.planning.devices import Rates
from mopd.wire.weights import stage_updates

SIZE = 512
"""Of the matrices that are multiplied: large enough for the BLAS library, small for a CPU."""
COPY_BYTES = 2**28
"""More than the caches hold."""
STAGED_BYTES = 2**26
ROUNDS = 5
CALLS = 2000
COLLECTIVE_CALLS = 25
"""Calls whose cost a collective of two processes of one machine has: it wakes the other one."""


def probe(*, num_ranks: int) -> Rates:
    """Rates of one rank of ``num_ranks`` on this machine: where these are more than the cores, each gets its share."""
    threads = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0))
    share = min(1.0, cores / num_ranks)
    torch.set_num_threads(max(1, cores // num_ranks))
    try:
        flops, bandwidth, call_s, train_call_s = (
            share * _flops(),
            share * _bandwidth(),
            _call_s() / share,
            _train_call_s() / share,
        )
        stage = share * _stage()
    finally:
        torch.set_num_threads(threads)
    return Rates(
        train=flops,
        train_moe=flops,
        prefill=flops,
        bandwidth=bandwidth,
        link=bandwidth / 2,
        network=bandwidth / 2,
        call_s=call_s,
        train_call_s=train_call_s,
        decode_step_s=0.0,
        collective_s=COLLECTIVE_CALLS * call_s,
        network_collective_s=COLLECTIVE_CALLS * call_s,
        stage=stage,
        send=stage / 2,
        source=f"measured on this machine, {cores} cores for {num_ranks} ranks",
    )


def _median_s(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    work()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _flops() -> float:
    """Of a product of two fp32 matrices."""
    a, b = torch.ones(SIZE, SIZE), torch.ones(SIZE, SIZE)
    out = torch.empty(SIZE, SIZE)
    return 2 * SIZE**3 / _median_s(lambda: torch.mm(a, b, out=out), 4 * ROUNDS)


def _bandwidth() -> float:
    """Bytes read and written by a copy."""
    source, target = torch.ones(COPY_BYTES // 4), torch.zeros(COPY_BYTES // 4)
    return 2 * COPY_BYTES / _median_s(lambda: target.copy_(source))


def _call_s() -> float:
    """Of an operation on nearly nothing, without gradients."""
    one = torch.ones(8, 64)

    def work() -> None:
        with torch.inference_mode():
            value = one
            for _ in range(CALLS):
                value = value * 1.0

    return _median_s(work) / CALLS


def _train_call_s() -> float:
    """Of an operation on nearly nothing and its way back, half each."""
    one = torch.ones(8, 64, requires_grad=True)

    def work() -> None:
        value = one
        for _ in range(CALLS):
            value = value * 1.0
        value.sum().backward()

    return _median_s(work) / (2 * CALLS)


def _stage() -> float:
    """Bytes of weights a second into messages."""
    weights = [(str(i), torch.ones(STAGED_BYTES // 16)) for i in range(4)]
    return STAGED_BYTES / _median_s(lambda: stage_updates(weights, 0), 3)

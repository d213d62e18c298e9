"""The runner: what is timed, counted, restored and reported, with contenders made for the purpose."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mopd.bench import clock
from mopd.bench.clock import Clock, copy_rate, peak_bytes
from mopd.bench.losses.cases import Case
from mopd.bench.losses.command import ENOUGH_S, Row, figures, measure
from mopd.bench.losses.contenders import BASELINE, Contender, logits_contenders
from mopd.bench.losses.inputs import make_inputs

CPU = torch.device("cpu")
CASE = Case(rows=24, vocab=700, k=6, dtype="float32")


class Ticks:
    """Time that passes when a test says so, whatever else the machine does."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def perf_counter(self) -> float:
        return self._now_s

    monotonic = perf_counter

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    """What the clock of a CPU reads."""
    ticks = Ticks()
    monkeypatch.setattr(clock, "time", ticks)
    return ticks


@pytest.fixture
def tidy() -> None:
    """What other tests left behind is not released while memory is counted."""
    gc.collect()


def contender(forward: Callable[[], Tensor] | str, leaf: Tensor, name: str = "it", group: str = "ours") -> Contender:
    return Contender(name=name, group=group, loss="x", forward=forward, leaves=(leaf,), upstream=None)  # type: ignore[arg-type]


def run(*entries: Contender, repeats: int = 2, limit_s: float | None = None) -> list[Row]:
    give_up_at = math.inf if limit_s is None else time.monotonic() + limit_s
    return measure(entries, device=CPU, repeats=repeats, give_up_at=give_up_at)[0]


@pytest.mark.usefixtures("tidy")
def test_peak_counts_what_lives_at_once() -> None:
    def work() -> None:
        first = torch.empty(1000, dtype=torch.float32)
        second = torch.empty(3000, dtype=torch.float32)
        del first
        third = torch.empty(500, dtype=torch.float32)
        del second, third

    assert peak_bytes(work, CPU) == 16_000


@pytest.mark.usefixtures("tidy")
def test_peak_sees_inside_operators() -> None:
    """The contiguous copy that a matrix product makes of an expanded operand is released before the product returns."""
    a, b = torch.ones(1, 1).expand(256, 256), torch.ones(256, 256)
    assert peak_bytes(lambda: None, CPU) == 0
    assert peak_bytes(lambda: _drop(torch.mm(a, b)), CPU) >= 2 * b.nbytes


def _drop(_: Tensor) -> None:
    pass


@pytest.mark.usefixtures("tidy")
def test_returned_gradients_are_not_extra_memory() -> None:
    leaf = torch.ones(10_000, requires_grad=True)
    plain = contender(lambda: (leaf * 2).sum(), leaf)
    row, overwriting = run(plain, replace(plain, overwrites=True))
    assert row.extra_bytes is not None and row.extra_bytes < leaf.nbytes / 2
    assert overwriting.extra_bytes == row.extra_bytes + leaf.nbytes


def test_every_contender_sees_the_same_logits() -> None:
    inputs = make_inputs(CASE, CPU)
    before = inputs.logits.detach().clone()
    entries = [e for e in logits_contenders(inputs) if e.name != "eager under torch.compile"]
    seen: list[Tensor] = []

    def looking(entry: Contender) -> Contender:
        own = entry.forward
        if isinstance(own, str):
            return entry

        def forward() -> Tensor:
            seen.append(inputs.logits.detach().clone())
            return own()

        return replace(entry, forward=forward)

    rows = run(*map(looking, entries))
    assert {row.status for row in rows} == {"measured", "not available"}
    assert len(seen) > 3 * len(rows) / 2
    assert all(torch.equal(logits, before) for logits in seen)
    assert torch.equal(inputs.logits, before)
    measured = [row for row in rows if row.status == "measured"]
    assert all(len(row.total_s) == 2 and 0 < row.forward_ms < row.total_ms for row in measured)  # type: ignore[operator]
    assert all(row.error < 1e-3 for row in measured)
    assert BASELINE in {row.name for row in measured}


def test_times_both_parts(ticks: Ticks) -> None:
    leaf = torch.ones(3, requires_grad=True)

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            ticks.sleep(0.05)
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            ticks.sleep(0.2)
            return grad

    (row,) = run(contender(lambda: Slow.apply(leaf).sum(), leaf))
    assert (row.forward_ms, row.total_ms) == (pytest.approx(50), pytest.approx(250))


def test_a_failure_of_ours_and_of_others() -> None:
    leaf = torch.ones(3, requires_grad=True)

    def broken() -> Tensor:
        raise RuntimeError("no such kernel\nmore")

    rows = run(
        contender(broken, leaf, group="ours"),
        contender(broken, leaf, group="released"),
        contender("not installed", leaf, group="released"),
        contender(lambda: leaf.sum(), leaf),
    )
    assert [row.status for row in rows] == ["failed", "not available", "not available", "measured"]
    assert rows[0].reason == "RuntimeError: no such kernel"
    assert rows[2].reason == "not installed"


def test_time_limit_keeps_what_is_measured() -> None:
    leaf = torch.ones(3, requires_grad=True)

    def slow() -> Tensor:
        time.sleep(0.2)
        return leaf.sum()

    rows = run(contender(slow, leaf), contender(lambda: leaf.sum(), leaf), repeats=50, limit_s=0.5)
    assert [row.status for row in rows] == ["measured", "not reached"]
    assert len(rows[0].total_s) == 1


def test_slow_contenders_sit_out(ticks: Ticks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENOUGH_S, "cpu", 0.05)
    leaf = torch.ones(3, requires_grad=True)

    def slow() -> Tensor:
        ticks.sleep(0.02)
        return leaf.sum()

    def quick() -> Tensor:
        ticks.sleep(0.001)
        return leaf.sum()

    slow_row, quick_row = run(contender(slow, leaf), contender(quick, leaf), repeats=9)
    assert (len(slow_row.total_s), len(quick_row.total_s)) == (5, 9)


@pytest.mark.parametrize("at_run", [1, 5])
def test_out_of_memory_is_a_result(at_run: int) -> None:
    """Run 1 is the one that checks the gradient, run 5 a timed one."""
    leaf, runs, restored = torch.ones(3, requires_grad=True), [], []

    def hungry() -> Tensor:
        runs.append(None)
        if len(runs) == at_run:
            raise torch.OutOfMemoryError("too much")
        return leaf.sum()

    greedy = replace(contender(hungry, leaf), restore=lambda: restored.append(len(runs)))
    row, other = run(greedy, contender(lambda: leaf.sum(), leaf), repeats=3)
    assert row.status == "out of memory" and row.total_ms is None
    assert restored[-1] == at_run and len(runs) == at_run
    assert len(other.total_s) == 3


def test_comparisons_within_a_case() -> None:
    base = Row(
        name="base", group="plain", loss="x", forward_s=[0.01], total_s=[0.02, 0.04, 0.09], extra_bytes=4 * 24 * 700
    )
    ours = Row(name="ours", group="ours", loss="x", forward_s=[0.01], total_s=[0.01])
    broken = Row(name="broken", group="released", loss="x", status="not available", reason="not installed")
    first, second, third = figures(CASE, [base, broken, ours], "base", 5.0)
    assert [row["name"] for row in (first, second, third)] == ["ours", "base", "broken"]
    assert (first["speedup"], first["floor_share"], second["speedup"]) == (4.0, 0.5, 1.0)
    assert second["extra_over_logits"] == 1.0 and "extra_over_logits" not in first
    assert third["total_ms"] is None and "speedup" not in third


def test_copy_counts_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(CPU)
    monkeypatch.setattr(clock, "mark", lambda: clock._marks.append(2.0 * len(clock._marks)))
    assert copy_rate(torch.ones(1000, 1000, requires_grad=True), clock) == 8_000_000 / 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inputs(dtype: str) -> None:
    inputs, again = (make_inputs(replace(CASE, dtype=dtype), CPU) for _ in range(2))
    assert torch.equal(inputs.logits, again.logits)
    assert inputs.logits.dtype == getattr(torch, dtype) and inputs.logits.shape == (24, 700)
    p = inputs.logits.detach().double().softmax(1).gather(1, inputs.ids)
    q = inputs.logprobs.double().exp()
    assert bool((q.diff(dim=1) <= 0).all()) and bool((q.sum(1) < 1).all())
    distance = float(((p - q).norm(dim=1) / q.norm(dim=1)).mean())
    assert 0.01 < distance < 0.2  # close, not equal


def test_inputs_are_the_same_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn a few rows at a time, student and teacher still belong together on every row."""
    monkeypatch.setattr("mopd.bench.losses.inputs.CHUNK_ELEMENTS", 5 * 700)
    inputs = make_inputs(CASE, CPU)
    difference = inputs.logits.detach().log_softmax(1).gather(1, inputs.ids) - inputs.logprobs
    assert float(difference.abs().max()) < 0.5

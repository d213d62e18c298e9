"""The runner: what is timed, counted, restored and reported, with contenders made for the purpose."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mopd.bench import clock
from mopd.bench.clock import Copy, CpuClock, Others
from mopd.bench.losses import exact, released
from mopd.bench.losses.contenders import BASELINE, Contender, logits_contenders
from mopd.bench.losses.heads import Truth
from mopd.bench.losses.inputs import make_head_inputs, make_inputs
from mopd.bench.losses.measure import ENOUGH_S, Deadline, measure, peak_bytes
from mopd.bench.losses.plan import Case
from mopd.bench.losses.results import CaseResult, Row

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
    return measure(entries, device=CPU, repeats=repeats, deadline=Deadline(limit_s), copy=None)[0]


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
    inputs = make_inputs(CASE, CPU, seed=1)
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
    released.close()
    assert {row.status for row in rows} == {"measured", "not available"}
    assert len(seen) > 3 * len(rows) / 2
    assert all(torch.equal(logits, before) for logits in seen)
    assert torch.equal(inputs.logits, before)
    measured = [row for row in rows if row.status == "measured"]
    assert all(row.rounds == 2 and 0 < row.forward_ms < row.total_ms for row in measured)  # type: ignore[operator]
    assert all(row.errors["relative"] < 1e-3 for row in measured)
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


def test_turns_rotate() -> None:
    leaf, order = torch.ones(3, requires_grad=True), []

    def named(name: str) -> Contender:
        def forward() -> Tensor:
            order.append(name)
            return leaf.sum()

        return contender(forward, leaf, name)

    run(*(named(name) for name in "abc"), repeats=3)
    assert "".join(order[-9:]) == "abcbcacab"


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
    assert rows[0].rounds == 1


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
    assert slow_row.rounds == 5 and quick_row.rounds == 9


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
    assert other.rounds == 3


def test_comparisons_within_a_case() -> None:
    rows = [
        Row(name="base", group="plain", loss="x", status="measured", total_ms=8.0, extra_bytes=24 * 700 * 4 * 2),
        Row(name="fast", group="ours", loss="x", status="measured", total_ms=2.0, extra_bytes=0),
        Row(name="gone", group="released", loss="x", status="not available"),
    ]
    result = CaseResult(case=CASE, baseline="base", floor="copy", floor_ms=1.0, rows=rows)
    result.finish()
    assert [row.speedup for row in rows] == [1.0, 4.0, None]
    assert [row.floor_share for row in rows] == [0.125, 0.5, None]
    assert [row.extra_over_logits for row in rows] == [2.0, 0.0, None]


def test_others_are_noticed(tmp_path: Path, ticks: Ticks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Busy time of the cores (idle and waiting left out) less that of this process, over wall-clock time."""
    second = os.sysconf("SC_CLK_TCK")
    statistics = tmp_path / "stat"
    monkeypatch.setattr(clock, "STATISTICS", statistics)
    monkeypatch.setattr(os, "cpu_count", lambda: 1000)
    statistics.write_text("cpu  0 0 0 0 0 0 0 0 0 0\ncpu0 0\n")
    others, before = Others(), os.times()
    while os.times().user - before.user < 0.2:
        pass
    ticks.sleep(0.5)
    busy = 2 * second
    statistics.write_text(f"cpu  {busy} {busy} {busy} {50 * second} {50 * second} {busy} {busy} {busy} 7 7\ncpu0 0\n")
    found, after = others.cores(), os.times()
    own = after.user + after.system - before.user - before.system
    assert found == pytest.approx((12 - own) / 0.5, rel=0.01)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)  # ticks of a short time may seem to hold more
    assert others.cores() == 4
    statistics.unlink()
    assert Others().cores() is None


@pytest.mark.parametrize(("others", "marked"), [(None, False), (0.0, False), (1e9, True)])
def test_disturbed_cases_are_marked(others: float | None, marked: bool) -> None:
    result = CaseResult(case=CASE, baseline="base", floor="copy", others_cores=others)
    assert result.is_disturbed == marked


def test_copy_counts_both_directions() -> None:
    copy = Copy(torch.ones(1000, 1000, requires_grad=True))
    assert copy.num_bytes == 8_000_000
    assert copy.time(CpuClock()) > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inputs(dtype: str) -> None:
    inputs = make_inputs(replace(CASE, dtype=dtype), CPU, seed=0)
    again = make_inputs(replace(CASE, dtype=dtype), CPU, seed=0)
    other = make_inputs(replace(CASE, dtype=dtype), CPU, seed=1)
    assert torch.equal(inputs.logits, again.logits) and not torch.equal(inputs.logits, other.logits)
    assert inputs.logits.dtype == getattr(torch, dtype) and inputs.logits.shape == (24, 700)
    p = inputs.logits.detach().double().softmax(1).gather(1, inputs.ids)
    q = inputs.logprobs.double().exp()
    assert bool((q.diff(dim=1) <= 0).all()) and bool((q.sum(1) < 1).all())
    distance = float(((p - q).norm(dim=1) / q.norm(dim=1)).mean())
    assert 0.01 < distance < 0.2  # close, not equal


def test_head_inputs_are_close() -> None:
    inputs = make_head_inputs(Case(rows=16, vocab=300, k=4, dtype="float32", hidden=32), CPU, seed=0)
    student = (inputs.hidden @ inputs.weight.T).detach().log_softmax(1).gather(1, inputs.ids)
    assert 0 < float((student - inputs.logprobs).abs().mean()) < 0.3
    assert float(inputs.weights.sum()) == pytest.approx(1)


@pytest.mark.parametrize("loss", ["bucket", "cross entropy"])
def test_truth_of_a_head(loss: str) -> None:
    """Rows of both gradients against float64 autograd through the whole head."""
    inputs = make_head_inputs(Case(rows=70, vocab=300, k=4, dtype="float32", hidden=32), CPU, seed=0)
    hidden, weight = (x.detach().double().requires_grad_() for x in (inputs.hidden, inputs.weight))
    log_p = (hidden @ weight.T).log_softmax(1)
    rows = exact.DEFINITIONS[loss](log_p, inputs.ids, inputs.logprobs.double())
    gradients = torch.autograd.grad((rows * inputs.weights).sum(), (hidden, weight))
    truth = Truth(inputs)
    assert max(truth.errors(loss, gradients).values()) < 1e-12
    gradients[1][truth.ids[3]] = 0
    assert truth.errors(loss, gradients)["weight"] > 1e-3 > truth.errors(loss, gradients)["hidden"]


def test_inputs_are_the_same_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn a few rows at a time, student and teacher still belong together on every row."""
    monkeypatch.setattr("mopd.bench.losses.inputs.CHUNK_ELEMENTS", 5 * 700)
    inputs = make_inputs(CASE, CPU, seed=0)
    difference = inputs.logits.detach().log_softmax(1).gather(1, inputs.ids) - inputs.logprobs
    assert float(difference.abs().max()) < 0.5

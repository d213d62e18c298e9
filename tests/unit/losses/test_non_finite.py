"""NaN and infinities: a row whose loss is not defined has a loss of NaN, in every loss and layer, and no other row has.

Each call holds one row for each way to spoil a row, beside a clean one. ``docs/losses.md`` says the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.losses.triton_layer import DEVICE, LOSSES, TAILS, run

VOCAB, PADDED, K = 19, 24, 3
IN_S, OUTSIDE = 2, 11
"""Columns: one that every row's teacher lists, and one that none does."""
NAN, INF = math.nan, math.inf


@dataclass
class Batch:
    """One call's tensors; the teachers list ids 1, 2 and 3."""

    z: Tensor
    ids: Tensor
    logq: Tensor
    weight: Tensor
    teacher_weights: Tensor


def clean(rows: int, teachers: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(1, PADDED, generator=generator).expand(rows, -1).clone()
    ids = torch.tensor([1, 2, 3]).expand(rows, teachers, K).clone()
    if teachers > 1:
        ids[:, 1, 2] = 4
    logq = torch.log_softmax(torch.randn(1, teachers, VOCAB, generator=generator), -1)[..., :K]
    weights = torch.linspace(0.5, 1, teachers).expand(rows, teachers).clone()
    return Batch(z, ids, logq.expand(rows, teachers, K).clone(), torch.ones(rows), weights)


Spoil = Callable[[Batch, int], None]


def logit(columns: Any, value: float | list[float]) -> Spoil:
    def spoil(b: Batch, row: int) -> None:
        b.z[row, columns] = torch.tensor(value)

    return spoil


def teacher(value: float, entries: Any = 1, beyond: bool = False) -> Spoil:
    def spoil(b: Batch, row: int) -> None:
        b.logq[row, -1, entries] = value
        if beyond:
            b.ids[row, -1, 1] = VOCAB + 1

    return spoil


def weight_of_teacher(b: Batch, row: int) -> None:
    b.teacher_weights[row, -1] = NAN


def weight_of_row(b: Batch, row: int) -> None:
    b.weight[row] = NAN


def unused(value: float) -> Spoil:
    """A row of weight 0 that holds nothing else."""

    def spoil(b: Batch, row: int) -> None:
        b.weight[row], b.z[row], b.logq[row], b.ids[row] = 0, value, value, -7

    return spoil


def no_teacher(b: Batch, row: int) -> None:
    b.teacher_weights[row], b.z[row, OUTSIDE] = 0, NAN


UNDEFINED: dict[str, Spoil] = {
    "a logit of the ids is NaN": logit(IN_S, NAN),
    "another logit is NaN": logit(OUTSIDE, NAN),
    "a logit of the ids is +inf": logit(IN_S, INF),
    "another logit is +inf": logit(OUTSIDE, INF),
    "two logits are +inf": logit([IN_S, OUTSIDE], INF),
    "one logit is +inf and another NaN": logit([IN_S, OUTSIDE], [INF, NAN]),
    "all logits are NaN": logit(slice(None), NAN),
    "all logits are -inf": logit(slice(VOCAB), -INF),
    "a teacher's log-prob is NaN": teacher(NAN),
    "a teacher's log-prob is +inf": teacher(INF),
    "a teacher's log-prob of an id in the padding is NaN": teacher(NAN, beyond=True),
    "a teacher's weight is NaN": weight_of_teacher,
    "the row's weight is NaN": weight_of_row,
    "no teacher counts beside a NaN": no_teacher,
}
CLEAN: dict[str, Spoil] = {
    "nothing": lambda b, row: None,
    "padding columns are NaN": logit(slice(VOCAB, None), NAN),
    "padding columns are +inf": logit(slice(VOCAB, None), INF),
    "padding columns are -inf": logit(slice(VOCAB, None), -INF),
}
ZERO: dict[str, Spoil] = {f"weight 0 beside {value}": unused(value) for value in (NAN, INF, -INF)}
MASKED: dict[str, Spoil] = {
    "another logit is -inf": logit(OUTSIDE, -INF),
    "all other logits are -inf": logit([0, *range(5, VOCAB)], -INF),
    "a logit of the ids is -inf": logit(IN_S, -INF),
    "all logits of the ids are -inf": logit(slice(1, 5), -INF),
    "a teacher's log-prob is -inf": teacher(-INF),
    "all of a teacher's log-probs are -inf": teacher(-INF, slice(None)),
}
WAYS = {**UNDEFINED, **CLEAN, **ZERO, **MASKED}
OPTIONS: list[dict[str, float]] = [
    {},
    {"logprob_min_clamp": -3.0},
    {"loss_max_clamp": 0.05},
    {"loss_soft_cap": 0.05},
    {"entry_max_clamp": 0.05},
]


def masked_value(way: str, loss: str, tail: str, options: dict[str, float]) -> str:
    """What a loss is where a legitimate -inf stands: "finite", "inf" or "nan"."""
    if way == "all logits of the ids are -inf" and tail == "renormalize" and "logprob_min_clamp" not in options:
        return "nan"  # a distribution conditional on ids without mass
    if "logit of the ids is" in way or "logits of the ids" in way:
        infinite = loss == "forward_kl" and options.keys() <= {"loss_soft_cap"}
        return "inf" if infinite else "finite"
    return "finite"


def kind(value: float) -> str:
    return "nan" if math.isnan(value) else "inf" if value == INF else "finite"


@pytest.mark.parametrize("backend", ["reference", "chunked", "triton"])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_way_in_every_form(loss: str, tail: str, backend: str) -> None:
    """In Triton's interpreter each form meets a third of the ways and one of the options."""
    form = LOSSES.index(loss) + 3 * TAILS.index(tail)
    slow = backend == "triton" and DEVICE.type == "cpu"
    for number, options in enumerate(OPTIONS):
        if not slow or number == form // 3:
            ways = [way for n, way in enumerate(WAYS) if not slow or n % 3 == form % 3 or way == "nothing"]
            check(loss, tail, 1 + number % 2, {**options, "backend": backend, "beta": 0.4}, ways)


def check(loss: str, tail: str, teachers: int, options: dict[str, Any], ways: list[str]) -> None:
    b = clean(len(ways), teachers)
    for row, way in enumerate(ways):
        WAYS[way](b, row)
    limits = {name: value for name, value in options.items() if name not in ("backend", "beta")}
    got, gradient, metrics = run(
        b.z, b.ids, b.logq, loss=loss, tail=tail, loss_weight=b.weight, teacher_weights=b.teacher_weights,
        true_vocab_size=VOCAB, with_entropy=True, target=b.ids[:, 0, 0].clamp_min(0), **options,
    )  # fmt: skip
    finite = gradient.isfinite().all(1).tolist()
    like = ways.index("nothing")
    for row, way in enumerate(ways):
        told = f"{way}: {got[row]}, gradient finite: {finite[row]}"
        if way in UNDEFINED:
            assert kind(float(got[row])) == "nan", told
            assert not finite[row] or options["backend"] == "reference" or way.startswith("no teacher"), told
            if "logit" in way:
                spoiled = ("unweighted_loss", "student_mass", "student_logprobs", "entropy")
                assert all(kind(float(metrics[name][row])) == "nan" for name in spoiled), told
        elif way in CLEAN:
            assert torch.equal(got[row], got[like]) and torch.equal(gradient[row, :VOCAB], gradient[like, :VOCAB]), told
        elif way in ZERO:
            assert float(got[row]) == 0 and not gradient[row].any(), told
            assert not any(bool(value[row]) for value in metrics.values()), told
        else:
            expected = masked_value(way, loss, tail, limits)
            assert kind(float(got[row])) == expected, told
            assert finite[row] == (expected != "nan"), told
        if way not in UNDEFINED:
            assert torch.count_nonzero(gradient[row, VOCAB:]) == 0, told
    assert got[like].isfinite() and (limits or gradient[like].any()), got[like]

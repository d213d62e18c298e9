"""What the Triton layer must satisfy whatever its numbers: launch parameters, numbers of ids, clamps, caps, entropy."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mopd.losses.triton import functions, table
from tests.parity.losses.definitions import teacher_topk
from tests.parity.losses.triton_layer import DEVICE, LOSSES, TAILS, run
from tests.unit.losses.test_topk_properties import assert_near

ROWS, VOCAB, K = 5, 53, 6


def batch(rows: int = ROWS, vocab: int = VOCAB, k: int = K) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 logits [T, V], ids [T, K], teacher log-probs [T, K]."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(rows, vocab, generator=generator) * 2
    ids, logq = teacher_topk(z + torch.randn(rows, vocab, generator=generator), k)
    return z, ids, logq


LAUNCHES = [(16, 1, 1), (16, 2, 1), (32, 1, 2), (16, 2, 3), (64, 1, 1)]


@pytest.mark.parametrize(("block", "stages", "splits"), LAUNCHES)
def test_launch_parameters_change_only_rounding(
    monkeypatch: pytest.MonkeyPatch, block: int, stages: int, splits: int
) -> None:
    """Tiles with and without ids, whole and partial tiles, splits without columns of their own."""
    z, ids, logq = batch(3)
    z[1, 16:48] = -torch.inf
    ids[2] = torch.arange(16, 16 + K)  # all in one tile
    options = {"temperature": 0.9, "target": ids[:, 0], "with_entropy": True, "true_vocab_size": VOCAB - 2}
    ids[ids >= VOCAB - 2] = 1
    expected = run(z.double(), ids, logq, **{**options, "backend": "reference"})
    how = table.Launch(block, 1, stages)
    entry = table.Entry(VOCAB, "float32", 4, "any", how, splits, table.Launch(block, 1, 1))
    monkeypatch.setattr(functions, "entry_for", lambda *_: entry)
    assert_near(run(z, ids, logq, **options), expected)


MOST = [4095, 4096] if DEVICE.type == "cuda" else [130]
"""Ids of a row near the limit; the interpreter takes half a minute for one of them."""


@pytest.mark.parametrize("k", [2, 16, 17, 70, *MOST])
def test_any_number_of_ids(k: int) -> None:
    """Powers of two and not; from 65 on they are sorted by the network, and arrive in no order."""
    z, ids, logq = batch(2, max(211, k + 9), k)
    order = torch.randperm(k, generator=torch.Generator().manual_seed(1))
    ids, logq = ids[:, order], logq[:, order]
    expected = run(z.double(), ids, logq, loss="jsd", backend="chunked")
    assert_near(run(z, ids, logq, loss="jsd"), expected)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("loss", LOSSES)
def test_clamps_and_floors(loss: str, tail: str) -> None:
    """A floor of the log-probs that holds entries of both sides, tails below their floor, a masked student token."""
    z, ids, logq = batch(4)
    z[1].scatter_(0, ids[1], 30.0)  # student tail of about 1e-10
    logq[2] = torch.log_softmax(logq[2], -1) + 5e-5  # teacher mass of 1 + 5e-5
    z[3, ids[3, 1]] = -torch.inf
    kind = {"loss": loss, "tail": tail, "beta": 0.3}
    for options in ({**kind}, {**kind, "logprob_min_clamp": -3.0}):
        expected = run(z.double(), ids, logq, backend="chunked", **options)
        actual = run(z, ids, logq, **options)
        assert_near(actual, expected)
        assert bool(actual[1].isfinite().all())
    assert float(expected[2]["clamped_entries"].max()) > 0


@pytest.mark.parametrize("cap", [{"loss_max_clamp": 0.3}, {"loss_soft_cap": 0.3}])
@pytest.mark.parametrize("teachers", [1, 2])
def test_caps(cap: dict[str, float], teachers: int) -> None:
    generator = torch.Generator().manual_seed(4)
    z = torch.randn(4, VOCAB, generator=generator) * 2
    ids, logq = teacher_topk(z[:, None] + torch.randn(4, teachers, VOCAB, generator=generator), K)
    options = {**cap, "teacher_weights": torch.rand(4, teachers, generator=generator)}
    expected = run(z.double(), ids, logq, backend="reference", **options)
    assert 0 < float(expected[2]["clamped"].sum()) < 4
    assert_near(run(z, ids, logq, **options), expected)


@pytest.mark.parametrize("backend", ["triton", "chunked", "reference"])
def test_entropy_on_request(backend: str) -> None:
    z, ids, logq = batch()
    z[1, 5:30] = -torch.inf
    z[2] = 0.0
    z[3, ids[3, 0]] += 60  # nearly one-hot
    weight = torch.ones(ROWS)
    weight[4] = 0
    options = {"temperature": 1.4, "loss_weight": weight, "true_vocab_size": VOCAB - 2, "backend": backend}
    _, gradient, metrics = run(z, ids, logq, with_entropy=True, **options)
    p = torch.softmax(z[:, : VOCAB - 2].double() / 1.4, -1)
    expected = -torch.where(p > 0, p * p.clamp_min(1e-300).log(), 0).sum(-1) * weight
    torch.testing.assert_close(metrics["entropy"].double(), expected, rtol=2e-6, atol=1e-6)
    assert float(metrics["entropy"][2]) == pytest.approx(math.log(VOCAB - 2))
    assert not metrics["entropy"].requires_grad
    without = run(z, ids, logq, **options)
    assert "entropy" not in without[2] and torch.equal(without[1], gradient)

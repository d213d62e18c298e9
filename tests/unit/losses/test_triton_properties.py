"""What the Triton layer must satisfy whatever its numbers: strides, padding rows, in place, launch parameters."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mopd.losses import parallel_topk_distill
from mopd.losses.triton import functions, table
from tests.parity.losses.definitions import teacher_topk
from tests.parity.losses.triton_layer import DEVICE, LOSSES, TAILS, run

ROWS, VOCAB, K = 5, 53, 6


def batch(rows: int = ROWS, vocab: int = VOCAB, k: int = K) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 logits [T, V], ids [T, K], teacher log-probs [T, K]."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(rows, vocab, generator=generator) * 2
    ids, logq = teacher_topk(z + torch.randn(rows, vocab, generator=generator), k)
    return z, ids, logq


def assert_same(actual: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    """Bit for bit: loss, gradient, metrics."""
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])
    assert actual[2].keys() == expected[2].keys()
    assert all(torch.equal(actual[2][name], expected[2][name]) for name in expected[2])


def assert_near(actual: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    """To fp32 rounding: loss, gradient, metrics."""
    torch.testing.assert_close(actual[0].double(), expected[0].double(), rtol=3e-6, atol=2e-6)
    torch.testing.assert_close(actual[1].double(), expected[1].double(), rtol=2e-6, atol=2e-6)
    assert actual[2].keys() == expected[2].keys()
    for name, value in expected[2].items():
        torch.testing.assert_close(actual[2][name].double(), value.double(), rtol=3e-6, atol=2e-6, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_in_place_equals_out_of_place(dtype: torch.dtype) -> None:
    z, ids, logq = batch()
    z = torch.cat([z, torch.ones(ROWS, 3)], 1).to(DEVICE, dtype)
    options: dict[str, Any] = {
        "loss_weight": torch.tensor([1.0, 0, 2, 0.5, 1]).to(DEVICE),
        "true_vocab_size": VOCAB,
        "backend": "triton",
    }
    ids, logq = ids.to(DEVICE), logq.to(DEVICE)
    leaf, source = z.clone().requires_grad_(), z.clone().requires_grad_()
    buffer = source * 1
    expected, _ = parallel_topk_distill(leaf, ids, logq, **options)
    actual, _ = parallel_topk_distill(buffer, ids, logq, overwrite_input=True, **options)
    assert torch.equal(actual, expected) and torch.equal(buffer, z)  # forward leaves the logits alone
    (gradient,) = torch.autograd.grad(expected.sum(), leaf)
    (overwritten,) = torch.autograd.grad(actual.sum(), source)
    assert torch.equal(overwritten, gradient) and torch.equal(buffer, gradient)
    assert gradient.dtype == dtype and torch.count_nonzero(gradient[1]) == 0
    assert torch.count_nonzero(gradient[:, VOCAB:]) == 0 and torch.count_nonzero(gradient[0, :VOCAB]) > VOCAB // 2


LAYOUTS = ("transposed", "batch_slice", "sequence_slice", "two_dims_strided", "column_step", "columns_outermost")


@pytest.mark.parametrize(("layout", "vocab"), [*((name, VOCAB) for name in LAYOUTS), *((n, 56) for n in LAYOUTS[:4])])
def test_any_strides(layout: str, vocab: int) -> None:
    """As from a contiguous copy, gradients in the caller's order of rows.

    Bit for bit where all rows begin at multiples of 16 bytes; else lanes sum other columns, which moves the rounding.
    """
    base = torch.randn(3, 4, vocab, generator=torch.Generator().manual_seed(2)).bfloat16()
    exact = vocab == 56
    base = base if exact else base.float()
    z = {
        "transposed": base.transpose(0, 1),
        "batch_slice": base[1:, :3],
        "sequence_slice": base[:, 1:3],
        "column_step": base[..., ::2],
        "two_dims_strided": base[:, 2],
        "columns_outermost": base.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    }[layout]
    assert not z.is_contiguous()
    generator = torch.Generator().manual_seed(3)
    ids, logq = teacher_topk(z.float() + torch.randn(z.shape, generator=generator), K)
    weight = torch.rand(z.shape[:-1], generator=generator) * (torch.rand(z.shape[:-1], generator=generator) > 0.3)
    options = {"loss_weight": weight, "target": ids[..., 1]}
    compare = assert_same if exact else assert_near
    expected = run(z.contiguous(), ids, logq, **options)
    compare(run(z, ids, logq, **options), expected)
    if layout == "transposed":  # the teacher's side in a stride of its own
        other = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (ids.int(), logq)]
        compare(run(z, *other, **options), expected)


def test_rows_of_weight_zero_are_inert() -> None:
    """NaN logits and nonsense from the teacher on padding rows reach neither loss, metrics nor gradient."""
    z, ids, logq = batch()
    weight = torch.ones(ROWS)
    weight[2:4] = 0
    options = {"loss_weight": weight, "check_values": True, "with_entropy": True}
    expected = run(z, ids, logq, target=ids[:, 0], **options)
    target = ids[:, 0].clone()
    z[2], ids[2], logq[2], target[2] = torch.nan, -7, torch.nan, -1
    z[3], ids[3], logq[3] = torch.inf, 0, 0.0
    actual = run(z, ids, logq, target=target, **options)
    assert_same(actual, expected)
    assert torch.count_nonzero(actual[1][2:4]) == 0
    assert all(torch.count_nonzero(value[2:4]) == 0 for value in actual[2].values())


def test_upstream_of_any_stride_and_size() -> None:
    """Row weights times upstream; a sum's expanded upstream; a tiny one keeps its digits."""
    z, ids, logq = batch()
    weight = torch.linspace(0.5, 2, ROWS)
    plain = run(z, ids, logq)
    weighted = run(z, ids, logq, loss_weight=weight)
    torch.testing.assert_close(weighted[0], plain[0] * weight)
    torch.testing.assert_close(weighted[1], plain[1] * weight[:, None])
    torch.testing.assert_close(weighted[2]["unweighted_loss"], plain[0])
    strided = torch.linspace(1, 3, 2 * ROWS).to(DEVICE)[::2]
    torch.testing.assert_close(run(z, ids, logq, strided)[1], plain[1] * strided.cpu()[:, None])
    tiny = run(z, ids, logq, torch.full((ROWS,), 1e-30))[1]
    torch.testing.assert_close(tiny * 1e30, plain[1])
    leaf = z.to(DEVICE).requires_grad_()
    total, _ = parallel_topk_distill(leaf, ids.to(DEVICE), logq.to(DEVICE), reduce_loss=True, backend="triton")
    total.backward()
    assert total.shape == () and leaf.grad is not None and torch.equal(leaf.grad.cpu(), plain[1])


def test_nan_of_a_live_teacher_and_of_a_logit_is_seen() -> None:
    z, ids, logq = batch()
    logq[1, 2] = torch.nan
    z[3, 7] = torch.nan
    loss, gradient, _ = run(z, ids, logq)
    assert loss.isnan().tolist() == [False, True, False, True, False]
    assert gradient.isnan().any(1).tolist() == [False, True, False, True, False]


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


def test_no_rows_and_an_empty_shard_of_rows() -> None:
    z, ids, logq = (x[:0] for x in batch())
    loss, gradient, metrics = run(z, ids, logq, target=ids[:, 0])
    assert loss.shape == (0,) and gradient.shape == (0, VOCAB) and metrics["student_mass"].shape == (0,)

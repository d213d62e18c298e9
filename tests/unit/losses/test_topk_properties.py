"""What every top-k loss must satisfy, whatever its numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mopd.losses import parallel_topk_distill
from tests.parity.losses import on_device

LOSSES = ("forward_kl", "reverse_kl", "jsd")
TAILS = ("bucket", "generalized", "renormalize", "none")
PROPER_TAILS = ("bucket", "generalized", "renormalize")
ROWS, VOCAB, K = 9, 53, 6


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 logits [T, V], ids [T, K], teacher log-probs [T, K]."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(ROWS, VOCAB, generator=generator) * 2
    logq, ids = torch.log_softmax(z + torch.randn(ROWS, VOCAB, generator=generator), -1).topk(K, -1)
    return z, ids, logq


def run(z: Tensor, ids: Tensor, logq: Tensor, **options: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    leaf = z.detach().clone().requires_grad_() if z.is_contiguous() else z.detach().requires_grad_()
    loss, metrics = on_device.parallel_topk_distill(leaf, ids, logq, **options)
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    return loss.detach(), gradient, metrics


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("loss", LOSSES)
def test_shift_of_the_logits_changes_nothing(loss: str, tail: str) -> None:
    z, ids, logq = batch()
    z = (z * 64).round() / 64  # so that the shift is exact in fp32
    one, two = (run(x, ids, logq, loss=loss, tail=tail) for x in (z, z + 100))
    torch.testing.assert_close(two[0], one[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(two[1], one[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("loss", LOSSES)
def test_gradient_rows_sum_to_zero(loss: str, tail: str) -> None:
    _, gradient, _ = run(*batch(), loss=loss, tail=tail)
    assert float(gradient.sum(1).abs().max()) < 1e-6
    assert float(gradient.abs().max()) > 1e-2


@pytest.mark.parametrize("tail", PROPER_TAILS)
@pytest.mark.parametrize("loss", LOSSES)
def test_at_least_zero_and_zero_only_where_equal(loss: str, tail: str) -> None:
    z, ids, logq = batch()
    value, _, _ = run(z, ids, logq, loss=loss, tail=tail)
    assert float(value.min()) > 1e-3
    own = torch.log_softmax(z.double(), -1).gather(1, ids).float()
    value, gradient, _ = run(z, ids, own, loss=loss, tail=tail)
    assert float(value.abs().max()) < 1e-11
    assert float(gradient.abs().max()) < 3e-7


@pytest.mark.parametrize("loss", LOSSES)
def test_renormalized_form_is_blind_outside_the_ids(loss: str) -> None:
    z, ids, logq = batch()
    one = run(z, ids, logq, loss=loss, tail="renormalize")
    elsewhere = torch.ones(ROWS, VOCAB).scatter(1, ids, 0) * torch.randn(ROWS, VOCAB)
    two = run(z + elsewhere, ids, logq, loss=loss, tail="renormalize")
    torch.testing.assert_close(two[0], one[0], rtol=1e-5, atol=1e-6)
    assert torch.count_nonzero(one[1]) == ROWS * K
    alone = run(z, ids[:, :1], logq[:, :1], loss=loss, tail="renormalize")
    assert torch.count_nonzero(alone[0]) == 0 and torch.count_nonzero(alone[1]) == 0


@pytest.mark.parametrize("elements", [1, VOCAB * 2, VOCAB * 4, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_size_changes_nothing(monkeypatch: pytest.MonkeyPatch, elements: int, dtype: torch.dtype) -> None:
    z, ids, logq = batch()
    weight = torch.tensor([1.0, 0, 0, 0, 2, 0.5, 0, 1, 1])
    options = {"loss_weight": weight, "temperature": 0.9, "target": ids[:, 0]}
    expected = run(z.to(dtype), ids, logq, **options)
    monkeypatch.setattr("mopd.losses.chunked.blocks.BLOCK_ELEMENTS", elements)
    actual = run(z.to(dtype), ids, logq, **options)
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])
    assert all(torch.equal(actual[2][name], expected[2][name]) for name in expected[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("padding", [0, 3])
def test_in_place_equals_out_of_place(dtype: torch.dtype, tail: str, padding: int) -> None:
    z, ids, logq = batch()
    weight = torch.tensor([1.0, 0, 1, 0, 2, 0.5, 1, 1, 1])
    options = {"tail": tail, "loss_weight": weight, "true_vocab_size": VOCAB}
    z = torch.cat([z, torch.ones(ROWS, padding)], 1).to(dtype)
    leaf, source = z.clone().requires_grad_(), z.clone().requires_grad_()
    buffer = source * 1
    expected, _ = parallel_topk_distill(leaf, ids, logq, **options)
    actual, _ = parallel_topk_distill(buffer, ids, logq, overwrite_input=True, **options)
    assert torch.equal(actual, expected) and torch.equal(buffer, z)  # forward leaves the logits alone
    (gradient,) = torch.autograd.grad(expected.sum(), leaf)
    (overwritten,) = torch.autograd.grad(actual.sum(), source)
    assert torch.equal(overwritten, gradient)
    assert torch.equal(buffer, gradient)  # written where the logits were


@pytest.mark.parametrize("layout", ["transposed", "batch_slice", "sequence_slice", "column_step", "two_dims_strided"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_strides(layout: str, dtype: torch.dtype) -> None:
    """Same numbers as from a contiguous copy; rows keep their place, and none is copied to get there."""
    generator = torch.Generator().manual_seed(2)
    base = torch.randn(4, 6, VOCAB, generator=generator).to(dtype)
    z = {
        "transposed": base.transpose(0, 1),
        "batch_slice": base[1:, :5],
        "sequence_slice": base[:, 2:5],
        "column_step": base[..., ::2],
        "two_dims_strided": base[:, 3],
    }[layout]
    teacher = torch.log_softmax(z.float() + torch.randn(z.shape, generator=generator), -1)
    logq, ids = teacher.topk(K, -1)
    weight = torch.rand(z.shape[:-1], generator=generator) * (torch.rand(z.shape[:-1], generator=generator) > 0.3)
    options = {"loss_weight": weight, "target": ids[..., 1]}
    expected = run(z.contiguous(), ids, logq, **options)
    actual = run(z, ids, logq, **options)
    assert not z.is_contiguous()
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])
    assert all(torch.equal(actual[2][name], expected[2][name]) for name in expected[2])


@pytest.mark.parametrize(("backend", "skips"), [("chunked", True), ("chunked", False), ("reference", True)])
def test_rows_of_weight_zero_are_inert(monkeypatch: pytest.MonkeyPatch, backend: str, skips: bool) -> None:
    """NaN logits and nonsense from the teacher on padding rows reach neither loss, metrics nor gradient.

    Without skipping, as on an accelerator, the rows are computed and masked.
    """
    if not skips:
        monkeypatch.setattr("mopd.losses.chunked.blocks.SYNCHRONOUS_DEVICES", ())
    z, ids, logq = batch()
    weight = torch.ones(ROWS)
    weight[3:5] = 0
    expected = run(z, ids, logq, loss_weight=weight, target=ids[:, 0], backend=backend)
    z[3], ids[3], logq[3] = torch.nan, -7, torch.nan
    ids[4], logq[4] = 0, 0.0
    actual = run(z, ids, logq, loss_weight=weight, target=ids[:, 0], check_values=True, backend=backend)
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])
    assert torch.count_nonzero(actual[1][3:5]) == 0
    assert all(torch.equal(actual[2][name], expected[2][name]) for name in expected[2])


def test_a_teacher_of_weight_zero_is_ignored() -> None:
    z, ids, logq = batch()
    expected = run(z, ids, logq)
    ids2 = torch.stack([ids, torch.full_like(ids, -3)], 1)
    logq2 = torch.stack([logq, torch.full_like(logq, torch.nan)], 1)
    actual = run(z, ids2, logq2, teacher_weights=torch.tensor([1.0, 0.0]).expand(ROWS, 2))
    torch.testing.assert_close(actual[0], expected[0])
    torch.testing.assert_close(actual[1], expected[1])
    torch.testing.assert_close(actual[2]["teacher_mass"], expected[2]["teacher_mass"])


def test_nan_of_a_live_teacher_is_seen() -> None:
    z, ids, logq = batch()
    logq[1, 2] = torch.nan
    loss, _, _ = run(z, ids, logq)
    assert loss.isnan().tolist() == [False, True] + [False] * (ROWS - 2)


def test_weights_scale_loss_and_gradient_and_reduction_sums() -> None:
    z, ids, logq = batch()
    weight = torch.linspace(0.5, 2, ROWS)
    plain, weighted = run(z, ids, logq), run(z, ids, logq, loss_weight=weight)
    torch.testing.assert_close(weighted[0], plain[0] * weight)
    torch.testing.assert_close(weighted[1], plain[1] * weight[:, None])
    torch.testing.assert_close(weighted[2]["unweighted_loss"], plain[0])
    leaf = z.clone().requires_grad_()
    total, _ = parallel_topk_distill(leaf, ids, logq, loss_weight=weight, reduce_loss=True)
    total.backward()
    assert total.shape == () and leaf.grad is not None
    torch.testing.assert_close(total.detach(), weighted[0].sum())
    assert torch.equal(leaf.grad, weighted[1])


def test_metrics() -> None:
    z, ids, logq = batch()
    _, _, metrics = run(z, ids, logq, target=ids[:, 2])
    p = torch.softmax(z.double(), -1)
    torch.testing.assert_close(metrics["student_mass"].double(), p.gather(1, ids).sum(1), rtol=1e-5, atol=0)
    torch.testing.assert_close(metrics["teacher_mass"], logq.exp().sum(1))
    torch.testing.assert_close(
        metrics["student_logprobs"].double(), p.log().gather(1, ids[:, 2:3])[:, 0], rtol=1e-5, atol=1e-6
    )
    assert all(not value.requires_grad and value.dtype == torch.float32 for value in metrics.values())
    assert all(torch.count_nonzero(metrics[name]) == 0 for name in ("clamped", "clamped_entries", "tail_floored"))


def test_integer_widths_agree() -> None:
    z, ids, logq = batch()
    assert torch.equal(run(z, ids, logq)[1], run(z, ids.int(), logq)[1])


def test_no_rows() -> None:
    z, ids, logq = (x[:0] for x in batch())
    loss, gradient, metrics = run(z, ids, logq, target=ids[:, 0])
    assert loss.shape == (0,) and gradient.shape == (0, VOCAB) and metrics["student_mass"].shape == (0,)

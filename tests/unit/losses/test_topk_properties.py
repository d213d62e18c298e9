"""What every top-k loss must satisfy, whatever its numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mopd.losses import parallel_topk_distill
from tests.parity.losses.definitions import teacher_topk
from tests.parity.losses.triton_layer import DEVICE, TAILS, run, to_device

ROWS, VOCAB, K = 5, 53, 6
in_both_layers = pytest.mark.parametrize("backend", ["chunked", "triton"])


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """fp32 logits [T, V], ids [T, K], teacher log-probs [T, K]."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(ROWS, VOCAB, generator=generator) * 2
    return z, *teacher_topk(z + torch.randn(ROWS, VOCAB, generator=generator), K)


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


@pytest.mark.parametrize("elements", [1, VOCAB * 2, VOCAB * 4, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_size_changes_nothing(monkeypatch: pytest.MonkeyPatch, elements: int, dtype: torch.dtype) -> None:
    z, ids, logq = batch()
    weight = torch.tensor([1.0, 0, 0, 2, 0.5])
    options = {"loss_weight": weight, "temperature": 0.9, "target": ids[:, 0], "backend": "chunked"}
    expected = run(z.to(dtype), ids, logq, **options)
    monkeypatch.setattr("mopd.losses.chunked.blocks.BLOCK_ELEMENTS", elements)
    assert_same(run(z.to(dtype), ids, logq, **options), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("backend", "tail"), [*(("chunked", tail) for tail in TAILS), ("triton", "bucket")])
@pytest.mark.parametrize("padding", [0, 3])
def test_in_place_equals_out_of_place(dtype: torch.dtype, tail: str, padding: int, backend: str) -> None:
    z, ids, logq = (to_device(x) for x in batch())
    weight = torch.tensor([1.0, 0, 2, 0.5, 1]).to(DEVICE)
    options: dict[str, Any] = {"tail": tail, "loss_weight": weight, "true_vocab_size": VOCAB, "backend": backend}
    z = torch.cat([z, torch.ones(ROWS, padding, device=DEVICE)], 1).to(dtype)
    leaf, source = z.clone().requires_grad_(), z.clone().requires_grad_()
    buffer = source * 1
    expected, _ = parallel_topk_distill(leaf, ids, logq, **options)
    actual, _ = parallel_topk_distill(buffer, ids, logq, overwrite_input=True, **options)
    assert torch.equal(actual, expected) and torch.equal(buffer, z)  # forward leaves the logits alone
    (gradient,) = torch.autograd.grad(expected.sum(), leaf)
    (overwritten,) = torch.autograd.grad(actual.sum(), source)
    assert torch.equal(overwritten, gradient) and torch.equal(buffer, gradient)  # written where the logits were
    assert gradient.dtype == dtype and torch.count_nonzero(gradient[1]) == 0
    assert torch.count_nonzero(gradient[:, VOCAB:]) == 0 and torch.count_nonzero(gradient[0, :VOCAB]) >= K


LAYOUTS = ("transposed", "batch_slice", "sequence_slice", "two_dims_strided", "column_step", "columns_outermost")


@pytest.mark.parametrize(
    ("backend", "layout", "dtype"),
    [
        *(("chunked", layout, dtype) for layout in LAYOUTS for dtype in (torch.float32, torch.bfloat16)),
        *(("triton", layout, torch.float32) for layout in LAYOUTS),
        *(("triton", layout, torch.bfloat16) for layout in LAYOUTS[:4]),
    ],
)
def test_any_strides(backend: str, layout: str, dtype: torch.dtype) -> None:
    """As from a contiguous copy, gradients in the caller's order of rows.

    Bit for bit in the chunked layer, and in Triton's where all rows begin at multiples of 16 bytes; else lanes sum
    other columns, which moves the rounding.
    """
    exact = backend == "chunked" or dtype == torch.bfloat16
    vocab = 56 if dtype == torch.bfloat16 else VOCAB
    base = torch.randn(3, 4, vocab, generator=torch.Generator().manual_seed(2)).to(dtype)
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
    options = {"loss_weight": weight, "target": ids[..., 1], "backend": backend}
    compare = assert_same if exact else assert_near
    expected = run(z.contiguous(), ids, logq, **options)
    compare(run(z, ids, logq, **options), expected)
    if layout == "transposed":  # the teacher's side in a stride and an integer type of its own
        other = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (ids.int(), logq)]
        compare(run(z, *other, **options), expected)


@pytest.mark.parametrize(
    ("backend", "skips"), [("chunked", True), ("chunked", False), ("reference", True), ("triton", True)]
)
def test_rows_of_weight_zero_are_inert(monkeypatch: pytest.MonkeyPatch, backend: str, skips: bool) -> None:
    """NaN logits and nonsense from the teacher on padding rows reach neither loss, metrics nor gradient.

    Without skipping, as on an accelerator, the rows are computed and masked.
    """
    if not skips:
        monkeypatch.setattr("mopd.losses.chunked.blocks.SYNCHRONOUS_DEVICES", ())
    z, ids, logq = batch()
    weight = torch.ones(ROWS)
    weight[2:4] = 0
    options = {"loss_weight": weight, "check_values": True, "with_entropy": True, "backend": backend}
    expected = run(z, ids, logq, target=ids[:, 0], **options)
    target = ids[:, 0].clone()
    z[2], ids[2], logq[2], target[2] = torch.nan, -7, torch.nan, -1
    z[3], ids[3], logq[3] = torch.inf, 0, 0.0
    actual = run(z, ids, logq, target=target, **options)
    assert_same(actual, expected)
    assert torch.count_nonzero(actual[1][2:4]) == 0
    assert all(torch.count_nonzero(value[2:4]) == 0 for value in actual[2].values())


def test_a_teacher_of_weight_zero_is_ignored() -> None:
    z, ids, logq = batch()
    expected = run(z, ids, logq, backend="chunked")
    ids2 = torch.stack([ids, torch.full_like(ids, -3)], 1)
    logq2 = torch.stack([logq, torch.full_like(logq, torch.nan)], 1)
    weights = torch.tensor([1.0, 0.0]).expand(ROWS, 2)
    actual = run(z, ids2, logq2, teacher_weights=weights, backend="chunked")
    torch.testing.assert_close(actual[:2], expected[:2])
    torch.testing.assert_close(actual[2]["teacher_mass"], expected[2]["teacher_mass"])


@in_both_layers
def test_upstream_and_weights_scale_and_the_reduction_sums(backend: str) -> None:
    """Row weights times upstream; an upstream of any stride; a tiny one keeps its digits."""
    z, ids, logq = batch()
    weight = torch.linspace(0.5, 2, ROWS)
    plain, weighted = (run(z, ids, logq, loss_weight=w, backend=backend) for w in (None, weight))
    torch.testing.assert_close(weighted[0], plain[0] * weight)
    torch.testing.assert_close(weighted[1], plain[1] * weight[:, None])
    torch.testing.assert_close(weighted[2]["unweighted_loss"], plain[0])
    strided = torch.linspace(1, 3, 2 * ROWS).to(DEVICE)[::2]
    torch.testing.assert_close(run(z, ids, logq, strided, backend=backend)[1], plain[1] * strided.cpu()[:, None])
    tiny = run(z, ids, logq, torch.full((ROWS,), 1e-30), backend=backend)[1]
    torch.testing.assert_close(tiny * 1e30, plain[1])
    total, whole, _ = run(z, ids, logq, loss_weight=weight, reduce_loss=True, backend=backend)
    assert total.shape == () and torch.equal(whole, weighted[1])
    torch.testing.assert_close(total, weighted[0].sum())


@in_both_layers
def test_no_rows(backend: str) -> None:
    z, ids, logq = (x[:0] for x in batch())
    loss, gradient, metrics = run(z, ids, logq, target=ids[:, 0], backend=backend)
    assert loss.shape == (0,) and gradient.shape == (0, VOCAB) and metrics["student_mass"].shape == (0,)

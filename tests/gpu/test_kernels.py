"""What only a CUDA device shows of the loss kernels: offsets past 2^31, strides with gaps, a captured graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mopd.losses import parallel_gather_logprobs, parallel_topk_distill
from tests.parity.losses.definitions import teacher_topk

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

K = 16


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def rows_of(z: Tensor, rows: Tensor, upstream: float = 1.0, **options: Any) -> tuple[Tensor, Tensor]:
    """Loss and gradient of some rows alone, in float64 from float64 logits."""
    leaf = z[rows].double().requires_grad_()
    loss, _ = parallel_topk_distill(leaf, backend="reference", **options)
    (gradient,) = torch.autograd.grad(loss.sum() * upstream, leaf)
    return loss.detach(), gradient


@pytest.mark.parametrize("layout", ["contiguous", "columns_outermost"])
@pytest.mark.skipif(free_bytes() < 24 * 2**30, reason="needs 24 GiB of free memory")
def test_more_than_two_to_the_31_logits(layout: str) -> None:
    """The first and the last rows, whose offsets differ by more than an int32 holds, against float64."""
    rows, vocab = 16_385, 131_072 + 3
    assert rows * vocab > 2**31
    shape = (rows, vocab) if layout == "contiguous" else (vocab, rows)
    z = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(
        generator=torch.Generator("cuda").manual_seed(0)
    )
    z = z if layout == "contiguous" else z.t()
    picked = torch.tensor([0, 1, rows // 2, rows - 2, rows - 1], device="cuda")
    ids = torch.randint(0, vocab, (rows, K), device="cuda").sort(1).values
    ids += torch.arange(K, device="cuda") * (ids < vocab - K)  # no id twice in a row, but by a rare chance
    ids[picked] = torch.arange(K, device="cuda") * (vocab // K) + 5
    logq = torch.full((rows, K), 1 / (2 * K), device="cuda").log()
    expected, gradient = rows_of(z, picked, teacher_ids=ids[picked], teacher_logprobs=logq[picked])
    leaf = z.requires_grad_()
    loss, _ = parallel_topk_distill(leaf, ids, logq, backend="triton")
    torch.testing.assert_close(loss[picked].double(), expected, rtol=1e-5, atol=1e-5)
    logprobs, _ = parallel_gather_logprobs(leaf.detach(), ids, backend="triton")
    exact = torch.log_softmax(z.detach()[picked].double(), -1).gather(1, ids[picked])
    torch.testing.assert_close(logprobs[picked].double(), exact, rtol=1e-5, atol=1e-5)
    (got,) = torch.autograd.grad(loss.sum(), leaf)
    assert float((got[picked].double() - gradient).norm() / gradient.norm()) < 2**-8
    assert bool(got.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("whole_groups", [True, False])
def test_three_dims_with_gaps_between_rows(dtype: torch.dtype, whole_groups: bool) -> None:
    """``[S, B, V]`` cut out of a larger buffer on the device, so that no copy closes the gaps.

    The same bits where all rows begin at multiples of 16 bytes, the same numbers where they do not.
    """
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(7, 6, 3008 if whole_groups else 3001, generator=generator).to("cuda", dtype)
    z = base[1:6, ::2, 8:3000] if whole_groups else base[1:6, ::2, 2:2999]
    z = z.transpose(0, 1)
    ids, logq = (x.cuda() for x in teacher_topk(z.float().cpu() + torch.randn(z.shape, generator=generator), K))
    results = []
    for source in (z, z.contiguous()):
        leaf = source.detach().requires_grad_()
        loss, metrics = parallel_topk_distill(leaf, ids, logq, backend="triton", with_entropy=True)
        (gradient,) = torch.autograd.grad(loss.sum(), leaf)
        results.append((loss.detach(), gradient, metrics["entropy"]))
    assert not z.is_contiguous()
    if whole_groups:
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("loss", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_captured_graph_replays_on_new_logits(loss: str, overwrite: bool) -> None:
    """Forward and backward in one graph give what they give outside of it."""
    generator = torch.Generator("cuda").manual_seed(2)
    z = torch.randn(64, 5003, device="cuda", generator=generator).bfloat16()
    ids, logq = (x.cuda() for x in teacher_topk(z.float().cpu(), K))
    weight = torch.rand(64, device="cuda", generator=generator)
    weight[7] = 0
    options: dict[str, Any] = {"loss": loss, "loss_weight": weight, "target": ids[:, 0], "with_entropy": True}

    def step(buffer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        leaf = buffer.detach().requires_grad_()
        value, metrics = parallel_topk_distill(
            leaf * 1, ids, logq, overwrite_input=overwrite, backend="triton", **options
        )
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
        return value.detach(), gradient, metrics["entropy"]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles the kernels, which a capture cannot
        for _ in range(3):
            step(z)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(z)
    for seed in (3, 4):
        z.copy_(torch.randn(z.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)))
        z[5, 9] = torch.nan
        graph.replay()
        expected = step(z)
        for got, wanted in zip(captured, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
        assert captured[0].isfinite().tolist() == [t != 5 for t in range(64)]

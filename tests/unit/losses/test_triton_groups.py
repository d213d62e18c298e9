"""Groups of 16 bytes: rows that begin anywhere in one, ids at their borders, groups of ids alone, ends of rows."""

from __future__ import annotations

import pytest
import torch

from mopd.losses import parallel_gather_logprobs, parallel_topk_distill
from mopd.losses.triton import functions, launches, table
from tests.parity.losses.triton_layer import DEVICE

ROWS, K = 4, 9


def lists(vocab: int, group: int) -> torch.Tensor:
    """Ids [T, K] of rows that begin in four ways: at both ends, a whole group, one of each group, one id only."""
    at_ends = [0, 1, vocab - 1, vocab - 2, group - 1, group, 2 * group, vocab // 2, vocab // 2 + 1]
    whole = [group + j % (K - 1) for j in range(K)]
    spread = [j * vocab // K for j in range(K)]
    return torch.tensor([at_ends, whole, spread, [vocab // 3] * K])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("vocab", "stride", "offset"), [(67, 71, 3), (67, 72, 0), (64, 65, 8), (10, 11, 5)])
@pytest.mark.parametrize(("block", "stages", "splits"), [(16, 1, 1), (32, 2, 2)])
def test_against_float64(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, vocab: int, stride: int, offset: int,
    block: int, stages: int, splits: int,
) -> None:  # fmt: skip
    """What lies before, between and behind the rows is NaN: nothing of it may be met. The ids hold most of the mass."""
    generator = torch.Generator().manual_seed(vocab)
    group = 16 // dtype.itemsize
    ids = lists(vocab, group).clamp_max(vocab - 1)
    buffer = torch.full((offset + ROWS * stride + 8,), torch.nan, dtype=dtype)
    z = buffer.as_strided((ROWS, vocab), (stride, 1), offset)
    z.copy_(torch.randn(ROWS, vocab, generator=generator) * 2)
    z.scatter_(1, ids, 12.0)
    how = table.Launch(block, 1, stages)
    entry = table.Entry(vocab, "any", ROWS, "any", how, splits, table.Launch(block, 1, 1))
    monkeypatch.setattr(functions, "entry_for", lambda *_: entry)
    source = buffer.to(DEVICE).as_strided((ROWS, vocab), (stride, 1), offset)
    leaf = source.detach().requires_grad_()
    logprobs, lse = parallel_gather_logprobs(leaf, ids.to(DEVICE), true_vocab_size=vocab - 1, backend="triton")
    upstream = torch.linspace(-1, 2, ROWS * K).view(ROWS, K)
    used = torch.where(ids < vocab - 1, upstream, 0).to(DEVICE)
    (gradient,) = torch.autograd.grad(torch.where(used != 0, logprobs * used, 0).sum() + lse.sum(), leaf)

    exact = z.double()[:, : vocab - 1].requires_grad_()
    log_p = torch.log_softmax(exact, -1).gather(1, ids.clamp_max(vocab - 2))
    total = exact.logsumexp(-1)
    (expected,) = torch.autograd.grad((log_p * used.cpu()).sum() + total.sum(), exact)
    torch.testing.assert_close(lse.detach().cpu().double(), total.detach(), rtol=2e-6, atol=2e-6)
    tolerance = 3e-6 if dtype == torch.float32 else 2**-7 if dtype == torch.bfloat16 else 2**-10
    torch.testing.assert_close(gradient.cpu()[:, : vocab - 1].double(), expected, rtol=tolerance, atol=tolerance / 10)
    assert torch.count_nonzero(gradient[:, vocab - 1 :]) == 0


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_small_tail_keeps_its_digits_beside_large_ids(overwrite: bool) -> None:
    """A tail of 1e-6 that shares its groups with the ids; entropy too. Written over, the gaps between rows stay."""
    vocab, stride = 45, 47
    buffer = torch.full((ROWS * stride + 1,), 7.0)
    z = buffer.as_strided((ROWS, vocab), (stride, 1), 1)
    z.copy_(torch.randn(ROWS, vocab, generator=torch.Generator().manual_seed(0)))
    ids = torch.arange(2, vocab, 5).expand(ROWS, -1)
    z.scatter_(1, ids, 14.0)
    logq = torch.full(ids.shape, 1 / 9 - 1e-8).log()
    own = buffer.clone().to(DEVICE)
    leaf = torch.nn.Parameter(own.as_strided((ROWS, vocab), (stride, 1), 1))
    options = {"with_entropy": True, "loss": "reverse_kl", "tail": "generalized"}
    loss, metrics = parallel_topk_distill(
        leaf * 1 if overwrite else leaf, ids.to(DEVICE), logq.to(DEVICE), overwrite_input=overwrite, backend="triton",
        **options,
    )  # fmt: skip
    exact = z.double().requires_grad_()
    expected, told = parallel_topk_distill(exact, ids, logq.double(), backend="reference", **options)
    tail = 1 - metrics["student_mass"].double().cpu()
    torch.testing.assert_close(metrics["entropy"].cpu().double(), told["entropy"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(loss.detach().cpu().double(), expected.detach(), rtol=1e-5, atol=1e-9)
    assert float(tail.max()) < 1e-4
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    (wanted,) = torch.autograd.grad(expected.sum(), exact)
    torch.testing.assert_close(gradient.cpu().double(), wanted, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("splits", [1, 2, 3])
def test_two_lists_of_everything_pull_at_a_tail_that_has_no_digits(
    monkeypatch: pytest.MonkeyPatch, splits: int
) -> None:
    """Nothing lies outside both lists: a split has no column of its own, and the tail of the one is the other's ids."""
    how = table.Launch(16, 1, 1)
    monkeypatch.setattr(functions, "entry_for", lambda *_: table.Entry(8, "any", 1, "any", how, splits, how))
    z = torch.randn(1, 8, generator=torch.Generator().manual_seed(0))
    z[:, 4:] -= 100  # e**-100 of the whole, which fp32 cannot tell from 0 beside it
    ids = torch.arange(8).view(1, 2, 4)
    logq = torch.tensor([[[0.3, 0.2, 0.1, 0.2], [0.2, 0.3, 0.1, 0.1]]]).log()
    weights = torch.tensor([[0.6, 0.4]])

    def found(leaf: torch.Tensor, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
        given = (one.to(leaf.device) for one in (ids, logq))
        loss, _ = parallel_topk_distill(leaf, *given, teacher_weights=weights.to(leaf.device), backend=backend)
        (gradient,) = torch.autograd.grad(loss.sum(), leaf)
        return loss.detach().cpu().double(), gradient.cpu().double()

    actual, expected = found(z.to(DEVICE).requires_grad_(), "triton"), found(z.double().requires_grad_(), "reference")
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert float(expected[1][0, 4:].max()) < -0.05


def test_nothing_is_written_behind_the_last_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several rows a program, of which the last program has one too many."""
    calls = []

    def with_a_row_behind(
        z: launches.Logits, sorted_ids: torch.Tensor, pay: torch.Tensor, marks: torch.Tensor, *rest: int
    ) -> None:
        behind = [torch.cat([one, torch.full_like(one[:1], 77)]) for one in (pay, marks)]
        launches.neighbours(z, sorted_ids, behind[0][:-1], behind[1][:-1], *rest)
        calls.append([one[-1].unique().tolist() for one in behind])
        for one, own in zip(behind, (pay, marks), strict=True):
            own.copy_(one[:-1])

    monkeypatch.setattr(functions, "neighbours", with_a_row_behind)
    z = torch.randn(3, 40, generator=torch.Generator().manual_seed(2))
    ids = torch.arange(3, 40, 4).expand(3, -1)
    logq = torch.full(ids.shape, 0.05).log()
    parallel_topk_distill(z.to(DEVICE), ids.to(DEVICE), logq.to(DEVICE), with_entropy=True, backend="triton")
    assert calls == [[[77], [77]]]


def test_memory_that_begins_nowhere_in_particular() -> None:
    """Of another library, say: as from memory of our own, columns taken one by one."""
    z = torch.randn(ROWS, 40, generator=torch.Generator().manual_seed(1)).bfloat16()
    ids = torch.arange(3, 40, 4).expand(ROWS, -1)
    strange = torch.frombuffer(bytearray(2 + z.nbytes), dtype=torch.bfloat16, offset=2).view_as(z).copy_(z)
    where = [launches.layout(x) for x in (z, strange)]
    assert [x.unit for x in where] == [True, strange.untyped_storage().data_ptr() % 16 == 0]
    values = [parallel_gather_logprobs(x.to(DEVICE), ids.to(DEVICE), backend="triton")[0] for x in (z, strange)]
    torch.testing.assert_close(values[1], values[0])

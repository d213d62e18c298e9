"""The gather primitive, and the diagnostics that cost a pass of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parity.losses.on_device import parallel_entropy_and_topk_overlap, parallel_gather_logprobs

VOCAB = 37


LAYERS = [
    ("chunked", torch.float32),
    ("chunked", torch.float64),
    ("reference", torch.float64),
    ("triton", torch.float32),
]


@pytest.mark.parametrize(("backend", "dtype"), LAYERS)
def test_gather_against_autograd(backend: str, dtype: torch.dtype) -> None:
    """Repeated ids, an id outside the vocabulary, temperature, a masked row, both outputs used."""
    z = torch.randn(3, 2, VOCAB, dtype=dtype, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(0, VOCAB - 1, (3, 2, 4), generator=torch.Generator().manual_seed(1))
    ids[..., 3] = ids[..., 0]
    ids[1, 1] = ids[1, 1, 0]
    ids[0, 0, 1] = VOCAB - 1
    mask = torch.ones(3, 2)
    mask[2, 1] = 0
    upstream = torch.linspace(-1, 2, 24).view(3, 2, 4)
    leaf = z.double().clone().requires_grad_()
    scaled = leaf[..., : VOCAB - 1] / 0.6
    used = (ids < VOCAB - 1) & (mask > 0).unsqueeze(-1)
    log_p = torch.log_softmax(scaled, -1).gather(-1, ids.clamp_max(VOCAB - 2))
    total = (log_p * upstream * used).sum() + (2 * scaled.logsumexp(-1) * mask).sum()
    (expected,) = torch.autograd.grad(total, leaf)

    own = z.clone().requires_grad_()
    options: dict[str, Any] = {"temperature": 0.6, "true_vocab_size": VOCAB - 1, "backend": backend}
    got, lse = parallel_gather_logprobs(own, ids, loss_weight=mask, **options)
    finite = torch.where(used, got, 0)
    ((finite * upstream).sum() + (2 * lse).sum()).backward()
    tolerance = {torch.float32: 3e-6, torch.float64: 1e-12}[dtype]
    close = {"rtol": tolerance, "atol": tolerance}
    assert own.grad is not None and own.grad.dtype == dtype and lse.shape == (3, 2)
    torch.testing.assert_close(own.grad.double(), expected, **close)
    torch.testing.assert_close(finite.double(), torch.where(used, log_p, 0), **close)
    torch.testing.assert_close(lse.detach().double(), scaled.logsumexp(-1) * mask, **close)
    assert float(got[0, 0, 1].detach()) == -torch.inf
    assert torch.count_nonzero(got[2, 1]) == 0 and torch.count_nonzero(own.grad[2, 1]) == 0


@pytest.mark.parametrize("elements", [1, VOCAB * 3, 1 << 20])
def test_entropy_and_overlap(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    monkeypatch.setattr("mopd.losses.chunked.blocks.BLOCK_ELEMENTS", elements)
    z = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(3)) * 2
    z[1, 5:30] = -torch.inf
    p = torch.softmax(z[:, : VOCAB - 2].double() / 1.4, -1)
    own = p.topk(5, -1).indices
    least = p.topk(5, -1, largest=False).indices
    ids = torch.cat([own[:, :3], least[:, :2]], 1)
    ids[2, 4] = VOCAB - 1  # padding: not one of the teacher's usable ids
    mask = torch.ones(6)
    mask[4] = 0
    entropy, overlap = parallel_entropy_and_topk_overlap(
        z, ids, temperature=1.4, loss_weight=mask, true_vocab_size=VOCAB - 2
    )
    expected = -torch.where(p > 0, p * p.clamp_min(1e-300).log(), 0).sum(-1) * mask
    torch.testing.assert_close(entropy.double(), expected, rtol=1e-5, atol=1e-6)
    assert overlap.tolist() == pytest.approx([0.6, 0.6, 0.75, 0.6, 0, 0.6])


def test_overlap_of_equal_sets_is_one_in_any_order() -> None:
    z = torch.randn(3, VOCAB).requires_grad_()
    ids = z.topk(8, -1).indices.flip(-1).int()
    entropy, overlap = parallel_entropy_and_topk_overlap(z, ids)
    assert overlap.tolist() == [1, 1, 1]
    assert not entropy.requires_grad

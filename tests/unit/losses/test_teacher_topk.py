"""``chunked_topk_logprobs`` against a log-softmax over all logits in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mopd.losses import chunked_topk_logprobs

R, H = 23, 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("vocab", "k"), [(50, 50), (50, 1), (4_001, 1), (4_001, 7), (4_001, 64)])
@pytest.mark.parametrize("max_rows", [1, 5, 100])
def test_equals_log_softmax(vocab: int, k: int, max_rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab + k)
    hidden = torch.randn(R, H, generator=generator).to(dtype)
    weight = torch.randn(vocab, H, generator=generator).to(dtype)
    bias = torch.randn(vocab, generator=generator).to(dtype)
    target = torch.randint(0, vocab, (R,), generator=generator)
    result = chunked_topk_logprobs(hidden, weight, k, target=target, temperature=0.8, bias=bias, max_rows=max_rows)
    logits = hidden @ weight.t() + bias  # rounded to the dtype, as a model's logits are
    expected = torch.log_softmax(logits.double() / 0.8, 1)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert result.ids.dtype == torch.int32
    assert result.logprobs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    if dtype != torch.bfloat16:  # its product of one row may round otherwise than that of all
        best = expected.topk(k, 1).values
        torch.testing.assert_close(result.logprobs.double(), best, rtol=0, atol=tolerance)
        torch.testing.assert_close(expected.gather(1, result.ids.long()), best, rtol=0, atol=tolerance)
        torch.testing.assert_close(result.mass.double(), best.exp().sum(1), rtol=0, atol=tolerance)
        assert result.target_logprobs is not None
        own = expected.gather(1, target[:, None])[:, 0]
        torch.testing.assert_close(result.target_logprobs.double(), own, rtol=0, atol=tolerance)
    else:
        best = expected.topk(k, 1).values
        torch.testing.assert_close(result.logprobs.double(), best, rtol=0, atol=0.05)
    assert bool((result.logprobs.diff(dim=1) <= 0).all())
    assert bool((result.ids.sort(1).values.diff(dim=1) > 0).all())


def test_padded_vocabulary_is_left_out() -> None:
    hidden, weight = torch.randn(R, H), torch.randn(70, H)
    weight[60:] = 50 * torch.sign(hidden.mean(0))
    expected = chunked_topk_logprobs(hidden, weight[:60], 9, max_rows=8)
    result = chunked_topk_logprobs(hidden, weight, 9, max_rows=8, true_vocab_size=60)
    assert torch.equal(result.ids, expected.ids) and torch.equal(result.logprobs, expected.logprobs)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"k": 0}, "k is 0: the vocabulary has 30 ids"),
        ({"k": 31}, "k is 31"),
        ({"max_rows": 0}, "max_rows is 0"),
        ({"temperature": 0.0}, "temperature 0.0"),
        ({"hidden": torch.zeros(R, H + 1)}, r"hidden is .*\[23, 17\] and weight .*\[30, 16\]"),
        ({"target": torch.zeros(R)}, "target is torch.float32"),
        ({"bias": torch.zeros(3)}, r"bias is \[3\]: pass \[30\]"),
        ({"true_vocab_size": 31}, "true_vocab_size is 31"),
    ],
)
def test_bad_arguments(changed: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"hidden": torch.zeros(R, H), "weight": torch.zeros(30, H), "k": 4, "max_rows": 8}
    with pytest.raises(ValueError, match=said):
        chunked_topk_logprobs(**{**given, **changed})

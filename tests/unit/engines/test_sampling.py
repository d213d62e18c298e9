"""Drawing tokens: the right distribution, the right support, and randomness that belongs to (seed, step) alone."""

from __future__ import annotations

import pytest
import torch

from mopd.engines.interface import SamplingParams
from mopd.engines.torch.decoding import draw, uniforms
from mopd.engines.torch.engine import token_budget_batches

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -30.0])


def test_uniforms_belong_to_seed_and_step() -> None:
    many = uniforms([3, 2**63 - 1, 3, 0], 50)
    assert torch.equal(many[0], many[2])
    assert torch.equal(uniforms([2**63 - 1], 20)[0], many[1, :20])
    assert not torch.equal(many[0], many[3])
    assert many.min() >= 0 and many.max() < 1
    assert abs(uniforms(range(400), 50).mean() - 0.5) < 0.01


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    num = 40_000
    sampling = SamplingParams(max_new_tokens=1, temperature=temperature)
    tokens, logprobs = draw(LOGITS.expand(num, -1), sampling, uniforms([1], num)[0])
    expected = torch.softmax(LOGITS.double() / temperature, -1)
    observed = torch.bincount(tokens, minlength=6) / num
    assert (observed - expected).abs().max() < 0.01
    torch.testing.assert_close(logprobs.double(), expected.log()[tokens], rtol=0, atol=1e-6)


def test_cuts_keep_the_right_tokens_and_report_uncut_logprobs() -> None:
    # softmax of LOGITS is about .58 .21 .13 .08 .03 0: 0.8 needs three tokens, 0.75 needs two
    num = 4_000
    cases = {(-1, 0.75): 2, (-1, 0.8): 3, (2, 1.0): 2, (1, 1.0): 1, (99, 1.0): 6, (-1, 1e-6): 1, (2, 0.5): 1}
    for (top_k, top_p), num_kept in cases.items():
        sampling = SamplingParams(max_new_tokens=1, top_k=top_k, top_p=top_p)
        tokens, logprobs = draw(LOGITS.flip(0).expand(num, -1), sampling, uniforms([7], num)[0])
        kept = set((5 - tokens).tolist())
        assert kept == set(range(min(num_kept, 5))), (top_k, top_p)  # token 5 has probability 1e-14
        expected = LOGITS.flip(0).log_softmax(-1)[tokens]
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)


def test_extreme_uniforms_never_pick_an_impossible_token() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, 0.0, float("-inf")]]).expand(2, -1)
    edge = torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64)
    tokens, logprobs = draw(logits, SamplingParams(max_new_tokens=1), edge)
    assert tokens.tolist() == [1, 2]
    assert logprobs.isfinite().all()
    many = torch.randn(500, 40, generator=torch.Generator().manual_seed(0))
    many[:, -1] = float("-inf")  # sums of 500 softmaxes end a little below and a little above 1
    tokens, _ = draw(many, SamplingParams(max_new_tokens=1), edge[1:].expand(500))
    assert tokens.max() == 38


def test_greedy_takes_the_maximum_at_temperature_one() -> None:
    tokens, logprobs = draw(LOGITS[None], SamplingParams(max_new_tokens=1, temperature=0), uniforms([0], 1)[:, 0])
    assert tokens.item() == 0
    torch.testing.assert_close(logprobs, LOGITS.log_softmax(-1)[:1])


def test_token_budget_batches_keep_the_budget_and_every_request() -> None:
    lengths = [3, 9, 4, 4, 1, 30, 2]
    batches = token_budget_batches(lengths, 12)
    assert sorted(i for batch in batches for i in batch) == list(range(7))
    assert [5] in batches  # longer than the budget: alone
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= 12
    assert len(batches) == 4

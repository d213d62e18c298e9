"""Weights that turn token losses into one number, the same for every split of the batch."""

from __future__ import annotations

import pytest
import torch

from mopd.losses import domain_factors, token_weights

MASK = torch.tensor([[1, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
LOSS = torch.arange(1.0, 17).view(4, 4)
MEANS = {
    "token_mean": (1 + 2 + 4 + 6 + 13 + 14 + 15 + 16) / 8,
    "sequence_mean": ((1 + 2 + 4) / 3 + 6 + (13 + 14 + 15 + 16) / 4) / 4,
    "token_sum": 1 + 2 + 4 + 6 + 13 + 14 + 15 + 16,
}


@pytest.mark.parametrize("aggregation", MEANS)
@pytest.mark.parametrize("split", [[4], [1, 3], [2, 2], [1, 1, 1, 1]])
def test_any_split_gives_the_same_number(aggregation: str, split: list[int]) -> None:
    total = 0.0
    for mask, loss in zip(MASK.split(split), LOSS.split(split), strict=True):
        weights = token_weights(mask, aggregation, num_loss_tokens=8, num_samples=4)
        assert weights.dtype == torch.float32 and torch.count_nonzero(weights[~mask]) == 0
        total += float((weights * loss).sum())
    assert total == pytest.approx(MEANS[aggregation])


@pytest.mark.parametrize("aggregation", MEANS)
def test_packed_and_transposed_rows(aggregation: str) -> None:
    index = torch.tensor([2, 0, 1, 5]).unsqueeze(1).expand(4, 4)
    expected = token_weights(MASK, aggregation, num_loss_tokens=8, num_samples=4)
    for reorder in (lambda x: x.flatten(), lambda x: x.t()):
        got = token_weights(reorder(MASK), aggregation, num_loss_tokens=8, num_samples=4, sample_index=reorder(index))
        assert torch.equal(got, reorder(expected))


@pytest.mark.parametrize("aggregation", MEANS)
def test_samples_in_parts(aggregation: str) -> None:
    """With the loss tokens of whole samples the weights are theirs, wherever a sample is cut."""
    index = torch.arange(4).unsqueeze(1).expand(4, 4)
    expected = token_weights(MASK, aggregation, num_loss_tokens=8, num_samples=4)
    for part in (slice(0, 1), slice(1, 4)):
        got = token_weights(
            MASK[:, part],
            aggregation,
            num_loss_tokens=8,
            num_samples=4,
            sample_index=index[:, part],
            sample_loss_tokens=MASK.sum(1),
        )
        assert torch.equal(got, expected[:, part])


@pytest.mark.parametrize(
    ("domains", "budget", "shares"),
    [
        ([0, 1, 1, 0], [0.5, 0.5], [0.5, 0.5]),
        ([0, 1, 1, 0], [0.9, 0.1], [0.9, 0.1]),
        ([1, 0, 2, 0], [0.2, 0.4, 0.4], [1 / 3, 2 / 3, 0]),  # the sample of domain 2 has no loss token
        ([0, 0, 0, 0], [0.1, 0.6, 0.3], [1, 0, 0]),
    ],
)
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_a_budget_gives_each_domain_its_share_of_the_weight(
    domains: list[int], budget: list[float], shares: list[float], aggregation: str
) -> None:
    """The share of a domain without a loss token goes to the others, in proportion to theirs."""
    of_samples = MASK.sum(1) > 0 if aggregation == "sequence_mean" else MASK.sum(1)
    own = [[float(of_samples[i]) for i, domain in enumerate(domains) if domain == d] for d in range(len(budget))]
    total = 4 if aggregation == "sequence_mean" else 8
    factors = torch.tensor(domain_factors([int(sum(one)) for one in own], budget, total=total))
    weights = (
        token_weights(MASK, aggregation, num_loss_tokens=8, num_samples=4) * factors[torch.tensor(domains)][:, None]
    )
    got = [float(weights[torch.tensor(domains) == d].sum()) for d in range(len(budget))]
    assert got == pytest.approx(shares)


def test_no_tokens() -> None:
    empty = torch.zeros(0, 4, dtype=torch.bool)
    assert token_weights(empty, "sequence_mean", num_loss_tokens=1, num_samples=1).shape == (0, 4)
    index = torch.zeros(0, dtype=torch.long)
    flat = token_weights(empty.flatten(), "sequence_mean", num_loss_tokens=1, num_samples=1, sample_index=index)
    assert flat.shape == (0,)


def test_misuse() -> None:
    good = {"num_loss_tokens": 8, "num_samples": 4}
    with pytest.raises(ValueError, match="aggregation is 'mean'"):
        token_weights(MASK, "mean", **good)
    with pytest.raises(ValueError, match="num_loss_tokens is 0"):
        token_weights(MASK, "token_mean", num_loss_tokens=0, num_samples=4)
    with pytest.raises(ValueError, match=r"loss_mask is torch.float32"):
        token_weights(MASK.float(), "token_mean", **good)
    with pytest.raises(ValueError, match=r"loss_mask is \[16\]"):
        token_weights(MASK.flatten(), "token_mean", **good)
    with pytest.raises(ValueError, match=r"sample_index is \[4\]"):
        token_weights(MASK, "token_mean", sample_index=torch.arange(4), **good)
    with pytest.raises(ValueError, match=r"sample_loss_tokens is given without sample_index"):
        token_weights(MASK, "token_mean", sample_loss_tokens=MASK.sum(1), **good)

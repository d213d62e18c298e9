"""Aggregation of many tokens' losses into one number, as a weight per token.

The denominators are those of the whole batch over all data-parallel ranks and micro-batches, known before the first
backward. ``sum_t weight_t loss_t`` then is the same number for every split of the batch; nothing divides it again.

    token_mean     1 / num_loss_tokens
    sequence_mean  1 / (num_samples * loss tokens of the token's own sample)
    token_sum      1

``domain_factors`` then give each domain a share of its own, whatever it has in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

AGGREGATIONS = ("token_mean", "sequence_mean", "token_sum")


def token_weights(
    loss_mask: Tensor,
    aggregation: str,
    *,
    num_loss_tokens: int,
    num_samples: int,
    sample_index: Tensor | None = None,
    sample_loss_tokens: Tensor | None = None,
) -> Tensor:
    """Return weights in the shape of ``loss_mask``, fp32; exactly 0 where the mask is off.

    Args:
        loss_mask: bool, ``[B, S]`` with one sample per row, or any shape together with ``sample_index``.
        aggregation: token_mean, sequence_mean or token_sum.
        num_loss_tokens: loss tokens of the whole batch, all ranks.
        num_samples: samples of the whole batch, all ranks (also those without a loss token).
        sample_index: int64, the shape of ``loss_mask``: number of each token's sample within this tensor, for packed or
            transposed layouts.
        sample_loss_tokens: ``[n]``: loss tokens of each sample of ``sample_index``, on whatever rank they are. If left
            out, ``loss_mask`` must hold all loss tokens of a sample, and counting them waits for the device.

    Raises:
        ValueError: unknown aggregation, wrong shapes, or a denominator below 1.
    """
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation is {aggregation!r}: choose one of {', '.join(AGGREGATIONS)}")
    if num_loss_tokens < 1 or num_samples < 1:
        raise ValueError(f"num_loss_tokens is {num_loss_tokens} and num_samples {num_samples}: both must be at least 1")
    if loss_mask.dtype != torch.bool:
        raise ValueError(f"loss_mask is {loss_mask.dtype}: pass bool")
    if sample_index is None and loss_mask.dim() != 2:
        raise ValueError(f"loss_mask is {list(loss_mask.shape)}: pass [B, S], or sample_index beside it")
    if sample_index is not None and sample_index.shape != loss_mask.shape:
        raise ValueError(
            f"sample_index is {list(sample_index.shape)}: pass the shape of loss_mask, {list(loss_mask.shape)}"
        )
    if sample_loss_tokens is not None and sample_index is None:
        raise ValueError("sample_loss_tokens is given without sample_index: pass both")
    mask = loss_mask.to(torch.float32)
    if aggregation == "token_sum":
        return mask
    if aggregation == "token_mean":
        return mask / num_loss_tokens
    if sample_loss_tokens is not None and sample_index is not None:
        lengths = sample_loss_tokens.to(torch.float32)[sample_index]
    elif sample_index is None:
        lengths = mask.sum(1, keepdim=True).expand_as(mask)
    else:
        index = sample_index.flatten()
        buckets = mask.new_zeros(loss_mask.numel() if index.numel() == 0 else int(index.max()) + 1)
        lengths = buckets.index_add(0, index, mask.flatten())[index].view_as(mask)
    return mask / (lengths.clamp_min(1) * num_samples)


def domain_factors(counts: Sequence[int], budget: Sequence[float], *, total: int) -> list[float]:
    """Return the factors that make the weights of each domain add up to its share of ``budget``, 0 for a domain without
    any; the shares of such domains go to the others, in proportion to theirs.

    Args:
        counts: loss tokens of each domain in the whole batch, over all ranks (``token_mean``), or its samples that have
            a loss token (``sequence_mean``).
        budget: share of each domain, above 0.
        total: the denominator of the aggregation: ``num_loss_tokens``, or ``num_samples``.
    """
    present = math.fsum(share for share, count in zip(budget, counts, strict=True) if count)
    return [share / present * total / count if count else 0.0 for share, count in zip(budget, counts, strict=True)]

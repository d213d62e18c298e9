"""Which requests share a forward pass."""

from __future__ import annotations

from collections.abc import Sequence


def token_budget_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of ``lengths`` in batches of similar length, longest first; ties keep the order of the request.

    The padded cost of a batch (rows x its longest length) stays within ``max_tokens``; a request that is longer on its
    own gets a batch of its own.

    Example: ``token_budget_batches([3, 9, 4], 10)`` is ``[[1], [2, 0]]``.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not batches or (len(batches[-1]) + 1) * lengths[batches[-1][0]] > max_tokens:
            batches.append([])
        batches[-1].append(index)
    return batches

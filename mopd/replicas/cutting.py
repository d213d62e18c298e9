"""Samples -> requests: bounded in tokens, longest first, finer towards the end."""

from __future__ import annotations

from collections.abc import Sequence


def cut(tokens: Sequence[int], *, max_tokens: int, num_replicas: int) -> list[list[int]]:
    """Positions of ``tokens`` in requests of at most ``max_tokens`` (a longer sample is a request of its own).

    Long samples come first, since a long one that starts last keeps the other replicas waiting; equals keep their
    order. With several replicas no request holds more than half of a replica's fair share of what is left, so the last
    requests are small and even out the finish (guided self-scheduling, Polychronopoulos and Kuck 1987). The cut depends
    on its arguments alone: equal batches are computed equally, however fast the replicas are.

    Example: ``cut([3, 9, 4, 1], max_tokens=10, num_replicas=1)`` is ``[[1], [2, 0, 3]]``.
    """
    requests: list[list[int]] = []
    left = sum(tokens)
    room = 0
    for position in sorted(range(len(tokens)), key=lambda i: -tokens[i]):
        if not requests or tokens[position] > room:
            requests.append([])
            room = max_tokens if num_replicas == 1 else min(max_tokens, left // (2 * num_replicas))
        requests[-1].append(position)
        room -= tokens[position]
        left -= tokens[position]
    return requests

"""Requests: bounded, complete, longest first, small at the end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd.engines.replicas.router import cut


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.integers(1, 500), max_size=60), max_tokens=st.integers(1, 1000), num_replicas=st.integers(1, 5)
)
def test_every_sample_is_in_one_request_and_requests_are_bounded(
    tokens: list[int], max_tokens: int, num_replicas: int
) -> None:
    requests = cut(tokens, max_tokens=max_tokens, num_replicas=num_replicas)
    assert sorted(position for request in requests for position in request) == list(range(len(tokens)))
    assert all(len(r) == 1 or sum(tokens[i] for i in r) <= max_tokens for r in requests)
    order = [tokens[i] for request in requests for i in request]
    assert order == sorted(order, reverse=True)


def test_one_replica_gets_the_largest_requests_that_fit() -> None:
    assert cut([3, 9, 4, 1], max_tokens=10, num_replicas=1) == [[1], [2, 0, 3]]
    assert cut([5, 5, 5], max_tokens=10, num_replicas=1) == [[0, 1], [2]]


@pytest.mark.parametrize("num_replicas", [2, 8])
def test_requests_shrink_towards_the_end(num_replicas: int) -> None:
    sizes = [len(request) for request in cut([1] * 1000, max_tokens=1000, num_replicas=num_replicas)]
    assert sizes[0] == 1000 // (2 * num_replicas)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-num_replicas:] == [1] * num_replicas
    assert len(sizes) < 20 * num_replicas

"""Whatever arrives is answered with a result or a refusal that blames the client (4xx), and the server lives on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mopd.engines.wire.messages import FrameReader, GenerateAnswer, ScoreAnswer, decode, encode
from tests.fixtures.servers import RunningServer
from tests.unit.engines.wire.test_messages import generate_request, score_request
from tests.unit.serving.test_limits import assert_lives, post

PATHS = ("/v1/score", "/v1/generate", "/v1/weights/begin", "/v1/weights/chunk")
FUZZ = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
Strategies = Mapping[str, st.SearchStrategy[Any]]

INT64 = st.integers(-(2**63), 2**63 - 1)
TOP_K = st.integers(-1, 49) | INT64
TEMPERATURE = st.sampled_from([0.0, 1e-300, 1e-45, 1e-30, 1e-4, 1e30]) | st.floats()


def ids(at_most: int) -> st.SearchStrategy[Any]:
    """Arrays of two requests' sequences: mostly of the right size, with values near and far."""
    values = st.integers(0, at_most) | st.integers(-(2**31), 2**31 - 1)
    return st.lists(values, max_size=9).map(lambda given: np.array(given, dtype=np.int32))


SAMPLING: Strategies = {
    "max_new_tokens": st.integers(0, 300) | INT64,
    "temperature": TEMPERATURE,
    "top_p": st.floats(0, 1) | st.floats(),
    "top_k": TOP_K,
}
SCORE: Strategies = {
    "tokens": ids(48),
    "lengths": ids(9),
    "prompt_lengths": ids(5),
    "top_k": TOP_K,
    "hidden_size": st.sampled_from([-1, 0, 64]) | INT64,
    "temperature": TEMPERATURE,
    "weight_version": INT64,
}
GENERATE: Strategies = {
    **SAMPLING,
    "tokens": ids(48),
    "lengths": ids(3),
    "seeds": st.lists(INT64, max_size=3).map(lambda given: np.array(given, dtype=np.int64)),
    "weight_version": INT64,
}


def some(strategies: Strategies) -> st.SearchStrategy[dict[str, Any]]:
    """New values for one or two fields: the others are right, so that the request comes far."""
    names = st.lists(st.sampled_from(sorted(strategies)), min_size=1, max_size=2, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: strategies[name] for name in chosen}))


def assert_blames_the_client(response: httpx.Response) -> None:
    assert 400 <= response.status_code < 500, response.text


@FUZZ
@given(some(SCORE))
def test_any_values_in_a_score_request(teacher: RunningServer, changes: dict[str, Any]) -> None:
    """Frame and checksum are right. An answer, where there is one, has numbers only."""
    response = post(teacher, "/v1/score", encode(score_request(**changes)))
    if response.status_code != 200:
        return assert_blames_the_client(response)
    answer = decode(response.content, ScoreAnswer)
    assert np.isfinite(answer.logprobs).all() and np.isfinite(answer.token_logprobs).all()


@FUZZ
@given(some(GENERATE))
def test_any_values_in_a_generate_request(teacher: RunningServer, changes: dict[str, Any]) -> None:
    good = {"weight_version": -1}
    response = post(teacher, "/v1/generate", encode(generate_request(**{**good, **changes})))
    if response.status_code != 200:
        return assert_blames_the_client(response)
    for body in FrameReader(max_bytes=2**20).feed(response.content):
        assert np.isfinite(decode(body, GenerateAnswer).logprobs).all()


def test_the_fuzzed_server_lives(teacher: RunningServer) -> None:
    assert_lives(teacher)

"""OpenAIScorer against answers that are wrong in one place each. The real one: tests/integration/test_stock_vllm.py."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from mopd.base.types import UserError
from mopd.engines.clients.openai import OpenAIScorer
from mopd.engines.interface import EngineUnavailable, SamplingParams, Scores, ToDraw, ToScore
from tests.unit.engines.raw_server import response, serving

TOKENS = [3, 1, 4, 1]
ROWS: list[dict[str, float] | None] = [  # per position, vocabulary of 6, top-2: the own token is extra in the third row
    None,
    {"1": -0.5, "2": -1.25},
    {"4": -3.0, "0": -0.25, "5": -2.0},
    {"2": -0.75, "1": -0.875},
]


def answer_of(rows: list[dict[str, float] | None]) -> dict[str, Any]:
    """As vLLM writes it."""
    entries = [r and {k: {"logprob": v, "rank": 1, "decoded_token": "x"} for k, v in r.items()} for r in rows]
    return {"choices": [{"prompt_logprobs": entries, "prompt_token_ids": TOKENS, "text": ""}]}


class Server:
    """Answers to a scoring request with ``body``."""

    def __init__(self) -> None:
        self.body = json.dumps(answer_of(ROWS)).encode()
        self.models: list[Any] = ["teacher"]
        self.requests: list[dict[str, Any]] = []
        self.heads: list[str] = []

    def answer(self, path: str, body: bytes) -> bytes:
        if path == "/v1/models":
            return response(json.dumps({"data": [{"id": name} for name in self.models]}).encode())
        self.requests.append(json.loads(body))
        return response(self.body)


@pytest.fixture
def server() -> Server:
    return Server()


def ask(
    server: Server, action: Callable[[OpenAIScorer], Awaitable[Any]], *, name: str | None = None, path: str = ""
) -> Any:
    """``action`` on a scorer of its own."""

    async def run() -> Any:
        async with serving(server.answer, server.heads) as url:
            settings = {"served_model_name": name, "vocab_size": 6, "max_positions": 16, "timeout_s": 10.0}
            scorer = OpenAIScorer(url + path, token="secret", **settings)
            try:
                return await action(scorer)
            finally:
                await scorer.close()

    return asyncio.run(run())


def score(server: Server, start: int = 1, *, name: str | None = None, **kwargs: Any) -> Scores:
    """One sequence."""
    asked = {"top_k": 2, "temperature": 1.0, **kwargs}
    (given,) = ask(server, lambda scorer: scorer.score(ToScore([torch.tensor(TOKENS)], [start], **asked)), name=name)
    return given


def test_response_rows_most_probable_first(server: Server) -> None:
    given = score(server, start=2)
    assert given.ids.tolist() == [[0, 5], [2, 1]] and given.ids.dtype == torch.int32
    assert given.logprobs.tolist() == [[-0.25, -2.0], [-0.75, -0.875]] and given.logprobs.dtype == torch.float32
    assert given.token_logprobs.tolist() == [-3.0, -0.875]
    assert server.requests[0]["prompt"] == TOKENS and server.requests[0]["prompt_logprobs"] == 2
    assert server.requests[0]["model"] == "teacher"
    assert all("authorization: bearer secret" in head.lower() for head in server.heads)
    assert score(server, start=4).ids.shape == (0, 2) and len(server.requests) == 1


def test_slow_path_is_said_once(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    async def twice(scorer: OpenAIScorer) -> tuple[int, int]:
        for _ in range(2):
            await scorer.score(ToScore([torch.tensor(TOKENS)], [1], top_k=2, temperature=1.0))
        return scorer.bytes_sent, scorer.bytes_received

    assert all(count > 0 for count in ask(server, twice, path="/v1"))
    assert ["mopd serve" in record.message for record in caplog.records] == [True]


def renamed(row: dict[str, Any], key: str, other: str) -> None:
    row[other] = row.pop(key)


Change = Callable[[dict[str, Any]], Any]
CORRUPT: dict[str, Change] = {
    "a row less": lambda choice: choice["prompt_logprobs"].pop(),
    "another prompt": lambda choice: choice.update(prompt_token_ids=[3, 1, 4, 2]),
    "no own token": lambda choice: choice["prompt_logprobs"][2].pop("4"),
    "an entry less": lambda choice: choice["prompt_logprobs"][3].pop("2"),
    "an id beyond 31 bits": lambda choice: renamed(choice["prompt_logprobs"][2], "5", str(2**31)),
    "not a number": lambda choice: choice["prompt_logprobs"][2]["4"].update(logprob="x"),
    "NaN": lambda choice: choice["prompt_logprobs"][2]["4"].update(logprob=float("nan")),
    "a log-prob of text": lambda choice: choice["prompt_logprobs"][2]["4"].update(logprob="-3.0"),
    "a truth": lambda choice: choice["prompt_logprobs"][2]["4"].update(logprob=False),
    "an id in two ways": lambda choice: choice["prompt_logprobs"][2].update({"04": {"logprob": -3.0}}),
    "an id in another way": lambda choice: renamed(choice["prompt_logprobs"][2], "5", "+5"),
    "an id with a space": lambda choice: renamed(choice["prompt_logprobs"][2], "5", " 5"),
    "an id in other digits": lambda choice: renamed(choice["prompt_logprobs"][2], "5", "\u0665"),
    "an id below 0": lambda choice: renamed(choice["prompt_logprobs"][2], "5", "-1"),
    "an id of 5,000 digits": lambda choice: choice["prompt_logprobs"][2].update({"9" * 5000: {"logprob": -9.0}}),
    "a prompt of floats": lambda choice: choice.update(prompt_token_ids=[3.0, 1.0, 4.0, 1.0]),
    "a prompt of truths": lambda choice: choice.update(prompt_token_ids=[3, True, 4, True]),
    "a null row": lambda choice: choice["prompt_logprobs"].__setitem__(2, None),
    "no log-probs": lambda choice: choice.pop("prompt_logprobs"),
}


@pytest.mark.parametrize("change", CORRUPT)
def test_corrupt_answers_are_no_answers(server: Server, change: str) -> None:
    answer = answer_of(ROWS)
    CORRUPT[change](answer["choices"][0])
    server.body = json.dumps(answer).encode()
    with pytest.raises(EngineUnavailable, match="corrupt answer"):
        score(server)


def test_what_stands_in_texts_does_not_count(server: Server) -> None:
    """The server turns each id into its text: of a response of brackets alone it is brackets."""
    answer = answer_of(ROWS)
    for entry in answer["choices"][0]["prompt_logprobs"][1:]:
        for value in entry.values():
            value["decoded_token"] = "[{," * 2000
    server.body = json.dumps(answer).encode()
    assert score(server).token_logprobs.tolist() == [-0.5, -3.0, -0.875]


@pytest.mark.parametrize(
    "logprobs",
    [
        {"tokens": ["token_id:1"], "token_logprobs": ["-0.5"]},
        {"tokens": ["token_id:1"], "token_logprobs": [True]},
        {"tokens": ["token_id:1"], "token_logprobs": [None]},
        {"tokens": ["token_id: 1"], "token_logprobs": [-0.5]},
        {"tokens": ["token_id:01"], "token_logprobs": [-0.5]},
        {"tokens": ["token_id:-1"], "token_logprobs": [-0.5]},
        {"tokens": [1], "token_logprobs": [-0.5]},
    ],
)
def test_responses_of_odd_numbers_are_none(server: Server, logprobs: dict[str, Any]) -> None:
    def draw(given: dict[str, Any]) -> Any:
        server.body = json.dumps({"choices": [{"logprobs": given, "finish_reason": "stop"}]}).encode()
        sampling = SamplingParams(max_new_tokens=2, temperature=0.0)
        return ask(server, lambda scorer: scorer.generate(ToDraw([[1]], sampling, [0])))

    assert draw({"tokens": ["token_id:1"], "token_logprobs": [-1]})[0].logprobs.tolist() == [-1.0]
    with pytest.raises(EngineUnavailable, match="corrupt answer"):
        draw(logprobs)


def test_the_server_is_told_what_ends_a_response(server: Server) -> None:
    logprobs = {"tokens": ["token_id:1"], "token_logprobs": [-1]}
    server.body = json.dumps({"choices": [{"logprobs": logprobs, "finish_reason": "stop"}]}).encode()
    stops = {"stop": ("a", "\n"), "stop_token_ids": (3,), "ignore_eos": True}
    for given in ({}, stops):
        sampling = SamplingParams(max_new_tokens=2, temperature=0.0, **given)
        ask(server, lambda scorer, sampling=sampling: scorer.generate(ToDraw([[1]], sampling, [0])))
    plain, told = server.requests
    assert not {*stops, "include_stop_str_in_output"} & plain.keys()
    assert told["stop"] == ["a", "\n"] and told["include_stop_str_in_output"] is True  # of the text; tokens stay
    assert told["stop_token_ids"] == [3] and told["ignore_eos"] is True


def test_what_the_user_must_cure(server: Server) -> None:
    def refuse(match: str, **kwargs: Any) -> None:
        with pytest.raises(UserError, match=match) as caught:
            score(server, **kwargs)
        assert "\n" not in str(caught.value)

    refuse("at temperature 1 only", temperature=0.5)
    refuse("served_model_name 'other' is not served there: 'teacher'", name="other")
    server.models = [7]
    with pytest.raises(EngineUnavailable, match="corrupt answer: /v1/models is not a list"):
        score(server)
    server.models = ["a", "b"]
    refuse("serves 'a', 'b': name one as placement.served_model_name")
    assert score(server, name="b").ids.shape == (3, 2)
    with pytest.raises(ValueError, match="top_k is 7"):
        score(server, top_k=7)

"""OpenAIScorer against answers that are wrong in one place each. The real one: tests/integration/test_stock_vllm.py."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from mopd.base.types import UserError
from mopd.engines.clients.openai import OpenAIScorer
from mopd.engines.interface import EngineUnavailable, SamplingParams, Scores

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
    """An HTTP server whose answer to a scoring request is ``reply``: status, headers and body."""

    def __init__(self) -> None:
        self.reply: tuple[int, dict[str, str], bytes] = (200, {}, json.dumps(answer_of(ROWS)).encode())
        self.models = ["teacher"]
        self.requests: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                body = {"data": [{"id": name} for name in outer.models]} if self.path == "/v1/models" else {}
                self._send(200, {}, json.dumps(body).encode())

            def do_POST(self) -> None:
                outer.authorizations.append(self.headers.get("authorization"))
                outer.requests.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                self._send(*outer.reply)

            def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
                self.send_response(status)
                for name, value in {**headers, "content-length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True)
        self.thread.start()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


def score(server: Server, start: int = 1, *, name: str | None = None, timeout_s: float = 10.0, **kwargs: Any) -> Scores:
    """One sequence through a scorer of its own."""

    async def run() -> Scores:
        scorer = OpenAIScorer(
            server.url, served_model_name=name, vocab_size=6, max_positions=16, token="secret", timeout_s=timeout_s
        )
        try:
            asked = {"top_k": 2, "temperature": 1.0, **kwargs}
            return (await scorer.score([torch.tensor(TOKENS)], [start], **asked))[0]
        finally:
            await scorer.close()

    return asyncio.run(run())


def test_response_rows_most_probable_first(server: Server) -> None:
    given = score(server, start=2)
    assert given.ids.tolist() == [[0, 5], [2, 1]] and given.ids.dtype == torch.int32
    assert given.logprobs.tolist() == [[-0.25, -2.0], [-0.75, -0.875]] and given.logprobs.dtype == torch.float32
    assert given.token_logprobs.tolist() == [-3.0, -0.875]
    assert server.requests[0]["prompt"] == TOKENS and server.requests[0]["prompt_logprobs"] == 2
    assert server.requests[0]["model"] == "teacher" and server.authorizations == ["Bearer secret"]
    assert score(server, start=4).ids.shape == (0, 2) and len(server.requests) == 1


def test_slow_path_is_said_once(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> tuple[int, int]:
        scorer = OpenAIScorer(server.url + "/v1", served_model_name=None, vocab_size=6, max_positions=16, timeout_s=10)
        for _ in range(2):
            await scorer.score([torch.tensor(TOKENS)], [1], top_k=2, temperature=1.0)
        await scorer.close()
        return scorer.bytes_sent, scorer.bytes_received

    assert all(count > 0 for count in asyncio.run(run()))
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
    server.reply = (200, {}, json.dumps(answer).encode())
    with pytest.raises(EngineUnavailable, match="corrupt answer"):
        score(server)


def test_what_stands_in_texts_does_not_count(server: Server) -> None:
    """The server turns each id into its text: of a response of brackets alone it is brackets."""
    answer = answer_of(ROWS)
    for entry in answer["choices"][0]["prompt_logprobs"][1:]:
        for value in entry.values():
            value["decoded_token"] = "[{," * 2000
    server.reply = (200, {}, json.dumps(answer).encode())
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
    async def draw() -> Any:
        scorer = OpenAIScorer(server.url, served_model_name=None, vocab_size=6, max_positions=16, timeout_s=10)
        try:
            return await scorer.generate([[1]], SamplingParams(max_new_tokens=2, temperature=0.0), [0])
        finally:
            await scorer.close()

    def reply(given: dict[str, Any]) -> None:
        server.reply = (200, {}, json.dumps({"choices": [{"logprobs": given, "finish_reason": "stop"}]}).encode())

    reply({"tokens": ["token_id:1"], "token_logprobs": [-1]})
    assert asyncio.run(draw())[0].logprobs.tolist() == [-1.0]
    reply(logprobs)
    with pytest.raises(EngineUnavailable, match="corrupt answer"):
        asyncio.run(draw())


def test_what_the_user_must_cure(server: Server) -> None:
    def refuse(match: str, **kwargs: Any) -> None:
        with pytest.raises(UserError, match=match) as caught:
            score(server, **kwargs)
        assert "\n" not in str(caught.value)

    refuse("at temperature 1 only", temperature=0.5)
    refuse("served_model_name 'other' is not served there: 'teacher'", name="other")
    server.models = [7]  # type: ignore[list-item]
    with pytest.raises(EngineUnavailable, match="corrupt answer: /v1/models is not a list"):
        score(server)
    server.models = ["a", "b"]
    refuse("serves 'a', 'b': name one as placement.served_model_name")
    assert score(server, name="b").ids.shape == (3, 2)
    with pytest.raises(ValueError, match="top_k is 7"):
        score(server, top_k=7)

"""The client's side: an answer that is not exactly right is no answer."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from mopd.base.metrics import apart
from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.interface import (
    EngineBusy,
    EngineInfo,
    EngineRejected,
    EngineUnavailable,
    EngineUnreachable,
    SamplingParams,
    StaleWeights,
    ToDraw,
    ToScore,
)
from mopd.engines.wire.messages import (
    VERSION,
    GenerateAnswer,
    GenerateFailure,
    GenerateRequest,
    Message,
    ScoreAnswer,
    ScoreRequest,
    decode,
    encode,
    frame,
)
from tests.unit.engines.raw_server import Answer, response, serving

TOKENS = [torch.tensor([1, 5, 9, 7, 7]), torch.tensor([1, 4, 4, 6])]
SAMPLING = SamplingParams(max_new_tokens=3)


def right_answer(path: str, body: bytes) -> ScoreAnswer:
    """What a correct server would say."""
    random = np.random.default_rng(0)
    if path == "/v1/score":
        asked = decode(body, ScoreRequest)
        rows = asked.num_rows
        return ScoreAnswer(
            request_checksum=asked.checksum,
            weight_version=asked.weight_version,
            top_k=asked.top_k,
            num_given=asked.num_given,
            hidden_size=asked.hidden_size,
            lengths=asked.lengths - asked.prompt_lengths,
            ids=np.concatenate([10 + random.permutation(9)[: asked.top_k] for _ in range(rows)]).astype(np.int32),
            logprobs=-2 - random.random(rows * asked.top_k, dtype=np.float32),
            token_logprobs=-2 - random.random(rows, dtype=np.float32),
            given_logprobs=-2 - random.random(rows * asked.num_given, dtype=np.float32),
            hidden=np.zeros(rows * asked.hidden_size, dtype=np.uint16),
        )
    raise AssertionError(path)


def right_responses(body: bytes) -> list[GenerateAnswer]:
    """What a correct server would say: the last response ends first."""
    wanted = decode(body, GenerateRequest)
    return [
        GenerateAnswer(
            request_checksum=wanted.checksum,
            index=index,
            finish_reason="length",
            tokens=ints(1, 1),
            logprobs=np.zeros(2, dtype=np.float32),
            token_versions=ints(wanted.weight_version, wanted.weight_version),
            top_ids=ints(),
            routes=np.zeros(0, np.uint8),
        )
        for index in reversed(range(len(wanted.lengths)))
    ]


def right_body(path: str, body: bytes) -> bytes:
    """As it travels."""
    if path == "/v1/generate":
        return stream(right_responses(body))
    return encode(right_answer(path, body))


def stream(messages: Sequence[Message]) -> bytes:
    return b"".join(frame(encode(message)) for message in messages)


def ask(answer: Answer, action: Callable[[RemoteEngine], Awaitable[Any]], timeout_s: float = 5.0) -> Any:
    """``action`` on a client whose server gives ``answer(path, body)``."""

    async def work() -> Any:
        async with serving(answer) as url:
            engine = RemoteEngine(url, timeout_s=timeout_s, name="math/0")
            try:
                return await action(engine)
            finally:
                await engine.close()

    return asyncio.run(work())


async def score(engine: RemoteEngine) -> Any:
    return await engine.score(ToScore(TOKENS, [3, 2], top_k=4, temperature=1.0))


async def generate(engine: RemoteEngine) -> Any:
    return await engine.generate(ToDraw([[1, 2], [3]], SAMPLING, [0, 1]))


def test_right_answers_pass() -> None:
    scores = ask(lambda path, body: response(right_body(path, body)), score)
    assert [tuple(s.ids.shape) for s in scores] == [(2, 4), (2, 4)]
    drawn = ask(lambda path, body: response(right_body(path, body)), generate)
    assert [generation.tokens.tolist() for generation in drawn] == [[1, 1], [1, 1]]
    assert [generation.token_versions.tolist() for generation in drawn] == [[-1, -1], [-1, -1]]


def changed(**fields: Any) -> Answer:
    return lambda path, body: response(encode(dataclasses.replace(right_answer(path, body), **fields)))


def first_changed(**fields: Any) -> Answer:
    """A stream whose first response is not right."""

    def answer(path: str, body: bytes) -> bytes:
        first, *rest = right_responses(body)
        return response(stream([dataclasses.replace(first, **fields), *rest]))

    return answer


def rearranged(change: Callable[[list[Any]], list[Any]]) -> Answer:
    """A stream of other messages than the right ones."""
    return lambda path, body: response(stream(change(right_responses(body))))


def failing(status: int) -> Answer:
    """After the first response the server gives up."""

    def answer(path: str, body: bytes) -> bytes:
        first, *_ = right_responses(body)
        failure = GenerateFailure(request_checksum=first.request_checksum, status=status, message="so it is")
        return response(stream([first, failure]))

    return answer


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize(
    ("call", "answer", "problem"),
    [
        (score, changed(request_checksum=b"x" * 16), "belongs to other tokens"),
        (score, changed(lengths=ints(1, 3)), "of another request"),
        (score, changed(lengths=ints(4)), "of another request"),
        (score, changed(lengths=ints(2, 1)), "add up to 3 but 4"),
        (score, changed(top_k=2), "4 rows x top_k 2 but 16 ids"),
        (score, changed(logprobs=np.zeros(15, dtype=np.float32)), "15 logprobs"),
        (generate, first_changed(request_checksum=b"x" * 16), "belongs to other tokens"),
        (generate, first_changed(index=2), "response 2 of 2 comes twice or was not asked for"),
        (generate, first_changed(index=0), "response 0 of 2 comes twice"),
        (generate, first_changed(index=-1), "response -1 of 2"),
        (generate, rearranged(lambda answers: answers[:1]), "ends after 1 of 2 responses"),
        (generate, rearranged(lambda answers: [*answers, answers[0]]), "comes twice"),
        (generate, lambda path, body: response(b""), "ends after 0 of 2"),
        (generate, lambda path, body: response(right_body(path, body)[:-5]), "ends after 1 of 2"),
        (generate, lambda path, body: response(b"<html>"), "a message of 1836345404 bytes"),
        (generate, lambda path, body: response(bytes(100_000)), "longer than|not msgpack"),
        (score, lambda path, body: response(b""), "not msgpack"),
        (score, lambda path, body: response(b"<html>"), "not msgpack"),
        (score, lambda path, body: response(right_body(path, body)[:-5]), "not msgpack"),
        (score, lambda path, body: response(b"x" * 10_000), "longer than"),
    ],
)
def test_a_corrupt_or_foreign_answer_is_none(call: Any, answer: Answer, problem: str) -> None:
    with pytest.raises(EngineUnavailable, match=rf"math/0: corrupt answer: .*({problem})"):
        ask(answer, call)


@pytest.mark.parametrize("call", [score, generate])
def test_one_flipped_bit_anywhere_is_noticed(call: Any) -> None:
    """A bit in the arrays, the scalars or the frames: never wrong scores or responses."""
    for place in range(0, 350, 7):

        def flip(path: str, body: bytes, place: int = place) -> bytes:
            answer = bytearray(right_body(path, body))
            answer[place % len(answer)] ^= 0x10
            return response(bytes(answer))

        with pytest.raises(EngineUnavailable, match="corrupt answer"):
            ask(flip, call)


def test_an_answer_of_other_weights_is_stale() -> None:
    for call, answer in ((score, changed(weight_version=6)), (generate, first_changed(token_versions=ints(-1, 6)))):
        with pytest.raises(StaleWeights, match="math/0: answered with weights 6, not -1"):
            ask(answer, call)


def test_newer_weights_may_answer_once_their_push_was_committed() -> None:
    """Not older ones than those that were asked for."""

    async def work(engine: RemoteEngine) -> Any:
        engine.weight_version = 5
        engine.allow(6)
        return await generate(engine)

    drawn = ask(first_changed(token_versions=ints(5, 6)), work)
    assert [generation.token_versions.tolist() for generation in drawn] == [[5, 5], [5, 6]]
    for versions, wrong in ((ints(4, 6), 4), (ints(6, 7), 7)):
        with pytest.raises(StaleWeights, match=f"answered with weights {wrong}, not 5"):
            ask(first_changed(token_versions=versions), work)


@pytest.mark.parametrize(("status", "error"), [(503, EngineUnreachable), (400, EngineRejected)])
def test_a_failure_in_mid_stream_leaves_what_was_told(status: int, error: type[Exception]) -> None:
    told: list[int] = []

    async def work(engine: RemoteEngine) -> Any:
        return await engine.generate(ToDraw([[1, 2], [3]], SAMPLING, [0, 1]), on_response=lambda i, _: told.append(i))

    with pytest.raises(error, match=rf"math/0: /v1/generate: HTTP {status}: so it is"):
        ask(failing(status), work)
    assert told == [1]


def test_a_response_is_told_when_it_comes() -> None:
    """While the server is silent about the other one; a deadline ends the wait."""
    told: list[int] = []

    def half(path: str, body: bytes) -> bytes:
        first = stream(right_responses(body)[:1])
        return b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n" + first

    async def work(engine: RemoteEngine) -> Any:
        return await engine.generate(ToDraw([[1, 2], [3]], SAMPLING, [0, 1]), on_response=lambda i, _: told.append(i))

    with pytest.raises(EngineUnavailable, match="no answer to /v1/generate"):
        ask(half, work, timeout_s=2.0)
    assert told == [1]


@pytest.mark.parametrize(
    ("status", "error"),
    [
        ("400 Bad Request", EngineRejected),
        ("401 Unauthorized", EngineRejected),
        ("404 Not Found", EngineRejected),
        ("408 Request Timeout", EngineUnavailable),
        ("409 Conflict", StaleWeights),
        ("413 Content Too Large", EngineRejected),
        ("429 Too Many Requests", EngineBusy),
        ("302 Found", EngineUnavailable),
        ("500 Internal Server Error", EngineUnavailable),
        ("502 Bad Gateway", EngineUnreachable),
        ("503 Service Unavailable", EngineUnreachable),
        ("504 Gateway Timeout", EngineUnreachable),
    ],
)
@pytest.mark.parametrize("body", [b'{"error": {"message": "so it is", "retry_after_s": 2.5}}', b"so it is", b"[1]"])
def test_every_status_has_its_error(status: str, error: type[Exception], body: bytes) -> None:
    with pytest.raises(error, match=rf"math/0: /v1/score: HTTP {status[:3]}: ") as raised:
        ask(lambda *_: response(body, status), score)
    assert type(raised.value) is error
    if isinstance(raised.value, EngineBusy):
        assert raised.value.retry_after_s == (2.5 if body[:1] == b"{" else 1.0)
    assert "so it is" in str(raised.value) or body == b"[1]"


def test_payload_bytes_are_counted() -> None:
    sizes: list[tuple[int, int]] = []

    def answer(path: str, body: bytes) -> bytes:
        encoded = right_body(path, body)
        sizes.append((len(body), len(encoded)))
        return response(encoded)

    async def work(engine: RemoteEngine) -> None:
        await score(engine)
        await generate(engine)
        counted = tuple(map(sum, zip(*sizes, strict=True)))
        assert (engine.bytes_sent, engine.bytes_received) == counted
        with apart():
            await score(engine)
        assert (engine.bytes_sent, engine.bytes_received) == counted

    ask(answer, work)


GOOD_INFO = dataclasses.asdict(
    EngineInfo(model="m", kind="torch", vocab_size=48, max_positions=64, dtype="float32", weight_version=-1)
)
BAD_INFO: dict[str, Any] = {
    "no object": [],
    "no engine": {"wire_version": VERSION},
    "vocabulary as text": {"vocab_size": "48"},
    "no vocabulary": {"vocab_size": 0},
    "2^60 positions": {"max_positions": 2**60},
    "version -2": {"weight_version": -2},
    "a kind of its own": {"kind": "gpt"},
    "hashes of its own": {"manifest": {"sha": "x"}},
    "a long name": {"model": "x" * 10**5},
    "no sequence at a time": {"limits": {**GOOD_INFO["limits"], "max_sequences": 0}},
    "no limits": {"limits": None},
    "more keys": {"more": 1},
}


def told(shown: Any) -> Any:
    return ask(lambda path, body: response(json.dumps(shown).encode()), RemoteEngine.info)


@pytest.mark.parametrize("name", BAD_INFO)
def test_a_description_is_of_its_types_or_not_believed(name: str) -> None:
    assert told({"wire_version": VERSION, "engine": GOOD_INFO}).vocab_size == 48
    change = BAD_INFO[name]
    is_whole = name in ("no object", "no engine")
    with pytest.raises(EngineUnavailable, match=r"math/0: corrupt answer: /info is not an engine server's"):
        told(change if is_whole else {"wire_version": VERSION, "engine": {**GOOD_INFO, **change}})
    with pytest.raises(EngineRejected, match=f"speaks wire version 1, not {VERSION}"):
        told({"wire_version": 1, "engine": {"of": "another mopd"}})

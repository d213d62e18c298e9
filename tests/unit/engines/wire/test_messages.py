"""Messages survive the trip, and nothing else passes for one."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd.base.types import PromptImage
from mopd.engines.wire.image_table import from_table, to_table
from mopd.engines.wire.images import ImageFiles, ImagesKept
from mopd.engines.wire.messages import (
    VERSION,
    FrameReader,
    GenerateAnswer,
    GenerateFailure,
    GenerateRequest,
    Message,
    ScoreAnswer,
    ScoreRequest,
    WireError,
    decode,
    encode,
    frame,
)
from mopd.engines.wire.weights import WeightFinish, WeightJoin, WeightPart, WeightReceived, WeightStart, stage_updates
from tests.fixtures import updates


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def score_request(**changes: Any) -> ScoreRequest:
    """Two sequences of 5 and 4 tokens."""
    fields: dict[str, Any] = {
        "tokens": ints(1, 5, 9, 7, 7, 1, 4, 4, 6),
        "lengths": ints(5, 4),
        "prompt_lengths": ints(3, 2),
        "images": ints(),
        "given_ids": ints(),
        "num_given": 0,
        "hidden_size": 0,
        "top_k": 8,
        "temperature": 1.0,
        "weight_version": -1,
    }
    return ScoreRequest(**{**fields, **changes})


def score_answer(rows: int = 4, top_k: int = 8, **changes: Any) -> ScoreAnswer:
    """``rows`` rows of one sequence."""
    random = np.random.default_rng(0)
    fields: dict[str, Any] = {
        "request_checksum": b"x" * 16,
        "weight_version": 2,
        "top_k": top_k,
        "num_given": 0,
        "hidden_size": 0,
        "lengths": ints(rows),
        "ids": random.integers(0, 1000, rows * top_k, dtype=np.int32),
        "logprobs": -random.random(rows * top_k, dtype=np.float32),
        "token_logprobs": -random.random(rows, dtype=np.float32),
        "given_logprobs": np.zeros(0, np.float32),
        "hidden": np.zeros(0, np.uint16),
    }
    return ScoreAnswer(**{**fields, **changes})


def generate_request(**changes: Any) -> GenerateRequest:
    fields: dict[str, Any] = {
        "tokens": ints(1, 2, 3),
        "lengths": ints(2, 1),
        "seeds": np.array([0, 2**62], dtype=np.int64),
        "images": ints(),
        "max_new_tokens": 4,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.1,
        "stop": '["a\\n", "</s>"]',
        "stop_token_ids": ints(7),
        "ignore_eos": True,
        "num_begun": 0,
        "num_top_ids": 0,
        "weight_version": 7,
    }
    return GenerateRequest(**{**fields, **changes})


def generate_answer(**changes: Any) -> GenerateAnswer:
    """The second of some responses, whose last token other weights drew."""
    fields: dict[str, Any] = {
        "request_checksum": b"y" * 16,
        "index": 1,
        "finish_reason": "stop",
        "tokens": ints(2, 3, 4),
        "logprobs": np.array([-0.5, -1.5, -2.5], dtype=np.float32),
        "token_versions": ints(7, 7, 8),
        "top_ids": ints(),
        "routes": np.zeros(0, np.uint8),
    }
    return GenerateAnswer(**{**fields, **changes})


NOTHING = {"tokens": ints(), "logprobs": np.zeros(0, dtype=np.float32), "token_versions": ints()}


def named(fill: int, *grid: int) -> PromptImage:
    return PromptImage(digest=bytes([fill]) * 16, grid=grid, load=bytes)  # type: ignore[arg-type]


FAILURE = GenerateFailure(request_checksum=b"y" * 16, status=503, message="the engine is dead")
IMAGES = [[named(200, 1, 4, 6), named(0, 1, 2, 2)], [named(200, 1, 4, 6)]]
JOIN = WeightJoin(
    group_id="g",
    host="127.0.0.1",
    port=80,
    first_rank=1,
    num_senders=1,
    num_receivers=2,
    large_bytes=99,
    bucket_bytes=2**20,
    timeout_s=2.5,
    secret="s" * 16,
    tensors=np.frombuffer(b'[["a","float32",[2],0]]', dtype=np.uint8),
    memory="[{}]",
)
MESSAGES = [
    score_request(),
    score_request(images=to_table(IMAGES)),
    score_answer(),
    score_answer(rows=0),
    generate_request(),
    ImageFiles.of([b"one", b"and two"]),
    ImagesKept(num_files=2),
    generate_answer(),
    generate_answer(finish_reason="handed_back", **NOTHING),
    FAILURE,
    JOIN,
    updates.join(dataclasses.replace(stage_updates([], 3), group_id="g")),
    WeightPart(group_id="g", index=0, digest=-(2**63), data=np.arange(8, dtype=np.uint8)),
    WeightStart(group_id="g", weight_version=3, verify=True, on_running="finish", patience_s=2.5),
    WeightFinish(group_id="g", weight_version=3),
    WeightReceived(weight_version=3, wait_s=0.5, load_s=1.25),
]


def assert_equal(one: Message, other: Message) -> None:
    for field in dataclasses.fields(one):
        left, right = getattr(one, field.name), getattr(other, field.name)
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype and np.array_equal(left, right), field.name
        else:
            assert left == right and type(left) is type(right), field.name


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message: Message) -> None:
    back = decode(encode(message), type(message))
    assert_equal(message, back)
    assert all(value.flags.writeable for value in vars(back).values() if isinstance(value, np.ndarray))


@pytest.mark.parametrize("top_k", [1, 8, 64])
@pytest.mark.parametrize("rows", [16, 500])
def test_bytes_per_scored_token(top_k: int, rows: int) -> None:
    assert len(encode(score_answer(rows, top_k))) / rows <= 8 * top_k + 32


def test_bytes_per_hidden_state() -> None:
    states = np.arange(500 * 1024, dtype=np.int64).astype(np.uint16)
    answer = score_answer(500, 0, hidden_size=1024, hidden=states)
    assert len(encode(answer)) / 500 <= 1.02 * (2 * 1024 + 4)
    assert np.array_equal(decode(encode(answer), ScoreAnswer).hidden, states)
    with pytest.raises(WireError, match="500 rows of hidden size 1000 but 512000 numbers"):
        decode(encode(score_answer(500, 0, hidden_size=1000, hidden=states)), ScoreAnswer)


def test_the_checksum_of_a_request_is_of_its_tokens_and_their_split() -> None:
    checksum = score_request().checksum
    assert checksum == score_request(top_k=3).checksum
    assert checksum != score_request(tokens=ints(1, 5, 9, 7, 7, 1, 4, 4, 7)).checksum
    assert checksum != score_request(lengths=ints(4, 5)).checksum
    assert checksum != score_request(prompt_lengths=ints(3, 3)).checksum
    seen = score_request(images=to_table(IMAGES)).checksum
    assert checksum != seen != score_request(images=to_table([IMAGES[0], [named(1, 1, 4, 6)]])).checksum


def test_images_by_name() -> None:
    assert from_table(to_table(IMAGES), 2) == [[(image.digest, image.grid) for image in own] for own in IMAGES]
    assert to_table(None).shape == to_table([[], []]).shape == (0,)
    assert from_table(to_table(None), 2) == [[], []]
    assert ImageFiles.of([b"one", b"and two"]).files == [b"one", b"and two"]
    extra = len(encode(score_request(images=to_table([IMAGES[0], []])))) - len(encode(score_request()))
    assert extra <= 2 * 32 + 4
    file = np.random.default_rng(0).bytes(10_000)
    assert len(encode(ImageFiles.of([file] * 3))) <= 3 * 1.05 * len(file)
    for lengths, problem in ((ints(), "0 files"), (ints(0, 3), "has not 1 to"), (ints(2), "add up to 2 but 3")):
        with pytest.raises(WireError, match=problem):
            decode(encode(ImageFiles(lengths=lengths, content=np.zeros(3, dtype=np.uint8))), ImageFiles)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"lengths": ints(5, 5)}, "add up to 10 but 9"),
        ({"lengths": ints(9, 0)}, "below 1"),
        ({"lengths": ints()}, "0 sequences"),
        ({"prompt_lengths": ints(3)}, "2 lengths but 1"),
        ({"prompt_lengths": ints(0, 2)}, "between 1 and"),
        ({"prompt_lengths": ints(6, 2)}, "between 1 and"),
        ({"tokens": ints(1, 5, 9, 7, 7, 1, 4, 4, -6)}, "negative"),
        ({"images": ints(0, 1, 2, 3, 4, 1, 2)}, "7 numbers of images"),
        ({"images": ints(2, 1, 2, 3, 4, 1, 2, 2)}, "other sequences than the 2"),
        ({"images": ints(-1, 1, 2, 3, 4, 1, 2, 2)}, "other sequences than the 2"),
        ({"images": ints(1, 1, 2, 3, 4, 1, 2, 2, 0, 1, 2, 3, 4, 1, 2, 2)}, "not in order"),
        ({"images": ints(0, 1, 2, 3, 4, 2, 2, 2)}, "grid is not one frame"),
        ({"images": ints(0, 1, 2, 3, 4, 1, 0, 2)}, "grid is not one frame"),
        ({"images": ints(0, 1, 2, 3, 4, 1, 2, 2**15 + 1)}, "grid is not one frame"),
        ({"top_k": -1}, "top_k is -1"),
        ({"hidden_size": -1}, "hidden_size is -1"),
        ({"num_given": 1}, "0 given ids for 4 rows of 1"),
        ({"num_given": 1, "given_ids": ints(3, -1, 3, 3)}, "given id is negative"),
        ({"temperature": 0.0}, "temperature is 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": 1e-39}, "temperature is 1e-39"),  # its inverse is infinite in fp32
    ],
)
def test_a_request_whose_parts_do_not_fit(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(WireError, match=problem):
        decode(encode(score_request(**changes)), ScoreRequest)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"seeds": np.array([1], dtype=np.int64)}, "2 prompts need as many seeds"),
        ({"seeds": np.array([1, -1], dtype=np.int64)}, "none negative"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"temperature": 1e-39}, "temperature is 1e-39"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"top_k": 0}, "top_k is 0"),
        ({"num_top_ids": -1}, "num_top_ids is -1"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"presence_penalty": 3.0}, "presence_penalty is 3.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"num_begun": 1}, "num_begun is 1: .* below the shortest prompt"),
        ({"stop_token_ids": ints(-1)}, "1 stop_token_ids: .* none negative"),
        ({"stop": "a"}, "stop is no JSON"),
        ({"stop": "[1]"}, "stop is no JSON list of texts"),
        ({"stop": '[""]'}, "stop has an empty text"),
        ({"stop": '["' + "x" * 257 + '"]'}, "stop has a text of 257 characters"),
    ],
)
def test_a_generate_request_that_nothing_can_answer(changes: dict[str, Any], problem: str) -> None:
    assert decode(encode(generate_request(temperature=0.0)), GenerateRequest).temperature == 0
    with pytest.raises(WireError, match=problem):
        decode(encode(generate_request(**changes)), GenerateRequest)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -float("inf"), -0.5, True, "1"])
def test_times_are_finite_and_not_negative(seconds: Any) -> None:
    for changes in ({"wait_s": seconds}, {"load_s": seconds}):
        message = WeightReceived(**{"weight_version": 3, "wait_s": 0, "load_s": 1.25, **changes})
        with pytest.raises(WireError, match=r"not finite|not negative"):
            decode(encode(message), WeightReceived)


@pytest.mark.parametrize("odd", [2.0, 8.0, 1.0, True, "2", None, 1e30, float("nan"), [2], b"2"])
def test_a_number_that_equals_another_is_not_that_number(odd: Any) -> None:
    scores = dataclasses.replace(score_answer(), top_k=odd)
    for message in (scores, score_answer(weight_version=odd), generate_answer(index=odd)):
        with pytest.raises(WireError, match="wrong type"):
            decode(encode(message), type(message))


@pytest.mark.parametrize(("length", "is_whole"), [(20, True), (4000, False)])
def test_a_wrong_value_is_shown_as_far_as_a_line_holds_it(length: int, is_whole: bool) -> None:
    wrong = "z" * length
    with pytest.raises(WireError) as caught:
        decode(encode(generate_answer(index=wrong)), GenerateAnswer)
    assert (repr(wrong) in str(caught.value)) == is_whole
    assert "'zzzz" in str(caught.value) and len(str(caught.value)) < 200


def test_one_of_several_kinds() -> None:
    for message in (generate_answer(), FAILURE):
        back = decode(encode(message), GenerateAnswer, GenerateFailure)
        assert_equal(message, back)
    with pytest.raises(WireError, match="expected kind 'response'"):
        decode(encode(score_request()), GenerateAnswer, GenerateFailure)
    with pytest.raises(WireError, match="status is 200"):
        failure = GenerateFailure(request_checksum=b"", status=200, message="")
        decode(encode(failure), GenerateAnswer, GenerateFailure)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=5), st.integers(1, 60))
def test_frames_come_out_as_they_went_in(bodies: list[bytes], step: int) -> None:
    stream, reader = b"".join(map(frame, bodies)), FrameReader(max_bytes=40)
    found = [body for start in range(0, len(stream), step) for body in reader.feed(stream[start : start + step])]
    assert found == bodies


def test_a_frame_that_announces_too_much_waits_for_nothing() -> None:
    reader = FrameReader(max_bytes=40)
    assert reader.feed(frame(b"x" * 40)[:20]) == []
    assert reader.feed(frame(b"x" * 40)[20:]) == [b"x" * 40]
    with pytest.raises(WireError, match="a message of 41 bytes"):
        reader.feed(frame(b"x" * 41)[:4])


def reframed(**changes: Any) -> bytes:
    """A score request whose outer map is changed after encoding; ``None`` takes a key away."""
    outer = {**msgpack.unpackb(encode(score_request())), **changes}
    return msgpack.packb({key: value for key, value in outer.items() if value is not None})


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", "not msgpack"),
        (b"\xc1", "not msgpack"),
        (b"\x91" * 5000, "not msgpack"),
        (msgpack.packb([1]), "message is not a map"),
        (msgpack.packb({}), "misses or does not know"),
        (encode(score_request()) + b"\x00", "not msgpack"),
        (encode(score_request())[:-3], "not msgpack"),
        (encode(score_answer()), "expected kind 'score'"),
        (reframed(version=2), "version 2"),
        (reframed(version=float(VERSION)), f"version {VERSION}.0"),
        (reframed(version="5"), "version '5'"),
        (reframed(extra=1), "extra"),
        (reframed(head=None), "head"),
        (reframed(head="text"), "head is not a buffer"),
        (reframed(head=b"\x01"), "checksum"),
        (reframed(arrays={"tokens": b""}), "images, lengths, prompt_lengths"),
        (
            reframed(arrays={"tokens": 1, "lengths": b"", "prompt_lengths": b"", "images": b"", "given_ids": b""}),
            "'tokens' is not a buffer",
        ),
        (reframed(crc=1), "checksum"),
        (reframed(crc=True), "checksum"),
    ],
)
def test_what_is_no_score_request(body: bytes, problem: str) -> None:
    with pytest.raises(WireError, match=problem):
        decode(body, ScoreRequest)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_changed_bytes_are_noticed(data: st.DataObject) -> None:
    """Any changed byte of any message raises ``WireError``: what passes has the bytes that were sent."""
    message = data.draw(st.sampled_from(MESSAGES))
    body = bytearray(encode(message))
    place = data.draw(st.integers(0, len(body) - 1))
    body[place] ^= data.draw(st.integers(1, 255))
    try:
        back = decode(bytes(body), type(message))
    except WireError:
        return
    assert_equal(message, back)  # msgpack can spell one value in two ways

"""Bodies on the wire: requests and answers of the engine server, and the messages of a weight push."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import torch

from mopd.base.files.json_text import parse_json
from mopd.engines.interface import EngineInfo, EngineLimits
from mopd.engines.wire.images import ImageFiles
from mopd.engines.wire.messages import (
    VERSION,
    FrameReader,
    GenerateAnswer,
    GenerateFailure,
    GenerateRequest,
    ScoreAnswer,
    ScoreRequest,
    WireError,
    decode,
    encode,
    frame,
)
from mopd.engines.wire.weights import WeightFinish, WeightJoin, WeightPart, WeightReceived, WeightStart, stage_updates
from mopd.serving.app import check_generate, check_score
from mopd.serving.errors import Refusal
from mopd.weights.carrying import PART_BYTES, Staging, staged_order
from mopd.weights.memory import SharedMemory, open_memory
from mopd.weights.parts import TensorMeta, from_json, to_json
from mopd.weights.receiving import check_fit
from tests.fixtures import updates
from tests.fuzz.harness import fuzz

SLOTS = {"a.weight": torch.zeros(3, 4, dtype=torch.bfloat16), "b": torch.zeros(()), "c": torch.zeros(2, 2, 2)}
INFO = EngineInfo(
    model="m",
    kind="torch",
    vocab_size=48,
    max_positions=64,
    dtype="float32",
    weight_version=0,
    limits=EngineLimits(max_tokens_per_request=64),
)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


SCORE = ScoreRequest(
    tokens=ints(1, 5, 9, 7, 7, 1, 4),
    lengths=ints(5, 2),
    prompt_lengths=ints(3, 1),
    images=ints(0, 1, 2, 3, 4, 1, 2, 2, 1, 5, 6, 7, 8, 1, 4, 2),
    given_ids=ints(*range(6)),
    num_given=2,
    hidden_size=3,
    top_k=2,
    temperature=1.0,
    weight_version=0,
)
GENERATE = GenerateRequest(
    tokens=ints(1, 2, 3),
    lengths=ints(2, 1),
    seeds=np.array([0, 2**62], dtype=np.int64),
    images=ints(),
    max_new_tokens=4,
    temperature=0.5,
    top_p=0.9,
    top_k=-1,
    min_p=0.1,
    presence_penalty=0.5,
    repetition_penalty=1.1,
    stop='["a\\n", "</s>"]',
    stop_token_ids=ints(7),
    ignore_eos=False,
    num_begun=0,
    num_top_ids=2,
    weight_version=0,
)
SCORES = ScoreAnswer(
    request_checksum=b"x" * 16,
    weight_version=0,
    top_k=2,
    num_given=2,
    hidden_size=3,
    lengths=ints(2, 1),
    ids=ints(*range(6)),
    logprobs=np.linspace(-3, -1, 6, dtype=np.float32),
    token_logprobs=np.linspace(-3, -1, 3, dtype=np.float32),
    given_logprobs=np.linspace(-4, -1, 6, dtype=np.float32),
    hidden=np.arange(9, dtype=np.uint16),
)
RESPONSE = GenerateAnswer(
    request_checksum=b"y" * 16,
    index=1,
    finish_reason="handed_back",
    tokens=ints(2, 3, 4),
    logprobs=np.array([-0.5, -1.5, -2.5], dtype=np.float32),
    token_versions=ints(0, 0, 1),
    top_ids=ints(*range(6)),
    routes=np.arange(12, dtype=np.uint8),
)
FAILURE = GenerateFailure(request_checksum=b"y" * 16, status=503, message="the engine is dead")


def inner(message: Any) -> bytes:
    """The message's head and arrays without the frame: what is mutated here arrives with a right checksum."""
    outer = msgpack.unpackb(encode(message))
    return bytes(msgpack.packb([outer["kind"], outer["head"], *outer["arrays"].values()]))


def framed(content: bytes, names: list[str]) -> bytes:
    """Inverse of ``inner``; ``WireError`` where the mutation left nothing to frame."""
    try:
        kind, head, *arrays = msgpack.unpackb(content, strict_map_key=False)
        crc = zlib.crc32(head)
        for array in arrays:
            crc = zlib.crc32(array, crc)
        outer = {
            "kind": kind,
            "version": VERSION,
            "head": head,
            "arrays": dict(zip(names, arrays, strict=True)),
            "crc": crc,
        }
        return bytes(msgpack.packb(outer))
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"nothing to frame: {type(error).__name__}") from error


def both(name: str, message: Any, use: Callable[[Any], object]) -> None:
    """Mutations of the whole body, which the checksum finds, and of what it covers, which the checks behind it find."""
    cls = type(message)
    names = list(msgpack.unpackb(encode(message))["arrays"])
    fuzz(f"{name} body", [encode(message)], lambda body: use(decode(body, cls)), (WireError, Refusal))
    fuzz(f"{name} inside", [inner(message)], lambda c: use(decode(framed(c, names), cls)), (WireError, Refusal))


def test_requests() -> None:
    both("wire score", SCORE, lambda request: check_score(request, INFO))
    both("wire generate", GENERATE, lambda request: check_generate(request, INFO))


def test_image_files() -> None:
    both("wire images", ImageFiles.of([b"one", b"and two"]), lambda message: message.files)


def test_answers() -> None:
    both("wire scores", SCORES, lambda answer: None)
    both("wire response", RESPONSE, lambda answer: None)
    both("wire failure", FAILURE, lambda answer: None)


def test_streams_of_answers() -> None:
    """However the bytes are cut, a reader holds no more than one message."""
    stream = b"".join(frame(encode(message)) for message in (RESPONSE, RESPONSE, FAILURE))

    def read(content: bytes) -> None:
        reader = FrameReader(max_bytes=1000)
        for start in range(0, len(content), 100):
            for body in reader.feed(content[start : start + 100]):
                decode(body, GenerateAnswer, GenerateFailure)
            assert len(reader._rest) <= 1004

    fuzz("wire stream", [stream], read, WireError)


def check_tensors(content: bytes) -> None:
    """As a server that is asked into a group."""
    try:
        check_fit(from_json(parse_json(content, max_values=1000)), SLOTS, name="m")
    except ValueError as error:
        raise WireError(str(error)) from error


def test_weight_push() -> None:
    """Messages, and parts on their way into the staging of a model of three weights."""
    memory = SharedMemory(16, torch.device("cpu"))
    rows = to_json([TensorMeta(name, slot.dtype, tuple(slot.shape)) for name, slot in SLOTS.items()])
    join = WeightJoin(
        group_id="g",
        host="127.0.0.1",
        port=80,
        first_rank=1,
        num_senders=1,
        num_receivers=2,
        large_bytes=99,
        bucket_bytes=99,
        timeout_s=1.0,
        secret="s" * 16,
        tensors=np.frombuffer(rows, dtype=np.uint8),
        memory=memory.handles(1),
    )

    def open_and_check(join: WeightJoin) -> None:
        check_tensors(join.tensors.tobytes())
        if join.memory:
            with contextlib.suppress(ValueError):
                open_memory(join.memory, 0, torch.device("cpu"))

    both("wire weight_join", join, open_and_check)
    memory.close()
    start = WeightStart(group_id="g", weight_version=1, verify=True, on_running="finish", patience_s=1.0)
    finish = WeightFinish(group_id="g", weight_version=1)
    received = WeightReceived(weight_version=1, wait_s=0.5, load_s=0.5)
    for message in (start, finish, received):
        both(f"wire {message.kind}", message, lambda message: None)

    staged = stage_updates(SLOTS.items(), 1, bucket_bytes=50)
    both("wire staged weight_join", updates.join(replace(staged, bucket_bytes=PART_BYTES)), open_and_check)
    parts = [decode(body, WeightPart) for body in staged.bodies]

    def stage(part: WeightPart) -> None:
        staging = Staging(staged_order(bucket_bytes=50), from_json(parse_json(staged.tensors)))
        try:
            for one in (*parts[: min(part.index, 1)], part):
                staging.add(one.index, one.digest, torch.from_numpy(one.data))
        except ValueError as error:
            raise WireError(str(error)) from error
        finally:
            staging.close()

    for part in parts:
        both(f"wire part {part.index}", part, stage)

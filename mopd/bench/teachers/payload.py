"""Scores on the wire: bytes per scored token, and the time until they are tensors.

Shapes: R response tokens, K top-k.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mopd.engines.clients.remote import to_scores
from mopd.wire.codec import decode, encode
from mopd.wire.messages import ScoreAnswer

NUM_ROWS = 8192
NUM_SAMPLES = 32
REPEATS = 5
DECODE_GOAL = 10.0
"""Smallest allowed speed-up over nested lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decode:
    """Seconds until one answer is in tensors, medians."""

    rows: int
    top_k: int
    binary_s: float
    """From the bytes of the body: checksum, checks and copies included."""
    lists_s: float
    """``torch.tensor`` of nested lists that lie in memory already: the parsing before it is not counted."""
    json_s: float
    """The same with the parsing of JSON."""
    json_bytes: int
    binary_bytes: int
    goal: float = DECODE_GOAL

    @property
    def speedup(self) -> float:
        return self.lists_s / self.binary_s

    @property
    def is_met(self) -> bool:
        return self.speedup >= self.goal


def payload_goal(top_k: int) -> int:
    """Bytes per scored token that an answer at fp32 may take."""
    return 8 * top_k + 32


def measure_decode(top_k: int) -> Decode:
    """One answer of 8,192 rows, as it comes over the wire and as JSON."""
    message = make_answer(top_k)
    body = encode(message)
    nested = [part.reshape(NUM_ROWS, -1).tolist() for part in (message.ids, message.logprobs, message.token_logprobs)]
    text = json.dumps(nested)

    def from_lists(lists: list[Any]) -> Any:
        ids, *logprobs = lists
        return torch.tensor(ids, dtype=torch.int32), [torch.tensor(part, dtype=torch.float32) for part in logprobs]

    return Decode(
        rows=NUM_ROWS,
        top_k=top_k,
        binary_s=_median_s(lambda: to_scores(decode(body, ScoreAnswer))),
        lists_s=_median_s(lambda: from_lists(nested)),
        json_s=_median_s(lambda: from_lists(json.loads(text))),
        json_bytes=len(text),
        binary_bytes=len(body),
    )


def make_answer(top_k: int) -> ScoreAnswer:
    """Plausible scores of 32 responses."""
    generator = np.random.default_rng(0)
    logprobs = -generator.exponential(4.0, (NUM_ROWS, top_k)).astype(np.float32)
    return ScoreAnswer(
        request_checksum=bytes(16),
        weight_version=-1,
        top_k=top_k,
        lengths=np.full(NUM_SAMPLES, NUM_ROWS // NUM_SAMPLES, dtype=np.int32),
        ids=generator.integers(0, 150_000, NUM_ROWS * top_k, dtype=np.int32),
        logprobs=np.sort(logprobs)[:, ::-1].reshape(-1).copy(),
        token_logprobs=logprobs[:, 0].copy(),
    )


def _median_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)

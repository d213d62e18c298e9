"""An engine behind mopd's HTTP server, as its callers see it.

Nothing in an answer is believed: sizes, dtypes, weight version and a checksum of the token ids that were asked about
must fit, or the answer is as good as none.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

import httpx
import numpy as np
import torch
from torch import Tensor

from mopd.engines.interface import (
    EngineBusy,
    EngineError,
    EngineInfo,
    EngineLimits,
    EngineRejected,
    EngineUnavailable,
    Generation,
    SamplingParams,
    Scores,
    StaleWeights,
)
from mopd.wire.codec import VERSION, Message, MessageT, WireError, decode, encode
from mopd.wire.limits import CONTENT_TYPE, DEADLINE_HEADER
from mopd.wire.messages import GenerateAnswer, GenerateRequest, ScoreAnswer, ScoreRequest
from mopd.wire.push import Step, push_weights
from mopd.wire.weights import WeightVersion

MAX_CONNECTIONS = 64
"""Per engine; further calls wait for one within their deadline. httpx looks at every connection and every waiting call
for each request: it gets few of them and no queue."""
ANSWER_HEAD_BYTES = 4096
"""What an answer may have beside its arrays."""
MAX_SMALL_BYTES = 2**20
"""Bound of answers without arrays, errors included."""
LARGE_BYTES = 2**18
"""Messages above this are coded in a thread: other replicas' answers are heard meanwhile."""
DEFAULT_RETRY_AFTER_S = 1.0
"""Of a 429 that does not say it (a proxy's)."""

ResultT = TypeVar("ResultT")


class RemoteEngine:
    """Implements ``Scorer``, ``Generator`` and ``Described`` over HTTP: one connection pool per engine.

    Errors: ``EngineUnavailable`` (refused, reset, deadline, 5xx, corrupt or foreign answer), ``EngineBusy`` (429),
    ``StaleWeights`` (409), ``EngineRejected`` (other 4xx). It never retries: the router does. It belongs to the event
    loop of its first call.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout_s: float,
        name: str | None = None,
        logprob_dtype: Literal["float32", "float16"] = "float32",
    ) -> None:
        """``url`` is ``http://host:port``; ``timeout_s`` bounds each call; ``name`` stands in errors (default: the
        url)."""
        self.url = url
        self.name = url if name is None else name
        self.weight_version = -1
        """Version of the last push through this object; every request asks for this version, -1 is the checkpoint."""
        self.bytes_sent = 0
        self.bytes_received = 0
        """Payload bytes of all msgpack requests and answers so far."""
        self._timeout_s = timeout_s
        self._logprob_dtype = logprob_dtype
        self._free_connections = asyncio.Semaphore(MAX_CONNECTIONS)
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={} if token is None else {"authorization": f"Bearer {token}"},
            verify=url.startswith("https:"),  # reading the certificates takes longer than a request
            timeout=None,  # asyncio.wait_for bounds every call as a whole
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=MAX_CONNECTIONS),
            trust_env=False,  # no proxy between replicas because of a variable somewhere
        )

    async def score(
        self, tokens: Sequence[Tensor], prompt_lengths: Sequence[int], *, top_k: int, temperature: float
    ) -> list[Scores]:
        """See ``Scorer.score``."""
        if not tokens:
            return []
        request = ScoreRequest(
            tokens=torch.cat([sequence.to(torch.int32) for sequence in tokens]).cpu().numpy(),
            lengths=np.array([len(sequence) for sequence in tokens], dtype=np.int32),
            prompt_lengths=np.array(prompt_lengths, dtype=np.int32),
            top_k=top_k,
            temperature=temperature,
            logprob_dtype=self._logprob_dtype,
            weight_version=self.weight_version,
        )
        request.check()
        longest = request.num_rows * (8 * top_k + 4) + 4 * len(tokens) + ANSWER_HEAD_BYTES
        answer = await self._ask("/v1/score", request, ScoreAnswer, longest)
        self._require_echo(answer, request)
        if answer.top_k != top_k or not np.array_equal(answer.lengths, request.lengths - request.prompt_lengths):
            raise self._corrupt(f"top_k {answer.top_k} and rows of another request than the one that was sent")
        return to_scores(answer)

    async def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, seeds: Sequence[int]
    ) -> list[Generation]:
        """See ``Generator.generate``; ``StaleWeights`` if the server's weights are not ``self.weight_version``."""
        if not prompts:
            return []
        request = GenerateRequest(
            tokens=np.concatenate([np.asarray(prompt, dtype=np.int32) for prompt in prompts]),
            lengths=np.array([len(prompt) for prompt in prompts], dtype=np.int32),
            seeds=np.array(seeds, dtype=np.int64),
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            weight_version=self.weight_version,
            logprob_dtype=self._logprob_dtype,
        )
        request.check()
        longest = len(prompts) * (8 * sampling.max_new_tokens + 5) + ANSWER_HEAD_BYTES
        answer = await self._ask("/v1/generate", request, GenerateAnswer, longest)
        self._require_echo(answer, request)
        if len(answer.lengths) != len(prompts) or answer.lengths.max() > sampling.max_new_tokens:
            raise self._corrupt(
                f"{len(answer.lengths)} responses of up to {answer.lengths.max()} tokens for {len(prompts)} prompts "
                f"and max_new_tokens {sampling.max_new_tokens}"
            )
        return _to_generations(answer)

    async def load_weights(self, weights: Iterable[tuple[str, Tensor]], weight_version: int) -> None:
        """See ``Generator.load_weights``: push to this server alone (``HttpWeightSync`` pushes to many at once)."""
        (error,) = await push_weights([self], weights, weight_version)
        if error is not None:
            raise error

    async def push(self, step: Step, body: bytes) -> int:
        """One message of a weight push, as ``mopd.wire.push`` makes it; returns the version that the server has."""
        return (await self._post(f"/v1/weights/{step}", body, WeightVersion, MAX_SMALL_BYTES)).weight_version

    async def info(self) -> EngineInfo:
        """See ``Described.info``. ``EngineRejected`` for a server of another wire version."""
        body = await self._call("GET", "/info", None, MAX_SMALL_BYTES, self._timeout_s)
        try:
            shown = json.loads(body)
            version, engine = shown["wire_version"], shown["engine"]
            info = EngineInfo(**{**engine, "limits": EngineLimits(**engine["limits"])})
        except (ValueError, KeyError, TypeError) as error:
            raise self._corrupt(f"/info is not an engine server's ({error})") from error
        if version != VERSION:
            raise EngineRejected(
                f"{self.name}: speaks wire version {version}, not {VERSION}: install one mopd everywhere"
            )
        return info

    async def health(self, *, timeout_s: float) -> None:
        """Returns when ``/health`` answers 200 within ``timeout_s``; ``EngineUnavailable`` if not."""
        await self._call("GET", "/health", None, MAX_SMALL_BYTES, timeout_s)

    async def sleep(self) -> None:
        """Let the server give its memory to others; ``EngineRejected`` if its engine cannot."""
        await self._call("POST", "/v1/sleep", b"", MAX_SMALL_BYTES, self._timeout_s)

    async def wake_up(self) -> None:
        """Undo ``sleep``."""
        await self._call("POST", "/v1/wake", b"", MAX_SMALL_BYTES, self._timeout_s)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _ask(self, path: str, request: Message, answer: type[MessageT], longest: int) -> MessageT:
        body = await _maybe_in_thread(_num_bytes(request), encode, request)
        return await self._post(path, body, answer, longest)

    async def _post(self, path: str, body: bytes, answer: type[MessageT], longest: int) -> MessageT:
        """Send a message and decode the answer of at most ``longest`` bytes."""
        self.bytes_sent += len(body)
        given = await self._call("POST", path, body, longest, self._timeout_s)
        self.bytes_received += len(given)
        try:
            return await _maybe_in_thread(len(given), decode, given, answer)
        except WireError as error:
            raise self._corrupt(str(error)) from error

    async def _call(self, method: str, path: str, content: bytes | None, longest: int, timeout_s: float) -> bytes:
        """The body of a successful answer."""
        try:
            return await asyncio.wait_for(self._when_free(method, path, content, longest, timeout_s), timeout_s)
        except asyncio.TimeoutError as error:
            raise EngineUnavailable(f"{self.name}: no answer to {path} within {timeout_s:g} s") from error
        except (httpx.HTTPError, httpx.StreamError, OSError) as error:
            raise EngineUnavailable(f"{self.name}: {path}: {type(error).__name__}: {error}") from error

    async def _when_free(self, method: str, path: str, content: bytes | None, longest: int, timeout_s: float) -> bytes:
        start = time.monotonic()
        async with self._free_connections:
            left_s = max(timeout_s - (time.monotonic() - start), 0.001)
            return await self._exchange(method, path, content, longest, left_s)

    async def _exchange(self, method: str, path: str, content: bytes | None, longest: int, timeout_s: float) -> bytes:
        headers = {DEADLINE_HEADER: f"{timeout_s:.3f}"}
        if content is not None:
            headers["content-type"] = CONTENT_TYPE
        async with self._client.stream(method, path, content=content, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                longest = MAX_SMALL_BYTES
            parts: list[bytes] = []
            size = 0
            async for part in response.aiter_raw():
                parts.append(part)
                size += len(part)
                if size > longest:
                    raise self._corrupt(f"the answer to {path} is longer than {longest} bytes")
        body = b"".join(parts)
        if response.status_code == httpx.codes.OK:
            return body
        raise self._refusal(path, response, body)

    def _refusal(self, path: str, response: httpx.Response, body: bytes) -> EngineError:
        """The error that a status stands for."""
        status = response.status_code
        said, retry_after_s = _read_refusal(body)
        message = f"{self.name}: {path}: HTTP {status}: {said}"
        if status == httpx.codes.TOO_MANY_REQUESTS:
            return EngineBusy(message, retry_after_s=retry_after_s)
        if status == httpx.codes.CONFLICT:
            return StaleWeights(message)
        if 400 <= status < 500 and status != httpx.codes.REQUEST_TIMEOUT:
            return EngineRejected(message)
        return EngineUnavailable(message)

    def _require_echo(self, answer: ScoreAnswer | GenerateAnswer, request: ScoreRequest | GenerateRequest) -> None:
        if answer.request_checksum != request.checksum:
            raise self._corrupt("it belongs to other tokens than those that were sent")
        if answer.weight_version != request.weight_version:
            raise StaleWeights(
                f"{self.name}: answered with weights {answer.weight_version}, not {request.weight_version}"
            )

    def _corrupt(self, problem: str) -> EngineUnavailable:
        return EngineUnavailable(f"{self.name}: corrupt answer: {problem}")


def to_scores(answer: ScoreAnswer) -> list[Scores]:
    """An answer's flat arrays as tensors per sequence, without a copy."""
    lengths = answer.lengths.tolist()
    ids = torch.from_numpy(answer.ids).view(-1, answer.top_k).split(lengths)
    logprobs = torch.from_numpy(answer.logprobs).view(-1, answer.top_k).split(lengths)
    token_logprobs = torch.from_numpy(answer.token_logprobs).split(lengths)
    return [
        Scores(ids=i, logprobs=row, token_logprobs=t) for i, row, t in zip(ids, logprobs, token_logprobs, strict=True)
    ]


def _to_generations(answer: GenerateAnswer) -> list[Generation]:
    lengths = answer.lengths.tolist()
    tokens = torch.from_numpy(answer.tokens).long().split(lengths)
    logprobs = torch.from_numpy(answer.logprobs).split(lengths)
    return [
        Generation(tokens=t, logprobs=row, finish_reason="stop" if stopped else "length")
        for t, row, stopped in zip(tokens, logprobs, answer.stopped.tolist(), strict=True)
    ]


def _read_refusal(body: bytes) -> tuple[str, float]:
    """``(message, retry_after_s)`` of an error's JSON body, or what can be shown of another body."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"]), float(error.get("retry_after_s", DEFAULT_RETRY_AFTER_S))
    except (ValueError, KeyError, TypeError):
        return repr(body[:200]), DEFAULT_RETRY_AFTER_S


def _num_bytes(message: Message) -> int:
    return sum(value.nbytes for value in vars(message).values() if isinstance(value, np.ndarray))


async def _maybe_in_thread(num_bytes: int, function: Callable[..., ResultT], *arguments: Any) -> ResultT:
    if num_bytes <= LARGE_BYTES:
        return function(*arguments)
    return await asyncio.to_thread(function, *arguments)

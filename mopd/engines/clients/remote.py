"""An engine behind mopd's HTTP server, as its callers see it.

Nothing in an answer is believed: sizes, dtypes, weight version and a checksum of the token ids that were asked about
must fit, or the answer is as good as none. Whether scores are possible is looked at by the router, as for every engine.
What a server says about itself in ``/info`` is of its type and in its range, or nothing is believed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import typing
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from mopd.conversion.hf.manifest import HASHES
from mopd.engines.clients.http import MAX_SMALL_BYTES, HttpClient
from mopd.engines.interface import (
    EngineInfo,
    EngineLimits,
    EngineRejected,
    Generation,
    SamplingParams,
    Scores,
    StaleWeights,
    Told,
)
from mopd.files.json_text import parse_json
from mopd.metrics import is_counted
from mopd.wire.limits import CONTENT_TYPE, DEADLINE_HEADER
from mopd.wire.messages import (
    VERSION,
    GenerateAnswer,
    GenerateRequest,
    Message,
    MessageT,
    ScoreAnswer,
    ScoreRequest,
    WireError,
    decode_aside,
    encode_aside,
)
from mopd.wire.weights import TensorLedger, WeightAbort, WeightBegin, WeightChunk, WeightCommit, WeightVersion, cut

ANSWER_HEAD_BYTES = 4096
"""What an answer may have beside its arrays."""
MAX_NUMBER = 2**53
MAX_TEXT_CHARACTERS = 4096
"""Of one number and one text of ``/info``."""

Step = Literal["begin", "chunk", "commit", "abort"]
"""Messages of a weight push."""


class RemoteEngine:
    """Implements ``Scorer``, ``Generator`` and ``Described`` over HTTP: one connection pool per engine.

    Errors: ``EngineUnavailable`` (refused, reset, deadline, 5xx, corrupt or foreign answer), ``EngineBusy`` (429),
    ``StaleWeights`` (409), ``EngineRejected`` (other 4xx). It never retries: the router does. It belongs to the event
    loop of its first call.
    """

    def __init__(self, url: str, *, token: str | None = None, timeout_s: float, name: str | None = None) -> None:
        """``url`` is ``http://host:port``; ``timeout_s`` bounds each call; ``name`` stands in errors (default: the
        url). ``UserError`` for a URL or token that cannot be used."""
        self._http = HttpClient(
            url,
            token=token,
            timeout_s=timeout_s,
            name=name,
            content_type=CONTENT_TYPE,
            deadline_header=DEADLINE_HEADER,
        )
        self.url = url
        self.name = self._http.name
        self.weight_version = -1
        """Version of the last push through this object; every request asks for this version, -1 is the checkpoint."""
        self.bytes_sent = 0
        self.bytes_received = 0
        """Payload bytes of all msgpack requests and answers so far."""

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
            weight_version=self.weight_version,
        )
        request.check()
        longest = request.num_rows * (8 * top_k + 4) + 4 * len(tokens) + ANSWER_HEAD_BYTES
        answer = await self._post("/v1/score", await encode_aside(request), ScoreAnswer, longest)
        self._require_echo(answer, request)
        if answer.top_k != top_k or not np.array_equal(answer.lengths, request.lengths - request.prompt_lengths):
            raise self._http.corrupt(f"top_k {answer.top_k} and rows of another request than the one that was sent")
        return to_scores(answer)

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        seeds: Sequence[int],
        *,
        told: Told | None = None,
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
        )
        request.check()
        longest = len(prompts) * (8 * sampling.max_new_tokens + 5) + ANSWER_HEAD_BYTES
        answer = await self._post("/v1/generate", await encode_aside(request), GenerateAnswer, longest)
        self._require_echo(answer, request)
        if len(answer.lengths) != len(prompts) or answer.lengths.max() > sampling.max_new_tokens:
            raise self._http.corrupt(
                f"{len(answer.lengths)} responses of up to {answer.lengths.max()} tokens for {len(prompts)} prompts "
                f"and max_new_tokens {sampling.max_new_tokens}"
            )
        return _to_generations(answer)

    async def load_weights(self, weights: Iterable[tuple[str, Tensor]], weight_version: int) -> None:
        """See ``TakesWeights.load_weights``: push to this server alone."""
        (error,) = await push_weights([self], weights, weight_version)
        if error is not None:
            raise error

    async def push(self, step: Step, body: bytes) -> int:
        """One message of a weight push, as ``push_weights`` makes it; returns the version that the server has."""
        return (await self._post(f"/v1/weights/{step}", body, WeightVersion, MAX_SMALL_BYTES)).weight_version

    async def info(self) -> EngineInfo:
        """See ``Described.info``. ``EngineRejected`` for a server of another wire version."""
        body = await self._http.call("GET", "/info", None, MAX_SMALL_BYTES)
        try:
            version, engine = read_shown(body)
            if version != VERSION:
                raise EngineRejected(
                    f"{self.name}: speaks wire version {version}, not {VERSION}: install one mopd everywhere"
                )
            return read_engine(engine)
        except ValueError as error:
            raise self._http.corrupt(f"/info is not an engine server's ({error})") from error

    async def health(self, *, timeout_s: float) -> None:
        """Returns when ``/health`` answers 200 within ``timeout_s``; ``EngineUnavailable`` if not."""
        await self._http.call("GET", "/health", None, MAX_SMALL_BYTES, timeout_s=timeout_s)

    async def sleep(self) -> None:
        """Let the server give its memory to others; ``EngineRejected`` if its engine cannot."""
        await self._http.call("POST", "/v1/sleep", b"", MAX_SMALL_BYTES)

    async def wake_up(self) -> None:
        """Undo ``sleep``."""
        await self._http.call("POST", "/v1/wake", b"", MAX_SMALL_BYTES)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def _post(self, path: str, body: bytes, answer: type[MessageT], longest: int) -> MessageT:
        """Send a message and decode the answer of at most ``longest`` bytes."""
        if is_counted():
            self.bytes_sent += len(body)
        given = await self._http.call("POST", path, body, longest)
        if is_counted():
            self.bytes_received += len(given)
        try:
            return await decode_aside(given, answer)
        except WireError as error:
            raise self._http.corrupt(error) from error

    def _require_echo(self, answer: ScoreAnswer | GenerateAnswer, request: ScoreRequest | GenerateRequest) -> None:
        if answer.request_checksum != request.checksum:
            raise self._http.corrupt("it belongs to other tokens than those that were sent")
        if answer.weight_version != request.weight_version:
            raise StaleWeights(
                f"{self.name}: answered with weights {answer.weight_version}, not {request.weight_version}"
            )


async def push_weights(
    targets: Sequence[RemoteEngine], weights: Iterable[tuple[str, Tensor]], weight_version: int
) -> list[Exception | None]:
    """Stream the weights to every target, in chunks of at most 64 MiB, one of them in memory; a target that fails is
    left behind, the others go on.

    The stream is read once, and to its end even when every target has failed: it may be a collective operation in which
    other ranks take part. Returns each target's error, ``None`` where it now serves ``weight_version``. A target that
    was left behind has its old weights, or none: it answers ``StaleWeights`` until a later push reaches it.
    """
    update_id = secrets.token_hex(8)
    errors: list[Exception | None] = [None] * len(targets)

    async def tell(target: RemoteEngine, step: Step, body: bytes) -> None:
        given = await target.push(step, body)
        if step == "commit" and given != weight_version:
            raise RuntimeError(f"{target.name}: has weights {given} after {weight_version} were sent")

    async def tell_all(step: Step, message: Message) -> None:
        body = await encode_aside(message)
        healthy = [i for i, error in enumerate(errors) if error is None]
        results = await asyncio.gather(*(tell(targets[i], step, body) for i in healthy), return_exceptions=True)
        for i, result in zip(healthy, results, strict=True):
            if isinstance(result, Exception):
                errors[i] = result
            elif result is not None:
                raise result  # a cancellation

    await tell_all("begin", WeightBegin(update_id=update_id, weight_version=weight_version))
    ledger = TensorLedger()
    try:
        for index, (pieces, data) in enumerate(cut(weights, ledger)):
            await tell_all("chunk", WeightChunk(update_id=update_id, index=index, pieces=pieces, data=data))
    except BaseException:
        await tell_all("abort", WeightAbort(update_id=update_id))
        raise
    commit = WeightCommit(update_id=update_id, num_tensors=ledger.num_tensors, digest=ledger.digest)
    await tell_all("commit", commit)
    for target, error in zip(targets, errors, strict=True):
        if error is None:
            target.weight_version = weight_version
    return errors


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
        Generation(
            tokens=t,
            logprobs=row,
            finish_reason="stop" if stopped else "length",
            token_versions=torch.full((len(t),), answer.weight_version, dtype=torch.int32),
        )
        for t, row, stopped in zip(tokens, logprobs, answer.stopped.tolist(), strict=True)
    ]


def read_shown(body: bytes) -> tuple[int, dict[str, Any]]:
    """Wire version and description of an answer of ``/info``; ``ValueError`` if it is none."""
    shown = parse_json(body, max_values=10_000)
    if not isinstance(shown, dict) or not isinstance(shown.get("engine"), dict):
        raise ValueError("no object with the key engine")
    version = shown.get("wire_version")
    if type(version) is not int:
        raise ValueError("wire_version is no whole number")
    return version, shown["engine"]


def read_engine(description: dict[str, Any]) -> EngineInfo:
    """The description as ``EngineInfo``; ``ValueError`` says what is wrong with it."""
    told = _fields(description, EngineInfo)
    if not isinstance(told["limits"], dict):
        raise ValueError("limits is no object")
    limits = _fields(told.pop("limits"), EngineLimits)
    for name, value in limits.items():
        _require_count(name, value, 1, is_optional=True)
    for name in ("model", "dtype"):
        _require_text(name, told[name])
    if told["kind"] not in typing.get_args(typing.get_type_hints(EngineInfo)["kind"]):
        raise ValueError(f"kind is {told['kind']!r:.60}")
    for name, least in (("vocab_size", 1), ("max_positions", 1), ("weight_version", -1)):
        _require_count(name, told[name], least)
    _require_count("max_logprobs", told["max_logprobs"], 1, is_optional=True)
    hashes = told["manifest"]
    if hashes is not None:
        if not isinstance(hashes, dict) or set(hashes) != set(HASHES):
            raise ValueError(f"manifest is no object of {', '.join(HASHES)}")
        for name, value in hashes.items():
            _require_text(name, value)
    return EngineInfo(**told, limits=EngineLimits(**limits))


def _fields(given: dict[str, Any], cls: type[Any]) -> dict[str, Any]:
    """A copy that has the fields of ``cls`` and no others."""
    odd = given.keys() ^ {field.name for field in dataclasses.fields(cls)}
    if odd:
        raise ValueError(f"{cls.__name__} misses or does not know {', '.join(sorted(odd)[:4])!a:.80}")
    return dict(given)


def _require_count(name: str, value: object, least: int, *, is_optional: bool = False) -> None:
    if value is None and is_optional:
        return
    if type(value) is not int or not least <= value <= MAX_NUMBER:
        raise ValueError(f"{name} is {value!r:.60}, no whole number from {least}")


def _require_text(name: str, value: object) -> None:
    if not isinstance(value, str) or len(value) > MAX_TEXT_CHARACTERS:
        raise ValueError(f"{name} is {value!r:.60}, no text of at most {MAX_TEXT_CHARACTERS} characters")

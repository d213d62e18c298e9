"""Client of an engine behind mopd's HTTP server.

Nothing in an answer is trusted: sizes, dtypes, weight version and a checksum of the request's token ids must fit, or
the answer is corrupt. Whether scores are possible is checked by the router, as for every engine. Each value of
``/info`` must have its type and range.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar, cast

import numpy as np
import torch

from mopd.base.files.json_text import parse_json
from mopd.base.metrics import is_counted
from mopd.base.types import PromptImage, RouteShape, UserError
from mopd.config.data import MAX_IMAGE_BYTES
from mopd.config.reading.build import build_from_json
from mopd.conversion.hf.manifest import HASHES
from mopd.engines.clients.http import MAX_SMALL_BYTES, HttpClient, UnknownImages
from mopd.engines.interface import (
    ROUTE_DTYPES,
    EngineInfo,
    EngineRejected,
    EngineUnavailable,
    Generation,
    Images,
    ResponseCallback,
    Scores,
    StaleWeights,
    ToDraw,
    ToScore,
    num_routed,
)
from mopd.engines.wire.image_table import to_table
from mopd.engines.wire.images import MAX_FILES, ImageFiles, ImagesKept
from mopd.engines.wire.messages import (
    CONTENT_TYPE,
    DEADLINE_HEADER,
    PLAIN_SAMPLING,
    VERSION,
    FrameReader,
    GenerateAnswer,
    GenerateFailure,
    GenerateRequest,
    MessageT,
    ScoreAnswer,
    ScoreRequest,
    WireError,
    decode,
    decode_aside,
    encode_aside,
)

ANSWER_HEAD_BYTES = 4096
"""Bytes that an answer, or one response, may have beside its arrays."""
MAX_NUMBER = 2**53
"""Largest number that ``/info`` may hold."""
MAX_KNOWN = 2**18
"""Digests of images remembered as sent, 16 bytes each."""
MAX_ROUNDS = 4
"""Times that missing images are sent for one request. A server that misses them still has no room for all of them."""
FOREIGN = "it belongs to other tokens than those that were sent"

T = TypeVar("T")


class RemoteEngine:
    """Implements ``Scorer``, ``Generator`` and ``Described`` over HTTP: connections for requests, others for weights.

    Errors: ``EngineUnavailable`` (refused, reset, deadline, 5xx, corrupt or foreign answer), ``EngineBusy`` (429),
    ``StaleWeights`` (409), ``EngineRejected`` (other 4xx). It never retries: the router does. It belongs to the event
    loop of its first call.
    """

    def __init__(self, url: str, *, token: str | None = None, timeout_s: float, name: str | None = None) -> None:
        """Configure the client without contacting the server.

        ``url`` is ``http://host:port``; ``timeout_s`` bounds each call; ``name`` stands in errors (default: the url).
        ``UserError`` for a URL or token that cannot be used.
        """
        self._http = HttpClient(
            url, token=token, timeout_s=timeout_s, name=name, content_type=CONTENT_TYPE, deadline_header=DEADLINE_HEADER
        )
        self._weights_http = HttpClient(url, token=token, timeout_s=timeout_s, name=name, content_type=CONTENT_TYPE)
        """Connections of its own for weight updates: neither waits for the other's."""
        self._images = _ImageSender(
            lambda body: self.post("/v1/images", body, ImagesKept, MAX_SMALL_BYTES), self._http.name
        )
        self.url = url
        self.name = self._http.name
        self.weight_version = -1
        """Version of the last push through this object; -1 is the checkpoint. Scoring requires exactly this version,
        generation this one or a newer one."""
        self._newest_version = -1
        """Newest version whose update was started: no answer can name a newer one."""
        self.bytes_sent = 0
        self.bytes_received = 0
        """Payload bytes of all msgpack requests and answers so far."""

    async def score(self, asked: ToScore) -> list[Scores]:
        """Score the responses with one HTTP request; ``StaleWeights`` for an answer of another version."""
        if not asked.tokens:
            return []
        given = torch.cat([ids.reshape(-1) for ids in asked.given or [torch.zeros(0)]])
        request = ScoreRequest(
            tokens=torch.cat([sequence.to(torch.int32) for sequence in asked.tokens]).cpu().numpy(),
            lengths=np.array([len(sequence) for sequence in asked.tokens], dtype=np.int32),
            prompt_lengths=np.array(asked.prompt_lengths, dtype=np.int32),
            images=to_table(asked.images),
            given_ids=given.numpy().astype(np.int32),
            num_given=asked.num_given,
            hidden_size=asked.hidden_size,
            top_k=asked.top_k,
            temperature=asked.temperature,
            adapter=asked.adapter,
            weight_version=self.weight_version,
        )
        request.check()
        row = 8 * request.top_k + 4 * request.num_given + 2 * request.hidden_size + 4
        longest = request.num_rows * row + 4 * len(asked) + ANSWER_HEAD_BYTES
        body = await encode_aside(request)
        answer = await self._images.asked(asked.images, lambda: self.post("/v1/score", body, ScoreAnswer, longest))
        if answer.request_checksum != request.checksum:
            raise self._http.corrupt(FOREIGN)
        if answer.weight_version != request.weight_version:
            raise StaleWeights(
                f"{self.name}: answered with weights {answer.weight_version}, not {request.weight_version}"
            )
        shape = answer.top_k, answer.num_given, answer.hidden_size
        if shape != (request.top_k, request.num_given, request.hidden_size) or not np.array_equal(
            answer.lengths, request.lengths - request.prompt_lengths
        ):
            raise self._http.corrupt(f"top_k {answer.top_k} and rows of another request than the one that was sent")
        return to_scores(answer)

    async def generate(self, asked: ToDraw, *, on_response: ResponseCallback | None = None) -> list[Generation]:
        """Draw the responses with one HTTP request; ``StaleWeights`` for weights older than ``self.weight_version``."""
        if not asked.prompts:
            return []
        sampling = asked.sampling
        told = sampling.routes or RouteShape(num_layers=0, num_choices=0, num_experts=0)
        request = GenerateRequest(
            tokens=np.concatenate([np.asarray(prompt, dtype=np.int32) for prompt in asked.prompts]),
            lengths=np.array([len(prompt) for prompt in asked.prompts], dtype=np.int32),
            seeds=np.array(asked.seeds, dtype=np.int64),
            images=to_table(asked.images),
            **{name: getattr(sampling, name) for name in PLAIN_SAMPLING},
            stop=json.dumps(sampling.stop),
            stop_token_ids=np.array(sampling.stop_token_ids, dtype=np.int32),
            route_layers=told.num_layers,
            route_choices=told.num_choices,
            route_experts=told.num_experts,
            adapter=asked.adapter,
            weight_version=self.weight_version,
        )
        request.check()
        responses = _Responses(request, self._http, newest=lambda: self._newest_version, on_response=on_response)
        body = await encode_aside(request)

        async def ask() -> None:
            if is_counted():
                self.bytes_sent += len(body)
            await self._http.call("POST", "/v1/generate", body, responses.longest, take=responses.take)

        try:
            await self._images.asked(asked.images, ask)
        finally:
            if is_counted():
                self.bytes_received += responses.num_bytes
        return responses.all()

    def allow(self, weight_version: int) -> None:
        """Accept answers with this version from now on. Call before the server starts an update: it may answer with the
        new weights before we learn that they serve."""
        self._newest_version = max(self._newest_version, weight_version)

    async def info(self) -> EngineInfo:
        """Return the server's description of its engine. ``EngineRejected`` for a server of another wire version."""
        body = await self._http.call("GET", "/info", None, MAX_SMALL_BYTES)
        try:
            said = parse_json(body, max_values=10_000)
            if not isinstance(said, dict) or not isinstance(said.get("engine"), dict) or "wire_version" not in said:
                raise ValueError("no object with the keys engine and wire_version")
            if (version := said["wire_version"]) != VERSION:
                raise EngineRejected(
                    f"{self.name}: speaks wire version {version}, not {VERSION}: install one mopd everywhere"
                )
            return read_engine(said["engine"])
        except ValueError as error:
            raise self._http.corrupt(f"/info is not an engine server's ({error})") from error

    async def health(self, *, timeout_s: float) -> None:
        """Return when ``/health`` answers 200 within ``timeout_s``; ``EngineUnavailable`` if not."""
        await self._http.call("GET", "/health", None, MAX_SMALL_BYTES, timeout_s=timeout_s)

    async def sleep(self) -> None:
        """Let the server release its GPU memory; ``EngineRejected`` if its engine cannot."""
        await self._http.call("POST", "/v1/sleep", b"", MAX_SMALL_BYTES)
        self.weight_version = -1  # a rollout's weights are gone; a teacher's are always -1

    async def wake_up(self, *, weights_only: bool = False) -> None:
        """Undo ``sleep``, or only its weights' part."""
        await self._http.call("POST", "/v1/wake" + "/weights" * weights_only, b"", MAX_SMALL_BYTES)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()
        await self._weights_http.close()

    async def post(
        self, path: str, body: bytes, answer: type[MessageT], longest: int, *, timeout_s: float | None = None
    ) -> MessageT:
        """Send a message and decode the answer of at most ``longest`` bytes."""
        if is_counted():
            self.bytes_sent += len(body)
        http = self._weights_http if path.startswith("/v1/weights/") else self._http
        given = await http.call("POST", path, body, longest, timeout_s=timeout_s)
        if is_counted():
            self.bytes_received += len(given)
        try:
            return await decode_aside(given, answer)
        except WireError as error:
            raise self._http.corrupt(error) from error


class _Responses:
    """Collects the responses to one request as they arrive; each is checked against the request."""

    def __init__(
        self,
        request: GenerateRequest,
        http: HttpClient,
        *,
        newest: Callable[[], int],
        on_response: ResponseCallback | None,
    ) -> None:
        """Keep the request. ``newest()`` returns the newest version that can answer now."""
        self._request, self._http, self._newest, self._on_response = request, http, newest, on_response
        self._checksum = request.checksum
        one = (12 + 4 * request.num_top_ids) * request.max_new_tokens + ANSWER_HEAD_BYTES
        if request.routes is not None:
            one += request.routes.token_bytes * (int(request.lengths.max()) + request.max_new_tokens)
        self.longest = len(request.lengths) * one + ANSWER_HEAD_BYTES
        """Limit of the whole answer in bytes."""
        self.num_bytes = 0
        self._frames = FrameReader(max_bytes=one)
        self._done: dict[int, Generation] = {}

    def take(self, part: bytes) -> None:
        """Decode the next bytes of the answer.

        Raises:
            CorruptAnswer, StaleWeights: they cannot be right.
            EngineError: the server's reason why the rest is missing.
        """
        self.num_bytes += len(part)
        try:
            for body in self._frames.feed(part):
                self._note(cast("GenerateAnswer | GenerateFailure", decode(body, GenerateAnswer, GenerateFailure)))
        except WireError as error:
            raise self._http.corrupt(error) from error

    def all(self) -> list[Generation]:
        """Return the responses in the order of the prompts; ``CorruptAnswer`` if one is missing."""
        count = len(self._request.lengths)
        if len(self._done) < count:
            raise self._http.corrupt(f"it ends after {len(self._done)} of {count} responses")
        return [self._done[i] for i in range(count)]

    def _note(self, answer: GenerateAnswer | GenerateFailure) -> None:
        if answer.request_checksum != self._checksum:
            raise WireError(FOREIGN)
        if isinstance(answer, GenerateFailure):
            raise self._http.refusal("/v1/generate", answer.status, answer.message)
        if not 0 <= answer.index < len(self._request.lengths) or answer.index in self._done:
            raise WireError(f"response {answer.index} of {len(self._request.lengths)} comes twice or was not asked for")
        least = self._request.weight_version
        for version in answer.token_versions.tolist():
            if not least <= version <= max(least, self._newest()):
                raise StaleWeights(f"{self._http.name}: answered with weights {version}, not {least}")
        num_top = self._request.num_top_ids
        if len(answer.top_ids) != num_top * len(answer.tokens):
            raise WireError(f"{len(answer.top_ids)} top ids for {len(answer.tokens)} tokens, {num_top} were asked for")
        routes, shape = None, self._request.routes
        if shape is not None:
            count = num_routed(int(self._request.lengths[answer.index]), len(answer.tokens))
            if len(answer.routes) != count * shape.token_bytes:
                raise WireError(f"{len(answer.routes)} bytes of routes for {count} tokens of {shape.token_bytes}")
            told = torch.from_numpy(answer.routes).view(ROUTE_DTYPES[shape.item_bytes])
            routes = told.view(count, shape.num_layers, shape.num_choices)
        generation = Generation(
            routes=routes,
            top_ids=torch.from_numpy(answer.top_ids).view(-1, num_top) if num_top else None,
            tokens=torch.from_numpy(answer.tokens).long(),
            logprobs=torch.from_numpy(answer.logprobs),
            finish_reason=cast(Any, answer.finish_reason),
            token_versions=torch.from_numpy(answer.token_versions),
        )
        self._done[answer.index] = generation
        if self._on_response is not None:
            self._on_response(answer.index, generation)


def to_scores(answer: ScoreAnswer) -> list[Scores]:
    """Split an answer's flat arrays into tensors per sequence, without a copy."""
    lengths = answer.lengths.tolist()
    rows = len(answer.token_logprobs)
    ids = torch.from_numpy(answer.ids).view(rows, answer.top_k).split(lengths)
    logprobs = torch.from_numpy(answer.logprobs).view(rows, answer.top_k).split(lengths)
    token_logprobs = torch.from_numpy(answer.token_logprobs).split(lengths)
    given = torch.from_numpy(answer.given_logprobs).view(rows, answer.num_given).split(lengths)
    bits = torch.from_numpy(answer.hidden.view(np.int16)).view(torch.bfloat16)
    hidden = bits.view(rows, answer.hidden_size).split(lengths)
    return [
        Scores(
            ids=i,
            logprobs=row,
            token_logprobs=t,
            given_logprobs=g if answer.num_given else None,
            hidden=h if answer.hidden_size else None,
        )
        for i, row, t, g, h in zip(ids, logprobs, token_logprobs, given, hidden, strict=True)
    ]


def read_engine(description: dict[str, Any]) -> EngineInfo:
    """Return the description as an ``EngineInfo``; ``ValueError`` says what is wrong with it."""
    try:
        info = build_from_json(EngineInfo, description, "/info")
    except UserError as error:
        raise ValueError(str(error)) from error
    counts = {name: getattr(info, name) for name in ("vocab_size", "max_positions", "max_logprobs", "num_workers")}
    for name, value in (counts | dataclasses.asdict(info.limits)).items():
        if value is not None and not 1 <= value <= MAX_NUMBER:
            raise ValueError(f"{name} is {value}, no number from 1 to {MAX_NUMBER}")
    if not -1 <= info.weight_version <= MAX_NUMBER:
        raise ValueError(f"weight_version is {info.weight_version}")
    if info.manifest is not None and info.manifest.keys() != set(HASHES):
        raise ValueError(f"manifest is no object of {', '.join(HASHES)}")
    return info


class _ImageSender:
    """Sends image files to one server, each once for all requests, and again if the server misses it."""

    def __init__(self, post: Callable[[bytes], Awaitable[object]], name: str) -> None:
        """Keep ``post``, which sends the body of one ``ImageFiles`` message, and ``name``, the server's in errors."""
        self._post, self._name = post, name
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._turn = asyncio.Lock()

    async def asked(self, images: Images, ask: Callable[[], Awaitable[T]]) -> T:
        """Provide the server with ``images`` and return ``ask()``. Raises what sending them and ``ask`` raise."""
        wanted = {image.digest: image for own in images or () for image in own}
        if not wanted:
            return await ask()
        for _ in range(MAX_ROUNDS):
            await self._provide(wanted)
            try:
                return await ask()
            except UnknownImages as unknown:
                for digest in unknown.digests:
                    self._known.pop(digest, None)
        raise EngineUnavailable(f"{self._name}: misses images that it was sent {MAX_ROUNDS} times: it has no room")

    async def _provide(self, wanted: Mapping[bytes, PromptImage]) -> None:
        async with self._turn:  # who waits here finds the files that another caller has sent meanwhile
            files: dict[bytes, bytes] = {}
            for image in [image for digest, image in wanted.items() if digest not in self._known]:
                content = await asyncio.to_thread(image.load)
                if files and (len(files) == MAX_FILES or _size(files) + len(content) > MAX_IMAGE_BYTES):
                    await self._send_files(files)
                    files = {}
                files[image.digest] = content
            if files:
                await self._send_files(files)

    async def _send_files(self, files: Mapping[bytes, bytes]) -> None:
        await self._post(await encode_aside(ImageFiles.of([*files.values()])))
        self._known.update(dict.fromkeys(files))
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)


def _size(files: Mapping[bytes, bytes]) -> int:
    return sum(map(len, files.values()))
